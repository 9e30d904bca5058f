"""The answer of a teardown while the cloud still deletes a resource."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.stages.teardown import RETRY_SECONDS, SLOW_AFTER, SLOW_RETRY_SECONDS, Scope, _pending

from ..deployments import context_with

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
RUN = "job-0123456789ab"


def record(began: datetime) -> Record:
    """Return a run whose only attempt ended, and whose teardown began, at `began`."""
    attempt = Attempt(number=1, placement=0, region="r", started=NOW, deadline=NOW, ended=began)
    history = [Transition(state=RunState.TEARING_DOWN, time=began)]
    state = RunState.TEARING_DOWN
    return Record(run=RUN, name="n", source="s", state=state, created=NOW, history=history, attempts=[attempt])


@pytest.mark.parametrize("scope", ["run", "attempt"])
def test_a_slow_deletion_is_logged_and_inspected_less_often(scope: Scope, capsys: pytest.CaptureFixture[str]) -> None:
    context = context_with(now=NOW)
    answer = _pending(context, record(NOW - SLOW_AFTER + timedelta(seconds=1)), scope, ["cluster"])
    assert answer.to_json() == {"status": "PENDING", "wait_seconds": RETRY_SECONDS, "remaining": ["cluster"]}
    assert capsys.readouterr().err == ""
    answer = _pending(context, record(NOW - SLOW_AFTER), scope, ["cluster"])
    assert answer.to_json() == {"status": "PENDING", "wait_seconds": SLOW_RETRY_SECONDS, "remaining": ["cluster"]}
    entry = json.loads(capsys.readouterr().err)
    assert {"severity": "WARNING", "stage": "teardown", "run": RUN, "resources": ["cluster"]}.items() <= entry.items()
