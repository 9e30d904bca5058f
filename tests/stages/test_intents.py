"""The same spec again joins the run of the first: at any moment, whatever carries it. A cancel says who asks for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, InvalidSpec, RetryLater, SpecProblem
from dropforge.run.events import Request
from dropforge.run.intents import JOIN_FOR
from dropforge.run.record import Cause, Record, RunState
from dropforge.stages import submit
from dropforge.stages.cancel import cancel_deleted
from dropforge.stages.submit import submit_message, submit_object

from ..deployments import Blob, TestClock
from .test_ceiling import document
from .test_requests import SPEC, Deployment

NAME = "specs/job.json"
OTHER_SPEC = json.dumps(document(name="other")).encode()
Upload = Callable[..., Record]


class Specs(Deployment):
    """A deployment whose specs bucket has generations of an object: `uploads` has the bytes of each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.uploads: dict[tuple[str, str], bytes] = {}
        self._numbers = itertools.count(1)
        patch.setattr(submit, "read_spec", lambda _, bucket, name, generation, *__: self.uploads[name, generation])

    def upload(self, data: bytes = SPEC, name: str = NAME, again: str = "") -> Record:
        """Upload an object and deliver its event, until the delivery is acknowledged."""
        return self.deliver(self.put(data, name), name, again)

    def put(self, data: bytes = SPEC, name: str = NAME) -> str:
        generation = str(next(self._numbers))
        self.uploads[name, generation] = data
        return generation

    def deliver(self, generation: str, name: str = NAME, again: str = "") -> Record:
        while True:
            try:
                return submit_object(self.context, "specs", name, generation, 100, again)
            except RetryLater:
                continue

    def end(self, run: str, state: RunState) -> None:
        def ended(record: Record) -> Record:
            return record.entered(RunState.TEARING_DOWN, record.created).entered(state, record.created)

        self.context.store.update(run, ended)

    def wait(self, time: timedelta) -> None:
        now = self.context.now()
        self.context.cloud.clock.now = TestClock(now + time).now  # type: ignore[method-assign]

    @property
    def runs(self) -> list[str]:
        return [name.split("/")[1] for name in self.storage.objects if name.endswith("/record.json")]

    def notices(self, begin: str) -> list[dict[str, Any]]:
        return [event for event in self.events if (event["notice"] or "").startswith(begin)]


def run_of(generation: str, name: str = NAME) -> str:
    return names.run_id_of_object("specs", name, generation)


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> Specs:
    return Specs(monkeypatch)


def test_the_same_upload_again_joins_its_run_and_is_answered(specs: Specs) -> None:
    first = specs.upload()
    repeat = specs.put()
    for _ in range(2):  # the event of the repeated upload may be delivered again
        assert specs.deliver(repeat).run == first.run
    assert specs.runs == [first.run]
    [answer] = specs.notices("joined-")
    assert (answer["run"], answer["state"], answer["notice"]) == (first.run, "ACCEPTED", f"joined-{run_of(repeat)}")
    details = answer["details"]
    assert (details["joined"], details["source"]) == (run_of(repeat), f"gs://specs/{NAME}#{repeat}")
    assert len([event for event in specs.events if event["notice"] == "joined"]) == 1, "people are told once"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_repeat_that_joined_is_answered_though_its_bytes_are_replaced_meanwhile(
    specs: Specs, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """The delivery that joined was not acknowledged, and the next one cannot read the spec any more."""
    first = specs.upload()
    repeat = specs.put()
    with monkeypatch.context() as failing:
        failing.setattr(submit, "answer_joined", lambda *_: "Pub/Sub does not answer")
        with pytest.raises(CloudError):
            submit_object(specs.context, "specs", NAME, repeat, 100)
    if is_cancelled:
        specs.context.store.keep_cancel(run_of(repeat), "", Cause("me"))

    def gone(*_: Any) -> bytes:
        raise InvalidSpec([SpecProblem("", "the spec was deleted or overwritten before it was read")])

    monkeypatch.setattr(submit, "read_spec", gone)
    specs.deliver(repeat)
    assert [answer["details"]["joined"] for answer in specs.notices("joined-")] == [run_of(repeat)]
    assert specs.runs == [first.run]
    assert (specs.context.store.record(first.run).cancel_requested is not None) is is_cancelled


def test_the_id_of_a_repeat_leads_to_the_run_that_it_joined(specs: Specs) -> None:
    first = specs.upload()
    repeat = specs.put()
    specs.deliver(repeat)
    found = specs.context.store.find(run_of(repeat))
    assert found is not None
    assert found.run == first.run
    specs.cancel(run_of(repeat), "operations")
    assert specs.is_cancelled(first.run)
    assert specs.runs == [first.run]


@pytest.mark.parametrize(
    ("data", "name", "again"),
    [(OTHER_SPEC, NAME, ""), (SPEC + b" ", NAME, ""), (SPEC, "specs/b.json", ""), (SPEC, NAME, "2")],
)
def test_another_request_is_another_run(specs: Specs, data: bytes, name: str, again: str) -> None:
    first, second = specs.upload(), specs.upload(data, name, again)
    assert first.run != second.run
    assert specs.upload(data, name, again).run == second.run
    assert specs.notices("joined-")[0]["run"] == second.run


@pytest.mark.parametrize(
    ("state", "minutes", "is_joined"),
    [
        (RunState.SUCCEEDED, 9, True),
        (RunState.FAILED, 9, True),
        (RunState.SUCCEEDED, 11, False),
        (RunState.FAILED, 11, False),
        (RunState.CANCELLED, 0, False),
    ],
)
def test_a_request_joins_a_run_for_some_minutes_after_its_end(
    specs: Specs, state: RunState, minutes: int, is_joined: bool
) -> None:
    assert timedelta(minutes=9) < JOIN_FOR < timedelta(minutes=11)
    first = specs.upload()
    specs.end(first.run, state)
    specs.wait(timedelta(minutes=minutes))
    second = specs.upload()
    assert (second.run == first.run) is is_joined
    assert specs.upload().run == second.run, "the newest run of a request counts"


def test_a_rejected_spec_is_checked_again(specs: Specs) -> None:
    rejected = [specs.upload(b"{}") for _ in range(2)]
    assert len({record.run for record in rejected}) == 2


def test_a_message_without_a_key_joins_and_a_key_stays_a_run_of_its_own(specs: Specs) -> None:
    def send(topic: str, message: str, key: str = "", again: str = "") -> str:
        request = Request(topic, key or message, message, again=again)
        return submit_message(specs.context, SPEC, request).run

    first = send("requests", "m-1")
    assert send("requests", "m-2") == first
    assert specs.notices("joined-")[0]["details"]["source"] == "topic requests message m-2"
    others = [send("requests", "m-3", "key-1"), send("requests", "m-4", "key-2"), send("requests", "m-5", again="2")]
    others += [send("requests-team", "m-6")]
    assert len({first, *others}) == 5
    assert send("requests", "m-7", "key-1") == others[0]


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("is_killed", [False, True])
def test_two_deliveries_at_once_are_one_run(
    specs: Specs, monkeypatch: pytest.MonkeyPatch, at: int, is_killed: bool
) -> None:
    """Before each write of a delivery, another does all of its work; the first goes on, or crashes and comes again."""
    first, second = specs.put(), specs.put()
    writes, upload = itertools.count(), Blob.upload_from_string

    def crossed(blob: Blob, *arguments: Any, **options: Any) -> None:
        if next(writes) == at:
            specs.deliver(second)
            if is_killed:
                raise InterruptedError
        upload(blob, *arguments, **options)

    monkeypatch.setattr(Blob, "upload_from_string", crossed)
    for generation in (first, second):
        try:
            specs.deliver(generation)
        except InterruptedError:
            specs.deliver(generation)
    assert len(specs.runs) == 1
    found = [specs.context.store.record(run_of(generation)).run for generation in (first, second)]
    assert found == [*specs.runs, *specs.runs]


def test_the_deletion_of_the_object_cancels_the_run_that_it_joined(specs: Specs) -> None:
    first = specs.upload()
    repeat = specs.put()
    specs.deliver(repeat)
    cancel_deleted(specs.context, "specs", NAME, repeat)
    record = specs.context.store.record(first.run)
    assert record.state is RunState.CANCELLED
    assert record.ended_by == f"the deletion of gs://specs/{NAME}"
    assert specs.upload().run != first.run, "whoever deletes a spec and uploads it again wants a run"


def test_a_cancel_of_a_repeat_before_its_event_cancels_the_run(specs: Specs) -> None:
    first = specs.upload()
    repeat = specs.put()
    specs.cancel(run_of(repeat), "operations")
    specs.deliver(repeat)
    record = specs.context.store.record(first.run)
    assert record.cancel_requested is not None
    assert record.ended_by == "topic operations message m-2"


def test_an_upload_that_was_replaced_by_the_same_bytes_before_it_was_read_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Deployment(monkeypatch)

    class Replaced:
        """A specs bucket whose object has generation 2 alone."""

        md5_hash, generation = "md5", 2

        def bucket(self, name: str) -> Any:
            return self if name == "specs" else place.storage

        def blob(self, name: str, generation: int | None = None, **_: Any) -> Replaced:
            found = Replaced()
            found.generation = generation or 2
            return found

        get_blob = blob

    place.context.cloud.clients.storage = Replaced  # type: ignore[method-assign]
    monkeypatch.setattr(submit, "read_at_most", lambda blob, _: SPEC if blob.generation == 2 else None)
    first = submit_object(place.context, "specs", NAME, "1", 100, "", "md5")
    second = submit_object(place.context, "specs", NAME, "2", 100, "", "md5")
    assert (first.state, second.run) == (RunState.ACCEPTED, first.run)
    changed = submit_object(place.context, "specs", NAME, "3", 100, "", "other")
    assert changed.state is RunState.REJECTED


@pytest.mark.parametrize("wanted", ["job", "request-0", 7, ["RUN"], "", None, "../../specs", "\ud800"])
@pytest.mark.parametrize("topic", ["requests", "operations"])
def test_a_cancel_that_names_no_run_is_answered(deployment: Deployment, wanted: object, topic: str) -> None:
    run = deployment.submit("requests").run
    deployment.cancel([run] if wanted == ["RUN"] else wanted, topic)  # type: ignore[arg-type]
    [answer] = deployment.answers()
    assert (answer["details"]["topic"], answer["details"]["message"]) == (topic, "m-2")
    assert "expected the id of a run" in answer["details"]["text"]
    assert not deployment.is_cancelled(run)


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(monkeypatch)


def test_blanks_around_an_id_are_no_part_of_it(deployment: Deployment) -> None:
    run = deployment.submit("requests").run
    deployment.cancel(f" {run}\n", "requests")
    assert deployment.is_cancelled(run)


def test_the_answer_names_the_open_runs_of_the_topic_that_may_be_meant(deployment: Deployment) -> None:
    run, foreign = deployment.submit("requests").run, deployment.submit("requests-team").run
    name = deployment.context.store.record(run).name
    mistyped = run[:-1] + ("0" if run[-1] != "0" else "1")
    for wanted in (name, run[:-4], mistyped):
        deployment.cancel(wanted, "requests", f"message of {wanted}")
    near = [answer["details"]["near"] for answer in deployment.answers()]
    assert near == [[run]] * 3
    assert run in deployment.answers()[0]["details"]["text"]
    deployment.events.clear()
    deployment.cancel(name, "operations", "m-9")
    assert sorted(deployment.answers()[0]["details"]["near"]) == sorted([run, foreign])


def test_the_record_and_the_run_event_say_who_ended_a_run(deployment: Deployment) -> None:
    run = deployment.submit("requests").run
    deployment.cancel(run, "requests")
    cause = "topic requests message m-2"
    assert deployment.context.store.record(run).ended_by == cause
    [end] = [event for event in deployment.events if event["state"] == "CANCELLED"]
    assert end["details"]["ended_by"] == cause
