"""Tests of every target: each way in which an attempt can end, and that no resource is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.platforms import get_target, servers, targets
from dropforge.platforms.serving import endpoint_key
from dropforge.platforms.training import Phase, launch_of
from dropforge.run.record import RunState

from ..deployments import clients, here
from ..stage_calls import inspect
from .conftest import User
from .targets import PARTS, SERVES
from .test_crash_windows import ME, URL, end, eventually, launched
from .test_runs import GATE, assert_clean, states

Part = dict[str, Any]
# The field of each target that a user raises after an out-of-memory error.
MEMORY_FIELDS = {"cloud_run": "memory_gib", "gke": "memory_gib", "ray": "head_memory_gib", "tpu_vm": "accelerator_type"}


def test_every_target_and_endpoint_is_tested(user: User) -> None:
    # The endpoint training_vm works with the target tpu_vm only: see test_tpu_vm.py.
    registered = (set(targets()), set(servers()) - {"training_vm"})
    assert registered == (set(PARTS), set(SERVES)), "add the missing platform to tests/stack/targets.py"


def test_a_train_only_run_succeeds_and_leaves_no_resource(user: User, target: Part) -> None:
    run = user.drop(user.spec(target=target, evaluation=GATE))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    assert record.metrics["exact_match"] == 0.9
    assert_clean(user, run)
    assert [h.rsplit(" ", 2)[-1] for h in user.slack(run, "succeeded")] == ["accepted", "started", "succeeded"]
    report = json.loads(user.store.read(names.report_object(run)).data)
    assert report["state"] == "SUCCEEDED"
    assert list(report["seconds_per_stage"]) == states(record)[:-1]


@pytest.mark.parametrize(
    ("behave", "error_class"),
    [
        ("fail-data", "data"),
        ("exit-64", "config"),
        ("exit-76", "out_of_memory"),
        ("exit-3", "code"),
        ("lie", "code"),
    ],
)
def test_a_permanent_failure_ends_the_run_at_once(user: User, target: Part, behave: str, error_class: str) -> None:
    run = user.drop(user.spec(behave, target=target))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == error_class, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)
    told = [headline.split(" ", 2)[-1] for headline in user.slack(run, "failed")]
    assert told[-1] == f"failed: {error_class}"
    if behave == "fail-data":  # its only message tells both
        assert told == ["accepted", "training started", "failed: data"]
        assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "FAILED"]


def test_an_attempt_that_ran_out_of_memory_is_not_repeated(user: User, target: Part) -> None:
    run = user.drop(user.spec("hog", target=target | ({"memory_gib": 1} if target["type"] == "gke" else {})))
    if target["type"] not in ("gke", "ray"):  # a container cannot fill the memory of these machines
        user.wait(run, "TRAINING")
        user.run_out_of_memory(run)
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "out_of_memory", record.error
    assert MEMORY_FIELDS.get(target["type"], "memory_gib") in record.error.hint
    assert len(record.attempts) == 1
    assert_clean(user, run)


def test_repeated_job_events_change_nothing(user: User, target: Part) -> None:
    run = user.drop(user.spec("repeat", target=target))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED
    assert states(record) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    stored = list(user.store.names(names.events_prefix(run)))
    # Teardown ends a TPU VM at once. If its script has not seen the container's end by then, it reports a preemption.
    events = [name for name in stored if not name.endswith("-preempted.json")]
    assert len(events) == len(set(events)) == 2
    assert len(user.slack(run, "succeeded")) == 3


def test_a_preempted_attempt_is_followed_by_another(user: User, target: Part) -> None:
    run = user.drop(user.spec("preempted-once", target=target))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["preempted", None]
    assert_clean(user, run)


# The Ray operator replaces a machine within the attempt: see test_ray.py.
@pytest.mark.parametrize("target", sorted(PARTS.keys() - {"ray"}), indirect=True)
def test_a_preempted_machine_is_replaced(user: User, target: Part) -> None:
    run = user.drop(user.spec("hang-once", target=target))
    user.wait(run, "TRAINING")
    user.preempt(run)
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    preempted, last = record.attempts
    assert preempted.error is not None
    # Cloud Run does not distinguish a preemption from another loss of the machine.
    assert preempted.error.error_class in ("preempted", "infrastructure")
    assert last.error is None
    assert_clean(user, run)


def test_an_attempt_killed_from_outside_is_followed_by_another(user: User, target: Part) -> None:
    record = user.wait(user.drop(user.spec("killed-once", target=target)))
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["infrastructure", None]


def test_a_deleted_training_resource_is_followed_by_another_attempt(user: User, target: Part) -> None:
    run = user.drop(user.spec("hang-once", target=target))
    user.wait(run, "TRAINING")
    user.delete(user.training(run))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    first, second = [a.error.error_class if a.error else None for a in record.attempts]
    assert first in ("infrastructure", "preempted")  # a deleted machine may still report that it was stopped
    assert second is None
    assert_clean(user, run)


def test_a_cancel_ends_a_training_run(user: User, target: Part) -> None:
    run = user.drop(user.spec("hang", target=target))
    user.wait(run, "TRAINING")
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    record = user.wait(run)
    assert record.state is RunState.CANCELLED
    assert_clean(user, run)
    assert " cancelled by topic " in user.slack(run, "cancelled")[-1]


def test_the_cloud_ends_an_attempt_at_its_deadline(user: User, target: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud ends the attempt without dropforge."""
    monkeypatch.setattr("dropforge.stages.provision.MIN_ATTEMPT_SECONDS", 1)
    run = launched(user, "hang", target=target, limits={"max_duration": "9s"})
    record, spec = user.store.record(run), user.store.spec(run)
    cloud = eventually(lambda: _inspect_cloud(target["type"], launch_of(record, spec, user.settings, key="")))
    assert cloud["phase"] is Phase.FAILED
    assert eventually(lambda: inspect(run, ME, 1, URL))["error"]["error_class"] == "deadline"
    end(user, run)


def _inspect_cloud(kind: str, launch: Any) -> dict[str, Any]:
    status = get_target(kind).inspect(here().cloud, launch)
    running = status.phase in (Phase.PENDING, Phase.RUNNING)
    return {"status": "WAITING" if running else "ENDED", "phase": status.phase, "message": status.message}


def test_a_served_run_answers_until_it_is_cancelled(user: User, serve: Part) -> None:
    run = user.drop(user.spec(serve=serve))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert record.endpoint is not None
    question = {"model": "noop", "messages": [{"role": "user", "content": "?"}]}
    url = f"{record.endpoint.url}/v1/chat/completions"
    assert requests.post(url, json=question, timeout=60).status_code in (401, 403)
    key = endpoint_key(here().cloud, user.store.spec(run))
    assert bool(key) is (serve["type"] in ("gke", "tpu_vm"))  # IAM guards other endpoints
    answer = clients.endpoint(record.endpoint.url, key).post(url, json=question, timeout=PATIENCE_SECONDS)
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    remaining = [entry.name for entry in user.store.ledger(run).remaining()]
    assert record.endpoint.service in remaining
    assert set(remaining) <= set(user.resources(run))
    assert not any("/jobs/" in name for name in user.resources(run))

    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert_clean(user, run)
