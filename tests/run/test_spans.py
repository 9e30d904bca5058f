"""The spans of a run: its states add up to the run, and its attempts to their phases, whatever happened to it."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import ErrorClass
from dropforge.run.record import Attempt, Endpoint, LedgerEntry, Parity, Record, ResourceState, RunError, RunState
from dropforge.run.record import Transition as Entered
from dropforge.run.series import Progress, Series, series_object
from dropforge.run.spans import ROOT, Span, Steps, read_steps, spans_of
from dropforge.run.store import RunStore

from ..deployments import Memory

NOW = datetime(2026, 11, 24, tzinfo=UTC)
RUN = "job-0123456789ab"
LOST = RunError(error_class=ErrorClass.PREEMPTED, message="the machine was taken away")
STATES = [RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING, RunState.DEPLOYING, RunState.TEARING_DOWN]


def at(minute: float) -> datetime:
    return NOW + timedelta(minutes=minute)


def attempt(number: int, **times: object) -> Attempt:
    own = {"number": number, "placement": 0, "region": "us-central1", "deadline": at(600), **times}
    return Attempt.model_validate(own)


def record(*entered: tuple[RunState, float], **fields: object) -> Record:
    history = [Entered(state=state, time=at(minute)) for state, minute in entered]
    own = {"run": RUN, "name": "n", "source": "s", "created": at(0), "execution": "e"}
    return Record.model_validate({**own, "state": history[-1].state, "history": history, **fields})


def run_in(*entered: tuple[RunState, float], **fields: object) -> dict[str, Span]:
    spans = spans_of(record((RunState.ACCEPTED, 0), *entered, **fields))
    assert len({span.path for span in spans}) == len(spans)
    return {span.path: span for span in spans}


def test_a_served_run_with_a_second_attempt() -> None:
    lost = attempt(1, started=at(2), launched=at(3), running=at(10), ended=at(20), error=LOST)
    trained = attempt(2, started=at(22), running=at(23), ended=at(60))
    states = list(zip(STATES, [0, 2, 60, 60, 70], strict=True))[1:]
    served = record(
        (RunState.ACCEPTED, 0),
        *states,
        (RunState.SUCCEEDED, 75),
        attempts=[lost, trained],
        parity=Parity(state="sealed", rows=32, tokens=433),
        endpoint=Endpoint(url="https://x.run.app", model="m", service="s", region="r", ready=at(70), expires=at(99)),
    )
    steps = {2: Steps(at(25), at(55))}
    spans = {span.path.removeprefix("run/"): span for span in spans_of(served, steps)}
    minutes = {
        path: (span.name, *(None if t is None else (t - NOW).total_seconds() / 60 for t in (span.began, span.ended)))
        for path, span in spans.items()
    }
    assert minutes == {
        "run": ("run", 0, 75),
        "0-accepted": ("accepted", 0, 2),
        "1-provisioning": ("provisioning", 2, 60),
        "2-training": ("training", 60, 60),
        "3-deploying": ("deploying", 60, 70),
        "4-tearing_down": ("tearing down", 70, 75),
        "attempt-1": ("attempt", 2, 20),
        "attempt-1/0-launch": ("launch", 2, 3),
        "attempt-1/1-wait-for-capacity": ("wait for capacity", 3, 10),
        "attempt-1/2-prepare": ("prepare", 10, 20),
        "attempt-2": ("attempt", 22, 60),
        "attempt-2/0-launch": ("launch", 22, 23),
        "attempt-2/1-prepare": ("prepare", 23, 25),
        "attempt-2/2-train": ("train", 25, 55),
        "attempt-2/3-finish": ("finish", 55, 60),
        "endpoint": ("endpoint", 70, None),
    }
    assert [path for path, span in spans.items() if span.problem] == ["attempt-1"]
    assert spans["attempt-1"].error_type == "preempted"
    assert spans["3-deploying"].attributes["dropforge.parity.state"] == "sealed"
    assert spans["endpoint"].attributes["server.address"] == "x.run.app"


def test_a_training_that_continues_has_no_end_and_does_not_finish_yet() -> None:
    running = attempt(1, started=at(1), running=at(2))
    open_run = record((RunState.ACCEPTED, 0), (RunState.PROVISIONING, 1), (RunState.TRAINING, 2), attempts=[running])
    spans = {span.path: span for span in spans_of(open_run, {1: Steps(at(4), at(9))})}
    assert [path for path, span in spans.items() if span.ended is None] == [
        "run",
        "run/2-training",
        "run/attempt-1",
        "run/attempt-1/2-train",
    ]


def test_the_endpoint_s_failure_is_that_of_the_run_and_of_its_state() -> None:
    error = RunError(error_class=ErrorClass.PARITY, message="differs")
    spans = run_in(
        (RunState.PROVISIONING, 1), (RunState.DEPLOYING, 2), (RunState.TEARING_DOWN, 3), (RunState.FAILED, 4),
        error=error, attempts=[attempt(1, started=at(1), ended=at(2))],
    )  # fmt: skip
    assert {path: span.error_type for path, span in spans.items() if span.problem} == {
        "run": "parity",
        "run/2-deploying": "parity",
    }


def test_waiting_for_a_place_lies_in_the_accepted_state() -> None:
    spans = run_in((RunState.PROVISIONING, 30), placed=at(29))
    place = spans["run/0-accepted/place"]
    assert (place.began, place.ended, place.parent) == (at(0), at(29), "run/0-accepted")
    waiting = run_in(queued={"rule": "max_runs", "place": 2, "since": at(0)})["run/0-accepted/place"]
    assert waiting.ended is None


def test_a_resource_lasts_from_the_intent_until_it_is_gone() -> None:
    kept = {"kind": "service", "name": "projects/p/services/s", "attempt": 1, "intended": at(1)}
    entries = [
        LedgerEntry(**kept, state=ResourceState.GONE, created=at(2), gone=at(9)),
        LedgerEntry(**kept, state=ResourceState.GONE, gone=at(8)),
        LedgerEntry(**kept, state=ResourceState.INTENDED),
    ]
    spans = run_in((RunState.PROVISIONING, 1), resources=entries)
    lasted = [(spans[f"run/resource-{i}"].began, spans[f"run/resource-{i}"].ended) for i in range(3)]
    assert lasted == [(at(1), at(9)), (at(1), at(8)), (at(1), None)]


def test_a_rejected_spec_is_an_error_without_duration() -> None:
    rejected = record((RunState.REJECTED, 0), problems=[{"pointer": "/name", "message": "m"}] * 2)
    [root] = spans_of(rejected)
    assert (root.path, root.began, root.ended, root.problem) == (ROOT, at(0), at(0), "the spec has 2 problems")


@given(
    gaps=st.lists(st.floats(0, 1e6), min_size=6, max_size=6),
    moments=st.lists(st.floats(-1e6, 2e6), min_size=4, max_size=4),
    is_over=st.booleans(),
)
def test_states_and_phases_have_no_gap_whatever_the_clocks_say(
    gaps: list[float], moments: list[float], is_over: bool
) -> None:
    """The times of launch, run and reports come from several clocks, and a container chooses when it reports."""
    times = list(itertools.accumulate(gaps))
    states = list(zip([*STATES[1:], RunState.SUCCEEDED][: 5 if is_over else 4], times, strict=False))
    ended = at(times[2]) if is_over else None
    launched, running, first, last = map(at, moments)
    trained = attempt(1, started=at(times[0]), launched=launched, running=running, ended=ended)
    steps = {1: Steps(min(first, last), max(first, last))}
    ran = record((RunState.ACCEPTED, 0), *states, attempts=[trained])
    spans = spans_of(ran, steps)
    root, found = spans[0], {span.path: span for span in spans}
    check_without_gap([s for s in spans if s.path.removeprefix("run/")[0].isdigit()], root)
    check_without_gap([s for s in spans if s.parent == "run/attempt-1"], found["run/attempt-1"])
    assert all(span.seconds(at(1e7)) >= 0 for span in spans)
    assert spans == spans_of(ran, steps)


def check_without_gap(parts: list[Span], whole: Span) -> None:
    assert (parts[0].began, parts[-1].ended) == (whole.began, whole.ended)
    assert all(one.ended == other.began for one, other in itertools.pairwise(parts))


@pytest.mark.parametrize(
    ("first", "last"),
    [(at(0), at(20)), (at(-60), at(-40)), (NOW.replace(year=2001), NOW.replace(year=2999)), (at(20), at(0))],
)
def test_phases_come_from_the_series_whatever_the_clock_of_the_trainer_says(first: datetime, last: datetime) -> None:
    store = RunStore(Memory(), "runs")
    series = Series(run=RUN, attempt=1, began=first, written=last)
    series.add(Progress(attempt=1, time=first, step=1, total_steps=2))
    series.add(Progress(attempt=1, time=first + timedelta(minutes=5), step=2, total_steps=2))
    series.written = last
    store.put_new(series_object(RUN, 1), series.encoded("k" * 64))
    received = utc_now()
    found = read_steps(store, record((RunState.ACCEPTED, 0), attempts=[attempt(1, started=at(0), running=at(1))]))
    begun, ended = found[1]
    assert begun <= ended <= utc_now()
    assert last < first or begun <= received - (last - first) + timedelta(minutes=1)


@pytest.mark.parametrize(("path", "other"), [("run", "run/0-accepted"), ("run/attempt-1", "run/attempt-11")])
def test_ids_are_those_of_w3c_and_repeat(path: str, other: str) -> None:
    """https://www.w3.org/TR/trace-context/: 16 and 8 bytes in lower-case hex, not all of them zero."""
    assert names.trace_id(RUN) == names.trace_id(RUN) != names.trace_id(f"{RUN}x")
    assert names.span_id(RUN, path) != names.span_id(RUN, other) != names.span_id(f"{RUN}x", other)
    assert (len(bytes.fromhex(names.trace_id(RUN))), len(bytes.fromhex(names.span_id(RUN, path)))) == (16, 8)
