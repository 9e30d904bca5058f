"""Promises of single calls of stages, on a bucket in memory: each of them is broken by a mutant of tests/mutants."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec
from dropforge.cloud.executions import SETTLED, wake
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import Phase, Status, Waits
from dropforge.run.artifacts import MANIFEST, Manifest, Source, model_prefix
from dropforge.run.proof import with_proof
from dropforge.run.record import (
    WAITING_SECONDS,
    Attempt,
    Endpoint,
    LedgerEntry,
    Outcome,
    Record,
    ResourceState,
    RunError,
    RunState,
    Transition,
)
from dropforge.run.store import RunStore
from dropforge.spec import MAX_SPEC_BYTES
from dropforge.stages.await_.inspect import inspect
from dropforge.stages.cancel import cancel
from dropforge.stages.completion import completion_problem
from dropforge.stages.deploy import deploy
from dropforge.stages.provision import provision
from dropforge.stages.submit import read_spec
from dropforge.stages.sweep.orphans import Orphan, delete_orphans, list_all
from dropforge.stages.teardown import teardown

from ..deployments import Memory, cloud_with, context_with, intend, settings_with
from ..platforms.shared import ME

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
RUN = "demo-0123456789ab"
FAILED = Outcome(state=RunState.FAILED)
SETTINGS = settings_with()
JOB = f"projects/p/locations/us-central1/jobs/df-{RUN}-a1"
SPEC = {
    "api_version": "dropforge/v1",
    "name": "demo",
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/data"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}], "price_usd_per_hour": 10},
    "serve": {"type": "cloud_run", "ttl": "1h", "price_usd_per_hour": 10},
}


class Platform:
    """A target and a server that notes what it is asked to create, and has no resource."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.places: list[Listed] = []

    def regions(self, spec: Any) -> list[str]:
        return ["us-central1"]

    def region(self, deployment: Any) -> str:
        return "us-central1"

    def price(self, *_: Any) -> HourlyPrice:
        return HourlyPrice(10.0, None, "a test")

    def resources(self, launch: Any) -> list[Any]:
        return [SimpleNamespace(kind="run.googleapis.com/Job", name=JOB, request=True)]

    def provision(self, cloud: Any, launch: Any) -> Waits | None:
        self.asked.append("provision")
        return None

    def inspect(self, cloud: Any, launch: Any) -> Status:
        return Status(Phase.PENDING)

    def deploy(self, cloud: Any, deployment: Any) -> str | Waits:
        self.asked.append("deploy")
        return Waits("the service has no instance yet")

    def listed(self, cloud: Any) -> list[Listed]:
        return self.places

    def teardown(self, cloud: Any, kind: str, name: str) -> bool:
        self.asked.append(f"teardown {name}")
        return True


class Place:
    """A deployment with one run, whose platform creates nothing. `logged` has its log."""

    def __init__(self, state: RunState = RunState.TRAINING, spec: dict[str, Any] | None = None, **fields: Any) -> None:
        self.platform, self.logged, storage = Platform(), list[dict[str, Any]](), Memory()
        platform: Any = self.platform
        platforms = Platforms(
            target=lambda _: platform, server=lambda _: platform, owner=lambda _: platform, all=lambda: [platform]
        )
        self.events: list[dict[str, Any]] = []

        def publish(topic: str, data: bytes, **_: Any) -> Any:
            self.events.append(json.loads(data))
            return SimpleNamespace(result=lambda timeout=None: "id")

        def log(message: str, **details: Any) -> None:
            self.logged.append({"message": message, **details})

        cloud = cloud_with(SETTINGS, NOW, log, storage=storage, publisher=SimpleNamespace(publish=publish))
        self.context = Context(cloud, platforms)
        self.store: RunStore = self.context.store
        attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW - MINUTE, deadline=NOW + 60 * MINUTE)
        history = [Transition(state=state, time=NOW - MINUTE)]
        own = {"attempts": [attempt], "execution": ME, "history": history, "created": NOW - MINUTE, **fields}
        self.store.put_new(names.spec_object(RUN), json.dumps({**SPEC, **(spec or {})}).encode())
        self.store.create(self.store.with_key(Record(run=RUN, name="demo", source="test", state=state, **own)))

    @property
    def record(self) -> Record:
        return self.store.record(RUN)


def commit(
    place: Place, unused_fields: tuple[str, ...] = (), template_date: date | None = None, **metrics: float | None
) -> None:
    """Write the manifest of a model, as a training container does."""
    source = Source(uri="u", revision="r")
    manifest = Manifest(
        run=RUN,
        attempt=1,
        created=NOW,
        spec_sha256="0" * 64,
        base=source,
        dataset=source,
        metrics=metrics,
        files=[],
        serve_path="attempt-1/model",
        versions={},
        unused_fields=list(unused_fields),
        template_date=template_date,
    )
    path = f"{model_prefix(RUN)}{MANIFEST}"
    document = json.loads(manifest.model_dump_json(exclude={"proof"})) | {"metrics": metrics}  # NaN, too, as json does
    place.store.put_new(path, with_proof(place.store.key(RUN), path, document))


def endpoint(expires: datetime, **fields: Any) -> Endpoint:
    service = f"projects/p/locations/us-central1/services/df-{RUN}-serve"
    return Endpoint(url="u", model="m", service=service, region="r", ready=NOW, expires=expires, **fields)


def test_an_attempt_whose_failure_is_noted_is_not_launched_again() -> None:
    place = Place(RunState.PROVISIONING)
    error = RunError(error_class=ErrorClass.CODE, message="broken")
    place.store.update(RUN, lambda record: record.with_end(1, error, NOW))
    answer = provision(place.context, RUN, ME, 1)
    assert (answer.status, answer.to_json()["error"]["message"]) == ("FAILED", "broken")
    assert place.platform.asked == []


@pytest.mark.parametrize("asked", [1, 2])
@pytest.mark.parametrize(("failure", "status"), [(None, "RUNNING"), (ErrorClass.PREEMPTED, "FAILED")])
def test_an_execution_that_takes_over_a_run_learns_the_present_attempt(
    asked: int, failure: ErrorClass | None, status: str
) -> None:
    """It begins with attempt 1; the run is at attempt 2."""
    times = {"started": NOW, "deadline": NOW + 60 * MINUTE}
    attempts = [Attempt(number=number, placement=0, region="us-central1", **times) for number in (1, 2)]
    place = Place(RunState.PROVISIONING, attempts=attempts)
    if failure:
        error = RunError(error_class=failure, message="x")
        place.store.update(RUN, lambda record: record.with_end(2, error, NOW))
    answer = provision(place.context, RUN, ME, asked)
    assert (answer.status, answer.to_json()["attempt"]) == (status, 2)


@pytest.mark.parametrize(
    ("limits", "minutes", "error_class"),
    [({"max_duration": "1h"}, 60, "deadline"), ({"max_duration": "9h", "max_cost_usd": 10}, 60, "budget")],
)
def test_the_error_of_a_run_names_the_limit_that_ended_it(
    limits: dict[str, Any], minutes: int, error_class: str
) -> None:
    """At 10 USD per hour."""
    began = NOW - minutes * MINUTE
    error = RunError(error_class=ErrorClass.PREEMPTED, message="x")
    first = Attempt(
        number=1, placement=0, region="r", usd_per_hour=10, started=began, running=began, ended=NOW, deadline=NOW,
        error=error, limit="max_cost_usd" if "max_cost_usd" in limits else "max_duration",
    )  # fmt: skip
    history = [Transition(state=RunState.ACCEPTED, time=began)]
    spec = {"limits": limits, "serve": None}
    place = Place(RunState.PROVISIONING, spec=spec, attempts=[first], created=began, history=history)
    answer = provision(place.context, RUN, ME, 2).to_json()
    assert (answer["status"], answer["retry"], answer["error"]["error_class"]) == ("FAILED", False, error_class)


def test_a_look_notes_the_callback_of_the_execution_that_looks() -> None:
    place = Place()
    for callback in ("http://first", "http://second"):
        inspect(place.context, RUN, ME, 1, callback)
        assert place.record.callback_url == callback


@pytest.mark.parametrize("seconds", [WAITING_SECONDS - 1, WAITING_SECONDS])
def test_the_wait_for_capacity_counts_from_a_launch_that_took_long(seconds: int) -> None:
    opened = Attempt(
        number=1,
        placement=0,
        region="us-central1",
        started=NOW - timedelta(seconds=seconds),
        deadline=NOW + timedelta(hours=1),
    )
    place = Place(RunState.PROVISIONING, attempts=[opened])
    assert provision(place.context, RUN, ME, 1).status == "RUNNING"
    assert place.record.attempts[-1].launched == (NOW if seconds == WAITING_SECONDS else None)


@pytest.mark.parametrize(("value", "passed"), [(0.9, True), (0.1, False), (None, False)])
def test_only_a_model_that_passes_its_gate_is_served(value: float | None, passed: bool) -> None:
    gate = {"holdout_fraction": 0.1, "gate": {"metric": "exact_match", "min": 0.5}}
    place = Place(spec={"evaluation": gate})
    commit(place, exact_match=value)
    answer = inspect(place.context, RUN, ME, 1, "http://callback").to_json()
    assert answer["status"] == "SUCCEEDED"
    assert (answer["gate"]["passed"], answer["serve"]) == (passed, True)
    assert place.record.metrics == {"exact_match": value}
    assert place.record.attempts[-1].ended == NOW


@pytest.mark.parametrize(
    "kept", [None, endpoint(NOW - MINUTE), endpoint(NOW + MINUTE, ended=NOW)], ids=["no endpoint", "expired", "ended"]
)
def test_a_cancel_does_not_change_a_finished_run_without_a_live_endpoint(kept: Endpoint | None) -> None:
    place = Place(RunState.SUCCEEDED, endpoint=kept)
    before = place.record
    cancel(place.context, RUN)
    assert place.record.cancel_requested is None
    if kept is None or kept.ended:
        assert place.record == before


def test_the_end_of_a_run_that_was_cancelled_before_its_start_is_told() -> None:
    place = Place(RunState.ACCEPTED, attempts=[], execution=None)
    cancel(place.context, RUN)
    assert place.record.state is RunState.CANCELLED
    assert [event["state"] for event in place.events] == ["CANCELLED"]
    assert json.loads(place.store.read(names.report_object(RUN)).data)["state"] == "CANCELLED"


@pytest.mark.parametrize("status", [200, 404, 409, 410, 429, 500, 503, 408])
def test_a_callback_that_did_not_reach_its_execution_is_sent_again(status: int) -> None:
    callbacks = SimpleNamespace(post=lambda *_, **__: SimpleNamespace(status_code=status))
    settled = wake(cloud_with(callbacks=callbacks), "http://callback", {}) in SETTLED
    assert settled is (status in {200, 404, 409, 410, 429})


def test_a_sweep_sees_only_resources_of_its_own_deployment() -> None:
    place = Place()
    own, foreign = (
        Listed("kind", name, names.labels(RUN, {names.DEPLOYMENT_LABEL: deployment}), NOW)
        for name, deployment in (("mine", SETTINGS.deployment), ("theirs", "another"))
    )
    place.platform.places = [own, foreign]
    assert list_all(place.context.cloud, place.context.platforms) == ([own], [])


def test_a_sweep_logs_what_it_deletes_and_notes_its_end_in_the_ledger() -> None:
    place = Place(RunState.FAILED)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    orphan = Listed("run.googleapis.com/Job", JOB, names.labels(RUN, {}), NOW)
    deletions = delete_orphans(place.context, [Orphan(orphan, "left by a run that is over")])
    assert deletions.gone == [orphan]
    assert place.platform.asked == [f"teardown {JOB}"]
    logged = [entry for entry in place.logged if entry["stage"] == "sweep"]
    assert [(entry["message"], entry["resource"], entry["run"]) for entry in logged] == [
        ("left by a run that is over", JOB, RUN)
    ]
    assert [entry.state for entry in place.store.ledger(RUN).entries] == [ResourceState.GONE]


def test_a_late_call_does_not_note_a_deleted_resource_as_existing() -> None:
    place = Place()
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    for state in (ResourceState.CREATED, ResourceState.GONE, ResourceState.CREATED):
        place.store.note(RUN, [JOB], state)
    [entry] = place.store.ledger(RUN).entries
    assert (entry.state, entry.gone is None) == (ResourceState.GONE, False)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 2)  # another attempt may create it again
    assert [entry.state for entry in place.store.ledger(RUN).entries] == [ResourceState.INTENDED]


def test_a_spec_that_is_too_large_is_refused_before_it_is_read() -> None:
    context = context_with()  # it has no clients
    with pytest.raises(InvalidSpec, match="too large"):
        read_spec(context, "specs", "specs/large.json", "1", MAX_SPEC_BYTES + 1)


def test_no_endpoint_starts_without_money_for_it() -> None:
    """The attempt has cost 10 USD."""
    times = {"started": NOW - 60 * MINUTE, "running": NOW - 60 * MINUTE, "ended": NOW, "deadline": NOW}
    spent = Attempt(number=1, placement=0, region="us-central1", usd_per_hour=10, **times)
    for most, status, asked in ((10.1, "FAILED", []), (40.0, "PENDING", ["deploy"])):
        place = Place(spec={"limits": {"max_cost_usd": most}}, attempts=[spent])
        answer = deploy(place.context, RUN, ME)
        assert (answer.status, place.platform.asked) == (status, asked)
        if status == "FAILED":
            assert answer.to_json()["error"]["error_class"] == "budget"


def test_a_late_call_does_not_note_an_endpoint_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends between the endpoint's first answer and the note of it."""
    place = Place(RunState.TRAINING)

    def answer(*_: Any) -> str:
        place.store.update(RUN, lambda record: record.entered(RunState.TEARING_DOWN, NOW))
        return ""

    monkeypatch.setattr(place.platform, "deploy", lambda *_: "http://endpoint")
    monkeypatch.setattr("dropforge.stages.deploy.completion_problem", answer)
    assert deploy(place.context, RUN, ME).status == "SUPERSEDED"
    assert place.record.endpoint is None


@pytest.mark.parametrize(
    ("status", "body", "answers"),
    [
        (200, {"choices": [{"message": {"content": "ok"}}]}, True),
        (200, {"choices": [{}]}, False),
        (200, {"choices": []}, False),
        (200, {"status": "healthy"}, False),
        (200, [], False),
        (503, {"choices": [{"message": {"content": "ok"}}]}, False),
    ],
)
def test_only_a_completion_proves_that_an_endpoint_answers(status: int, body: Any, answers: bool) -> None:
    response = SimpleNamespace(status_code=status, text="text", json=lambda: body)
    session = SimpleNamespace(post=lambda *_, **__: response)
    assert (completion_problem(cloud_with(endpoint=session), "http://endpoint", "demo") == "") is answers


def elsewhere(place: Place) -> RunStore:
    """The runs bucket for another process: what it writes, the process of `place` does not know yet."""
    return RunStore(place.store.bucket.client, SETTINGS.runs_bucket)


def looked(place: Place) -> str:
    """The answer to an inspection by the owner, whose callback the record has."""
    return inspect(place.context, RUN, ME, 1, "http://callback").status


@pytest.fixture
def trained() -> Place:
    """A run that is about to end with its training, and whose record this process knows."""
    place = Place(RunState.PROVISIONING, spec={"serve": None}, callback_url="http://callback")
    commit(place, exact_match=0.9)
    return place


def test_a_run_that_ends_with_its_training_begins_its_teardown_in_the_same_write(trained: Place) -> None:
    assert looked(trained) == "SUCCEEDED"
    states = [RunState.PROVISIONING, RunState.TRAINING, RunState.TEARING_DOWN]
    assert [entered.state for entered in trained.record.history] == states
    assert trained.record.outcome == Outcome(state=RunState.SUCCEEDED)
    assert [event["state"] for event in trained.events] == ["TRAINING"]
    assert looked(trained) == "SUCCEEDED"  # the answer was lost
    success = Outcome(state=RunState.SUCCEEDED)
    assert teardown(trained.context, RUN, ME, "run", keep_endpoint=True, outcome=success).status == "ENDED"
    assert [event["state"] for event in trained.events] == ["TRAINING", "TEARING_DOWN", "SUCCEEDED"]


def test_a_cancel_that_inspect_has_not_seen_wins_over_the_success(trained: Place) -> None:
    elsewhere(trained).update(RUN, lambda record: record.model_copy(update={"cancel_requested": NOW}))
    assert looked(trained) in ("SUCCEEDED", "CANCELLED")
    assert (trained.record.state, trained.record.outcome) == (RunState.TRAINING, None)
    success = Outcome(state=RunState.SUCCEEDED)
    assert teardown(trained.context, RUN, ME, "run", keep_endpoint=True, outcome=success).status == "ENDED"
    assert trained.record.state is RunState.CANCELLED


@pytest.mark.parametrize("change", [{"execution": "another"}, {"attempts": []}, {"state": RunState.FAILED}])
def test_an_inspection_changes_no_run_that_it_does_not_own_any_more(trained: Place, change: dict[str, Any]) -> None:
    changed = elsewhere(trained).update(RUN, lambda record: record.model_copy(update=change))
    assert looked(trained) == "SUPERSEDED"
    assert (trained.record, trained.events) == (changed, [])


def test_a_model_that_does_not_pass_its_gate_begins_the_teardown_of_its_run() -> None:
    gate = {"gate": {"metric": "exact_match", "min": 0.5}}
    place = Place(RunState.TRAINING, spec={"evaluation": gate}, callback_url="http://callback")
    commit(place, exact_match=0.1)
    assert looked(place) == "SUCCEEDED"
    outcome = place.record.outcome
    assert place.record.state is RunState.TEARING_DOWN
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.state, outcome.error.error_class) == (RunState.FAILED, ErrorClass.GATE)


def test_a_run_that_is_served_goes_on_after_its_training() -> None:
    place = Place(RunState.TRAINING, callback_url="http://callback")
    commit(place, exact_match=0.9)
    assert looked(place) == "SUCCEEDED"
    assert (place.record.state, place.record.outcome) == (RunState.TRAINING, None)


def test_a_teardown_by_an_old_record_ends_no_run_of_another_execution() -> None:
    place = with_job(Place(RunState.TEARING_DOWN, outcome=FAILED))
    changed = elsewhere(place).update(RUN, lambda record: record.model_copy(update={"execution": "another"}))
    assert torn_down(place) == "SUPERSEDED"
    assert (place.record.state, place.events) == (changed.state, [])


def test_a_late_teardown_of_an_attempt_deletes_nothing_of_the_next_one() -> None:
    place, later = Place(), f"{JOB}-2"
    for attempt, name in ((1, JOB), (2, later)):
        intend(place.store, RUN, "run.googleapis.com/Job", name, attempt)
    assert teardown(place.context, RUN, ME, 1, keep_endpoint=True).status == "GONE"
    assert place.platform.asked == [f"teardown {JOB}"]
    assert [entry.name for entry in place.record.ledger.remaining()] == [later]


def torn_down(place: Place) -> str:
    return teardown(place.context, RUN, ME, "run", keep_endpoint=False, outcome=FAILED).status


def with_job(place: Place) -> Place:
    entry = LedgerEntry(kind="job", name=f"df-{RUN}-a1", attempt=1, state=ResourceState.CREATED, intended=NOW)
    place.store.update(RUN, lambda record: record.model_copy(update={"resources": [entry]}))
    return place


def test_a_teardown_that_lasts_is_announced_at_once_and_its_end_later(monkeypatch: pytest.MonkeyPatch) -> None:
    place = with_job(Place(RunState.TRAINING))
    answers = iter([False, False, True])
    monkeypatch.setattr(place.platform, "teardown", lambda *_: next(answers))
    assert torn_down(place) == "PENDING"
    assert [event["state"] for event in place.events] == ["TEARING_DOWN"]
    assert [torn_down(place), torn_down(place)] == ["PENDING", "ENDED"]
    assert [event["state"] for event in place.events] == ["TEARING_DOWN", "FAILED"]


def test_a_teardown_that_fails_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    place = with_job(Place(RunState.TRAINING))

    def refuse(*_: Any) -> bool:
        raise CloudError(ErrorClass.PERMISSION, "not allowed")

    monkeypatch.setattr(place.platform, "teardown", refuse)
    with pytest.raises(CloudError, match="not allowed"):
        torn_down(place)
    assert [event["state"] for event in place.events] == ["TEARING_DOWN"]


def test_a_short_teardown_is_announced_with_its_end() -> None:
    place = with_job(Place(RunState.TRAINING))
    assert torn_down(place) == "ENDED"
    assert [event["state"] for event in place.events] == ["TEARING_DOWN", "FAILED"]


def test_the_record_of_a_failed_run_says_why_and_its_end_is_told() -> None:
    place = Place(RunState.TEARING_DOWN, callback_url="http://callback")
    assert torn_down(place) == "ENDED"
    assert (place.record.state, place.record.error, place.record.callback_url) == (RunState.FAILED, FAILED.error, None)
    assert [event["state"] for event in place.events] == ["TEARING_DOWN", "FAILED"]
    assert json.loads(place.store.read(names.report_object(RUN)).data)["state"] == "FAILED"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_run_opens_its_first_attempt_unless_it_is_cancelled(cancelled: bool) -> None:
    place = Place(RunState.ACCEPTED, attempts=[], cancel_requested=NOW if cancelled else None)
    for _ in range(2):  # the call may be repeated
        answer = provision(place.context, RUN, ME, 1)
    if cancelled:
        assert (answer.status, place.record.attempts, place.platform.asked) == ("CANCELLED", [], [])
    else:
        [attempt] = place.record.attempts
        assert (answer.status, place.record.state) == ("RUNNING", RunState.PROVISIONING)
        assert (attempt.number, attempt.started, attempt.usd_per_hour) == (1, NOW, 10)
        assert attempt.deadline > NOW


def test_the_price_of_an_endpoint_is_pinned_when_the_deployment_begins() -> None:
    place = Place(RunState.TRAINING)
    deploy(place.context, RUN, ME)
    assert (place.record.state, place.record.serving_usd_per_hour) == (RunState.DEPLOYING, 10)
    pinned = Place(RunState.DEPLOYING, serving_usd_per_hour=5)
    deploy(pinned.context, RUN, ME)
    assert pinned.record.serving_usd_per_hour == 5


def test_only_the_execution_that_owns_a_run_opens_attempts() -> None:
    place = Place(RunState.ACCEPTED, attempts=[])
    assert provision(place.context, RUN, "another execution", 1).status == "SUPERSEDED"
    assert (place.record.attempts, place.record.execution, place.platform.asked) == ([], ME, [])


def test_a_cancelled_run_deploys_nothing() -> None:
    place = Place(RunState.TRAINING, cancel_requested=NOW)
    assert deploy(place.context, RUN, ME).status == "CANCELLED"
    assert (place.record.state, place.platform.asked) == (RunState.TRAINING, [])
