"""Cancel requests: every way to send them, at every moment. No request is lost, and no resource stays."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.run.record import RunState
from dropforge.stages.looks import LONGEST_SECONDS

from ..deployments import clients
from ..stage_calls import cancel, cancel_deleted, deploy, inspect, provision, teardown
from .conftest import User
from .test_crash_windows import ME, SUCCESS, URL, accepted, end, eventually, launched
from .test_runs import assert_clean, deliver, deliver_upload, run_events, states

Part = dict[str, Any]
SERVE = {"type": "cloud_run", "ttl": "1h"}


def test_deleting_the_spec_cancels_its_run(user: User, target: Part) -> None:
    name = f"specs/deleted-{time.time_ns()}.json"
    run = user.drop(user.spec("hang", target=target), name)
    user.wait(run, "TRAINING")
    clients.storage().bucket(user.settings.specs_bucket).blob(name).delete()
    assert user.wait(run).state is RunState.CANCELLED
    assert_clean(user, run)
    told = f"cancelled by the deletion of gs://{user.settings.specs_bucket}/{name}"
    assert told in user.slack(run, "cancelled")[-1]


def test_deleting_the_spec_of_a_finished_run_changes_nothing(user: User) -> None:
    """People and the bucket's lifecycle rule may clean up the specs bucket."""
    bucket, name = clients.storage().bucket(user.settings.specs_bucket), f"specs/tidied-{time.time_ns()}.json"
    run = user.drop(user.spec(serve=SERVE), name)
    before = user.wait(run)
    generation = str(bucket.get_blob(name).generation)
    bucket.blob(name).delete()
    cancel_deleted(user.settings.specs_bucket, name, generation)  # a second delivery of the event
    assert user.store.record(run) == before
    assert before.endpoint is not None
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    after = user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    assert after.endpoint is not None
    assert after.endpoint.expires < before.endpoint.expires  # the sweep would end it if the cancel did not
    assert_clean(user, run)


def test_overwriting_a_spec_cancels_nothing(user: User) -> None:
    name = f"specs/overwritten-{time.time_ns()}.json"
    first = user.drop(user.spec("hang"), name)
    user.wait(first, "TRAINING")
    generation = str(clients.storage().bucket(user.settings.specs_bucket).get_blob(name).generation)
    second = user.drop(user.spec("hang", name="other"), name)
    user.wait_for(second, lambda record: True)
    cancel_deleted(user.settings.specs_bucket, name, generation)
    assert user.store.record(first).cancel_requested is None
    for run in (first, second):
        user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
        assert user.wait(run).state is RunState.CANCELLED


@pytest.mark.parametrize("name", ["notes.txt", "elsewhere/a.json", "specs/readme.md"])
def test_deleting_an_object_that_is_not_a_spec_does_nothing(user: User, name: str) -> None:
    assert deliver_delete(user, user.settings.specs_bucket, name, "1234567") == 200
    run = names.run_id_of_object(user.settings.specs_bucket, name, "1234567")
    assert list(user.store.names(f"runs/{run}/")) == []


def test_a_cancel_that_arrives_before_its_spec_takes_effect(user: User) -> None:
    key = f"overtaken-{time.time_ns()}"
    run = names.run_id_of_message(key)
    for _ in range(2):
        user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    user.until(lambda: list(user.store.names(names.cancel_object(run))))
    user.publish("dropforge-requests", json.dumps(user.spec()).encode(), idempotency_key=key)
    record = user.wait(run)
    assert states(record) == ["ACCEPTED", "CANCELLED"]
    assert len(user.slack(run, "cancelled")) == 1
    assert user.executions(run) == []
    assert user.store.ledger(run).entries == []


def test_a_cancel_from_another_source_changes_nothing_and_is_answered_as_for_no_run(user: User) -> None:
    """The spec was dropped in the bucket; the cancels come from the requests topic."""
    run, unknown = user.drop(user.spec("hang")), "unknown-0123456789ab"
    user.wait(run, "TRAINING")
    answers: dict[str, dict[str, Any]] = {}
    with run_events(user) as pull:
        sent = [user.publish("dropforge-requests", json.dumps({"cancel": name}).encode()) for name in (run, unknown)]

        def both_arrived() -> bool:
            answers.update({event["run"]: event for _, event in pull() if event["state"] == "UNKNOWN"})
            return len(answers) == 2

        user.until(both_arrived)
    foreign, none = (answers[name] for name in (run, unknown))
    assert [foreign["details"].pop("message"), none["details"].pop("message")] == sent
    assert foreign["details"] == none["details"]
    assert user.store.record(run).cancel_requested is None
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    assert user.wait(run).state is RunState.CANCELLED


def test_a_deletion_event_that_arrives_before_its_upload_takes_effect(user: User) -> None:
    bucket, name, generation = user.settings.specs_bucket, f"specs/gone-{time.time_ns()}.json", "1234567"
    run = names.run_id_of_object(bucket, name, generation)
    assert deliver_delete(user, bucket, name, generation) == 200
    assert deliver_upload(user, bucket, name, generation) == 204
    record = user.wait(run)
    assert states(record) == ["CANCELLED"]
    assert len(user.slack(run, "cancelled")) == 1
    assert deliver_delete(user, bucket, name, generation) == 200
    assert deliver_upload(user, bucket, name, generation) == 204
    assert len(user.slack(run, "cancelled")) == 1


def test_a_cancel_ends_a_run_without_resources_at_once(user: User) -> None:
    run = accepted(user)
    cancel(run)
    record = user.store.record(run)
    assert states(record) == ["ACCEPTED", "CANCELLED"]
    cancel(run)
    assert len(user.slack(run, "cancelled")) == 1
    assert json.loads(user.store.read(names.report_object(run)).data)["cost_usd"]["total_at_most"] == 0
    assert provision(run, ME, 1)["status"] == "SUPERSEDED"
    assert_clean(user, run)


def test_a_cancel_between_two_stages_wins_in_the_next_stage(user: User) -> None:
    """The cancel wins in provision (first and second attempt), inspect and deploy."""
    run = launched(user)
    cancel(run)
    for answer in (provision(run, ME, 1), provision(run, ME, 2), inspect(run, ME, 1, URL), deploy(run, ME)):
        assert answer["status"] == "CANCELLED"
    end(user, run)
    assert user.store.record(run).state is RunState.CANCELLED


def test_a_cancel_during_teardown_wins_over_an_unrecorded_success(user: User) -> None:
    run = launched(user, "silent", serve=SERVE)
    assert eventually(lambda: inspect(run, ME, 1, URL))["status"] == "SUCCEEDED"
    assert eventually(lambda: deploy(run, ME))["status"] == "READY"
    assert eventually(lambda: teardown(run, ME, "run", True)) == {"status": "GONE", "cancelled": False}
    assert len(user.resources(run)) == 1
    cancel(run)
    assert eventually(lambda: teardown(run, ME, "run", True, SUCCESS)) == {"status": "ENDED", "state": "CANCELLED"}
    assert user.store.record(run).state is RunState.CANCELLED
    assert_clean(user, run)


def test_a_cancel_during_a_stockout_does_not_wait_for_the_capacity_pause(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stockout in every placement the run requests nothing for a while, but it looks for a cancel."""
    from dropforge.base.errors import CloudError, ErrorClass
    from dropforge.platforms.cloud_run.train import CloudRunJobs

    def refuse(*_: Any) -> bool:
        raise CloudError(ErrorClass.STOCKOUT, "none left")

    monkeypatch.setattr(CloudRunJobs, "provision", refuse)
    run = accepted(user)
    assert [provision(run, ME, number)["retry"] for number in (1, 2)] == [True, True]
    answer = provision(run, ME, 3)
    assert answer["status"] == "PENDING"
    assert 0 < answer["wait_seconds"] <= LONGEST_SECONDS
    later = utc_now() + timedelta(seconds=user.settings.capacity_pause_seconds + 1)
    monkeypatch.setattr(Clock, "now", lambda _: later)
    assert provision(run, ME, 3)["retry"] is True
    assert user.store.record(run).attempts[-1].region == "us-central1"
    cancel(run)
    assert provision(run, ME, 4)["status"] == "CANCELLED"
    end(user, run)


def deliver_delete(user: User, bucket: str, name: str, generation: str) -> int:
    """Deliver a deletion event as Eventarc does; return the HTTP status."""
    return deliver(user, "on_spec_deleted", "deleted", bucket, name, generation)
