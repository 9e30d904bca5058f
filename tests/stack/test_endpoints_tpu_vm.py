"""Named endpoints on TPU VMs: a name of Cloud DNS that points to one machine at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAIError

from dropforge.cloud.dns import TTL_SECONDS, change_record, find_record
from dropforge.endpoints.record import RolloutState
from dropforge.run.record import RunState

from ..deployments import here
from .conftest import User
from .named import Load, Named
from .test_endpoints import audited, lent
from .test_runs import call, run_events


@pytest.fixture
def named(user: User) -> Iterator[Named]:
    with lent(user, "tpu_vm") as named:
        yield named


def test_a_new_model_takes_the_name_and_no_request_fails(named: Named) -> None:
    """The machine before stays until nobody may use its address any more, and is deleted then."""
    before = named.serves()
    first = before.revision(1).revision
    address = address_of(named)
    with Load(named).running() as load:
        named.user.until(lambda: load.has_seen(first))
        after = named.serves()
        second = after.revision(2).revision
        named.user.until(lambda: load.has_seen(second))
    assert load.problems == []
    assert set(load.answers) == {first, second}
    assert address_of(named) != address
    record = named.record
    assert (record.url, record.stable, record.previous) == (before.url, 2, 0)
    moved, ended = record.rollouts[-1].moved, record.rollouts[-1].ended
    assert moved is not None
    assert ended is not None
    assert (ended - moved).total_seconds() > TTL_SECONDS
    named.user.until(lambda: named.revisions() == {second})
    assert {revision.number for revision in record.revisions if revision.paid_since} == {2}
    named.retire()
    assert named.service() is None


# What a name on TPU VMs cannot have, and what the answer says.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"canary": {"percent": 10, "for": "30m"}}, "a name has one address"),
    ({"share": True}, "cannot serve many adapters"),
    ({"accelerator_type": "v5litepod-16"}, "not the type of a TPU VM of one machine"),
    ({"zone": "us-west1-c"}, "its URL would change"),
]


def test_what_a_name_cannot_do_is_refused_and_changes_nothing(named: Named) -> None:
    """Not in the middle of a run, but before the run costs anything; a rollback when somebody asks for it."""
    before = named.serves()
    for wrong, why in IMPOSSIBLE:
        refused = named.user.wait(named.put(**wrong))
        assert refused.state is RunState.REJECTED
        assert why in str(refused.problems)
    with run_events(named.user) as pull:
        rollback = named.ask(rollback=named.name)
        texts: list[str] = []

        def is_answered() -> bool:
            texts.extend(event["details"]["text"] for _, event in pull() if event["run"] == rollback)
            return bool(texts)

        named.user.until(is_answered)
    assert "is on serve.type tpu_vm, which keeps no machine for a rollback" in texts[0]
    assert named.record == before
    assert named.answer() == before.revision(1).revision


def test_a_suspended_endpoint_has_no_machine_and_gets_another_behind_its_name(named: Named) -> None:
    """What is left without a budget is the record of the endpoint: nobody else may get its requests meanwhile."""
    before = named.serves(price_usd_per_hour=2)
    named.ask(budget={"endpoint": named.name, "usd": 1e-6, "per": "month"})
    named.user.until(lambda: named.record.budget is not None)
    named.user.until(lambda: call(named.user, "sweep", {}).ok and named.record.state == "SUSPENDED")
    assert named.service() is None
    with pytest.raises(OpenAIError):
        named.answer()
    assert named.name not in {line["run"] for line in audited()}
    named.ask(budget={"endpoint": named.name, "usd": 1000, "per": "month"})
    named.user.until(lambda: named.record.state == "SERVING" and named.record.current is None)
    assert named.record.rollouts[-1].state is RolloutState.PROMOTED
    assert (named.record.url, named.record.stable) == (before.url, 1)
    assert named.answer() == before.revision(1).revision


def test_a_machine_that_somebody_deleted_is_missing_and_the_sweep_replaces_it(named: Named) -> None:
    """The name and the model stay, and what is there afterwards is as the record says."""
    before, address = named.serves(), address_of(named)
    named.destroy()
    named.user.until(lambda: {"missing"} <= {line["difference"] for line in audited() if line["run"] == named.name})
    assert call(named.user, "sweep", {}).ok
    named.user.until(lambda: named.record.rollouts[-1].state is RolloutState.PROMOTED and not named.record.current)
    record = named.record
    assert (record.rollouts[-1].kind, record.stable, record.url) == ("resume", 1, before.url)
    assert address_of(named) != address
    assert named.answer() == before.revision(1).revision
    assert named.name not in {line["run"] for line in audited()}


def test_a_name_that_somebody_changed_points_to_its_machine_again(named: Named) -> None:
    """The machine stays as it is."""
    before, address, cloud = named.serves(), address_of(named), here().cloud
    assert change_record(cloud, named.record.service, find_record(cloud, named.record.service), "10.99.0.1")
    assert call(named.user, "sweep", {}).ok
    named.user.until(lambda: named.record.rollouts[-1].state is RolloutState.PROMOTED and not named.record.current)
    assert address_of(named) == address
    assert named.answer() == before.revision(1).revision


def address_of(named: Named) -> str:
    found = find_record(here().cloud, named.record.service)
    assert found is not None
    return str(found["rrdatas"][0])
