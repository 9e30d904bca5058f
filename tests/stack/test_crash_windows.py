"""One function at a time against the stack's cloud, with a death, a race or a refusal put between two of its writes."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import requests
from google.api_core.exceptions import NotFound, ServiceUnavailable

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec, RetryLater, SpecProblem
from dropforge.cloud.context import Cloud
from dropforge.cloud.executions import start_execution
from dropforge.platforms.cloud_run.train import CloudRunJobs
from dropforge.platforms.training import Launch, Phase, Status
from dropforge.run.record import Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec

from ..deployments import clients
from ..stage_calls import (
    deploy,
    inspect,
    notify,
    provision,
    receive_job_event,
    submit_message,
    submit_object,
    sweep,
    teardown,
)
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
    assert provision(run, ME, 1)["status"] == "FAILED"  # for an execution that takes over: how the run ends
    assert_clean(user, run)


def test_a_launch_that_stays_pending_ends_as_a_stockout(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = accepted(user)
    monkeypatch.setattr(CloudRunJobs, "provision", lambda *_: False)
    assert provision(run, ME, 1)["status"] == "PENDING"
    later = utc_now() + timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    monkeypatch.setattr(Clock, "now", lambda _: later)
    answer = provision(run, ME, 1)
    assert (answer["status"], answer["retry"]) == ("FAILED", True)
    assert answer["error"]["error_class"] == "stockout"
    end(user, run)


def test_what_passes_by_itself_ends_an_attempt_when_it_does_not(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = accepted(user)

    def refuse(*_: Any) -> bool:
        raise CloudError(ErrorClass.TRANSIENT, "503")

    monkeypatch.setattr(CloudRunJobs, "provision", refuse)
    with pytest.raises(CloudError):
        provision(run, ME, 1)
    later = utc_now() + timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    monkeypatch.setattr(Clock, "now", lambda _: later)
    answer = provision(run, ME, 1)
    assert (answer["error"]["error_class"], answer["retry"]) == ("transient", True)
    end(user, run)


def test_a_stockout_after_the_provisioning_deadline_moves_on(user: User, faults: Any) -> None:
    faults(stockout=["us-central1"])
    run = launched(user)
    long_ago = utc_now() - timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    user.store.update(run, lambda r: r.with_launch(1, long_ago))
    assert eventually(lambda: inspect(run, ME, 1, URL))["error"]["error_class"] == "stockout"
    assert eventually(lambda: teardown(run, ME, "attempt", True))["status"] == "GONE"
    assert eventually(lambda: provision(run, ME, 2))["status"] == "RUNNING"
    assert user.store.record(run).attempts[1].region == "europe-west4"
    end(user, run)


def test_a_model_that_is_committed_between_two_looks_counts(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container commits and ends after the bucket was looked at and before the cloud is."""
    run = launched(user, "silent")
    look = CloudRunJobs.inspect

    def late_look(target: CloudRunJobs, cloud: Cloud, launch: Launch) -> Status:
        deadline = time.monotonic() + 20
        while (status := look(target, cloud, launch)).phase is not Phase.SUCCEEDED and time.monotonic() < deadline:
            time.sleep(0.02)
        monkeypatch.undo()
        return status

    monkeypatch.setattr(CloudRunJobs, "inspect", late_look)
    monkeypatch.setattr("dropforge.stages.await_.inspect.read_manifest", lambda *_: None)
    assert inspect(run, ME, 1, URL)["status"] == "SUCCEEDED"
    end(user, run)


def test_a_resource_that_cannot_be_deleted_spares_no_other(user: User, faults: Any) -> None:
    run = launched(user)
    first = user.store.ledger(run).entries[0].name
    user.store.intend(run, "run.googleapis.com/Service", first.replace("/jobs/", "/services/"), 1)
    faults(fail_next={"method": "delete_job", "status": "PERMISSION_DENIED"})
    with pytest.raises(CloudError) as refused:
        teardown(run, ME, "run", False)
    assert refused.value.error_class is ErrorClass.PERMISSION
    assert [entry.kind for entry in user.store.ledger(run).remaining()] == ["run.googleapis.com/Job"]
    end(user, run)


def test_teardown_does_not_wait_for_pubsub(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launched(user)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotFound("Resource not found (resource=dropforge-run-events).")

    monkeypatch.setattr(clients.publisher(), "publish", refuse)
    end(user, run)
    assert notify(run, ME, RunState.CANCELLED, None)["status"] == "UNTOLD"
    assert user.store.record(run).state is RunState.CANCELLED
    monkeypatch.undo()
    assert notify(run, ME, RunState.CANCELLED, None)["status"] == "NOTIFIED"
    assert user.slack(run, "cancelled")


def test_a_start_whose_reply_was_lost_is_found_again(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Death between starting the execution and noting it; the second delivery finds it, and tells what was not told."""
    key = f"lost-{time.time_ns()}"
    data = json.dumps(user.spec()).encode()

    def start_and_die(cloud: Cloud, run: str) -> str:
        start_execution(cloud, run)
        raise ServiceUnavailable("the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr("dropforge.stages.submit.start_execution", start_and_die)
        with pytest.raises(ServiceUnavailable):
            submit_message(data, key)
    run = names.run_id_of_message(key)
    with suppress(RetryLater):  # unless the execution has come to `provision` by now
        submit_message(data, key)
    monkeypatch.setattr("dropforge.stages.submit.START_SECONDS", 0)
    submit_message(data, key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1
    assert_clean(user, run)


def test_death_between_record_and_start_is_followed_up_by_the_next_delivery(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"died-{time.time_ns()}"
    data = json.dumps(user.spec()).encode()
    told: list[str] = []

    def die(*_: Any) -> None:
        raise ServiceUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr("dropforge.tell.everybody.announce", die)
        with pytest.raises(ServiceUnavailable):
            submit_message(data, key)
    monkeypatch.setattr("dropforge.stages.submit.START_SECONDS", 0)
    monkeypatch.setattr("dropforge.tell.everybody.announce", lambda context, record, state: told.append(state))
    submit_message(data, key)
    assert told == ["ACCEPTED"]
    run = names.run_id_of_message(key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1
    assert [h.split()[-1] for h in user.slack(run, "succeeded")] == ["accepted", "started", "succeeded"]


def test_the_first_spec_under_a_key_counts(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delivery dies after writing its spec; the second brings another one under the same key."""
    key = f"reused-{time.time_ns()}"

    def die(*_: Any) -> bool:
        raise ServiceUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "create", die)
        with pytest.raises(ServiceUnavailable):
            submit_message(json.dumps(user.spec(name="first")).encode(), key)
    record = submit_message(json.dumps(user.spec(name="second")).encode(), key)
    assert record.name == user.store.spec(record.run).name == "first"
    user.wait(record.run)


def test_a_run_that_another_delivery_has_accepted_is_not_told_as_rejected(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second delivery finds the spec deleted, after the first has read and accepted it."""
    name = f"specs/{time.time_ns()}.json"
    bucket = user.settings.specs_bucket
    blob = clients.storage().bucket(bucket).blob(name)
    accept: list[Record] = []

    def accepted_meanwhile(*_: Any) -> bytes:
        accept.append(submit_message(json.dumps(user.spec()).encode(), name))
        raise InvalidSpec([SpecProblem("", "deleted", None, None)])

    monkeypatch.setattr("dropforge.stages.submit.names.run_id_of_object", lambda *_: names.run_id_of_message(name))
    monkeypatch.setattr("dropforge.stages.submit.read_spec", accepted_meanwhile)
    record = submit_object(bucket, name, "1", 100)
    assert blob.exists() is False
    assert record.state is not RunState.REJECTED
    assert user.wait(record.run).state is RunState.SUCCEEDED
    assert "rejected" not in " ".join(user.slack(record.run, "succeeded"))
    assert names.errors_object(record.run) not in list(user.store.names(f"runs/{record.run}/"))


def test_an_event_that_overtakes_the_callback_wakes_it(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` notes its callback, and finds no event yet, while the event is being kept."""
    run = launched(user)
    keep = RunStore.put_new
    woken: list[str] = []

    def keep_slowly(store: RunStore, name: str, data: bytes, content_type: str = "application/json") -> bool:
        store.update(run, lambda r: r.model_copy(update={"callback_url": URL}))
        return keep(store, name, data, content_type)

    monkeypatch.setattr(RunStore, "put_new", keep_slowly)

    def wake(_: Any, url: str, body: Any) -> bool:
        woken.append(url)
        return True

    monkeypatch.setattr("dropforge.stages.await_.job_events.wake", wake)
    event = {"type": "failed", "run": run, "attempt": 1, "sequence": 1, "time": "2026-01-01T00:00:00Z"}
    receive_job_event(json.dumps({**event, "error_class": "code", "message": "x"}).encode())
    assert woken == [URL]
    monkeypatch.undo()
    end(user, run)


def test_a_deploy_that_comes_late_notes_no_endpoint(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launched(user, "silent", serve={"type": "cloud_run", "ttl": "1h"})
    assert eventually(lambda: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"
    done: list[dict[str, Any]] = []

    def torn_down_meanwhile(cloud: Cloud, url: str, model: str) -> str:
        done.append(eventually(lambda: teardown(run, ME, "run", False)))
        return ""

    monkeypatch.setattr("dropforge.stages.deploy.completion_problem", torn_down_meanwhile)
    assert eventually(lambda: deploy(run, ME))["status"] == "SUPERSEDED"
    assert user.store.record(run).endpoint is None
    assert_clean(user, run)


def test_an_endpoint_that_is_refused_keeps_the_model_and_nothing_else(user: User, faults: Any) -> None:
    message = "Quota exceeded for total allowable count of GPUs per project per region."
    faults(fail_next={"method": "create_service", "status": "RESOURCE_EXHAUSTED", "message": message})
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error
    assert (record.error.error_class, record.endpoint) == ("quota", None)
    assert user.store.read(f"models/{run}/MANIFEST.json")
    assert_clean(user, run)


def test_an_endpoint_whose_creation_is_ambiguous_is_made_once(user: User, faults: Any) -> None:
    faults(fail_next={"method": "create_service", "status": "UNAVAILABLE", "after_effect": True})
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(user.resources(run)) == 1
    user.publish("dropforge-requests", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert_clean(user, run)


def test_a_webhook_that_is_deleted_while_the_run_goes_on_changes_nothing(user: User) -> None:
    parent, name = f"projects/{user.settings.project}", f"webhook-{time.time_ns()}"
    created = clients.secrets().create_secret(parent=parent, secret_id=name, secret={"replication": {"automatic": {}}})
    clients.secrets().add_secret_version(
        parent=created.name, payload={"data": f"{user.info.http}/slack/services/T/B/x".encode()}
    )
    run = user.drop(user.spec("slow", notify={"slack": {"webhook_secret": name}}))
    user.wait(run, "TRAINING")
    clients.secrets().delete_secret(name=created.name)
    assert user.wait(run).state is RunState.SUCCEEDED
    deadline = time.monotonic() + 10
    while names.report_object(run) not in user.store.names(f"runs/{run}/"):
        assert time.monotonic() < deadline, "no report: the end of the run was not told"
        time.sleep(0.05)


def test_the_sweep_deletes_what_the_cloud_lists_whatever_the_ledger_says(
    user: User, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A create that took effect after teardown had seen nothing; and one endpoint that cannot be deleted."""
    runs = []
    for _ in range(2):
        run = launched(user, "silent", serve={"type": "cloud_run", "ttl": "1h"})
        assert eventually(lambda run=run: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"
        assert eventually(lambda run=run: deploy(run, ME))["status"] == "READY"
        assert eventually(lambda run=run: teardown(run, ME, "run", True))["status"] == "GONE"
        notify(run, ME, RunState.SUCCEEDED, None)
        runs.append(run)
    lost = user.store.record(runs[0]).endpoint
    assert lost
    user.store.note(runs[0], lost.service, ResourceState.GONE)
    faults(fail_next={"method": "delete_service", "status": "PERMISSION_DENIED"})
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(days=2))
    assert len(sweep()["deleted"]) == 1
    assert len(sweep()["deleted"]) == 1
    for run in runs:
        assert_clean(user, run)
        ended = user.store.record(run).endpoint
        assert ended
        assert ended.ended
