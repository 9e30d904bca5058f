"""Call single stages against the stack's cloud, with a death, a race or a refusal between two writes of a stage."""

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
from tests.patience import PATIENCE_SECONDS, looks

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec, RetryLater, SpecProblem
from dropforge.cloud.context import Cloud
from dropforge.cloud.executions import start_execution
from dropforge.platforms.cloud_run.train import CloudRunJobs
from dropforge.platforms.training import Launch, Phase, Status, Waits
from dropforge.run.proof import EVENT_NAME, proof
from dropforge.run.record import Outcome, Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages import submit

from ..deployments import clients, intend
from ..stage_calls import (
    deploy,
    inspect,
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
SUCCESS, FAILED = Outcome(state=RunState.SUCCEEDED), Outcome(state=RunState.FAILED)
URL = "http://127.0.0.1:1/callback"
_numbers = itertools.count()


def accepted(user: User, behave: str = "hang", age: timedelta = timedelta(0), **changes: Any) -> str:
    """Create an accepted run without an execution; the test calls the stages itself. Return the run id."""
    run = names.run_id_of_message(f"crash-window-{time.time_ns()}-{next(_numbers)}")
    spec = JobSpec.model_validate_json(json.dumps(user.spec(behave, **changes)))
    now = utc_now() - age
    history = [Transition(state=RunState.ACCEPTED, time=now)]
    record = Record(run=run, name="noop", source="test", state=RunState.ACCEPTED, created=now, history=history)
    user.store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode())
    user.store.create(record.model_copy(update={"execution": ME}))
    return run


def launched(user: User, behave: str = "hang", **changes: Any) -> str:
    """Create an accepted run and provision its first attempt; return the run id."""
    run = accepted(user, behave, **changes)
    assert eventually(lambda: provision(run, ME, 1))["status"] == "RUNNING"
    return run


def eventually(stage: Any) -> dict[str, Any]:
    """Call a stage until its status is neither PENDING nor WAITING; return its answer."""
    answer: dict[str, Any] = {}
    for _ in looks(PATIENCE_SECONDS):
        answer = dict(stage())
        if answer["status"] not in ("PENDING", "WAITING"):
            break
    return answer


def end(user: User, run: str) -> None:
    assert eventually(lambda: teardown(run, ME, "run", False, FAILED))["status"] == "ENDED"
    assert_clean(user, run)


@pytest.fixture
def faults(user: User) -> Iterator[Any]:
    """Yield a function that switches on faults of the Cloud Run emulator; switch them off after the test."""

    def switch(**body: Any) -> None:
        requests.post(f"{user.info.http}/_local/cloudrun/faults", json=body, timeout=60).raise_for_status()

    yield switch
    switch(quota={}, stockout=[], fail_next=[])


def test_after_a_quota_error_the_next_placement_trains(user: User, faults: Any) -> None:
    faults(quota={"us-central1": 0})
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert [a.region for a in record.attempts] == ["us-central1", "europe-west4"]
    assert [a.error.error_class if a.error else None for a in record.attempts] == ["quota", None]
    assert all(a.ended for a in record.attempts)
    assert_clean(user, run)


def test_a_repeated_provision_of_a_refused_attempt_returns_the_same_answer(
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


def test_an_ambiguous_create_creates_one_job(user: User, faults: Any) -> None:
    faults(fail_next={"method": "create_job", "status": "UNAVAILABLE", "after_effect": True})
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(record.attempts) == 1
    assert_clean(user, run)


def test_a_provision_after_teardown_creates_nothing(user: User) -> None:
    run = launched(user)
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
    assert provision(run, ME, 1)["status"] == "FAILED"  # a takeover learns from this answer how the run ends
    assert_clean(user, run)


def test_a_launch_that_stays_pending_ends_as_a_stockout(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = accepted(user)
    monkeypatch.setattr(CloudRunJobs, "provision", lambda *_: Waits("no capacity"))
    assert provision(run, ME, 1)["status"] == "PENDING"
    later = utc_now() + timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    monkeypatch.setattr(Clock, "now", lambda _: later)
    answer = provision(run, ME, 1)
    assert (answer["status"], answer["retry"]) == ("FAILED", True)
    assert answer["error"]["error_class"] == "stockout"
    end(user, run)


def test_a_transient_error_ends_the_attempt_at_the_provisioning_deadline(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_after_a_stockout_beyond_the_provisioning_deadline_the_next_placement_trains(user: User, faults: Any) -> None:
    faults(stockout=["us-central1"])
    run = launched(user)
    long_ago = utc_now() - timedelta(seconds=user.settings.provision_deadline_seconds + 1)
    user.store.update(run, lambda r: r.with_launch(1, long_ago))
    assert eventually(lambda: inspect(run, ME, 1, URL))["error"]["error_class"] == "stockout"
    assert eventually(lambda: teardown(run, ME, 1, True))["status"] == "GONE"
    assert eventually(lambda: provision(run, ME, 2))["status"] == "RUNNING"
    assert user.store.record(run).attempts[1].region == "europe-west4"
    end(user, run)


def test_a_model_that_is_committed_during_an_inspection_counts(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container commits and ends after inspect read the bucket and before it inspects the job."""
    run = launched(user, "silent")
    inspect_job = CloudRunJobs.inspect

    def inspect_after_success(target: CloudRunJobs, cloud: Cloud, launch: Launch) -> Status:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (
            status := inspect_job(target, cloud, launch)
        ).phase is not Phase.SUCCEEDED and time.monotonic() < deadline:
            time.sleep(0.02)
        monkeypatch.undo()
        return status

    monkeypatch.setattr(CloudRunJobs, "inspect", inspect_after_success)
    monkeypatch.setattr("dropforge.stages.await_.inspect.read_manifest", lambda *_: None)
    assert inspect(run, ME, 1, URL)["status"] == "SUCCEEDED"
    end(user, run)


def test_a_failed_deletion_does_not_keep_other_resources(user: User, faults: Any) -> None:
    run = launched(user)
    first = user.store.ledger(run).entries[0].name
    intend(user.store, run, "run.googleapis.com/Service", first.replace("/jobs/", "/services/"), 1)
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
    user.until(lambda: teardown(run, ME, "run", False, FAILED) and user.store.record(run).state is RunState.FAILED)
    assert teardown(run, ME, "run", False, FAILED)["status"] == "PENDING"
    monkeypatch.undo()
    assert teardown(run, ME, "run", False, FAILED) == {"status": "ENDED", "state": "FAILED"}
    assert user.slack(run, "failed")
    assert_clean(user, run)


def test_a_lost_reply_to_an_execution_start_starts_no_second_execution(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submit crashes after it started the execution; the next delivery finds the execution and announces the run."""
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
    with suppress(RetryLater):  # not raised if the execution already called `provision`
        submit_message(data, key)
    monkeypatch.setattr("dropforge.stages.submit.START_SECONDS", 0)
    submit_message(data, key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1
    assert_clean(user, run)


def test_the_next_delivery_starts_a_run_whose_submit_crashed_after_the_record(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"crashed-{time.time_ns()}"
    data = json.dumps(user.spec()).encode()
    announced: list[str] = []

    def crash(*_: Any) -> None:
        raise ServiceUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr("dropforge.tell.everybody.announce", crash)
        with pytest.raises(ServiceUnavailable):
            submit_message(data, key)
    monkeypatch.setattr("dropforge.stages.submit.START_SECONDS", 0)
    monkeypatch.setattr("dropforge.tell.everybody.announce", lambda context, record, state: announced.append(state))
    submit_message(data, key)
    assert announced == ["ACCEPTED"]
    run = names.run_id_of_message(key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1
    assert [h.split()[-1] for h in user.slack(run, "succeeded")] == ["accepted", "started", "succeeded"]


def test_the_first_large_spec_with_an_idempotency_key_counts(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first delivery crashes after it wrote its spec; the second delivery has another spec with the same key."""
    key = f"reused-{time.time_ns()}"

    def crash(*_: Any) -> bool:
        raise ServiceUnavailable("killed")

    monkeypatch.setattr(submit, "MAX_SPEC_IN_RECORD", 0)
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "create", crash)
        with pytest.raises(ServiceUnavailable):
            submit_message(json.dumps(user.spec(name="first")).encode(), key)
    record = submit_message(json.dumps(user.spec(name="second")).encode(), key)
    assert record.name == user.store.spec(record.run).name == "first"
    user.wait(record.run)


def test_a_late_delivery_does_not_reject_an_accepted_run(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec is deleted after the first delivery accepted it and before the second delivery reads it."""
    name = f"specs/{time.time_ns()}.json"
    bucket = user.settings.specs_bucket
    blob = clients.storage().bucket(bucket).blob(name)

    def accept_first(*_: Any) -> bytes:
        submit_message(json.dumps(user.spec()).encode(), name)
        raise InvalidSpec([SpecProblem("", "deleted", None, None)])

    monkeypatch.setattr("dropforge.stages.submit.names.run_id_of_object", lambda *_: names.run_id_of_message(name))
    monkeypatch.setattr("dropforge.stages.submit.read_spec", accept_first)
    with suppress(RetryLater):  # not raised if the execution already called `provision`
        submit_object(bucket, name, "1", 100)
    assert blob.exists() is False
    run = names.run_id_of_message(name)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert "rejected" not in " ".join(user.slack(run, "succeeded"))
    assert names.errors_object(run) not in list(user.store.names(f"runs/{run}/"))


def test_a_job_event_during_the_callback_registration_wakes_the_execution(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`inspect` stores its callback and sees no event, while `receive_job_event` is about to store the event."""
    run = launched(user)
    put_new = RunStore.put_new
    called: list[str] = []

    def put_after_callback(store: RunStore, name: str, data: bytes, content_type: str = "application/json") -> bool:
        store.update(run, lambda r: r.model_copy(update={"callback_url": URL}))
        return put_new(store, name, data, content_type)

    monkeypatch.setattr(RunStore, "put_new", put_after_callback)

    def wake(_: Any, url: str, body: Any) -> int:
        called.append(url)
        return 200

    monkeypatch.setattr("dropforge.stages.await_.job_events.wake", wake)
    event = {"type": "failed", "run": run, "attempt": 1, "sequence": 1, "time": "2026-01-01T00:00:00Z"}
    data = json.dumps({**event, "error_class": "code", "message": "x"}).encode()
    receive_job_event(data, proof(user.store.key(run), EVENT_NAME, data))
    assert called == [URL]
    monkeypatch.undo()
    end(user, run)


def test_a_deploy_during_teardown_records_no_endpoint(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    run = launched(user, "silent", serve={"type": "cloud_run", "ttl": "1h"})
    assert eventually(lambda: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"

    def tear_down_first(cloud: Cloud, url: str, model: str, key: str) -> str:
        eventually(lambda: teardown(run, ME, "run", False))
        return ""

    monkeypatch.setattr("dropforge.stages.deploy.completion_problem", tear_down_first)
    assert eventually(lambda: deploy(run, ME))["status"] == "SUPERSEDED"
    assert user.store.record(run).endpoint is None
    assert_clean(user, run)


def test_a_run_with_a_refused_endpoint_keeps_only_its_model(user: User, faults: Any) -> None:
    message = "Quota exceeded for total allowable count of GPUs per project per region."
    faults(fail_next={"method": "create_service", "status": "RESOURCE_EXHAUSTED", "message": message})
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error
    assert (record.error.error_class, record.endpoint) == ("quota", None)
    assert user.store.read(f"models/{run}/MANIFEST.json")
    assert_clean(user, run)


def test_an_ambiguous_endpoint_creation_creates_one_service(user: User, faults: Any) -> None:
    faults(fail_next={"method": "create_service", "status": "UNAVAILABLE", "after_effect": True})
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert len(user.resources(run)) == 1
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert_clean(user, run)


def test_a_run_succeeds_after_its_webhook_was_deleted(user: User) -> None:
    parent, name = f"projects/{user.settings.project}", f"webhook-{time.time_ns()}"
    created = clients.secrets().create_secret(parent=parent, secret_id=name, secret={"replication": {"automatic": {}}})
    clients.secrets().add_secret_version(
        parent=created.name, payload={"data": f"{user.info.http}/slack/services/T/B/x".encode()}
    )
    run = user.drop(user.spec("slow", notify={"slack": {"webhook_secret": name}}))
    user.wait(run, "TRAINING")
    clients.secrets().delete_secret(name=created.name)
    assert user.wait(run).state is RunState.SUCCEEDED
    deadline = time.monotonic() + PATIENCE_SECONDS
    while names.report_object(run) not in user.store.names(f"runs/{run}/"):
        assert time.monotonic() < deadline, "the run has no report.json, so its end was not announced"
        time.sleep(0.05)


def test_the_sweep_deletes_expired_endpoints_regardless_of_the_ledger(
    user: User, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger of the first run says that its endpoint is gone; the first deletion of an endpoint fails."""
    services = {}  # the endpoint of each run, by the run's id
    for _ in range(2):
        run = launched(user, "silent", serve={"type": "cloud_run", "ttl": "1h"})
        assert eventually(lambda run=run: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"
        assert eventually(lambda run=run: deploy(run, ME))["status"] == "READY"
        assert eventually(lambda run=run: teardown(run, ME, "run", True, SUCCESS))["status"] == "ENDED"
        endpoint = user.store.record(run).endpoint
        assert endpoint
        services[run] = endpoint.service
    run = next(iter(services))
    user.store.note(run, [services[run]], ResourceState.GONE)
    faults(fail_next={"method": "delete_service", "status": "PERMISSION_DENIED"})
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(days=2))
    first = sweep()  # other tests of this stack may have left endpoints, which have expired too
    assert any("PERMISSION_DENIED" in problem for problem in first["problems"]), first
    deleted = {*first["deleted"]}
    assert deleted & {*services.values()}, first  # the failed deletion does not stop the others
    assert {*services.values()} <= deleted | {*sweep()["deleted"]}
    for run in services:
        assert_clean(user, run)
        ended = user.store.record(run).endpoint
        assert ended
        assert ended.ended
