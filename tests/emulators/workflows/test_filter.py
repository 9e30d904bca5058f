"""The filter and the order of executions.list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.workflows.filter import parse_entry_filter, parse_filter, parse_order

ENTRY: Any = {
    "entryId": "12",
    "createTime": "2025-06-15T15:06:40.5Z",
    "updateTime": "2025-06-15T15:06:41Z",
    "routine": "main",
    "step": "one-step",
    "stepType": "STEP_CALL",
    "state": "STATE_FAILED",
    "navigationInfo": {"parent": "3"},
}
RECORD: Any = SimpleNamespace(
    id="e-1",
    state="SUCCEEDED",
    created=1_750_000_000.0,
    started=1_750_000_001.0,
    ended=1_750_000_004.5,
    revision_id="000001-abc",
    current_steps=[{"step": "main"}],
    labels={"team": "search", "note": 'say "AND"', "sign": "-x"},
    settings={"disable_overflow_buffering": True},
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
        ('-state="FAILED"', True),
        ("-(state=SUCCEEDED) OR -labels.team=ads", True),
        ('-state="SUCCEEDED"', False),
        ("labels.sign = -x", True),
        ('startTime>"2025-06-15" AND startTime<2025-06-16', True),
        ("startTime > 2025-06-16", False),
        ("disableConcurrencyQuotaOverflowBuffering=true", True),
        ("NOT disable_concurrency_quota_overflow_buffering = false", True),
        ('executionID="e-1" workflowRevisionID=000001-abc', True),
    ],
)
def test_filter(text: str, expected: bool) -> None:
    assert parse_filter(text)(RECORD) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('state="FAILED"', True),
        ("state=STATE_FAILED AND stepType=CALL", True),
        ('createTime>"2025-06-15" AND -state="SUCCEEDED"', True),
        ("entryId > 9 parent=3", True),
        ('routine=main AND NOT step="one-step"', False),
        ("update_time < '2025-06-15T15:06:41Z'", False),
    ],
)
def test_filter_of_step_entries(text: str, expected: bool) -> None:
    assert parse_entry_filter(text)(ENTRY) is expected


@pytest.mark.parametrize("text", ["labels.a=b", "entryId=x", "exception=1"])
def test_invalid_filter_of_step_entries_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match=r"unknown field|is not an integer"):
        parse_entry_filter(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("state", "expected OPERATOR at its end"),
        ("state=", "expected STRING or WORD at its end"),
        ("(state=x", "expected"),
        ("state=x AND", "expected"),
        ("= x", "expected '\\(' or '-' or NAME or NOT at offset 0"),
        ("-", "expected '\\(' or NAME at its end"),
        ("disableConcurrencyQuotaOverflowBuffering=yes", "is not true or false"),
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
    assert parse_order("") == []
    assert parse_order("state, startTime desc,endTime asc") == [
        ("state", False),
        ("startTime", True),
        ("endTime", False),
    ]
    for text in ("colour", "state up", "state desc twice"):
        with pytest.raises(ApiError, match="is not FIELD"):
            parse_order(text)
