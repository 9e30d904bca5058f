"""Documents change through one function, which checks the change."""

from __future__ import annotations

import ast
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dropforge.base.changes import evolve
from dropforge.run.record import Record, RunState, Transition

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("functions", "local", "containers", "cli", "console", "bench", "tools")
SOURCES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
THE_ONE = ROOT / "functions/dropforge/base/changes.py"
NOW = datetime(2026, 11, 29, tzinfo=UTC)
RECORD = Record(
    run="demo-0123456789ab",
    name="n",
    source="s",
    state=RunState.ACCEPTED,
    created=NOW,
    history=[Transition(state=RunState.ACCEPTED, time=NOW)],
)


class Renamed(BaseModel):
    """A field with an alias, and a rule about what a user writes."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    share: float = Field(default=0.5, alias="for", ge=0)

    @model_validator(mode="after")
    def _is_half(self) -> Renamed:
        assert self.share == 0.5, "a user writes a half"
        return self


def test_a_change_gives_a_changed_copy() -> None:
    changed = evolve(RECORD, placed=NOW, name="m")

    assert (changed.placed, changed.name, RECORD.placed, RECORD.name) == (NOW, "m", None, "n")
    assert Record.model_validate_json(changed.model_dump_json()) == changed


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"endpoint_wait_reasons": "no capacity"}, "endpoint_wait_reasons is 'no capacity': Extra inputs"),
        ({"placed": "yesterday"}, "placed is 'yesterday': Input should be a valid datetime"),
        ({"placed": NOW, "attempts": None}, "attempts is None: Input should be a valid list"),
        ({"attempts": [{"number": 1}]}, "attempts.0.placement is {'number': 1}: Field required"),
        ({"state": "TRAINING"}, "state is 'TRAINING': Input should be an instance of RunState"),
        ({"key_day": "today"}, "key_day is 'today': String should match pattern"),
    ],
)
def test_a_wrong_change_fails_where_it_is_made(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        evolve(RECORD, **changes)

    assert str(caught.value).startswith(f"a change of Record is wrong: {problem}")


def test_a_wrong_value_is_shown_without_its_credentials() -> None:
    with pytest.raises(TypeError, match="redacted") as caught:
        evolve(RECORD, placed="https://user:a-pass-word@example.com")

    assert "a-pass-word" not in str(caught.value)


def test_a_field_is_named_by_itself_and_keeps_the_bounds_of_its_class() -> None:
    assert evolve(Renamed(), share=0.25).share == 0.25
    for wrong in ({"for": 0.25}, {"share": -1.0}, {"share": float("inf")}):
        with pytest.raises(TypeError):
            evolve(Renamed(), **wrong)


def unchecked(code: str) -> list[str]:
    """The changes in a module that nothing checks."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    copies = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "model_copy"]
    return [
        ast.unparse(node) for node in copies if node.args or any(key.arg in ("update", None) for key in node.keywords)
    ]


def test_every_change_is_checked() -> None:
    found = {str(file.relative_to(ROOT)): unchecked(file.read_text()) for file in SOURCES if file != THE_ONE}

    assert {file: calls for file, calls in found.items() if calls} == {}


def test_the_rule_finds_an_unchecked_change() -> None:
    assert unchecked("r.model_copy(update={'a': 1})")
    assert unchecked("r.model_copy(**changes)")
    assert not unchecked("r.model_copy(deep=True)")
