"""Successive attempts, however each of them ends, keep within the time, the budget and the placements of the spec."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.platforms import get_target
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.training import Phase, Status, launch_of
from dropforge.run.record import Record, RunError, RunState, Transition
from dropforge.spec import JobSpec, seconds
from dropforge.stages.await_.inspect import inspect
from dropforge.stages.provision import _open_attempt
from dropforge.stages.retries import retries
from dropforge_cli.deployment import placeholders

from ..deployments import Memory, context_with

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
REGIONS = ["us-central1", "europe-west4", "us-east4"]
CONTEXT = context_with()


def spec(minutes: int, usd: float | None, price: float, regions: int) -> JobSpec:
    placements = [{"region": region} for region in REGIONS[:regions]]
    return JobSpec.model_validate_json(
        json.dumps(
            {
                "api_version": "dropforge/v1",
                "name": "n",
                "model": {"source": "a/b"},
                "dataset": {"source": "a/b"},
                "serve": None,
                "target": {"type": "cloud_run", "placements": placements, "price_usd_per_hour": price},
                "limits": {"max_duration": f"{minutes}m", "max_cost_usd": usd},
            }
        )
    )


RETRIED = [error for error in ErrorClass if retries(spec(60, None, 1.0, 1).limits, error)]
# For each attempt: the used share of its allowed time, the delay until the next inspection, and the attempt's end.
ENDS = st.tuples(st.floats(0, 1), st.integers(0, 3600), st.sampled_from(RETRIED))


@given(
    st.integers(1, 720),
    st.none() | st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.integers(1, 3),
    st.lists(ENDS, min_size=1, max_size=12),
)
def test_attempts_keep_within_time_money_and_placements(
    minutes: int, usd: float | None, price: float, regions: int, ends: list[tuple[float, int, ErrorClass]]
) -> None:
    job, now, record = spec(minutes, usd, price, regions), NOW, _record()
    for number, (share, pause, error_class) in enumerate(ends, 1):
        attempt = _open_attempt(CONTEXT, record, number, job, now)
        if attempt is None:
            break
        assert attempt.region == REGIONS[attempt.placement]
        assert attempt.placement < regions
        assert attempt.deadline <= NOW + timedelta(seconds=seconds(job.limits.max_duration))
        record = record.model_copy(update={"attempts": [*record.attempts, attempt]})
        now = attempt.started + (attempt.deadline - attempt.started) * share
        record = record.with_end(number, RunError(error_class=error_class, message="x"), now)
        if error_class.moves_on and regions > 1 and (after := _open_attempt(CONTEXT, record, number + 1, job, now)):
            assert after.placement != attempt.placement
        now += timedelta(seconds=pause)
    cost = record.training_cost(now)
    assert cost is not None
    assert usd is None or cost <= usd + 1e-5


TARGETS: dict[str, dict[str, Any]] = {
    "cloud_run": {"placements": [{"region": "us-central1"}, {"region": "europe-west4"}]},
    "gke": {"placements": [{"region": "us-central1"}, {"region": "us-east4"}], "cluster": {"name": "c"}},
    "ray": {
        "accelerator": "tpu-v5p-slice",
        "topology": "2x2x2",
        "cluster": {"name": "c"},
        "placements": [{"region": "us-central1"}, {"region": "us-east5"}],
    },
    "tpu_vm": {"placements": [{"zone": "us-west1-c"}, {"zone": "us-west4-a"}]},
}


@pytest.mark.parametrize("kind", TARGETS)
def test_after_a_wait_the_resources_own_timeout_ends_with_the_run(kind: str) -> None:
    """The run has an hour and waits 40 minutes for the first placement: the second resource gets a timeout of 20."""
    job = spec(60, None, 1.0, 1).model_dump(mode="json", exclude_none=True)
    job |= {"target": {"type": kind, **TARGETS[kind]}, "training": {"adapter": {"type": "none"}}}
    parsed = JobSpec.model_validate_json(json.dumps({**job, "serve": None}))
    first = _open_attempt(CONTEXT, _record(), 1, parsed, NOW)
    assert first
    waited = NOW + timedelta(minutes=40)
    refused = RunError(error_class=ErrorClass.STOCKOUT, message="x")
    record = _record().model_copy(update={"attempts": [first]}).with_end(1, refused, waited)
    second = _open_attempt(CONTEXT, record, 2, parsed, waited)
    assert second
    record = record.model_copy(update={"attempts": [*record.attempts, second]})
    ends = int((NOW + timedelta(hours=1)).timestamp())
    requests = json.dumps(
        [resource.request for resource in get_target(kind).resources(launch_of(record, parsed, placeholders(), key=""))]
    )
    assert second.placement == 1
    deadline_pattern = r'"name": "DROPFORGE_DEADLINE", "value": "(\d+)"|DROPFORGE_DEADLINE=(\d+)'
    containers = {int(left or right) for left, right in re.findall(deadline_pattern, requests)}
    assert containers == {ends}
    limits = {
        "cloud_run": '"timeout": "1200s"',
        "gke": '"activeDeadlineSeconds": 1200',
        "ray": '"activeDeadlineSeconds": 1200',
        "tpu_vm": f'"dropforge-deadline": "{ends}"',
    }
    assert requests.count(limits[kind]) == 1


def test_the_end_of_an_attempt_is_noted_once() -> None:
    first = _open_attempt(CONTEXT, _record(), 1, spec(60, None, 1.0, 1), NOW)
    assert first
    error = RunError(error_class=ErrorClass.DATA, message="first")
    ended = _record().model_copy(update={"attempts": [first]}).with_end(1, error, NOW + timedelta(seconds=5))
    second_end = ended.with_end(1, RunError(error_class=ErrorClass.CODE, message="second"), NOW + timedelta(seconds=9))
    assert second_end == ended


@pytest.mark.parametrize(
    ("status", "allowed_minutes", "cancelled", "paid_minutes"),
    [
        (Status(Phase.PENDING, "", ErrorClass.STOCKOUT), 60, None, 0),
        # The inspection that ends the attempt for lack of capacity may be the first inspection that sees paid machines.
        (Status(Phase.PENDING, "", ErrorClass.STOCKOUT, is_paid=True), 60, None, 5),
        (Status(Phase.PENDING), 30, None, 0),
        (Status(Phase.PENDING), 60, NOW, 0),
        (Status(Phase.PENDING, is_paid=True), 60, NOW, 5),
        (Status(Phase.RUNNING), 60, NOW, 5),  # it may have started after it was last seen waiting
        (None, 60, NOW, 5),
    ],
)
def test_an_attempt_that_ends_while_it_waits_costs_only_its_paid_machines(
    status: Status | None,
    allowed_minutes: int,
    cancelled: datetime | None,
    paid_minutes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, now = spec(allowed_minutes, None, 3.6, 1), NOW + timedelta(minutes=31)
    opened = _open_attempt(CONTEXT, _record(), 1, job, NOW)
    assert opened
    seen = {"launched": NOW, "waiting": now - timedelta(minutes=5)}
    state = {"attempts": [opened.model_copy(update=seen)], "state": RunState.PROVISIONING}
    versions = [_record().model_copy(update={**state, "execution": "e", "cancel_requested": cancelled})]

    def update(run: str, change: Callable[[Record], Record]) -> Record:
        versions.append(change(versions[-1]))
        return versions[-1]

    def inspect_resource(*_: Any) -> Status:
        if status is None:
            raise CloudError(ErrorClass.TRANSIENT, "the cloud does not answer")
        return status

    target: Any = SimpleNamespace(inspect=inspect_resource)
    context = context_with(placeholders(), now, Platforms(target=lambda _: target), storage=Memory())
    monkeypatch.setattr(context.store, "update", update)
    monkeypatch.setattr(context.store, "spec", lambda run: job)
    monkeypatch.setattr(context.store, "key", lambda run: "k")
    assert inspect(context, "r", "e", 1, "").status == ("CANCELLED" if cancelled else "FAILED")
    cancelled_run = versions[-1].entered(RunState.TEARING_DOWN, now).entered(RunState.CANCELLED, now)
    assert cancelled_run.training_cost(NOW + timedelta(hours=9)) == pytest.approx(3.6 * paid_minutes / 60)


def _record() -> Record:
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    return Record(run="r-0123456789ab", name="n", source="s", state=RunState.ACCEPTED, created=NOW, history=history)
