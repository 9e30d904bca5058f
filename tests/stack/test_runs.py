"""What becomes of a dropped spec, on the whole stack: every way a run can end, and what must hold on each."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import requests

from dropforge.base import names
from dropforge.cloud import clients
from dropforge.run.record import Record, RunState

from .conftest import User

GATE = {"holdout_fraction": 0.1, "gate": {"metric": "exact_match", "min": 0.5}}
SERVE = {"type": "cloud_run", "ttl": "1h"}


def assert_clean(user: User, run: str) -> None:
    assert user.resources(run) == []
    assert user.store.ledger(run).remaining() == []


def states(record: Record) -> list[str]:
    return [transition.state.value for transition in record.history]


def test_a_gate_that_is_not_passed_keeps_the_model_but_serves_nothing(user: User) -> None:
    run = user.drop(user.spec("poor", evaluation=GATE, serve=SERVE))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "gate"
    assert "0.1" in record.error.message
    assert ">= 0.5" in record.error.message
    assert RunState.DEPLOYING not in states(record)
    assert_clean(user, run)


def test_success_without_a_single_event_is_seen(user: User) -> None:
    record = user.wait(user.drop(user.spec("silent")))
    assert record.state is RunState.SUCCEEDED


def test_attempts_are_limited(user: User) -> None:
    run = user.drop(user.spec("preempted", limits={"max_attempts": 2}))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "preempted"
    assert len(record.attempts) == 2
    assert_clean(user, run)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5])
def test_cancel_wins_at_any_moment(user: User, seconds: float) -> None:
    """Before the run is known, while it is provisioned, trained, deployed or torn down: nothing stays."""
    run = user.drop(user.spec(serve=SERVE))
    time.sleep(seconds)  # wherever the run is by then
    user.wait_for(run, lambda record: True)
    user.publish("dropforge-requests", json.dumps({"cancel": run}).encode())
    record = user.wait_for(run, lambda r: r.state.is_terminal and (r.endpoint is None or r.endpoint.ended is not None))
    assert record.state in (RunState.CANCELLED, RunState.SUCCEEDED)
    assert_clean(user, run)


def test_a_budget_that_buys_less_than_a_minute_is_refused(user: User) -> None:
    target = {**user.spec()["target"], "price_usd_per_hour": 3600.0}
    run = user.drop(user.spec("hang", target=target, limits={"max_cost_usd": 0.5}))
    record = user.wait(run)
    assert record.state is RunState.REJECTED
    assert record.problems[0]["pointer"] == "/limits/max_cost_usd"


def test_the_same_event_again_is_the_same_run(user: User) -> None:
    """Delivered by hand, as Eventarc would deliver it again."""
    run = user.drop(user.spec())
    user.wait(run)
    source = user.store.record(run).source
    bucket, _, rest = source.removeprefix("gs://").partition("/")
    name, _, generation = rest.rpartition("#")
    for _ in range(3):
        assert deliver_upload(user, bucket, name, generation) == 204
    assert len(user.executions(run)) == 1
    assert len(user.slack(run, "succeeded")) == 3


def deliver_upload(user: User, bucket: str, name: str, generation: str) -> int:
    status = deliver(user, "on_spec_uploaded", "finalized", bucket, name, generation)
    return 204 if status == 200 else status


def deliver(user: User, function: str, event: str, bucket: str, name: str, generation: str) -> int:
    """The status of an event of Cloud Storage that is delivered by hand, as Eventarc would."""
    from dropforge_local.base.identity import Identity

    url = user.info.functions + function
    token = Identity((user.state / "identity").read_text()).token("OIDC", url)
    headers = {
        "Authorization": f"Bearer {token}",
        "ce-id": "by-hand",
        "ce-source": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "ce-type": f"google.cloud.storage.object.v1.{event}",
        "ce-specversion": "1.0",
    }
    body = {"bucket": bucket, "name": name, "generation": generation, "size": "100"}
    return requests.post(url, json=body, headers=headers, timeout=30).status_code


def test_two_specs_with_one_name_are_two_runs(user: User) -> None:
    first, second = user.drop(user.spec(name="twin")), user.drop(user.spec(name="twin"))
    assert first != second
    assert user.wait(first).state is user.wait(second).state is RunState.SUCCEEDED


def test_a_spec_overwritten_while_it_runs_is_another_run(user: User) -> None:
    first = user.drop(user.spec("hang"), "specs/overwritten.json")
    user.wait(first, "TRAINING")
    second = user.drop(user.spec(), "specs/overwritten.json")
    assert user.wait(second).state is RunState.SUCCEEDED
    assert user.store.record(first).state is RunState.TRAINING
    user.publish("dropforge-requests", json.dumps({"cancel": first}).encode())
    assert user.wait(first).state is RunState.CANCELLED


def test_a_message_with_a_key_is_one_run_however_often_published(user: User) -> None:
    key = f"key-{time.time_ns()}"
    for _ in range(3):
        user.publish("dropforge-requests", json.dumps(user.spec()).encode(), idempotency_key=key)
    run = names.run_id_of_message(key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1


def test_a_message_may_name_a_spec(user: User) -> None:
    bucket = clients.storage().bucket(user.settings.specs_bucket)
    bucket.blob("elsewhere/spec.json").upload_from_string(json.dumps(user.spec()))
    key = f"key-{time.time_ns()}"
    uri = f"gs://{user.settings.specs_bucket}/elsewhere/spec.json"
    user.publish("dropforge-requests", json.dumps({"spec_uri": uri}).encode(), idempotency_key=key)
    assert user.wait(names.run_id_of_message(key)).state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "event",
    [
        b"not json",
        b'{"type": "succeeded"}',
        json.dumps({"type": "failed", "run": "forged-0123456789ab", "attempt": 1, "sequence": 1}).encode(),
    ],
)
def test_malformed_and_forged_job_events_do_nothing(user: User, event: bytes) -> None:
    user.publish("dropforge-job-events", event)
    record = user.wait(user.drop(user.spec()))
    assert record.state is RunState.SUCCEEDED
    with pytest.raises(Exception, match="does not exist"):
        user.store.record("forged-0123456789ab")


def test_late_job_events_change_nothing(user: User) -> None:
    run = user.drop(user.spec())
    before = user.wait(run)
    late = {"type": "failed", "run": run, "attempt": 1, "sequence": 9, "time": "2026-01-01T00:00:00Z"}
    user.publish("dropforge-job-events", json.dumps({**late, "error_class": "code", "message": "late"}).encode())
    user.wait(user.drop(user.spec()))  # whatever was published before has been delivered by then
    assert user.store.record(run) == before


def test_the_run_is_told_to_other_systems(user: User) -> None:
    from google.cloud import pubsub_v1

    subscriber = pubsub_v1.SubscriberClient()
    name = f"projects/{user.settings.project}/subscriptions/watch-{time.time_ns()}"
    topic = user.settings.topic(user.settings.run_events_topic)
    subscriber.create_subscription(name=name, topic=topic)
    run = user.drop(user.spec())
    user.wait(run)
    told: dict[str, Any] = {}
    deadline = time.monotonic() + 20
    while "SUCCEEDED" not in told and time.monotonic() < deadline:
        for received in subscriber.pull(subscription=name, max_messages=50, timeout=10).received_messages:
            data = json.loads(received.message.data)
            if data["run"] == run:
                told[data["state"]] = received.message.attributes["ce-type"]
    subscriber.close()
    assert list(told) == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    assert told["SUCCEEDED"] == "dev.dropforge.run.succeeded"
