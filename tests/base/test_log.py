"""Log entries about a run name the run's trace, and no text that is given as a run stops an entry."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.log import TRACE, traced

RUN = "job-0123456789ab"


def entry(capsys: pytest.CaptureFixture[str], run: str) -> dict[str, Any]:
    """Return the entry that is written about a run."""
    traced("my-project")("m", stage="submit", run=run)
    written: dict[str, Any] = json.loads(capsys.readouterr().err)
    return written


def test_an_entry_about_a_run_names_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """The form is that of https://cloud.google.com/trace/docs/trace-log-integration."""
    assert entry(capsys, RUN)[TRACE] == f"projects/my-project/traces/{names.trace_id(RUN)}"


@pytest.mark.parametrize("run", ["", "\ud800", "../x", "x" * 5000])
def test_a_text_that_is_no_run_has_no_trace(capsys: pytest.CaptureFixture[str], run: str) -> None:
    written = entry(capsys, run)
    assert (written["run"], TRACE in written) == (run, False)
