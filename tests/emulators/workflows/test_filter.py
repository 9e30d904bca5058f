"""The filter and the order of executions.list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.workflows.filter import parse_filter, parse_order

RECORD: Any = SimpleNamespace(
    id="e-1",
    state="SUCCEEDED",
    created=1_750_000_000.0,
    started=1_750_000_001.0,
    ended=1_750_000_004.5,
    revision_id="000001-abc",
    current_steps=[{"step": "main"}],
    labels={"team": "search", "note": 'say "AND"'},
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("state=SUCCEEDED", True),
        ('state = "SUCCEEDED" AND NOT labels.team = "ads"', True),
        ('state="FAILED" OR state="SUCCEEDED"', True),
        ('state="SUCCEEDED" OR state="FAILED" AND labels.team="ads"', False),
        ("state:SUCCEEDED labels.team:*", True),
        ("NOT (state=FAILED OR label.team=search)", False),
        (r'labels.note = "say \"AND\""', True),
        ("labels.missing != x", False),
        ("stepName='main'", True),
        ("create_time >= '2025-06-15T00:00:00Z' AND duration > 3s", True),
        ("duration > 3.5s", False),
    ],
)
def test_filter(text: str, expected: bool) -> None:
    assert parse_filter(text)(RECORD) is expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("state", "expected OPERATOR at its end"),
        ("state=", "expected STRING or WORD at its end"),
        ("(state=x", "expected"),
        ("state=x AND", "expected"),
        ("= x", "expected '\\(' or NOT or WORD at offset 0"),
        ("colour=red", "unknown field 'colour'"),
        ("createTime>yesterday", "is not a timestamp"),
        ("duration<long", "is not a duration"),
    ],
)
def test_invalid_filter_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        parse_filter(text)
    assert refused.value.status == "INVALID_ARGUMENT"


def test_order() -> None:
    assert parse_order("") == [("createTime", True)]
    assert parse_order("state, startTime desc,endTime asc") == [
        ("state", False),
        ("startTime", True),
        ("endTime", False),
    ]
    for text in ("colour", "state up", "state desc twice"):
        with pytest.raises(ApiError, match="is not FIELD"):
            parse_order(text)
