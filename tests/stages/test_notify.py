"""What is told again, and what is not."""

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
    """Notes the ids of events; the first `broken` of them time out."""

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


def tell(process: Context, state: RunState) -> None:
    announce(process, record(state), state)


def test_a_stage_that_waits_is_told_of_once_by_a_process_and_again_by_another() -> None:
    one, other = Publisher(), Publisher()
    process = context_with(publisher=one)
    for _ in range(3):
        tell(process, RunState.PROVISIONING)
    tell(process, RunState.DEPLOYING)
    assert one.ids == ["r-1/1/provisioning", "r-1/1/deploying"]
    tell(context_with(publisher=other), RunState.PROVISIONING)
    assert other.ids == ["r-1/1/provisioning"]


def test_what_may_not_have_arrived_is_told_again() -> None:
    publisher = Publisher(broken=2)
    process = context_with(publisher=publisher)
    tell(process, RunState.TEARING_DOWN)  # nobody waits for it
    with pytest.raises(CloudError, match="could not be published"):
        tell(process, RunState.SUCCEEDED)
    for state in (RunState.TEARING_DOWN, RunState.SUCCEEDED, RunState.SUCCEEDED):
        tell(process, state)
    assert publisher.ids == [f"r-1/1/{state}" for state in ("tearing_down", "succeeded") * 2]
