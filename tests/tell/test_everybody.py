"""Who is told of an end, and how often: of runs that an execution ends, and of runs that never had an execution."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from dropforge.base import names
from dropforge.run.record import Attempt, RunState, Transition
from dropforge.tell.everybody import conclude, tell_unstarted

from ..stages.test_promises import MINUTE, NOW, RUN, Place


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[RunState]:
    """The states that people were told."""
    states: list[RunState] = []
    monkeypatch.setattr("dropforge.tell.everybody.send_state", lambda _, record, *__: states.append(record.state))
    return states


def cancelled(*before: RunState) -> Place:
    """A cancelled run that was in these states before."""
    times: list[datetime] = [NOW - (len(before) - number) * MINUTE for number in range(len(before) + 1)]
    states = zip([*before, RunState.CANCELLED], times, strict=True)
    attempts: list[Attempt] = []
    history = [Transition(state=state, time=time) for state, time in states]
    return Place(RunState.CANCELLED, attempts=attempts, execution=None, history=history)


def test_an_end_is_published_sent_and_reported(sent: list[RunState]) -> None:
    place = cancelled(RunState.ACCEPTED)
    conclude(place.context, place.record, place.store.spec(RUN))
    assert [event["state"] for event in place.events] == sent == [RunState.CANCELLED]
    report: dict[str, Any] = json.loads(place.store.read(names.report_object(RUN)).data)
    assert report["state"] == "CANCELLED"


@pytest.mark.parametrize("before", [(), (RunState.ACCEPTED,)], ids=["unread", "accepted"])
def test_the_end_of_a_run_that_never_had_an_execution_is_told_once(
    before: tuple[RunState, ...], sent: list[RunState]
) -> None:
    """Each delivery of its spec, and each sweep, asks again."""
    place = cancelled(*before)
    for _ in range(3):
        tell_unstarted(place.context, place.record)
    assert [event["state"] for event in place.events] == sent == [RunState.CANCELLED]


def test_the_end_of_a_run_that_has_trained_is_left_to_its_execution(sent: list[RunState]) -> None:
    place = cancelled(RunState.ACCEPTED, RunState.PROVISIONING, RunState.TEARING_DOWN)
    tell_unstarted(place.context, place.record)
    assert (place.events, sent) == ([], [])
