"""The verdict on an attempt: every combination of its reports and the status of the cloud."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.platforms.training import Phase, Status
from dropforge.run.events import Failed, Preempted, Started, Succeeded
from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.run.series import Kept, Progress, Series, series_object
from dropforge.run.store import RunStore
from dropforge.stages.await_.decide import MOST_REPORTS, Heard, Report, decide, hear

from ..deployments import SETTINGS, Memory, settings_with

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
RUN = "job-0123456789ab"
BASE: dict[str, Any] = {"run": RUN, "attempt": 1, "time": NOW}
STARTED = Started(**BASE, sequence=1)
FAILED = Failed(**BASE, sequence=2, error_class=ErrorClass.DATA, message="3 rows")
PREEMPTED = Preempted(**BASE, sequence=2, step=40)
SUCCEEDED = Succeeded(**BASE, sequence=2, manifest_uri="gs://b/m")
RUNNING = Status(Phase.RUNNING)


def record(started: timedelta = timedelta(minutes=-5), allowed: timedelta = timedelta(hours=1)) -> Record:
    attempt = Attempt(
        number=1, placement=0, region="us-central1", started=NOW + started, deadline=NOW + started + allowed
    )
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    return Record(
        run=RUN, name="n", source="s", state=RunState.TRAINING, created=NOW, history=history, attempts=[attempt]
    )


def store_of(memory: Memory) -> RunStore:
    """The runs bucket, with the record of the run."""
    store = RunStore(memory, "runs")
    assert store.create(record())
    return store


def heard(events: list[Any], ago: float = 0, progress: float | None = None) -> Heard:
    """Return `events` as received `ago` seconds ago, and the last progress, if any, `progress` seconds ago."""
    progress_events = [] if progress is None else [("p", NOW - timedelta(seconds=progress))]
    return Heard([Report(event, NOW - timedelta(seconds=ago)) for event in events], progress_events)


def heard_by_series(events: list[Any], ago: float, progress: float | None) -> Heard:
    """The same with a series. The trainer's clock is an hour behind, and the series was written late: just now."""
    behind = NOW - timedelta(hours=1)
    events = [event.model_copy(update={"time": behind - timedelta(seconds=ago)}) for event in events]
    reports = [Report(event, NOW - timedelta(seconds=ago)) for event in events]
    if progress is None:
        return Heard(reports)
    return Heard(reports, [], Kept(series_of(behind - timedelta(seconds=progress), behind), 1, NOW))


def series_of(time: datetime, written: datetime) -> Series:
    series = Series(run=RUN, attempt=1, began=time, written=time)
    series.add(Progress(attempt=1, time=time, step=1, total_steps=2))
    series.written = written
    return series


def verdict(events: list[Any], cloud: Status | None, **times: timedelta) -> Any:
    return decide(heard(events), cloud, record(**times), NOW, SETTINGS)


@pytest.mark.parametrize("cloud", [None, RUNNING, Status(Phase.PENDING)])
def test_the_verdict_waits_without_a_proof_of_the_end(cloud: Status | None) -> None:
    decision = verdict([STARTED], cloud)
    assert decision.error is None
    assert decision.started


def test_reported_success_without_a_manifest_waits_for_the_cloud() -> None:
    assert verdict([SUCCEEDED], RUNNING).error is None
    assert verdict([SUCCEEDED], Status(Phase.SUCCEEDED)).error.error_class is ErrorClass.CODE


@pytest.mark.parametrize(
    ("events", "cloud", "expected"),
    [
        ([FAILED], Status(Phase.FAILED, "x", ErrorClass.CODE, 65), ErrorClass.DATA),
        ([FAILED], Status(Phase.GONE, "x"), ErrorClass.DATA),
        ([PREEMPTED], Status(Phase.FAILED, "x", ErrorClass.INFRASTRUCTURE), ErrorClass.PREEMPTED),
        ([STARTED], Status(Phase.FAILED, "x", ErrorClass.OUT_OF_MEMORY, 76), ErrorClass.OUT_OF_MEMORY),
        ([STARTED], Status(Phase.FAILED, "x"), ErrorClass.INFRASTRUCTURE),
        ([STARTED], Status(Phase.GONE, "x"), ErrorClass.INFRASTRUCTURE),
        ([], Status(Phase.SUCCEEDED), ErrorClass.CODE),
    ],
)
def test_the_event_or_the_cloud_alone_proves_the_failure(
    events: list[Any], cloud: Status | None, expected: ErrorClass
) -> None:
    assert verdict(events, cloud).error.error_class is expected


@pytest.mark.parametrize("cloud", [None, RUNNING, Status(Phase.PENDING), Status(Phase.FAILED)])
@pytest.mark.parametrize("events", [[], [STARTED], [PREEMPTED]])
def test_after_the_deadline_the_class_is_deadline(events: list[Any], cloud: Status | None) -> None:
    decision = verdict(events, cloud, started=timedelta(hours=-2))
    assert decision.error.error_class is ErrorClass.DEADLINE


def test_pending_too_long_is_a_stockout() -> None:
    decision = verdict([], Status(Phase.PENDING), started=timedelta(seconds=-1801))
    assert decision.error.error_class is ErrorClass.STOCKOUT
    assert "us-central1" in decision.error.message


@pytest.mark.parametrize(("most", "waits"), [(200, False), (400, True)])
def test_an_attempt_waits_for_capacity_no_longer_than_max_wait(most: int, waits: bool) -> None:
    """It has waited for 300 s. Without max_wait the deployment's setting would decide, and otherwise."""
    run = record()
    limited = run.attempts[0].model_copy(update={"max_wait_seconds": most})
    run = run.model_copy(update={"attempts": [limited]})
    settings = settings_with(provision_deadline_seconds=100 if waits else 10_000)
    decision = decide(heard([]), Status(Phase.PENDING), run, NOW, settings)
    assert (decision.error is None) is waits


def test_the_wait_for_capacity_begins_at_the_launch() -> None:
    """The creation of an attempt's own cluster can take longer than the user's longest wait for its nodes."""
    overdue = record(started=timedelta(seconds=-1801))
    launched = overdue.with_launch(1, NOW - timedelta(seconds=1700))
    assert decide(heard([]), Status(Phase.PENDING), launched, NOW, SETTINGS).error is None


@pytest.mark.parametrize(("ago", "expected"), [(5, None), (1700, None), (1900, ErrorClass.STOCKOUT)])
def test_the_wait_for_capacity_begins_again_after_training(ago: float, expected: ErrorClass | None) -> None:
    """Examples: a Ray slice is replaced; a Cloud Run task has ended, its execution ends a moment later."""
    trained = record(started=timedelta(hours=-9), allowed=timedelta(hours=12))
    decision = decide(heard([STARTED], 32_000, progress=ago), Status(Phase.PENDING), trained, NOW, SETTINGS)
    assert (decision.error and decision.error.error_class) == expected


@pytest.mark.parametrize("report", [FAILED, PREEMPTED])
@pytest.mark.parametrize(
    ("cloud", "ago", "progress", "believed"),
    [
        (RUNNING, 0, None, False),  # the container may still be ending
        (RUNNING, 59, 60, False),
        (RUNNING, 61, None, True),  # ... but not for more than a minute
        (Status(Phase.PENDING), 61, None, True),
        (Status(Phase.FAILED), 0, None, True),
        (None, 0, None, False),
        (None, 3600, None, False),  # never before the cloud has answered
        (RUNNING, 61, 57, True),  # the events arrived in another order
        (RUNNING, 61, 1, False),  # training continues: the report of its end was not from the container
        (RUNNING, 3000, 1, False),
    ],
)
@pytest.mark.parametrize("of", [heard, heard_by_series])
def test_a_reported_end_needs_the_cloud_or_silence(
    of: Any, report: Any, cloud: Status | None, ago: float, progress: float | None, believed: bool
) -> None:
    decision = decide(of([STARTED, report], ago, progress), cloud, record(), NOW, SETTINGS)
    assert (decision.error is not None) is believed


@pytest.mark.parametrize(("key", "started"), [("", True), ("another run's key", False)])
def test_a_series_with_the_proof_of_its_run_shows_that_the_attempt_trains(key: str, started: bool) -> None:
    """Even if its report of the start is lost; and a container of another run shows nothing of it."""
    memory = Memory()
    store = store_of(memory)
    memory.objects[series_object(RUN, 1)] = (series_of(NOW, NOW).encoded(key or store.key(RUN)), 1)
    assert hear(store, RUN, 1).started is started


def test_a_forged_failure_does_not_hide_how_the_attempt_really_ended() -> None:
    cloud = Status(Phase.FAILED, "x", ErrorClass.PREEMPTED)
    decision = decide(heard([STARTED, FAILED], 600, 1), cloud, record(), NOW, SETTINGS)
    assert decision.error is not None
    assert decision.error.error_class is ErrorClass.PREEMPTED


@pytest.mark.parametrize(("limit", "expected"), [("max_duration", "deadline"), ("max_cost_usd", "budget")])
@pytest.mark.parametrize(
    ("events", "cloud", "left"),
    [
        ([STARTED], RUNNING, -1),
        ([STARTED], None, -1),
        ([STARTED], Status(Phase.FAILED, "x", ErrorClass.DEADLINE), 20),
        ([Failed(**BASE, sequence=2, error_class=ErrorClass.DEADLINE, message="x")], Status(Phase.FAILED), 20),
    ],
)
def test_the_class_names_the_limit_that_ended_an_attempt(
    events: list[Any], cloud: Status | None, left: int, limit: Any, expected: str
) -> None:
    begun = record(timedelta(seconds=left) - timedelta(hours=1), timedelta(hours=1))
    attempt = begun.attempts[0].model_copy(update={"limit": limit})
    now = begun.model_copy(update={"attempts": [attempt]})
    error = decide(heard(events), cloud, now, NOW, SETTINGS).error
    assert error is not None
    assert error.error_class == expected
    assert limit in error.hint


@pytest.mark.parametrize(
    ("limit", "ran", "expected"),
    [
        ("max_duration", False, "deadline"),  # counted from the acceptance, including every wait
        ("max_cost_usd", False, "stockout"),  # the attempt cost nothing: the next placement has the whole budget
        ("max_cost_usd", True, "budget"),  # for example, the attempt lost its machine and waits for another machine
    ],
)
def test_an_attempt_that_has_only_waited_has_spent_nothing(limit: Any, ran: bool, expected: str) -> None:
    begun = record(timedelta(minutes=-20), timedelta(minutes=19))
    attempt = begun.attempts[0].model_copy(update={"limit": limit, "running": NOW if ran else None})
    now = begun.model_copy(update={"attempts": [attempt]})
    error = decide(heard([]), Status(Phase.PENDING), now, NOW, SETTINGS).error
    assert error is not None
    assert error.error_class == expected
    ended = now.with_end(1, error, NOW).attempts[0].model_copy(update={"usd_per_hour": 1.0})
    assert (ended.cost(NOW) == 0) is (expected == "stockout" or ran)


@pytest.mark.parametrize(("seconds", "waits"), [(0, True), (2, True), (4, False)])
def test_a_container_that_just_ended_may_still_report_why(seconds: int, waits: bool) -> None:
    cloud = Status(Phase.FAILED, "exit code 65", ErrorClass.DATA, 65, NOW - timedelta(seconds=seconds))
    assert (verdict([STARTED], cloud).error is None) is waits
    assert verdict([STARTED, FAILED], cloud).error.message == "3 rows"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"{}",
        b"[" * 5000,
        FAILED.model_copy(update={"run": "other-0123456789ab"}).model_dump_json().encode(),
    ],
)
def test_a_stored_event_that_is_none_of_the_run_is_not_heard(content: bytes) -> None:
    memory = Memory()
    memory.objects[names.event_object(RUN, 1, 1, "failed")] = (content, 1)
    memory.objects[names.event_object(RUN, 1, 2, "started")] = (STARTED.model_dump_json().encode(), 1)
    memory.objects[f"{names.events_prefix(RUN, 1)}failed"] = (content, 1)
    assert [report.event for report in hear(store_of(memory), RUN, 1).reports] == [STARTED]


@pytest.mark.parametrize("end", [FAILED, PREEMPTED, SUCCEEDED], ids=lambda end: end.type)
@pytest.mark.parametrize("is_held", [True, False])
def test_an_end_that_tells_its_start_shows_that_the_attempt_trained(end: Any, is_held: bool) -> None:
    """An attempt that ended before its start was no training."""
    memory, stored = Memory(), end.with_start(STARTED) if is_held else end
    memory.objects[names.event_object(RUN, 1, 2, end.type)] = (stored.model_dump_json().encode(), 1)
    heard = hear(store_of(memory), RUN, 1)
    assert [report.event for report in heard.reports] == ([STARTED, stored] if is_held else [end])
    assert decide(heard, RUNNING, record(), NOW, SETTINGS).started is is_held


def test_only_the_first_and_the_last_of_many_reports_are_read() -> None:
    """A container may publish any number of events; its run must still be looked at within a function's time-out."""
    memory = Memory()
    for sequence in range(5 * MOST_REPORTS):
        event = STARTED.model_copy(update={"sequence": sequence})
        memory.objects[names.event_object(RUN, 1, sequence, "started")] = (event.model_dump_json().encode(), 1)
    last = 5 * MOST_REPORTS
    memory.objects[names.event_object(RUN, 1, last, "failed")] = (FAILED.model_dump_json().encode(), 1)
    heard = hear(store_of(memory), RUN, 1)
    assert len(heard.reports) == 2 * MOST_REPORTS
    assert heard.reports[0].event.sequence == 0
    assert heard.end is not None
    assert heard.end.event == FAILED
