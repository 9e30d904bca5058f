"""The examples of docs/notifications.md are valid, and each state of a run has one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dropforge.run.events import RunEvent
from dropforge.run.record import RunState

from .stories import spec_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notifications.md"
EXAMPLES = re.findall(r"```json\n(.*?)\n```", PAGE.read_text(), re.S)


def test_each_run_event_of_the_page_is_valid_and_each_state_has_an_example() -> None:
    events = [RunEvent.model_validate_json(text) for text in EXAMPLES if text.startswith('{"id"')]
    assert {event.state for event in events} == {*map(str, RunState), "UNKNOWN"}
    assert {event.notice for event in events} == {None, "budget-50", "cancel-1234567890"}
    for event in events:
        assert event.id.split("/")[-1] in (event.state.lower(), event.notice)


def test_each_notify_of_the_page_is_valid() -> None:
    specs = [spec_of(**json.loads(text)) for text in EXAMPLES if text.startswith('{"notify"')]
    assert {name for spec in specs for name, value in spec.notify if value} == {
        "slack",
        "webhook",
        "teams",
        "email",
        "github",
    }
