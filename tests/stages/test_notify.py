"""Which run events are published again, and which are not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dropforge.base.errors import CloudError
from dropforge.context import Context
from dropforge.run.record import Record, RunState, Transition
from dropforge.tell.run_events import announce

from ..deployments import context_with

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


class Publisher:
    """A publisher that stores the ids of events; the first `broken` events time out."""

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.ids = broken, list[str]()

    def publish(self, topic: str, data: bytes, timeout: float, **attributes: str) -> Publisher:
        self.ids.append(attributes["ce-id"])
        return self

    def result(self, timeout: float) -> None:
        self.broken -= 1
        if self.broken >= 0:
            raise TimeoutError


def record(state: RunState) -> Record:
    history = [Transition(state=state, time=NOW, attempt=1)]
    return Record(run="r-1", name="n", source="s", state=state, created=NOW, history=history)


def announce_state(process: Context, state: RunState) -> None:
    announce(process, record(state), state)


def test_each_process_announces_a_waiting_stage_once() -> None:
    first, second = Publisher(), Publisher()
    process = context_with(publisher=first)
    for _ in range(3):
        announce_state(process, RunState.PROVISIONING)
    announce_state(process, RunState.DEPLOYING)
    assert first.ids == ["r-1/1/provisioning", "r-1/1/deploying"]
    announce_state(context_with(publisher=second), RunState.PROVISIONING)
    assert second.ids == ["r-1/1/provisioning"]


def test_an_event_that_may_not_have_arrived_is_published_again() -> None:
    publisher = Publisher(broken=2)
    process = context_with(publisher=publisher)
    announce_state(process, RunState.TEARING_DOWN)  # the stage does not wait for the result
    with pytest.raises(CloudError, match="could not be published"):
        announce_state(process, RunState.SUCCEEDED)
    for state in (RunState.TEARING_DOWN, RunState.SUCCEEDED, RunState.SUCCEEDED):
        announce_state(process, state)
    assert publisher.ids == [f"r-1/1/{state}" for state in ("tearing_down", "succeeded") * 2]


def test_the_event_of_a_teardown_is_sent_with_that_of_the_end_and_decides_nothing() -> None:
    publisher = Publisher(broken=1)
    process = context_with(publisher=publisher)
    history = [Transition(state=state, time=NOW, attempt=1) for state in (RunState.TEARING_DOWN, RunState.FAILED)]
    ended = record(RunState.FAILED).model_copy(update={"history": history})
    announce(process, ended, RunState.FAILED)  # the first of two events is lost
    assert publisher.ids == ["r-1/1/tearing_down", "r-1/1/failed"]
    announce(process, ended, RunState.FAILED)
    assert publisher.ids == ["r-1/1/tearing_down", "r-1/1/failed", "r-1/1/tearing_down"]
    announce(process, ended, RunState.FAILED)
    assert len(publisher.ids) == 3
