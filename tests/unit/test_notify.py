"""What is told again, and what is not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dropforge.base.errors import CloudError
from dropforge.cloud import clients
from dropforge.run.record import Record, RunState, Transition
from dropforge.stages.notify import announce

from ..deployments import settings_with

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


@pytest.fixture(autouse=True)
def deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.stages.notify.settings", lambda: settings_with())


def tell(publisher: Publisher, state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "publisher", lambda: publisher)
    announce(record(state), state)


def test_a_stage_that_waits_is_told_of_once_by_a_process_and_again_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Publisher()
    for _ in range(3):
        tell(one, RunState.PROVISIONING, monkeypatch)
    tell(one, RunState.DEPLOYING, monkeypatch)
    assert one.ids == ["r-1/1/provisioning", "r-1/1/deploying"]
    other = Publisher()
    tell(other, RunState.PROVISIONING, monkeypatch)
    assert other.ids == ["r-1/1/provisioning"]


def test_what_may_not_have_arrived_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(broken=2)
    tell(publisher, RunState.TEARING_DOWN, monkeypatch)  # nobody waits for it
    with pytest.raises(CloudError, match="could not be published"):
        tell(publisher, RunState.SUCCEEDED, monkeypatch)
    for state in (RunState.TEARING_DOWN, RunState.SUCCEEDED, RunState.SUCCEEDED):
        tell(publisher, state, monkeypatch)
    assert publisher.ids == [f"r-1/1/{state}" for state in ("tearing_down", "succeeded") * 2]
