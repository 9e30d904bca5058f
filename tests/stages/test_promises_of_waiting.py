"""More promises of single calls of stages: of waiting attempts, job events, takeovers, cancels and endpoints."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, RetryLater
from dropforge.money.limits import endpoint_expiry, kept_until
from dropforge.platforms.training import Phase, Status, Waits
from dropforge.run.events import Failed, Request, Started
from dropforge.run.proof import EVENT_NAME, proof
from dropforge.run.record import Attempt, Outcome, Record, ResourceState, RunError, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages import deploy as deploying_stage
from dropforge.stages import submit
from dropforge.stages.await_.inspect import inspect
from dropforge.stages.await_.job_events import receive_job_event
from dropforge.stages.cancel import cancel, cancel_deleted
from dropforge.stages.deploy import deploy
from dropforge.stages.provision import provision
from dropforge.stages.sweep import lost_work
from dropforge.stages.teardown import teardown
from dropforge.tell import channels
from dropforge.tell.channel import Failure

from ..deployments import intend
from ..platforms.shared import ME
from .test_promises import JOB, MINUTE, NOW, RUN, SPEC, Place, commit, endpoint

CALLBACK = "http://callback"
MONTH = 60 * 24 * 30  # minutes
ON_THE_MACHINE = {  # that trained
    "training": {"adapter": {"type": "none"}},
    "target": {"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}], "price_usd_per_hour": 10},
    "serve": {"type": "training_vm", "ttl": "1h", "startup_timeout": "20m"},
    "limits": {"max_duration": "6h"},
}
DAY = {"limits": {"max_duration": "6h"}}


def running(minutes: float = 30, left: float = 300, **fields: Any) -> Attempt:
    """An attempt that has run for so many minutes, with so many left until its deadline."""
    began = NOW - minutes * MINUTE
    times = {"started": began, "launched": began, "running": began, "seen": began, "deadline": NOW + left * MINUTE}
    return Attempt(number=1, placement=0, region="us-central1", usd_per_hour=10, **{**times, **fields})


def look(place: Place, status: Status) -> dict[str, Any]:
    place.platform.inspect = lambda *_: status  # type: ignore[method-assign]
    return inspect(place.context, RUN, ME, 1, CALLBACK).to_json()


def test_an_inspection_of_an_earlier_attempt_looks_at_no_machine() -> None:
    """The machine of the present attempt says nothing about the attempt that the call names."""
    later = running(5).model_copy(update={"number": 2})
    place = Place(spec={**DAY, "serve": None}, attempts=[running(20, ended=NOW - 10 * MINUTE), later])
    looked: list[str] = []
    place.platform.inspect = lambda *_: looked.append("machine")  # type: ignore[method-assign,assignment]
    assert inspect(place.context, RUN, ME, 1, CALLBACK).to_json()["status"] == "SUPERSEDED"
    assert looked == []


def test_people_are_warned_once_about_the_budget() -> None:
    """30 minutes at 10 USD per hour have cost 5 of 8 USD."""
    place = Place(spec={"limits": {"max_duration": "6h", "max_cost_usd": 8}, "serve": None}, attempts=[running()])
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "WAITING"
        assert len(place.record.notices) == 1
        assert len(place.events) == 1
    assert "budget" in json.dumps(place.events)


def test_the_time_of_a_run_counts_over_all_its_attempts() -> None:
    """It was accepted 5 of 6 hours ago; its present attempt is 5 minutes old."""
    began = NOW - 300 * MINUTE
    history = [Transition(state=RunState.ACCEPTED, time=began)]
    spec = {**DAY, "serve": None}
    place = Place(spec=spec, created=began, history=history, attempts=[running(5, left=60)])
    look(place, Status(Phase.RUNNING))
    assert place.record.notices == ["time-80"]


@pytest.mark.parametrize(("on_stuck", "status"), [("notify", "WAITING"), ("restart", "FAILED"), ("fail", "FAILED")])
def test_a_stuck_attempt_is_told_and_ended_if_the_spec_says_so(on_stuck: str, status: str) -> None:
    limits = {"max_duration": "6h", "stuck_after": "10m", "on_stuck": on_stuck}
    place = Place(spec={"limits": limits, "serve": None}, attempts=[running()])
    answer = look(place, Status(Phase.RUNNING))
    assert (answer["status"], place.record.notices) == (status, ["stuck-a1"])
    if status == "FAILED":
        assert (answer["error"]["error_class"], answer["retry"]) == ("stuck", on_stuck == "restart")


@pytest.mark.parametrize(("minutes", "status"), [(2, "WAITING"), (20, "FAILED")])
def test_an_attempt_whose_machine_began_again_just_now_is_not_stuck(minutes: float, status: str) -> None:
    """The training began 25 minutes ago, and again on a restarted machine."""
    limits = {"max_duration": "6h", "stuck_after": "10m", "on_stuck": "fail"}
    place = Place(spec={"limits": limits, "serve": None}, attempts=[running()])
    received = {}
    for sequence, ago in ((5, 25.0), (9, minutes)):
        name = names.event_object(RUN, 1, sequence, "started")
        assert place.store.put_new(name, started(sequence=sequence))
        received[name] = NOW - ago * MINUTE
    place.store.written = lambda prefix: iter(received.items())  # type: ignore[method-assign]
    assert look(place, Status(Phase.RUNNING))["status"] == status


@pytest.mark.parametrize(("left", "least", "most"), [(300, 60, 60), (0.5, 30, 32)])
def test_the_next_look_is_within_the_check_interval_and_at_the_deadline(left: float, least: int, most: int) -> None:
    place = Place(spec={**DAY, "serve": None}, attempts=[running(left=left)])
    interval = place.context.settings.check_interval_seconds
    answer = look(place, Status(Phase.RUNNING))
    assert answer["status"] == "WAITING"
    assert min(least, interval) <= answer["wait_seconds"] <= max(most, interval if left > 1 else most)


def test_the_wait_for_a_machine_and_its_start_are_noted() -> None:
    waiting = running(5, launched=None, running=None, seen=None)
    place = Place(RunState.PROVISIONING, spec={**DAY, "serve": None}, attempts=[waiting])
    look(place, Status(Phase.PENDING))
    [attempt] = place.record.attempts
    assert (attempt.waiting, attempt.running, attempt.cost(NOW)) == (NOW, None, 0)
    look(place, Status(Phase.RUNNING))
    [attempt] = place.record.attempts
    assert (attempt.running, attempt.seen) == (NOW, NOW)
    later = place.record.with_seen(1, NOW + MINUTE)
    assert later.attempts[0].seen == NOW  # a noted time stays


class Callback:
    """The callback of an execution, which answers with a status, or cannot be reached."""

    def __init__(self, place: Place, status: int = 200) -> None:
        self.status, self.posted = status, list[str]()
        clients: Any = place.context.cloud.clients
        clients.callbacks = lambda: self

    def post(self, url: str, **_: Any) -> Any:
        self.posted.append(url)
        if not self.status:
            raise requests.ConnectionError("reset")
        return SimpleNamespace(status_code=self.status)


def started(attempt: int = 1, sequence: int = 5) -> bytes:
    event = Started(run=RUN, attempt=attempt, sequence=sequence, time=NOW, type="started")
    return event.model_dump_json().encode()


def receive(place: Place, data: bytes) -> None:
    receive_job_event(place.context, data, proof(place.store.key(RUN), EVENT_NAME, data))


def kept(place: Place) -> list[str]:
    return list(place.store.names(names.events_prefix(RUN)))


def test_a_job_event_is_kept_and_wakes_the_execution_that_waits() -> None:
    place = Place(callback_url=CALLBACK)
    callback = Callback(place)
    receive(place, started())
    assert kept(place) == [names.event_object(RUN, 1, 5, "started")]
    assert callback.posted == [CALLBACK]


def test_a_job_event_reads_the_callback_after_it_is_kept() -> None:
    """An inspection that crosses it notes its callback before it reads the events."""
    place = Place()
    callback, put_new = Callback(place), place.store.put_new

    def put(name: str, data: bytes) -> bool:
        place.store.update(RUN, lambda record: record.model_copy(update={"callback_url": CALLBACK}))
        return put_new(name, data)

    place.store.put_new = put  # type: ignore[assignment,method-assign]
    receive(place, started())
    assert callback.posted == [CALLBACK]


@pytest.mark.parametrize(("state", "attempt"), [(RunState.TRAINING, 2), (RunState.FAILED, 1)], ids=str)
def test_an_event_of_no_running_attempt_has_no_effect(state: RunState, attempt: int) -> None:
    place = Place(state, callback_url=CALLBACK)
    callback = Callback(place)
    receive(place, started(attempt))
    assert (kept(place), callback.posted) == ([], [])


@pytest.mark.parametrize("status", [0, 500])
def test_a_job_event_that_did_not_reach_its_execution_is_delivered_again(status: int) -> None:
    place = Place(callback_url=CALLBACK)
    Callback(place, status)
    with pytest.raises(RetryLater, match="callback"):
        receive(place, started())
    assert len(kept(place)) == 1


@pytest.mark.parametrize("status", [0, 500])
def test_a_cancel_is_kept_even_if_the_execution_cannot_be_woken(status: int) -> None:
    place = Place(callback_url=CALLBACK)
    callback = Callback(place, status)
    cancel(place.context, RUN)
    assert place.record.cancel_requested == NOW
    assert callback.posted == [CALLBACK]


@pytest.mark.parametrize(
    ("state", "outcome", "status", "error"),
    [
        (RunState.DEPLOYING, None, "RUNNING", None),
        (RunState.TEARING_DOWN, Outcome(state=RunState.SUCCEEDED), "SUCCEEDED", None),
        (RunState.TEARING_DOWN, Outcome(state=RunState.CANCELLED), "CANCELLED", None),
        (
            RunState.TEARING_DOWN,
            Outcome(state=RunState.FAILED, error=RunError(error_class=ErrorClass.GATE, message="x")),
            "FAILED",
            "gate",
        ),
        (RunState.TEARING_DOWN, None, "FAILED", "infrastructure"),
    ],
    ids=str,
)
def test_a_takeover_after_the_training_continues_with_what_was_decided(
    state: RunState, outcome: Outcome | None, status: str, error: str | None
) -> None:
    place = Place(state, outcome=outcome)
    answer = provision(place.context, RUN, ME, 1).to_json()
    assert (answer["status"], (answer.get("error") or {}).get("error_class")) == (status, error)
    assert place.platform.asked == []


@pytest.mark.parametrize(
    ("error_class", "waited", "answer"),
    [
        (ErrorClass.TRANSIENT, 1, "raises"),
        (ErrorClass.TRANSIENT, 10_000, "FAILED"),
        (ErrorClass.STOCKOUT, 1, "FAILED"),
        (ErrorClass.CONFIG, 1, "FAILED"),
    ],
    ids=str,
)
def test_only_a_temporary_error_of_a_creation_is_tried_again(error_class: ErrorClass, waited: int, answer: str) -> None:
    place = Place(RunState.PROVISIONING, attempts=[running(waited / 60, launched=None, running=None, seen=None)])

    def refuse(*_: Any) -> bool:
        raise CloudError(error_class, "refused")

    place.platform.provision = refuse  # type: ignore[assignment,method-assign]
    if answer == "raises":
        with pytest.raises(CloudError, match="refused"):
            provision(place.context, RUN, ME, 1)
        assert place.record.attempts[-1].ended is None
    else:
        assert provision(place.context, RUN, ME, 1).status == answer
        assert place.record.attempts[-1].error is not None


def test_an_attempt_that_is_not_launched_in_time_says_what_it_waited_for() -> None:
    place = Place(RunState.PROVISIONING, attempts=[running(100, launched=None, running=None, seen=None)])
    place.platform.provision = lambda *_: Waits("the cluster is being created")  # type: ignore[method-assign]
    assert provision(place.context, RUN, ME, 1).status == "FAILED"
    error = place.record.attempts[-1].error
    assert error is not None
    assert error.error_class is ErrorClass.STOCKOUT
    assert error.message.endswith("was not launched in us-central1 within 6000 s: the cluster is being created")


def test_in_a_pause_no_placement_is_asked() -> None:
    full = RunError(error_class=ErrorClass.STOCKOUT, message="x")
    place = Place(RunState.PROVISIONING, spec=DAY, attempts=[running(5, ended=NOW, error=full)])
    answer = provision(place.context, RUN, ME, 2).to_json()
    assert answer["status"] == "PENDING"
    assert 0 < answer["wait_seconds"] <= place.context.settings.capacity_pause_seconds
    assert (len(place.record.attempts), place.platform.asked) == (1, [])


def test_the_ledger_says_which_resources_were_seen_to_exist() -> None:
    """The container's first report proves that they exist."""
    place = Place(RunState.PROVISIONING, resources=[])
    assert provision(place.context, RUN, ME, 1).status == "RUNNING"
    assert [(entry.name, entry.state) for entry in place.store.ledger(RUN).entries] == [(JOB, ResourceState.INTENDED)]
    started = Started(run=RUN, attempt=1, sequence=1, time=NOW)
    place.store.put_new(names.event_object(RUN, 1, 1, "started"), started.model_dump_json().encode())
    assert inspect(place.context, RUN, ME, 1, "http://callback").status == "WAITING"
    assert [(entry.name, entry.state) for entry in place.store.ledger(RUN).entries] == [(JOB, ResourceState.CREATED)]
    assert place.record.state is RunState.TRAINING


@pytest.mark.parametrize("status", [Status(Phase.RUNNING), Status(Phase.FAILED, "x")], ids=["runs", "ended"])
def test_an_attempt_whose_start_and_end_came_together_has_trained(status: Status) -> None:
    """The run enters TRAINING and tells it once, whether or not the cloud has seen the container's end."""
    place = Place(RunState.PROVISIONING, resources=[], spec={**DAY, "serve": None})
    assert provision(place.context, RUN, ME, 1).status == "RUNNING"
    start = Started(run=RUN, attempt=1, sequence=1, time=NOW)
    failed = Failed(run=RUN, attempt=1, sequence=2, time=NOW, error_class=ErrorClass.DATA, message="3 rows")
    content = failed.with_start(start).model_dump_json().encode()
    place.store.put_new(names.event_object(RUN, 1, 2, "failed"), content)
    place.events.clear()
    looked = [look(place, seen)["status"] for seen in (status, Status(Phase.FAILED, "x"))]
    assert looked == ["WAITING" if status.phase is Phase.RUNNING else "FAILED", "FAILED"]
    assert [entered.state for entered in place.record.history].count(RunState.TRAINING) == 1
    assert [event["state"] for event in place.events].count("TRAINING") == 1
    [attempt] = place.record.attempts
    assert (attempt.running, attempt.ended) == (attempt.started, NOW)
    assert attempt.error is not None
    assert attempt.error.error_class is ErrorClass.DATA
    assert [entry.state for entry in place.store.ledger(RUN).entries] == [ResourceState.CREATED]


def test_a_call_that_was_suspended_past_the_deployment_creates_nothing() -> None:
    """Between its read of the record and its entry in the ledger, the run was torn down."""
    place = Place(RunState.TRAINING)
    intend_all = place.store.intend_all

    def late(*arguments: Any) -> bool:
        place.store.update(RUN, lambda record: record.entered(RunState.TEARING_DOWN, NOW))
        return intend_all(*arguments)

    place.store.intend_all = late  # type: ignore[assignment,method-assign]
    assert deploy(place.context, RUN, ME).status == "SUPERSEDED"
    assert place.platform.asked == []


def test_a_machine_that_serves_is_kept_and_the_others_are_not() -> None:
    place = Place()
    for name in ("serves", "trains"):
        intend(place.store, RUN, "kind", f"projects/p/df-{RUN}-{name}", 1)
    for _ in range(2):
        place.store.keep(RUN, [f"projects/p/df-{RUN}-serves"])
    place.store.keep(RUN, ["unknown"])
    kept_ones = [entry.name.rsplit("-", 1)[1] for entry in place.store.ledger(RUN).entries if entry.kept]
    assert kept_ones == ["serves"]


def test_the_record_says_when_the_endpoint_ended() -> None:
    live = endpoint(NOW + MINUTE)
    place = Place(RunState.DEPLOYING, endpoint=live, cancel_requested=NOW)
    intend(place.store, RUN, "run.googleapis.com/Service", live.service, 1)
    answer = teardown(place.context, RUN, ME, "run", True)
    assert (answer.status, answer.to_json()["cancelled"]) == ("GONE", True)
    assert place.platform.asked == [f"teardown {live.service}"]
    assert place.record.endpoint is not None
    assert place.record.endpoint.ended == NOW


def test_a_cancelled_endpoint_expires_at_once_so_that_the_sweep_deletes_it_in_any_case() -> None:
    place = Place(RunState.SUCCEEDED, endpoint=endpoint(NOW + 60 * MINUTE))
    place.platform.teardown = lambda *_: False  # type: ignore[method-assign]
    intend(place.store, RUN, "run.googleapis.com/Service", endpoint(NOW).service, 1)
    with pytest.raises(RetryLater, match="being deleted"):
        cancel(place.context, RUN)
    assert place.record.endpoint is not None
    assert (place.record.endpoint.expires, place.record.endpoint.ended) == (NOW, None)


@pytest.mark.parametrize(
    ("state", "is_overwritten", "cancelled"),
    [
        (RunState.TRAINING, False, True),
        (RunState.TRAINING, True, False),
        (RunState.SUCCEEDED, False, False),
    ],
)
def test_a_deleted_spec_cancels_its_run_unless_it_ended_or_another_spec_took_its_name(
    state: RunState, is_overwritten: bool, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(state, endpoint=endpoint(NOW + 60 * MINUTE) if state.is_terminal else None)
    monkeypatch.setattr(names, "run_id_of_object", lambda *_: RUN)
    storage: Any = place.context.cloud.clients.storage()
    other = SimpleNamespace(generation=8) if is_overwritten else None
    storage.get_blob = lambda name, timeout: other
    cancel_deleted(place.context, "specs", "specs/a.json", "7")
    assert (place.record.cancel_requested is not None) is cancelled
    if place.record.endpoint:
        assert place.record.endpoint.expires == NOW + 60 * MINUTE


def test_a_cancel_that_crosses_the_creation_of_the_record_is_seen() -> None:
    """The record is created after the cancel has found none, and before the cancel is kept beside it."""
    place = Place()
    record = place.record.model_copy(update={"history": [Transition(state=RunState.TRAINING, time=NOW)]})
    removed = names.record_object(RUN)
    place.context.cloud.clients.storage().objects.pop(removed)
    store = place.context.store
    vars(store)["_known"].clear()
    put_new = store.put_new

    def put(name: str, *arguments: Any) -> bool:
        is_new = put_new(name, *arguments)
        if name == names.cancel_object(RUN):
            store.create(record)
        return is_new

    store.put_new = put  # type: ignore[assignment,method-assign]
    cancel(place.context, RUN)
    assert store.record(RUN).cancel_requested == NOW


def test_the_wait_since_the_launch_decides_about_a_stockout() -> None:
    late = timedelta(hours=9)
    waiting = running(5, launched=NOW - late, running=None, seen=None, started=NOW - late)
    place = Place(RunState.PROVISIONING, spec={**DAY, "serve": None}, attempts=[waiting])
    assert look(place, Status(Phase.PENDING))["error"]["error_class"] == "stockout"


def test_only_the_execution_that_owns_a_run_creates_its_endpoint() -> None:
    place = Place(RunState.TRAINING)
    assert deploy(place.context, RUN, "another execution").status == "SUPERSEDED"
    assert (place.platform.asked, place.record.state) == ([], RunState.TRAINING)


def test_an_attempt_that_waits_for_its_creation_notes_that() -> None:
    """So the wait costs nothing, however the attempt ends."""
    place = Place(RunState.PROVISIONING, attempts=[running(5, launched=None, running=None, seen=None)])
    place.platform.provision = lambda *_: Waits("the cluster is being created")  # type: ignore[method-assign]
    assert provision(place.context, RUN, ME, 1).status == "PENDING"
    assert place.record.attempts[-1].waiting == NOW
    assert place.record.wait_reason == "the cluster is being created"


QUOTA = "Waiting for nvidia-l4 quota in us-central1: 3 of 3 in use."
UNSEEN: dict[str, Any] = {"launched": None, "running": None, "seen": None}


def waiting_place(minutes: float = 5, **fields: Any) -> Place:
    attempt = running(minutes, **UNSEEN, **fields)
    return Place(RunState.PROVISIONING, spec={**DAY, "serve": None}, attempts=[attempt])


def test_the_reason_for_waiting_is_written_when_it_changes_and_cleared_when_the_machine_runs() -> None:
    place = waiting_place()
    writes: list[str] = []
    update = place.context.store.update

    def counted(run: str, change: Any) -> Record:
        before = place.record
        after = update(run, change)
        writes.extend(["write"] * (after != before))
        return after

    place.context.store.update = counted  # type: ignore[method-assign]
    for reason in (QUOTA, QUOTA, "Insufficient capacity"):
        look(place, Status(Phase.PENDING, reason))
        assert place.record.wait_reason == reason
    # The first look also notes the callback, and the time of the wait.
    assert len(writes) == 3
    look(place, Status(Phase.RUNNING, starting="pod x pulls its image"))
    assert place.record.wait_reason == "pod x pulls its image"
    look(place, Status(Phase.RUNNING))
    assert place.record.wait_reason == ""


def test_a_wait_of_seconds_writes_no_reason() -> None:
    place = waiting_place(5 / 60)
    look(place, Status(Phase.PENDING, QUOTA))
    assert place.record.wait_reason == ""
    place = waiting_place(11 / 60)
    answer = look(place, Status(Phase.PENDING, QUOTA))
    assert place.record.wait_reason == QUOTA
    assert answer["wait_seconds"] <= 11


def test_a_reason_is_cut_and_holds_no_credential() -> None:
    place = waiting_place()
    look(place, Status(Phase.PENDING, "hf_abcdefghijklmnopqrstuvwxyz012345 " + "x" * 5000))
    assert len(place.record.wait_reason) <= 500
    assert "hf_abcdefghij" not in place.record.wait_reason


def test_people_are_told_once_of_a_wait_that_lasts() -> None:
    place = waiting_place(9)
    look(place, Status(Phase.PENDING, QUOTA))
    assert place.record.notices == []
    place = waiting_place(11)
    for _ in range(2):
        look(place, Status(Phase.PENDING, QUOTA))
    assert place.record.notices == ["waits-a1"]
    [notice] = [event for event in place.events if event["notice"]]
    assert QUOTA in notice["details"]["text"]


@pytest.mark.parametrize(
    ("state", "status", "message"),
    [
        (RunState.PROVISIONING, Status(Phase.PENDING, QUOTA), f"cancelled while it waited: {QUOTA}"),
        (RunState.PROVISIONING, Status(Phase.PENDING), "cancelled while waiting for a machine"),
        (RunState.PROVISIONING, Status(Phase.RUNNING), "cancelled while the container was starting"),
        (RunState.TRAINING, Status(Phase.RUNNING), "cancelled while training"),
    ],
)
def test_the_end_says_what_a_cancel_interrupted(state: RunState, status: Status, message: str) -> None:
    place = Place(state, spec=DAY, attempts=[running(5, **UNSEEN)], cancel_requested=NOW)
    assert look(place, status)["error"]["message"] == message
    teardown(place.context, RUN, ME, "run", keep_endpoint=False)
    assert place.record.attempts[-1].ending in ("cancelled", "")


def test_a_deadline_in_the_queue_says_what_the_attempt_waited_for() -> None:
    place = waiting_place(300, left=-1)
    answer = look(place, Status(Phase.PENDING, QUOTA))
    assert answer["error"]["error_class"] == "deadline"
    assert answer["error"]["message"].endswith(f"it waited: {QUOTA}")


def test_the_endpoints_reason_is_kept_until_it_is_ready() -> None:
    began = Transition(state=RunState.DEPLOYING, time=NOW - MINUTE, attempt=1)
    place = Place(RunState.DEPLOYING, attempts=[running(ended=NOW - MINUTE)], serving_usd_per_hour=1.0)
    place.context.store.update(RUN, lambda r: r.model_copy(update={"history": [*r.history[:-1], began]}))
    assert deploy(place.context, RUN, ME).status == "PENDING"
    assert place.record.wait_reason == "the service has no instance yet"
    place.store.update(RUN, lambda record: record.model_copy(update={"endpoint": endpoint(NOW)}))
    ready = place.record.model_copy(update={"endpoint_wait_reason": ""})
    assert ready.with_endpoint_wait_reason("a late call") is ready  # chaos seed 355


def test_an_endpoint_that_is_not_ready_is_looked_at_when_its_startup_timeout_ends() -> None:
    serve = {"type": "cloud_run", "ttl": "1h", "price_usd_per_hour": 10, "startup_timeout": "20m"}
    began = Transition(state=RunState.DEPLOYING, time=NOW - 20 * MINUTE + timedelta(seconds=7), attempt=1)
    place = Place(RunState.DEPLOYING, spec={"serve": serve}, attempts=[running(ended=NOW - 20 * MINUTE)])
    place.context.store.update(RUN, lambda r: r.model_copy(update={"history": [*r.history[:-1], began]}))
    answer = deploy(place.context, RUN, ME).to_json()
    assert (answer["status"], answer["wait_seconds"]) == ("PENDING", 7)


@pytest.mark.parametrize(("paid_minutes", "error_class"), [(12, ErrorClass.BUDGET), (60, ErrorClass.CODE)])
def test_an_endpoint_that_was_never_ready_ends_for_the_limit_that_ended_its_time(
    paid_minutes: int, error_class: ErrorClass
) -> None:
    serve = {"type": "cloud_run", "ttl": "1h", "price_usd_per_hour": 10, "startup_timeout": "20m"}
    place, began = Place(RunState.DEPLOYING, spec={"serve": serve}), NOW - 21 * MINUTE
    deployment: Any = SimpleNamespace(spec=place.store.spec(RUN), expires=began + paid_minutes * MINUTE)
    problem = CloudError(ErrorClass.CODE, "the container ended")
    answer = deploying_stage._not_ready(place.context, deployment, began, lambda: problem).to_json()
    waited = 60 * min(paid_minutes, 20)
    assert (answer["status"], answer["error"]["error_class"]) == ("FAILED", error_class)
    assert f"{waited} s" in answer["error"]["message"]
    assert answer["error"]["message"].endswith(": the container ended")


class Deaf:
    """A channel whose messages never arrive."""

    def secrets_of(self, spec: Any) -> dict[str, str]:
        return {}

    NAME = "deaf"

    def address_of(self, spec: Any, settings: Any) -> str:
        return "secret"

    def send(self, *_: Any) -> Failure:
        return Failure("it is down", may_pass=True)


@pytest.mark.parametrize(("state", "waits"), [(RunState.TRAINING, False), (RunState.FAILED, True)], ids=str)
def test_only_the_end_of_a_run_waits_for_a_channel(
    state: RunState, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CHANNELS", (Deaf(),))
    place = Place(state)
    if waits:
        with pytest.raises(CloudError, match="it is down"):
            channels.send_state(place.context, place.record)
    else:
        channels.send_state(place.context, place.record)
    assert [entry["message"] for entry in place.logged if entry["stage"] == "notify"] == ["it is down"]


@pytest.mark.parametrize(
    ("state", "execution"), [(RunState.REJECTED, None), (RunState.FAILED, ME)], ids=["rejected", "lost execution"]
)
def test_a_sweep_tells_an_untold_end_once(
    state: RunState, execution: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def note(_: Any, record: Record) -> bool:
        told.append(record.state)
        return True

    monkeypatch.setattr(lost_work, "state_of", lambda *_: "FAILED")
    monkeypatch.setattr(lost_work, "tell", lambda _, record: told.append(record.state))
    monkeypatch.setattr(lost_work, "finish", note)
    place = Place(state, execution=execution)
    for _ in range(2):
        assert lost_work._tell_end(place.context, place.record, frozenset())
    assert told == [state]


@pytest.mark.parametrize("crashes", [True, False])
def test_of_two_specs_under_a_key_the_first_counts(crashes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large specs, which are objects of their own, the first counts even if its delivery crashes before the record.
    A delivery that wrote nothing but the open mark decided nothing."""
    monkeypatch.setattr("dropforge.stages.admission.check", lambda *_: None)
    monkeypatch.setattr(submit, "start_execution", lambda *_: "e-1")
    monkeypatch.setattr(submit, "START_SECONDS", 0)
    monkeypatch.setattr(submit, "find_execution", lambda *_: "e-1")
    monkeypatch.setattr(submit, "MAX_SPEC_IN_RECORD", 0 if crashes else 1 << 14)
    place = Place()
    request = Request(place.context.settings.requests_topic, "key", "m-1")
    run, first = submit.run_of_request(place.context.settings, request), {**SPEC, "name": "first"}
    if crashes:
        place.store.put_new(names.spec_object(run), json.dumps(first).encode())
    else:
        submit.submit_message(place.context, json.dumps(first).encode(), request)
    record = submit.submit_message(place.context, json.dumps({**SPEC, "name": "second"}).encode(), request)
    assert record.name == place.store.spec(run).name == "first"


@pytest.mark.parametrize("longer", [0, 1])
def test_a_large_spec_is_an_object_of_its_own(longer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no record is large. Either way, the spec is what was submitted, for every later reader."""
    monkeypatch.setattr("dropforge.stages.admission.check", lambda *_: None)
    monkeypatch.setattr(submit, "start_execution", lambda *_: "e-1")
    text = json.dumps(SPEC)
    size = len(JobSpec.model_validate(SPEC).model_dump_json(by_alias=True).encode())
    monkeypatch.setattr(submit, "MAX_SPEC_IN_RECORD", size - longer)
    place = Place()
    record = submit.submit_message(place.context, text.encode(), Request("t", "key", "m-1"))
    assert (record.spec is None) is place.store.has_spec_beside(record.run) is bool(longer)
    for store in (place.store, RunStore(place.store.bucket.client, place.store.bucket.name)):
        assert store.spec(record.run) == JobSpec.model_validate(SPEC)


@pytest.mark.parametrize(("execution", "attempt"), [("another execution", 1), (ME, 2)])
def test_only_the_owner_of_a_run_looks_and_only_at_the_present_attempt(execution: str, attempt: int) -> None:
    place = Place()
    assert inspect(place.context, RUN, execution, attempt, CALLBACK).status == "SUPERSEDED"
    assert place.record.callback_url is None


def test_a_repeated_call_keeps_the_endpoint_that_is_ready_with_its_expiry() -> None:
    place = Place(RunState.DEPLOYING, endpoint=endpoint(NOW + MINUTE))
    assert deploy(place.context, RUN, ME).to_json() == {"status": "READY", "url": "u"}
    assert (place.platform.asked, place.record.endpoint) == ([], endpoint(NOW + MINUTE))


def test_the_machine_that_trained_and_serves_is_kept() -> None:
    place = Place(spec=ON_THE_MACHINE, attempts=[running()])
    intend(place.store, RUN, "kind", JOB, 1)
    commit(place)
    assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    assert [entry.kept for entry in place.store.ledger(RUN).entries] == [True]


def test_the_record_and_the_label_of_a_machine_that_serves_agree_about_its_expiry() -> None:
    """A TPU VM got its label when it was created to train: it ends with the time for training and serving."""
    place = Place(spec=ON_THE_MACHINE, attempts=[running(left=-5)])
    expires: list[Any] = []

    def note(_: Any, deployment: Any) -> Waits:
        expires.append(deployment.expires)
        return Waits("the machine loads the model")

    place.platform.deploy = note  # type: ignore[assignment,method-assign]
    deploy(place.context, RUN, ME)
    record = place.record
    assert expires == [kept_until(record, place.store.spec(RUN))]
    assert expires < [endpoint_expiry(record, place.store.spec(RUN), NOW)]


def test_a_model_that_was_committed_in_the_last_moment_counts() -> None:
    """After the first read of the manifest, and before the cloud says that the container failed."""
    place = Place()

    def fail(*_: Any) -> Status:
        commit(place)
        return Status(Phase.FAILED, "lost", ErrorClass.CODE, 70)

    place.platform.inspect = fail  # type: ignore[assignment,method-assign]
    assert inspect(place.context, RUN, ME, 1, CALLBACK).status == "SUCCEEDED"


def test_a_cancel_that_crosses_the_end_of_a_run_leaves_no_endpoint() -> None:
    """The cancel is recorded after teardown has decided to keep the endpoint, and before it writes the end."""
    live = endpoint(NOW + 60 * MINUTE)
    place = Place(RunState.DEPLOYING, endpoint=live)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    intend(place.store, RUN, "run.googleapis.com/Service", live.service, 1)
    delete = place.platform.teardown

    def cancelled_meanwhile(cloud: Any, kind: str, name: str) -> bool:
        place.store.update(RUN, lambda record: record.model_copy(update={"cancel_requested": NOW}))
        return delete(cloud, kind, name)

    place.platform.teardown = cancelled_meanwhile  # type: ignore[method-assign]
    outcome = Outcome(state=RunState.SUCCEEDED)
    answer = teardown(place.context, RUN, ME, "run", True, outcome)
    assert (answer.status, place.record.state) == ("ENDED", RunState.CANCELLED)
    assert place.platform.asked == [f"teardown {JOB}", f"teardown {live.service}"]
    assert place.record.endpoint is not None
    assert place.record.endpoint.ended == NOW


def deploying(minutes: float) -> Place:
    """A run whose deployment began so many minutes ago."""
    began = Transition(state=RunState.DEPLOYING, time=NOW - minutes * MINUTE, attempt=1)
    place = Place(RunState.DEPLOYING, attempts=[running(ended=began.time)], serving_usd_per_hour=1.0)
    place.store.update(RUN, lambda record: record.model_copy(update={"history": [*record.history[:-1], began]}))
    return place


def test_a_temporary_error_does_not_end_a_deployment_that_may_still_succeed() -> None:
    for minutes, status in ((1, ""), (MONTH, "FAILED")):
        place = deploying(minutes)
        place.platform.deploy = refuse  # type: ignore[method-assign,assignment]
        with nullcontext() if status else pytest.raises(CloudError, match="503"):
            assert deploy(place.context, RUN, ME).status == status


def refuse(*_: Any) -> str | Waits:
    raise CloudError(ErrorClass.TRANSIENT, "the API answered 503")


def test_an_endpoint_whose_time_is_over_is_not_created() -> None:
    place = deploying(MONTH)
    answer = deploy(place.context, RUN, ME).to_json()
    assert (answer["status"], place.platform.asked) == ("FAILED", [])
    assert "the endpoint's time was over" in answer["error"]["message"]


def test_an_endpoint_that_is_ready_after_its_time_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    place = deploying(1)

    def answers_a_month_later(*_: Any) -> str:
        place.context.cloud.clock.now = lambda: NOW + MONTH * MINUTE  # type: ignore[method-assign]
        return "http://endpoint"

    place.platform.deploy = answers_a_month_later  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(deploying_stage, "completion_problem", lambda *_: "")
    monkeypatch.setattr(deploying_stage, "_compare", lambda *_: None)
    answer = deploy(place.context, RUN, ME).to_json()
    assert (answer["status"], place.record.endpoint) == ("FAILED", None)
    assert "before it was ready" in answer["error"]["message"]


FAILED = Outcome(state=RunState.FAILED, error=RunError(error_class=ErrorClass.CODE, message="the first", hint=""))


def test_an_execution_that_owns_no_run_deletes_nothing_and_ends_nothing() -> None:
    place = Place(RunState.TRAINING)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    answer = teardown(place.context, RUN, "another", "run", False, FAILED)
    assert (answer.status, place.record.state, place.record.outcome) == ("SUPERSEDED", RunState.TRAINING, None)
    assert place.platform.asked == []


def test_an_execution_that_lost_the_run_while_it_deleted_does_not_end_it() -> None:
    place = Place(RunState.TRAINING)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    delete = place.platform.teardown

    def taken_over_meanwhile(cloud: Any, kind: str, name: str) -> bool:
        place.store.update(RUN, lambda record: record.model_copy(update={"execution": "another"}))
        return delete(cloud, kind, name)

    place.platform.teardown = taken_over_meanwhile  # type: ignore[method-assign]
    answer = teardown(place.context, RUN, ME, "run", False, FAILED)
    assert (answer.status, place.record.state) == ("SUPERSEDED", RunState.TEARING_DOWN)


def test_the_outcome_that_was_decided_first_stays_until_the_end() -> None:
    """Another execution may call again: after a crash it decides anew, and may decide otherwise."""
    place = Place(RunState.TRAINING)
    intend(place.store, RUN, "run.googleapis.com/Job", JOB, 1)
    place.platform.teardown = lambda *_: False  # type: ignore[method-assign]
    for outcome in (FAILED, Outcome(state=RunState.SUCCEEDED), None):
        assert teardown(place.context, RUN, ME, "run", False, outcome).status == "PENDING"
        assert place.record.outcome == FAILED


@pytest.mark.parametrize(("truncated", "is_told"), [(0, False), (3, False), (4, True), (None, False)])
def test_people_are_told_if_many_rows_were_cut(truncated: float | None, is_told: bool) -> None:
    place = Place(spec={**DAY, "serve": None}, attempts=[running()])
    commit(place, rows_train=300, rows_truncated=truncated)
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    texts = [event["details"]["text"] for event in place.events if event["notice"]]
    assert ["4 of 300 rows were cut after" in text for text in texts] == [True] * is_told
    assert place.record.metrics["rows_truncated"] == truncated


@pytest.mark.parametrize(
    ("beyond", "told"), [(0, []), (None, []), (3, ["3 held-out answers are longer than 40 tokens"])]
)
def test_people_are_told_of_answers_that_were_too_long_to_judge(beyond: float | None, told: list[str]) -> None:
    place = Place(spec={**DAY, "serve": None}, attempts=[running()])
    commit(place, max_new_tokens=40, answers_beyond=beyond)
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    texts = [event["details"]["text"] for event in place.events if event["notice"]]
    assert [text.partition(" and count")[0] for text in texts] == told


@pytest.mark.parametrize("fields", [[], ["mood", "page"]])
def test_people_are_told_the_fields_of_the_data_that_nothing_has_read(fields: list[str]) -> None:
    place = Place(spec={**DAY, "serve": None}, attempts=[running()])
    commit(place, unused_fields=tuple(fields))
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    texts = [event["details"]["text"] for event in place.events if event["notice"]]
    assert [text.partition(":")[0] for text in texts] == (["mood, page"] if fields else [])


@pytest.mark.parametrize("shown", [None, date(2026, 11, 29)])
def test_people_are_told_of_a_date_that_the_chat_template_always_shows(shown: date | None) -> None:
    place = Place(spec={**DAY, "serve": None}, attempts=[running()])
    commit(place, template_date=shown)
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    texts = [event["details"]["text"] for event in place.events if event["notice"]]
    assert [text.partition(", ")[0] for text in texts] == (
        ["the chat template always shows 2026-11-29"] if shown else []
    )


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_told_and_harms_no_message(odd: float) -> None:
    """An image of the user's may write a manifest with NaN, as Python's json does."""
    place = Place(spec={**DAY, "serve": None}, attempts=[running()])
    commit(place, loss=odd, loss_before=2.5, rows_eval=odd, rows_train=300, rows_truncated=odd)
    for _ in range(2):
        assert look(place, Status(Phase.RUNNING))["status"] == "SUCCEEDED"
    texts = [event["details"]["text"] for event in place.events if event["notice"]]
    assert texts == [
        f"loss is {odd}, rows_eval is {odd}, rows_truncated is {odd}: lists and reports have no value of it"
    ]
    assert place.record.metrics == {
        "loss": None, "loss_before": 2.5, "rows_eval": None, "rows_train": 300, "rows_truncated": None,
    }  # fmt: skip


@pytest.mark.parametrize(("odd", "bound"), [(math.nan, "max"), (math.inf, "min"), (-math.inf, "max")])
def test_a_metric_that_is_not_finite_passes_no_gate(odd: float, bound: str) -> None:
    metric = "loss" if bound == "max" else "exact_match"
    evaluation = {"gate": {"metric": metric, bound: 1.0}}
    place = Place(spec={**DAY, "serve": None, "evaluation": evaluation}, attempts=[running()])
    commit(place, **{metric: odd})  # type: ignore[arg-type]
    answer = look(place, Status(Phase.RUNNING))
    assert answer["gate"]["passed"] is False
    assert f"{metric} is {odd}; the gate asks for" in answer["gate"]["error"]["message"]
