"""docs/messages.md shows every kind of message, and the examples of docs/notifications.md are valid."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from tools import messages

from dropforge.run.events import RunEvent
from dropforge.run.record import RunState
from dropforge.tell.news import MAX_LINES, notice_news
from dropforge.tell.slack import message_of as slack_message
from dropforge.tell.teams import message_of as teams_message

from .stories import spec_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "messages.md").read_text()
SHOWN = re.findall(r"```text\n(.*?)\n```", PAGE, re.S)
TITLES = [text.splitlines()[0] for text in SHOWN]
NOTICES = [*messages.of_runs(), *messages.of_endpoints()]


def test_the_page_is_that_of_the_code() -> None:
    assert messages.text() in PAGE


def test_each_state_has_a_valid_run_event() -> None:
    events = [RunEvent.model_validate_json(text) for text in re.findall(r"```json\n(.*?)\n```", PAGE)]
    assert {event.state for event in events} == {*map(str, RunState), "UNKNOWN"}
    for event in events:
        assert event.title
        assert event.id.split("/")[-1] in (event.state.lower(), event.notice)


def test_each_notice_that_the_code_can_send_is_on_the_page() -> None:
    """The headline of every `Notice(…)` in functions/, but for its values, is in a title of the page."""
    headlines = [
        [
            part.value
            for part in ast.walk(call.args[1])
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        ]
        for path in (ROOT / "functions").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Notice"
    ]
    assert len(headlines) > 20
    missing = [parts for parts in headlines if not any(all(part in title for part in parts) for title in TITLES)]
    assert missing == []


@pytest.mark.parametrize("text", SHOWN, ids=TITLES)
def test_each_message_says_which_run_what_it_costs_what_to_do_and_has_a_link(text: str) -> None:
    title, *lines = text.splitlines()
    assert "0123456789ab" in title
    assert len(lines) <= MAX_LINES
    assert any(line.startswith("cost: ") and " an hour" in line and "so far" in line for line in lines)
    assert re.search(r"^[^:]+: (dropforge [a-z]+|curl) ", text, re.M)
    assert lines[-1].startswith("page: https://")


@pytest.mark.parametrize("number", range(len(NOTICES)))
def test_slack_and_teams_have_the_link_and_each_command(number: int) -> None:
    record, notice, now = NOTICES[number]
    news = notice_news(record, notice, messages.SETTINGS, now)
    commands = [line.text for line in news.lines if line.is_code]
    assert commands
    for message in (slack_message(news).blocks, teams_message(news)):
        sent = json.dumps(message, ensure_ascii=False)
        assert all(text in sent for text in (news.link, *commands))


def test_each_notify_of_the_page_is_valid() -> None:
    page = (ROOT / "docs" / "notifications.md").read_text()
    specs = [spec_of(**json.loads(text)) for text in re.findall(r'```json\n(\{"notify".*?)\n```', page, re.S)]
    assert {name for spec in specs for name, value in spec.notify if value} == {
        "slack",
        "webhook",
        "teams",
        "email",
        "github",
    }
