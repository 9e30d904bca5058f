"""Requests and cancels by message: each counts only within its source, and specs are read only where it may read."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError
from dropforge.cloud.executions import live_executions
from dropforge.context import Context
from dropforge.run.events import REQUESTED_BY, Request, request_message
from dropforge.run.record import Cause, Record, RunState
from dropforge.stages import submit
from dropforge.stages.cancel import cancel, cancel_requested
from dropforge.stages.submit import ignore_object, submit_message, submit_object, submit_uri

from ..deployments import Memory, TestClock, cloud_with, context_with, settings_with
from .test_ceiling import document
from .test_promises import RUN, Place

SETTINGS = settings_with(
    specs_bucket="specs",
    runs_bucket="runs",
    requests_topic="requests",
    operations_topic="operations",
    data_buckets="rows,more-rows",
)
SPEC = json.dumps(document()).encode()
RECORD = b'{"api_version": "dropforge/v1", "run": "job-0123456789ab", "secret": "four-seven"}'
OTHERS = ("requests-team", "requests-other")


class Deployment:
    """A deployment whose executions never begin, and which keeps the run events that it publishes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storage, self.events = Memory(), list[dict[str, Any]]()
        publisher = SimpleNamespace(publish=self.publish)
        self.context = context_with(SETTINGS, storage=self.storage, publisher=publisher, hub=None)
        self.is_reachable = True
        patch.setattr("dropforge.stages.admission.check", lambda *_: None)
        patch.setattr(submit, "start_execution", lambda *_: "e-1")
        patch.setattr(submit, "find_execution", lambda *_: "e-1")
        patch.setattr(submit, "START_SECONDS", 0)

    def publish(self, topic: str, data: bytes, **_: Any) -> Any:
        def result(_: float) -> str:
            if not self.is_reachable:
                raise TimeoutError
            self.events.append(json.loads(data))
            return "1"

        return SimpleNamespace(result=result)

    def submit(self, topic: str, key: str = "key") -> Record:
        return submit_message(self.context, SPEC, Request(topic, key, "m-1"))

    def cancel(self, run: str, topic: str, message: str = "m-2") -> None:
        cancel_requested(self.context, run, Request(topic, message, message))

    def answers(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["state"] == "UNKNOWN"]

    def is_cancelled(self, run: str) -> bool:
        return self.context.store.record(run).cancel_requested is not None


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(monkeypatch)


def test_a_key_is_taken_only_within_its_topic(deployment: Deployment) -> None:
    runs = [deployment.submit(topic).run for topic in ("requests", *OTHERS)]
    assert len(set(runs)) == 3
    assert [deployment.submit(topic).run for topic in ("requests", *OTHERS)] == runs
    assert runs[0] == names.run_id_of_message("key"), "runs of earlier versions keep their ids"


@pytest.mark.parametrize("key", ["requests-team\0key", "\0requests-team\0key", "topic\0requests-team\0key"])
def test_no_key_reaches_the_run_of_another_topic(deployment: Deployment, key: str) -> None:
    victim = deployment.submit("requests-team").run
    assert deployment.submit("requests", key).run != victim
    assert deployment.submit("requests-other", key).run != victim


@pytest.mark.parametrize("topic", ["requests", "requests-team"])
def test_a_cancel_reaches_the_runs_of_its_topic(deployment: Deployment, topic: str) -> None:
    run = deployment.submit(topic).run
    deployment.cancel(run, topic)
    assert deployment.is_cancelled(run)
    assert deployment.answers() == []


def test_an_operator_cancels_any_run(deployment: Deployment) -> None:
    for topic in ("requests", "requests-team"):
        run = deployment.submit(topic).run
        deployment.cancel(run, "operations")
        assert deployment.is_cancelled(run)


def test_the_first_who_cancels_a_run_is_named() -> None:
    place = Place(RunState.TRAINING)
    for person in ("ann@example.com", "bob@example.com"):
        cancel(place.context, RUN, cause=Cause("the console", person))
    assert place.record.cancelled_by == "ann@example.com"


def test_a_cancel_of_another_source_is_answered_like_that_of_no_run(deployment: Deployment) -> None:
    run = deployment.submit("requests").run
    deployment.cancel(run, "requests-team")
    deployment.cancel("request-aaaaaaaaaaaa", "requests-team")
    assert not deployment.is_cancelled(run)
    foreign, unknown = (json.dumps(answer).replace(answer["run"], "RUN") for answer in deployment.answers())
    assert _without_time(foreign) == _without_time(unknown)


def test_a_cancel_without_an_answer_is_delivered_again(deployment: Deployment) -> None:
    deployment.is_reachable = False
    with pytest.raises(CloudError, match="could not be published"):
        deployment.cancel("request-aaaaaaaaaaaa", "requests")
    deployment.is_reachable = True
    deployment.cancel("request-aaaaaaaaaaaa", "requests")
    assert [answer["details"]["message"] for answer in deployment.answers()] == ["m-2"]


@pytest.mark.parametrize(("topic", "counts"), [("requests", True), ("operations", True), ("requests-team", False)])
def test_a_cancel_before_its_run_counts_only_from_the_source_of_the_run(
    deployment: Deployment, topic: str, counts: bool
) -> None:
    run = names.run_id_of_message("key")
    deployment.cancel(run, "requests-other", "m-0")
    deployment.cancel(run, topic)
    assert deployment.submit("requests").state is (RunState.CANCELLED if counts else RunState.ACCEPTED)
    states = [event["state"] for event in deployment.events if event["run"] == run and event["state"] != "UNKNOWN"]
    assert states == ["CANCELLED" if counts else "ACCEPTED"]


def test_the_end_of_a_run_whose_spec_was_deleted_before_it_was_read_is_told(deployment: Deployment) -> None:
    name, generation = "specs/deleted.json", "7"
    run = names.run_id_of_object("specs", name, generation)
    deployment.cancel(run, "operations")
    deployment.events.clear()
    for _ in range(2):  # the event of the upload may be delivered again
        record = submit_object(deployment.context, "specs", name, generation, 100)
        assert [transition.state for transition in record.history] == [RunState.CANCELLED]
        assert [event["state"] for event in deployment.events] == ["CANCELLED"]


def test_a_cancel_that_an_earlier_version_stored_still_counts(deployment: Deployment) -> None:
    run = names.run_id_of_message("key")
    deployment.context.store.put_new(f"runs/{run}/cancel.json", b"{}")
    assert deployment.submit("requests").state is RunState.CANCELLED


def test_only_operators_reach_a_run_whose_record_names_no_topic(deployment: Deployment) -> None:
    """It is from the specs bucket."""
    run = deployment.submit("requests").run
    deployment.context.store.update(run, lambda record: record.model_copy(update={"topic": ""}))
    deployment.cancel(run, "requests")
    assert not deployment.is_cancelled(run)
    deployment.cancel(run, "operations")
    assert deployment.is_cancelled(run)


class Buckets:
    """A storage client whose specs and data buckets have objects. Reading another bucket fails the test."""

    def __init__(self, memory: Memory, content: bytes) -> None:
        self.memory, self.content = memory, content

    def bucket(self, name: str) -> Any:
        if name == "runs":
            return self.memory
        assert name in ("specs", "rows", "more-rows"), f"gs://{name} was read"
        blob = SimpleNamespace(generation=1, size=len(self.content), download_as_bytes=lambda **_: self.content)
        blob.open = lambda *_, **__: (_ for _ in ())
        return SimpleNamespace(get_blob=lambda *_, **__: blob, blob=lambda *_, **__: blob)


def requested(deployment: Deployment, patch: pytest.MonkeyPatch, uri: str, content: bytes) -> Record:
    storage = Buckets(deployment.storage, content)
    patch.setattr(submit, "read_at_most", lambda blob, size: content)
    context: Context = context_with(SETTINGS, storage=storage, publisher=SimpleNamespace(publish=deployment.publish))
    return submit_uri(context, uri, Request("requests", uri, "m-1"))


@pytest.mark.parametrize("bucket", ["specs", "rows", "more-rows"])
def test_a_spec_is_read_from_the_specs_bucket_and_from_data_buckets(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    record = requested(deployment, monkeypatch, f"gs://{bucket}/job.json", SPEC)
    assert (record.state, record.topic) == (RunState.ACCEPTED, "requests")
    assert record.source.endswith(f"gs://{bucket}/job.json")


@pytest.mark.parametrize("bucket", ["runs", "elsewhere", "rows-of-others", "*"])
def test_no_other_bucket_is_read(deployment: Deployment, monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    record = requested(deployment, monkeypatch, f"gs://{bucket}/runs/job-0123456789ab/record.json", RECORD)
    [problem] = record.problems
    assert record.state is RunState.REJECTED
    if bucket != "*":
        assert (problem["pointer"], problem["found"]) == ("/spec_uri", f"gs://{bucket}")
        assert problem["expected"] == "one of specs, rows, more-rows"
    assert "four-seven" not in record.model_dump_json() + json.dumps(deployment.events)


@pytest.mark.parametrize("content", [b'{"name": "four-seven"}', b"four-seven", b'["four-seven"]', b"[" * 100_000])
def test_nothing_of_an_object_that_is_no_spec_is_repeated(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """The publisher of the message may not be allowed to read the data bucket."""
    record = requested(deployment, monkeypatch, "gs://rows/private.json", content)
    assert record.state is RunState.REJECTED
    assert record.problems[0]["message"] == "the object is not a job spec"
    stored = b"".join(data for data, _ in deployment.storage.objects.values())
    assert b"four-seven" not in stored + json.dumps(deployment.events).encode()


def _without_time(event: str) -> dict[str, Any]:
    return {**json.loads(event), "time": ""}


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"spec": document()}, "'spec'"),
        ({"spec_url": "gs://specs/job.json"}, "'spec_url'"),
        ({"cancel": "job-0123456789ab", "spec_uri": "gs://specs/job.json"}, "'cancel', 'spec_uri'"),
        ({"cancel": "job-0123456789ab", "name": "job"}, "'cancel', 'name'"),
        ([document()], "a JSON list"),
        ("cancel job-0123456789ab", "a JSON string"),
        ({}, "an empty object"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_message_in_no_envelope_is_answered_by_the_names_of_the_envelopes(
    deployment: Deployment, message: Any, found: str
) -> None:
    record = submit_message(deployment.context, json.dumps(message).encode(), Request("requests", "key", "m-1"))
    [problem] = record.problems
    assert (record.state, problem["message"], problem["found"]) == (
        RunState.REJECTED,
        "the message is not a request",
        found,
    )
    for envelope in ("api_version", "spec_uri", "cancel"):
        assert envelope in str(problem["expected"])
    [event] = deployment.events
    assert event["details"]["problems"] == record.problems


def test_a_message_with_an_incomplete_spec_is_a_spec(deployment: Deployment) -> None:
    data = json.dumps({"name": "job", "model": {}}).encode()
    problems = submit_message(deployment.context, data, Request("requests", "key", "m-1")).problems
    assert "/api_version" in [problem["pointer"] for problem in problems]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("specs/x.yaml", "its name ends in .yaml; a job spec is a JSON document"),
        ("specs/job", "its name does not end in .json"),
        ("specs/JOB.JSON", "its name ends in .JSON"),
        ("job.json", "it is not below specs/"),
        ("team/specs/job.json", "it is not below specs/"),
        ("specs/hf_CanaryCanaryCanaryCanary.yml", "its name ends in .yml"),
    ],
)
def test_an_object_that_is_no_spec_is_answered(deployment: Deployment, name: str, text: str) -> None:
    for _ in range(2):  # the event may be delivered again
        ignore_object(deployment.context, "specs", name, "7")
    [event] = deployment.events
    assert (event["notice"], event["state"]) == ("ignored", "UNKNOWN")
    assert text in event["details"]["text"]
    assert "gs://specs/specs/NAME.json" in event["details"]["text"]
    assert "Canary" not in json.dumps(event)
    assert deployment.context.store.find(event["run"]) is None
    assert deployment.storage.objects == {}


@pytest.mark.parametrize("name", ["specs/", "rows/train.jsonl", "rows/train.csv", "a/"])
def test_other_objects_and_folders_get_no_answer(deployment: Deployment, name: str) -> None:
    ignore_object(deployment.context, "specs", name, "7")
    assert deployment.events == []


@pytest.mark.parametrize("console", ["", "console"])
def test_without_a_console_the_specs_bucket_reaches_only_its_own(console: str) -> None:
    """The specs bucket is the source "", and so is a topic that does not exist."""
    settings = replace(SETTINGS, console_topic=console)
    reaching = {topic for topic in ("", "console", "requests", "operations") if settings.reaches_all(topic)}
    assert reaching == {"operations"} | {console} - {""}


@pytest.mark.parametrize(
    ("topic", "by", "expected"),
    [("console", "ada@example.com", "ada@example.com"), ("console", "<b>ada", ""), ("requests", "ada@example.com", "")],
)
def test_only_the_console_names_who_asked(topic: str, by: str, expected: str) -> None:
    message = {"messageId": "1", "attributes": {REQUESTED_BY: by}}
    _, request = request_message({"message": message}, f"//pubsub.googleapis.com/projects/p/topics/{topic}", "console")
    assert request.by == expected


def test_the_executions_of_a_workflow_are_looked_up_in_that_workflow() -> None:
    asked: list[str] = []

    def listed(request: Any, **_: Any) -> list[Any]:
        asked.append(request.parent)
        return []

    client = SimpleNamespace(list_executions=listed)
    assert live_executions(cloud_with(SETTINGS, workflow_executions=client), "rollouts") == frozenset()
    assert set(asked) == {"rollouts"}


@pytest.mark.parametrize(
    ("name", "by", "expected"),
    [
        ("specs/console/a.json", "ada@example.com", "ada@example.com"),
        ("specs/console/a.json", "<b>ada", ""),
        ("specs/a.json", "ada@example.com", ""),
    ],
)
def test_only_the_console_names_who_dropped_a_spec(deployment: Deployment, name: str, by: str, expected: str) -> None:
    """Every writer of the specs bucket can write metadata; only the console's account may write its folder."""
    settings = replace(SETTINGS, console_topic="console")
    deployment.context = replace(deployment.context, cloud=replace(deployment.context.cloud, settings=settings))
    deployment.storage.objects[name] = (SPEC, 1)
    deployment.storage.metadata[name] = {names.SUBMITTER: by}
    record = submit_object(deployment.context, "specs", name, "1", len(SPEC))
    assert record is not None
    assert record.submitter == expected


def test_a_flood_of_objects_gets_thirty_answers_an_hour_and_one_line_that_says_so(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [datetime(2026, 11, 24, 9, 59, tzinfo=UTC)]
    context = replace(deployment.context, cloud=replace(deployment.context.cloud, clock=TestClock(lambda: times[0])))
    for number in range(100):
        ignore_object(context, "specs", f"specs/{number}.yaml", "7")
    assert len(deployment.events) == 30
    logged = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert logged[30:] == ["more than 30 objects were ignored; the others of this hour get no answer"]
    times[0] += timedelta(minutes=1)
    ignore_object(context, "specs", "specs/next.yaml", "7")
    assert len(deployment.events) == 31


def test_an_answer_that_is_lost_fails_no_delivery(deployment: Deployment) -> None:
    deployment.is_reachable = False
    ignore_object(deployment.context, "specs", "specs/x.yaml", "7")
    assert deployment.events == []
