"""Log entries: those about a run name the run's trace, no text stops an entry, and none has a credential."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.log import TRACE, log, traced

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


# JSON escapes a letter of each, and the quotes and backslashes around it.
URLS = ["postgres://me:kennwört@db.example", "postgres://me:пароль@db.example", "postgres://mé:secret@db.example"]


@pytest.mark.parametrize("url", URLS)
def test_no_escape_of_json_hides_a_credential(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    quoted = f'\\"{url}"'
    fields: dict[str, Any] = {
        "text": quoted,
        "nested": [{"deep": (quoted, 1)}, {quoted: "key"}],
        "group": {quoted},
        "error": ValueError(quoted),
    }
    log(quoted, stage="submit", run=quoted, **fields)
    written = json.loads(capsys.readouterr().err)
    shown = '\\"postgres://[redacted]@db.example"'
    assert (written["message"], written["run"], written["text"], written["error"]) == (shown,) * 4
    assert written["nested"] == [{"deep": [shown, 1]}, {shown: "key"}]
    assert "[redacted]" in written["group"]


def test_a_credential_that_its_key_tells_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    log("m", stage="submit", settings={"aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"})
    assert "EXAMPLEKEY" not in capsys.readouterr().err


def test_values_that_are_no_text_stay(capsys: pytest.CaptureFixture[str]) -> None:
    log("m", stage="submit", step=3, loss=0.5, final=True, hint=None, counts={1: 2})
    written = json.loads(capsys.readouterr().err)
    assert [written[name] for name in ("step", "loss", "final", "hint", "counts")] == [3, 0.5, True, None, {"1": 2}]
