"""The demo's report: how far each link from the trained model to the endpoint differs."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dropforge.run.record import Parity, Record, RunState, Transition
from dropforge_cli.report import show_parity

NOW = datetime(2026, 11, 23, tzinfo=UTC)
LINKS = {"adapter_to_merged": 3e-5, "saved_to_reloaded": 0.0}
SEALED = Parity(state="sealed", rows=32, tokens=433, divergence=2e-6, limit=5e-5, floor=1e-6)


def shown(metrics: dict[str, Any], parity: Parity | None) -> str:
    history = [Transition(state=RunState.SUCCEEDED, time=NOW)]
    record = Record(
        run="demo-0123456789ab",
        name="demo",
        source="s",
        state=RunState.SUCCEEDED,
        created=NOW,
        history=history,
        metrics=metrics,
        parity=parity,
    )
    text = StringIO()
    show_parity(record, Console(file=text, width=100))
    return text.getvalue()


@pytest.mark.parametrize(
    ("metrics", "parity", "expected"),
    [
        (LINKS, SEALED, ["sealed: 32 held-out rows, 433 tokens", "adapter to merged", "merged to served", "2e-06"]),
        (LINKS, None, ["not served", "adapter to merged", "3e-05", "equal in every bit"]),
        ({"saved_to_reloaded": 0.0}, None, ["not served", "equal in every bit"]),
        ({}, Parity(state="unsealed", reason="the model has no seal"), ["unsealed: the model has no seal"]),
    ],
)
def test_every_link_that_was_measured_is_shown(
    metrics: dict[str, Any], parity: Parity | None, expected: list[str]
) -> None:
    text = shown(metrics, parity)
    assert [part for part in expected if part not in text] == []
    assert ("merged to served" in text) is (parity is SEALED)


def test_a_run_without_links_shows_nothing() -> None:
    assert shown({"loss": 0.1}, None) == ""
