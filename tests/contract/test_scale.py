"""docs/scale.md: its demand and its price are those of the counted requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dropforge.base.settings import Settings
from dropforge.money.control_plane import RUN, Usage, usage_of_training

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
SECONDS = 2 * 3600 + 24 * 60
A_DAY = 100_000
LONG = usage_of_training(SECONDS, Settings.check_interval_seconds)
ROWS: dict[str, Callable[[Usage], float]] = {
    "calls of functions": lambda usage: usage.calls,
    "writes to Cloud Storage": lambda usage: usage.writes,
    "reads from Cloud Storage": lambda usage: usage.reads,
    "messages of Pub/Sub": lambda usage: usage.messages,
    "steps of Cloud Workflows": lambda usage: usage.internal_steps + usage.external_steps,
}


def cells(title: str) -> list[str]:
    (row,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", PAGE, re.M)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("title", ROWS)
def test_the_demand_is_counted(title: str) -> None:
    count = ROWS[title]
    each_second = count(LONG) * A_DAY / 86400
    assert cells(title) == [f"{count(RUN):.0f}", f"{count(LONG):.0f}", f"{each_second:.0f} a second"]


def test_the_price_is_computed() -> None:
    month = LONG.usd * A_DAY * 30
    expected = [f"${RUN.usd:.4f}", f"${LONG.usd:.4f}", f"${round(month, -2):,.0f} a month"]
    assert cells("price of the control plane") == expected
