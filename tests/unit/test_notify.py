"""What a notice leaves: in the record, and in the log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from dropforge import notify
from dropforge.limits import Notice
from dropforge.runs import Record, RunState, RunStore, Transition
from dropforge.spec import JobSpec

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def test_a_notice_is_no_end_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A WARNING of this stage is: fifteen of them in half an hour raise the alert run_stuck (terraform/alerts.tf)."""
    monkeypatch.setattr(notify, "_publish", lambda event: "")
    monkeypatch.setattr(notify, "_send", lambda *_: ("", False))
    history = [Transition(state=RunState.TRAINING, time=NOW)]
    state = RunState.TRAINING
    record = Record(run="job-0123456789ab", name="n", source="s", state=state, created=NOW, history=history)
    store = Mock(RunStore, update=lambda _, change: change(record))
    noted = notify.warn(store, record, Mock(JobSpec), Notice("stuck-a1", "is stuck", "no progress"))
    assert noted.notices == ["stuck-a1"]
    told = json.loads(capsys.readouterr().err)
    assert (told["stage"], told["severity"], told["notice"]) == ("notify", "NOTICE", "stuck-a1")
