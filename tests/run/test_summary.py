"""The summary of a run: metadata has it, and it says of any record what the record says."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.base.errors import ErrorClass
from dropforge.run.record import About, Attempt, Endpoint, Queued, Record, RunError, RunState, Transition
from dropforge.run.summary import MOST_BYTES, Summary, read_summary, text_of

RUN = "job-0123456789ab"
NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PRICE = st.one_of(st.none(), st.floats(0, 1000))
MONEY = st.floats(allow_nan=True, allow_infinity=True)
TIME = st.floats(0, 1e6).map(lambda seconds: NOW + timedelta(seconds=seconds))
ERROR = st.builds(RunError, error_class=st.sampled_from(ErrorClass), message=TEXT)
ATTEMPT = st.builds(
    Attempt,
    number=st.integers(1, 20),
    placement=st.just(0),
    region=TEXT,
    started=TIME,
    deadline=TIME,
    usd_per_hour=PRICE,
    waiting=st.one_of(st.none(), TIME),
    running=st.one_of(st.none(), TIME),
    ended=st.one_of(st.none(), TIME),
    error=st.one_of(st.none(), ERROR),
    wait_reason=TEXT,
)
ENDPOINT = st.builds(
    Endpoint,
    url=TEXT,
    model=TEXT,
    service=TEXT,
    region=TEXT,
    ready=TIME,
    expires=TIME,
    limit=st.just("ttl"),
    ended=st.one_of(st.none(), TIME),
)
ABOUT = st.builds(
    About, target=TEXT, model=TEXT, labels=st.dictionaries(TEXT, TEXT, max_size=5), metric=TEXT, most_usd=PRICE
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Return a record as wild as its model allows, whether or not a run can reach it."""
    state = draw(st.sampled_from(RunState))
    entered = [RunState.ACCEPTED, RunState.DEPLOYING, state] if draw(st.booleans()) else [state]
    return Record(
        run=RUN,
        name=draw(TEXT),
        source=draw(TEXT),
        state=state,
        created=draw(TIME),
        history=[Transition(state=entry, time=draw(TIME)) for entry in entered],
        attempts=draw(st.lists(ATTEMPT, max_size=4)),
        metrics=draw(st.dictionaries(TEXT, st.one_of(st.none(), MONEY), max_size=6)),
        queued=draw(st.one_of(st.none(), st.builds(Queued, rule=TEXT, place=st.integers(), since=TIME))),
        endpoint=draw(st.one_of(st.none(), ENDPOINT)),
        endpoint_wait_reason=draw(TEXT),
        serving_usd_per_hour=draw(PRICE),
        about=draw(ABOUT),
    )


def stored(record: Record) -> Record:
    return Record.model_validate_json(record.model_dump_json())


@settings(max_examples=100, deadline=None)
@given(records())
def test_the_metadata_has_the_summary_of_any_record(record: Record) -> None:
    text = text_of(record)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= MOST_BYTES
    if text:
        assert read_summary(RUN, text) == Summary.of(stored(record))
        assert text == text_of(stored(record))
    else:
        assert len(json.dumps(json.loads(Summary.of(record).model_dump_json(exclude_defaults=True)))) > MOST_BYTES


@settings(max_examples=100, deadline=None)
@given(records(), st.floats(1e6, 1e7))
def test_a_summary_costs_what_its_record_costs(record: Record, seconds: float) -> None:
    now = NOW + timedelta(seconds=seconds)
    summary = Summary.of(record)
    for name in ("training_cost", "serving_cost", "cost"):
        assert getattr(summary, name)(now) == pytest.approx(getattr(record, name)(now), abs=1e-5)


def test_a_summary_that_is_too_long_is_left_out() -> None:
    metrics = {f"metric {number} \u20ac": 0.5 for number in range(300)}
    assert text_of(record(metrics=metrics)) == ""


def test_a_run_that_was_never_accepted_needs_no_spec_for_its_summary() -> None:
    rejected = record(about=None, state=RunState.REJECTED, history=[Transition(state=RunState.REJECTED, time=NOW)])
    summary = read_summary(RUN, text_of(rejected))
    assert summary is not None
    assert (summary.state, summary.target, summary.labels) == (RunState.REJECTED, None, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "\ud800",
        '{"run":"other-0123456789ab","name":"n","state":"ACCEPTED","created":"2026-11-25T12:00:00Z"}',
        '{"run":"job-0123456789ab","name":"n","state":"DONE","created":"2026-11-25T12:00:00Z"}',
        '{"run":"job-0123456789ab","name":"n","state":"FAILED","created":"2026-11-25T12:00:00Z","newer":1}',
    ],
)
def test_anything_but_a_summary_of_the_run_is_not_believed(text: str) -> None:
    assert read_summary(RUN, text) is None


def record(**changes: Any) -> Record:
    fields = {
        "run": RUN,
        "name": "job",
        "source": "gs://b/o#1",
        "state": RunState.ACCEPTED,
        "created": NOW,
        "history": [Transition(state=RunState.ACCEPTED, time=NOW)],
        "about": About(target="gke", model="m"),
    }
    return Record(**(fields | changes))
