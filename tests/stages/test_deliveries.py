"""A spec that is delivered again, at once or after a crash, gets one execution, which begins after the announcement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import ServiceUnavailable
from google.cloud.workflows import executions_v1

from dropforge.base.errors import RetryLater
from dropforge.context import Context
from dropforge.run.events import Request
from dropforge.run.record import Record
from dropforge.stages.submit import START_SECONDS, submit_message

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document

NOW = datetime(2026, 11, 26, tzinfo=UTC)
SETTINGS = settings_with(requests_topic="requests")
SPEC = json.dumps(document()).encode()


class Deployment:
    """The functions, whose executions never call. `starts` is called at each start, before the API lists it."""

    def __init__(self) -> None:
        self.now, self.events, self.executions = NOW, list[str](), list[Any]()
        self.starts: Callable[[], object] = lambda: None
        self._storage = Memory()

    def context(self) -> Context:
        """The context of another instance of the functions, which remembers nothing."""
        publisher = SimpleNamespace(publish=self._publish)
        return context_with(
            SETTINGS, lambda: self.now, storage=self._storage, publisher=publisher, workflow_executions=self, hub=None
        )

    def deliver(self) -> Record:
        return submit_message(self.context(), SPEC, Request("requests", "key", "m-1"))

    def create_execution(self, parent: str, execution: Any, timeout: float) -> Any:
        self.starts()
        state, name = executions_v1.Execution.State.ACTIVE, f"{parent}/executions/e-{len(self.executions)}"
        made = SimpleNamespace(name=name, labels=dict(execution.labels), state=state, start_time=self.now)
        self.executions.append(made)
        return made

    def list_executions(self, request: Any, timeout: float) -> Iterator[Any]:
        return iter(self.executions[::-1])

    def _publish(self, topic: str, data: bytes, **_: Any) -> Any:
        self.events.append(json.loads(data)["state"])
        return SimpleNamespace(result=lambda _: "1")


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setattr("dropforge.stages.admission.check", lambda *_: None)
    return Deployment()


def test_a_second_delivery_waits_for_the_first_one(deployment: Deployment) -> None:
    """The first delivery has asked for an execution, which no list shows yet."""
    second: list[str] = []

    def deliver_again() -> None:
        deployment.starts = lambda: None
        with pytest.raises(RetryLater) as refused:
            deployment.deliver()
        second.append(str(refused.value))

    deployment.starts = deliver_again
    assert deployment.deliver().execution == "e-0"
    assert len(second) == len(deployment.executions) == 1


def test_an_execution_whose_id_was_lost_is_found_again(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function ended between the start of the execution and the answer."""
    create = deployment.create_execution

    def create_and_crash(**arguments: Any) -> None:
        create(**arguments)
        raise ServiceUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr(deployment, "create_execution", create_and_crash)
        with pytest.raises(ServiceUnavailable):
            deployment.deliver()
    deployment.now += timedelta(seconds=START_SECONDS + 1)
    records = [deployment.deliver() for _ in range(2)]
    assert [record.execution for record in records] == ["e-0", "e-0"]
    assert len(deployment.executions) == 1


def test_an_execution_begins_after_the_acceptance_was_told(deployment: Deployment) -> None:
    """Otherwise, people could hear that the run has ended before they hear that it was accepted."""
    told: list[list[str]] = []
    deployment.starts = lambda: told.append(list(deployment.events))
    deployment.deliver()
    assert told == [["ACCEPTED"]]
