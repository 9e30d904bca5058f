"""Runs on the whole stack: each way in which a run can end, and the promises for each end."""

from __future__ import annotations

import json
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import requests

from dropforge.base import names
from dropforge.run.record import Record, RunState, Transition
from dropforge_local.base.identity import Identity

from ..deployments import clients
from .conftest import User

GATE = {"holdout_fraction": 0.1, "gate": {"metric": "exact_match", "min": 0.5}}
SERVE = {"type": "cloud_run", "ttl": "1h"}


def assert_clean(user: User, run: str) -> None:
    assert user.resources(run) == []
    assert user.store.ledger(run).remaining() == []


def states(record: Record) -> list[str]:
    return [transition.state.value for transition in record.history]


def test_a_failed_gate_keeps_the_model_and_creates_no_endpoint(user: User) -> None:
    run = user.drop(user.spec("poor", evaluation=GATE, serve=SERVE))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "gate"
    assert "0.1" in record.error.message
    assert ">= 0.5" in record.error.message
    assert RunState.DEPLOYING not in states(record)
    assert_clean(user, run)


def test_a_run_without_job_events_succeeds(user: User) -> None:
    record = user.wait(user.drop(user.spec("silent")))
    assert record.state is RunState.SUCCEEDED


def test_a_training_with_an_ephemeral_disk_succeeds(user: User) -> None:
    """google-cloud-run does not know such disks, so the job is created by plain REST."""
    target = {"type": "cloud_run", "disk_gib": 10, "placements": [{"region": "us-central1"}]}
    run = user.drop(user.spec(target=target))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record.error
    assert_clean(user, run)


def test_attempts_are_limited(user: User) -> None:
    run = user.drop(user.spec("preempted", limits={"max_attempts": 2}))
    record = user.wait(run)
    assert record.state is RunState.FAILED
    assert record.error is not None
    assert record.error.error_class == "preempted"
    assert len(record.attempts) == 2
    assert_clean(user, run)


# The calls of a run that succeeds, in the order of workflows/run.workflows.yaml.
CALLS = ["provision", "inspect", "teardown attempt", "deploy", "teardown run"]


@pytest.mark.parametrize("moment", CALLS)
def test_a_cancel_before_any_call_of_the_workflow_wins(user: User, moment: str) -> None:
    workflow = HandMadeWorkflow(user, cancel_before=moment)
    workflow.finish()
    record = user.store.record(workflow.run)
    assert record.cancel_requested is not None
    assert record.state is RunState.CANCELLED
    assert workflow.calls[: CALLS.index(moment)] == CALLS[: CALLS.index(moment)]
    assert_clean(user, workflow.run)


def test_a_cancel_after_the_last_call_of_the_workflow_ends_the_endpoint(user: User) -> None:
    workflow = HandMadeWorkflow(user)
    workflow.finish()
    assert workflow.calls == CALLS
    assert len(user.resources(workflow.run)) == 1
    workflow.cancel()
    record = user.store.record(workflow.run)
    assert record.state is RunState.SUCCEEDED
    assert record.endpoint is not None
    assert record.endpoint.ended is not None
    assert_clean(user, workflow.run)


class HandMadeWorkflow:
    """Makes the workflow's calls for an accepted run, with a cancel right before the call `cancel_before`."""

    def __init__(self, user: User, cancel_before: str = "") -> None:
        self.run = names.run_id_of_message(uuid.uuid4().hex)
        self.calls: list[str] = []
        self._user, self._cancel_before = user, cancel_before
        now = datetime.now(UTC)
        history = [Transition(state=RunState.ACCEPTED, time=now)]
        user.store.put_new(names.spec_object(self.run), json.dumps(user.spec(serve=SERVE)).encode())
        record = Record(run=self.run, name="noop", source="s", state=RunState.ACCEPTED, created=now, history=history)
        assert user.store.create(record.model_copy(update={"execution": self.run}))

    def finish(self) -> None:
        status = self._serve() if (trained := self._train()) == "SUCCEEDED" else trained
        if status == "SUPERSEDED":
            return
        outcome, is_kept = {"state": status, "error": None}, status == "SUCCEEDED"
        self._call("teardown", "run", scope="run", keep_endpoint=is_kept, outcome=outcome)

    def cancel(self) -> None:
        """Deliver a cancel until its function acknowledges it."""
        request = json.dumps({"cancel": self.run}).encode()
        self._user.until(lambda: deliver_message(self._user, "on_spec_message", "dropforge-operations", request))

    def _train(self) -> str:
        callback = "http://127.0.0.1:1/callback"
        provisioned = self._call("provision", attempt=1, callback_url=callback)
        if provisioned["status"] != "RUNNING":
            return str(provisioned["status"])
        trained = self._call("inspect", attempt=1, callback_url=callback)
        return str(trained["status"])

    def _serve(self) -> str:
        self._call("teardown", "attempt", scope=1, keep_endpoint=True, outcome=None)
        deployed = self._call("deploy")["status"]
        return "SUCCEEDED" if deployed == "READY" else str(deployed)

    def _call(self, function: str, detail: str = "", **fields: Any) -> dict[str, Any]:
        """Call a function until its answer is final."""
        name = f"{function} {detail}".strip()
        if name == self._cancel_before:
            self.cancel()
        self.calls.append(name)
        body = {"run": self.run, "execution": self.run, **fields}
        answers: list[dict[str, Any]] = []

        def is_final() -> bool:
            response = call(self._user, function, body)
            assert response.ok, f"{name}: {response.status_code} {response.text}"
            answers.append(response.json())
            return answers[-1]["status"] not in ("PENDING", "WAITING")

        self._user.until(is_final)
        return answers[-1]


def call(user: User, function: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> requests.Response:
    """Call a function as the workflow or Eventarc does."""
    url = user.info.functions + function
    token = Identity((user.state / "identity").read_text()).token("OIDC", url)
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {token}", **(headers or {})}, timeout=60)


@pytest.mark.parametrize(
    ("caller", "function", "may"),
    [
        ("workflow", "teardown", True),
        ("workflow", "sweep", False),
        ("events", "teardown", False),
        ("trainer", "teardown", False),
        ("trainer", "on_job_event", False),
        ("deploy", "teardown", True),  # may call every Cloud Run service of the project (docs/security.md)
    ],
)
def test_terraform_says_who_may_call_a_function(user: User, caller: str, function: str, may: bool) -> None:
    url = user.info.functions + function
    token = Identity((user.state / "identity").read_text()).token("OIDC", url, caller)
    body = {"run": "unknown-0123456789ab", "execution": "e", "scope": "run", "keep_endpoint": False}
    answer = requests.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    assert (answer.status_code != 403) is may, answer.text


def test_a_budget_for_less_than_a_minute_is_rejected(user: User) -> None:
    target = {**user.spec()["target"], "price_usd_per_hour": 60.0}
    run = user.drop(user.spec("hang", target=target, limits={"max_cost_usd": 0.5}))
    record = user.wait(run)
    assert record.state is RunState.REJECTED
    assert [problem["pointer"] for problem in record.problems] == ["/limits/max_cost_usd"]


def test_repeated_upload_events_create_one_run(user: User) -> None:
    """Eventarc may repeat the delivery of an event at any time."""
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
    """Deliver an event of Cloud Storage as Eventarc does; return the status."""
    headers = {
        "ce-id": "by-hand",
        "ce-source": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "ce-type": f"google.cloud.storage.object.v1.{event}",
        "ce-specversion": "1.0",
    }
    body = {"bucket": bucket, "name": name, "generation": generation, "size": "100"}
    return call(user, function, body, headers).status_code


def test_two_specs_with_the_same_name_are_two_runs(user: User) -> None:
    first, second = user.drop(user.spec(name="twin")), user.drop(user.spec(name="twin"))
    assert first != second
    assert user.wait(first).state is user.wait(second).state is RunState.SUCCEEDED


def test_an_overwritten_spec_is_another_run(user: User) -> None:
    first = user.drop(user.spec("hang"), "specs/overwritten.json")
    user.wait(first, "TRAINING")
    second = user.drop(user.spec(), "specs/overwritten.json")
    assert user.wait(second).state is RunState.SUCCEEDED
    assert user.store.record(first).state is RunState.TRAINING
    user.publish("dropforge-operations", json.dumps({"cancel": first}).encode())
    assert user.wait(first).state is RunState.CANCELLED


def test_repeated_messages_with_the_same_key_are_a_single_run(user: User) -> None:
    key = f"key-{time.time_ns()}"
    for _ in range(3):
        user.publish("dropforge-requests", json.dumps(user.spec()).encode(), idempotency_key=key)
    run = names.run_id_of_message(key)
    assert user.wait(run).state is RunState.SUCCEEDED
    assert len(user.executions(run)) == 1


def test_a_message_may_contain_the_uri_of_a_spec(user: User) -> None:
    bucket = clients.storage().bucket(user.settings.specs_bucket)
    bucket.blob("elsewhere/spec.json").upload_from_string(json.dumps(user.spec()))
    key = f"key-{time.time_ns()}"
    uri = f"gs://{user.settings.specs_bucket}/elsewhere/spec.json"
    user.publish("dropforge-requests", json.dumps({"spec_uri": uri}).encode(), idempotency_key=key)
    assert user.wait(names.run_id_of_message(key)).state is RunState.SUCCEEDED


FORGED = "forged-0123456789ab"


@pytest.mark.parametrize(
    "event",
    [
        b"not json",
        b'{"type": "succeeded"}',
        json.dumps({"type": "failed", "run": FORGED, "attempt": 1, "sequence": 1}).encode(),
        json.dumps(
            {"type": "started", "run": FORGED, "attempt": 1, "sequence": 1, "time": "2026-01-01T00:00:00Z"}
        ).encode(),
    ],
)
def test_a_malformed_or_forged_job_event_is_acknowledged_and_does_nothing(user: User, event: bytes) -> None:
    assert deliver_message(user, "on_job_event", "dropforge-job-events", event)
    assert list(user.store.names(f"runs/{FORGED}/")) == []


def test_a_late_job_event_changes_nothing(user: User) -> None:
    run = user.drop(user.spec())
    before = user.wait(run)
    late = {"type": "failed", "run": run, "attempt": 1, "sequence": 9, "time": "2026-01-01T00:00:00Z"}
    event = {**late, "error_class": "code", "message": "late"}
    assert deliver_message(user, "on_job_event", "dropforge-job-events", json.dumps(event).encode())
    assert user.store.record(run) == before


def deliver_message(user: User, function: str, topic: str, data: bytes) -> bool:
    """Deliver a Pub/Sub message as Eventarc does; return whether the function acknowledges it."""
    event = {"message": {"data": b64encode(data).decode(), "messageId": "1"}, "subscription": "s"}
    headers = {
        "ce-id": uuid.uuid4().hex,
        "ce-source": f"//pubsub.googleapis.com/{user.settings.topic(topic)}",
        "ce-type": "google.cloud.pubsub.topic.v1.messagePublished",
        "ce-specversion": "1.0",
    }
    return call(user, function, event, headers).ok


@contextmanager
def run_events(user: User) -> Iterator[Callable[[], Iterator[tuple[str, dict[str, Any]]]]]:
    """Subscribe to the run events; yield a function that pulls some of them, each with its type."""
    from google.cloud import pubsub_v1

    with pubsub_v1.SubscriberClient() as subscriber:
        name = f"projects/{user.settings.project}/subscriptions/watch-{time.time_ns()}"
        topic = user.settings.topic(user.settings.run_events_topic)
        subscriber.create_subscription(name=name, topic=topic)

        def pull() -> Iterator[tuple[str, dict[str, Any]]]:
            for received in subscriber.pull(subscription=name, max_messages=50, timeout=60).received_messages:
                yield received.message.attributes["ce-type"], json.loads(received.message.data)

        yield pull


def test_every_state_of_a_run_is_published(user: User) -> None:
    types: dict[str, str] = {}
    with run_events(user) as pull:
        run = user.drop(user.spec())
        expected = states(user.wait(run))

        def all_arrived() -> bool:
            types.update({event["state"]: kind for kind, event in pull() if event["run"] == run})
            return types.keys() >= set(expected)

        user.until(all_arrived)
    assert expected == ["ACCEPTED", "PROVISIONING", "TRAINING", "TEARING_DOWN", "SUCCEEDED"]
    assert types == {state: f"dev.dropforge.run.{state.lower()}" for state in expected}
