"""One function at a time against the stack's cloud, with a death, a race or a refusal put between two of its writes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import requests

from dropforge import names
from dropforge.errors import CloudError, ErrorClass
from dropforge.inspect import inspect
from dropforge.provision import provision
from dropforge.runs import Record, RunState, Transition, utc_now
from dropforge.spec import JobSpec
from dropforge.targets.base import Launch, Phase, Status
from dropforge.targets.cloud_run import CloudRunJobs
from dropforge.teardown import teardown

from .conftest import User
from .test_runs import assert_clean

ME = "the-execution-of-this-test"
URL = "http://127.0.0.1:1/callback"
_numbers = itertools.count()


def accepted(user: User, behave: str = "hang", age: timedelta = timedelta(0), **changes: Any) -> str:
    """A run that is accepted and that no execution knows of: the test calls the stages itself."""
    run = names.run_id_of_message(f"crash-window-{time.time_ns()}-{next(_numbers)}")
    spec = JobSpec.model_validate_json(json.dumps(user.spec(behave, **changes)))
    now = utc_now() - age
    history = [Transition(state=RunState.ACCEPTED, time=now)]
    record = Record(run=run, name="noop", source="test", state=RunState.ACCEPTED, created=now, history=history)
    user.store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode())
    user.store.create(record.model_copy(update={"execution": ME}))
    return run


def launched(user: User, behave: str = "hang", **changes: Any) -> str:
    run = accepted(user, behave, **changes)
    assert eventually(lambda: provision(run, ME, 1))["status"] == "RUNNING"
    return run


def eventually(stage: Any) -> dict[str, Any]:
    """A stage's answer once it is no longer "call again"."""
    deadline = time.monotonic() + 30
    while (answer := stage())["status"] in ("PENDING", "WAITING") and time.monotonic() < deadline:
        time.sleep(0.05)
    return dict(answer)


def end(user: User, run: str) -> None:
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
    assert_clean(user, run)


@pytest.fixture
def faults(user: User) -> Iterator[Any]:
    """Switch faults of the Cloud Run emulator on; off again after the test."""

    def switch(**body: Any) -> None:
        requests.post(f"{user.info.http}/_local/cloudrun/faults", json=body, timeout=10).raise_for_status()

    yield switch
    switch(quota={}, stockout=[], fail_next=[])


def test_a_quota_refusal_moves_on_to_the_next_placement(user: User, faults: Any) -> None:
    faults(quota={"us-central1": 0})
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.region for a in record.attempts] == ["us-central1", "europe-west4"]
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["quota", None]
    assert all(a.ended for a in record.attempts)
    assert_clean(user, run)


def test_a_refused_attempt_is_answered_the_same_when_the_reply_was_lost(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = accepted(user)

    def refuse(*_: Any) -> bool:
        raise CloudError(ErrorClass.QUOTA, "no quota", "ask for some")

    with monkeypatch.context() as patch:
        patch.setattr(CloudRunJobs, "provision", refuse)
        first = provision(run, ME, 1)
    assert (first["status"], first["retry"]) == ("FAILED", True)
    assert provision(run, ME, 1) == first
    assert user.resources(run) == []
    end(user, run)


def test_an_ambiguous_create_is_looked_at_and_made_once(user: User, faults: Any) -> None:
    faults(fail_next={"method": "create_job", "status": "UNAVAILABLE", "after_effect": True})
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)


def test_a_provision_that_comes_after_teardown_makes_nothing(user: User) -> None:
    run = launched(user)
    end(user, run)
    assert provision(run, ME, 1)["status"] == "SUPERSEDED"
    assert_clean(user, run)


def test_a_launch_that_stays_pending_ends_as_a_stockout(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = accepted(user)
    monkeypatch.setattr(CloudRunJobs, "provision", lambda *_: False)
    assert provision(run, ME, 1)["status"] == "PENDING"
    later = utc_now() + timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    monkeypatch.setattr("dropforge.provision.utc_now", lambda: later)
    answer = provision(run, ME, 1)
    assert (answer["status"], answer["retry"]) == ("FAILED", True)
    assert answer["error"]["error_class"] == "stockout"
    end(user, run)


def test_a_stockout_after_the_provisioning_deadline_moves_on(user: User, faults: Any) -> None:
    faults(stockout=["us-central1"])
    run = launched(user)
    later = utc_now() - timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    user.store.update(
        run, lambda r: r.model_copy(update={"attempts": [r.attempts[0].model_copy(update={"started": later})]})
    )
    assert eventually(lambda: inspect(run, ME, 1, URL))["error"]["error_class"] == "stockout"
    assert eventually(lambda: teardown(run, ME, "attempt", True))["status"] == "GONE"
    assert eventually(lambda: provision(run, ME, 2))["status"] == "RUNNING"
    assert user.store.record(run).attempts[1].region == "europe-west4"
    end(user, run)


def test_a_model_that_is_committed_between_two_looks_counts(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container commits and ends after the bucket was looked at and before the cloud is."""
    run = launched(user, "silent")
    look = CloudRunJobs.inspect

    def late_look(target: CloudRunJobs, launch: Launch) -> Status:
        deadline = time.monotonic() + 20
        while (status := look(target, launch)).phase is not Phase.SUCCEEDED and time.monotonic() < deadline:
            time.sleep(0.02)
        monkeypatch.undo()
        return status

    monkeypatch.setattr(CloudRunJobs, "inspect", late_look)
    monkeypatch.setattr("dropforge.inspect.read_manifest", lambda *_: None)
    assert inspect(run, ME, 1, URL)["status"] == "SUCCEEDED"
    end(user, run)
