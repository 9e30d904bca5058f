"""Executions of rollouts: a request that is delivered again, or a sweep, starts no second one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.workflows import executions_v1

from dropforge.endpoints.record import EndpointRecord
from dropforge.stages.rollout.requests import START_WITHIN, retire
from dropforge.stages.sweep.named import tend

from ..deployments import Memory, context_with, settings_with

SETTINGS = settings_with(runs_bucket="runs", operations_topic="operations", rollout_workflow="rollout")
NOW = datetime(2026, 11, 26, tzinfo=UTC)
State = executions_v1.Execution.State


class Executions:
    """The Executions API. Its executions begin late: none notes itself in its endpoint's record."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.now, self.listings = NOW, 0

    def create_execution(self, parent: str, execution: Any, timeout: float) -> Any:
        name = f"{parent}/executions/e-{len(self.all)}"
        made = {"name": name, "labels": dict(execution.labels), "state": State.ACTIVE, "start_time": self.now}
        self.all.append(SimpleNamespace(**made))
        return self.all[-1]

    def list_executions(self, request: Any, timeout: float) -> Iterator[Any]:
        self.listings += 1
        return iter([each for each in self.all[::-1] if each.name.startswith(f"{request.parent}/")])


@pytest.mark.parametrize("look", ["request", "sweep"])
def test_a_rollout_gets_another_execution_only_when_its_own_has_ended(look: str) -> None:
    executions = Executions()
    context = context_with(SETTINGS, lambda: executions.now, storage=Memory(), workflow_executions=executions)
    place = {"type": "cloud_run", "region": "us-central1", "service": "s"}
    context.endpoints.create(EndpointRecord(name="sql", source="", created=NOW, **place))

    def again() -> int:
        if look == "request":
            retire(context, "sql", "r-1", "me", "operations")
        else:
            tend(context, "sql", [], executions.now)
        return len(executions.all)

    retire(context, "sql", "r-1", "me", "operations")
    assert (again(), executions.listings) == (1, 0), "a new execution may not be listed yet"
    executions.now += START_WITHIN + timedelta(seconds=1)
    assert [again(), again()] == [1, 1]
    executions.all[0].state = State.FAILED
    assert [again(), again()] == [2, 2]
    executions.all[1].labels = {**executions.all[1].labels, "dropforge-endpoint": "other"}
    assert again() == 3
