"""The answer of a teardown while the cloud still deletes a resource."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from dropforge.run.record import Attempt, LedgerEntry, Record, ResourceState, RunState, Transition
from dropforge.stages.looks import LONGEST_SECONDS, SHORTEST_SECONDS
from dropforge.stages.teardown import SLOW_AFTER, SLOW_RETRY_SECONDS, Scope, _pending

from ..deployments import context_with

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
RUN = "job-0123456789ab"
CLUSTER, JOB = "container.googleapis.com/Cluster", "batch.k8s.io/Job"


def record(began: datetime) -> Record:
    """Return a run whose only attempt ended, and whose teardown began, at `began`."""
    attempt = Attempt(number=1, placement=0, region="r", started=NOW, deadline=NOW, ended=began)
    history = [Transition(state=RunState.TEARING_DOWN, time=began)]
    state = RunState.TEARING_DOWN
    return Record(run=RUN, name="n", source="s", state=state, created=NOW, history=history, attempts=[attempt])


def entry(kind: str) -> LedgerEntry:
    return LedgerEntry(kind=kind, name=kind.lower(), attempt=1, state=ResourceState.CREATED, intended=NOW)


@pytest.mark.parametrize("scope", ["run", 1])
def test_a_teardown_waits_as_long_as_its_slowest_resource_suggests(scope: Scope) -> None:
    context, minute_ago = context_with(now=NOW), record(NOW - timedelta(minutes=1))
    waits = [
        _pending(context, began, scope, [entry(kind) for kind in kinds]).wait_seconds
        for began, kinds in [(record(NOW), [JOB, CLUSTER]), (minute_ago, [JOB]), (minute_ago, [JOB, CLUSTER])]
    ]
    assert waits[0] == SHORTEST_SECONDS < waits[1] < waits[2] == LONGEST_SECONDS


@pytest.mark.parametrize("scope", ["run", 1])
def test_a_slow_deletion_is_logged_and_inspected_less_often(scope: Scope, capsys: pytest.CaptureFixture[str]) -> None:
    context = context_with(now=NOW)
    answer = _pending(context, record(NOW - SLOW_AFTER + timedelta(seconds=1)), scope, [entry(JOB)])
    assert answer.to_json() == {"status": "PENDING", "wait_seconds": LONGEST_SECONDS, "remaining": [JOB.lower()]}
    assert capsys.readouterr().err == ""
    answer = _pending(context, record(NOW - SLOW_AFTER), scope, [entry(JOB)])
    assert answer.to_json() == {"status": "PENDING", "wait_seconds": SLOW_RETRY_SECONDS, "remaining": [JOB.lower()]}
    logged = json.loads(capsys.readouterr().err)
    assert {
        "severity": "WARNING",
        "stage": "teardown",
        "run": RUN,
        "resources": [JOB.lower()],
    }.items() <= logged.items()
