"""The verdict on an attempt: every combination of what it reported, what it left and what the cloud says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.platforms.training import Phase, Status
from dropforge.run.events import Failed, Preempted, Started, Succeeded
from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.stages.await_.decide import Heard, Report, decide

from ..deployments import SETTINGS

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


def heard(events: list[Any], ago: float = 0, progress: float | None = None) -> Heard:
    """What was received `ago` seconds ago, and the last progress, if there was any, `progress` seconds ago."""
    told = [] if progress is None else [("p", NOW - timedelta(seconds=progress))]
    return Heard([Report(event, NOW - timedelta(seconds=ago)) for event in events], told)


def verdict(events: list[Any], cloud: Status | None, manifest: Any = None, **times: timedelta) -> Any:
    return decide(heard(events), manifest, cloud, record(**times), NOW, SETTINGS)


@pytest.mark.parametrize("events", [[], [STARTED], [STARTED, FAILED], [PREEMPTED], [SUCCEEDED]])
@pytest.mark.parametrize("cloud", [None, RUNNING, Status(Phase.FAILED), Status(Phase.GONE)])
def test_a_committed_manifest_is_success_whatever_else_is_said(events: list[Any], cloud: Status | None) -> None:
    assert verdict(events, cloud, manifest=object()).succeeded


@pytest.mark.parametrize("cloud", [None, RUNNING, Status(Phase.PENDING)])
def test_it_waits_while_nothing_is_decided(cloud: Status | None) -> None:
    found = verdict([STARTED], cloud)
    assert not found.succeeded
    assert found.error is None
    assert found.started


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
def test_either_path_alone_tells_the_failure(events: list[Any], cloud: Status | None, expected: ErrorClass) -> None:
    assert verdict(events, cloud).error.error_class is expected


@pytest.mark.parametrize("cloud", [None, RUNNING, Status(Phase.PENDING), Status(Phase.FAILED)])
@pytest.mark.parametrize("events", [[], [STARTED], [PREEMPTED]])
def test_after_the_deadline_it_is_the_deadline(events: list[Any], cloud: Status | None) -> None:
    found = verdict(events, cloud, started=timedelta(hours=-2))
    assert found.error.error_class is ErrorClass.DEADLINE


def test_pending_too_long_is_a_stockout() -> None:
    found = verdict([], Status(Phase.PENDING), started=timedelta(seconds=-1801))
    assert found.error.error_class is ErrorClass.STOCKOUT
    assert "us-central1" in found.error.message


def test_capacity_is_waited_for_from_the_launch() -> None:
    """A cluster of the attempt's own takes longer to make than somebody may want to wait for its nodes."""
    late = record(started=timedelta(seconds=-1801))
    launched = late.with_launch(1, NOW - timedelta(seconds=1700))
    assert decide(heard([]), None, Status(Phase.PENDING), launched, NOW, SETTINGS).error is None


@pytest.mark.parametrize(("ago", "expected"), [(5, None), (1700, None), (1900, ErrorClass.STOCKOUT)])
def test_what_has_trained_and_waits_again_waits_from_then(ago: float, expected: ErrorClass | None) -> None:
    """A Ray slice that is replaced; a Cloud Run task that has ended, a moment before its execution has."""
    trained = record(started=timedelta(hours=-9), allowed=timedelta(hours=12))
    found = decide(heard([STARTED], 32_000, progress=ago), None, Status(Phase.PENDING), trained, NOW, SETTINGS)
    assert (found.error and found.error.error_class) == expected


@pytest.mark.parametrize("report", [FAILED, PREEMPTED])
@pytest.mark.parametrize(
    ("cloud", "ago", "progress", "believed"),
    [
        (RUNNING, 0, None, False),  # the container may still be ending
        (RUNNING, 59, 60, False),
        (RUNNING, 61, None, True),  # ... but not for so long
        (Status(Phase.PENDING), 61, None, True),
        (Status(Phase.FAILED), 0, None, True),
        (None, 0, None, False),
        (None, 3600, None, False),  # never before the cloud was asked
        (RUNNING, 61, 57, True),  # events in another order
        (RUNNING, 61, 1, False),  # training goes on: whoever reported its end was not the container
        (RUNNING, 3000, 1, False),
    ],
)
def test_a_reported_end_needs_the_cloud_or_silence(
    report: Any, cloud: Status | None, ago: float, progress: float | None, believed: bool
) -> None:
    found = decide(heard([STARTED, report], ago, progress), None, cloud, record(), NOW, SETTINGS)
    assert (found.error is not None) is believed


def test_a_forged_failure_does_not_hide_how_the_attempt_really_ended() -> None:
    cloud = Status(Phase.FAILED, "x", ErrorClass.PREEMPTED)
    found = decide(heard([STARTED, FAILED], 600, 1), None, cloud, record(), NOW, SETTINGS)
    assert found.error is not None
    assert found.error.error_class is ErrorClass.PREEMPTED


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
def test_the_class_says_which_limit_ended_an_attempt(
    events: list[Any], cloud: Status | None, left: int, limit: Any, expected: str
) -> None:
    found = record(timedelta(seconds=left) - timedelta(hours=1), timedelta(hours=1))
    attempt = found.attempts[0].model_copy(update={"limit": limit})
    now = found.model_copy(update={"attempts": [attempt]})
    error = decide(heard(events), None, cloud, now, NOW, SETTINGS).error
    assert error is not None
    assert error.error_class == expected
    assert limit in error.hint


@pytest.mark.parametrize(
    ("limit", "ran", "expected"),
    [
        ("max_duration", False, "deadline"),  # from the acceptance, whatever it waited for
        ("max_cost_usd", False, "stockout"),  # nothing was spent: the next placement has all of the budget
        ("max_cost_usd", True, "budget"),  # a machine that was taken away, say, and is waited for again
    ],
)
def test_an_attempt_that_has_only_waited_has_spent_nothing(limit: Any, ran: bool, expected: str) -> None:
    found = record(timedelta(minutes=-20), timedelta(minutes=19))
    attempt = found.attempts[0].model_copy(update={"limit": limit, "running": NOW if ran else None})
    now = found.model_copy(update={"attempts": [attempt]})
    error = decide(heard([]), None, Status(Phase.PENDING), now, NOW, SETTINGS).error
    assert error is not None
    assert error.error_class == expected
    ended = now.with_end(1, error, NOW).attempts[0].model_copy(update={"usd_per_hour": 1.0})
    assert (ended.cost(NOW) == 0) is (expected == "stockout" or ran)


@pytest.mark.parametrize(("seconds", "waits"), [(0, True), (2, True), (4, False)])
def test_a_container_that_just_ended_may_still_report_why(seconds: int, waits: bool) -> None:
    cloud = Status(Phase.FAILED, "exit code 65", ErrorClass.DATA, 65, NOW - timedelta(seconds=seconds))
    assert (verdict([STARTED], cloud).error is None) is waits
    assert verdict([STARTED, FAILED], cloud).error.message == "3 rows"
