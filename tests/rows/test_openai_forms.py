"""The rows that users of OpenAI's fine-tuning have: which are taken, what is learnt of them, and which are refused.

https://platform.openai.com/docs/guides/supervised-fine-tuning, …/direct-preference-optimization, …/vision-fine-tuning
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from dropforge.rows import Reader, UnsupportedRow, columns_of, form_of
from dropforge.spec import Dataset

Q, A = {"role": "user", "content": "Which team? The lamp is broken"}, {"role": "assistant", "content": "returns"}
SYSTEM = {"role": "system", "content": "Name the team."}
TOOL = {"name": "get_team", "parameters": {"type": "object", "properties": {"ticket": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"name": "get_team", "arguments": '{"ticket": "lamp"}'}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "returns"}
SHOWN = '[{"name": "get_team", "arguments": {"ticket": "lamp"}}]'
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/lamp.png"}}


class Form(NamedTuple):
    """A row as OpenAI takes it; the answers that are learnt; for a refused row, the words that name the part."""

    row: dict[str, Any]
    learnt: list[str] = []
    refused: str = ""


FORMS = {
    "system, question, answer": Form({"messages": [SYSTEM, Q, A]}, ["returns"]),
    "without a system message": Form({"messages": [Q, A]}, ["returns"]),
    "several turns": Form({"messages": [SYSTEM, Q, A, Q, A]}, ["returns", "returns"]),
    "weight 0 and 1": Form({"messages": [Q, {**A, "weight": 0}, Q, {**A, "content": "sales", "weight": 1}]}, ["sales"]),
    "role developer": Form({"messages": [{**SYSTEM, "role": "developer"}, Q, A]}, ["returns"]),
    "content as text parts": Form(
        {"messages": [{**Q, "content": [{"type": "text", "text": "Which team?"}]}, A]}, ["returns"]
    ),
    "name of a speaker": Form({"messages": [{**Q, "name": "Ada"}, A]}, ["returns"]),
    "a call of a tool": Form({"messages": [Q, CALLED], "tools": TOOLS}, [SHOWN]),
    "the result of a tool, and the answer": Form(
        {"messages": [Q, CALLED, RESULT, A], "tools": TOOLS}, [SHOWN, "returns"]
    ),
    "parallel_tool_calls": Form({"messages": [Q, CALLED], "tools": TOOLS, "parallel_tool_calls": False}, [SHOWN]),
    "functions and function_call": Form(
        {
            "messages": [
                Q,
                {"role": "assistant", "content": None, "function_call": CALL},
                {"role": "function", "name": "get_team", "content": "returns"},
                A,
            ],
            "functions": [TOOL],
        },
        [SHOWN, "returns"],
    ),
    "refusal": Form({"messages": [Q, {"role": "assistant", "content": None, "refusal": "I cannot."}]}, ["I cannot."]),
    "prompt and completion": Form({"prompt": Q["content"], "completion": " returns"}, [" returns"]),
    "preferences": Form(
        {
            "input": {"messages": [Q], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [A],
            "non_preferred_output": [{**A, "content": "sales"}],
        },
        refused="preferred_output and non_preferred_output",
    ),
    "images": Form(
        {"messages": [{**Q, "content": [{"type": "text", "text": "Which team?"}, IMAGE]}, A]}, refused="image_url"
    ),
}


def learnt(row: dict[str, Any]) -> list[str]:
    """The answers of a row that are learnt. Raises UnsupportedRow."""
    described = Dataset.model_validate({"source": "gs://data/x.jsonl"})
    reader = Reader(form_of(columns_of([row]), described), described.ignore)
    read = reader(row)
    assert not reader.unused, "each field is used or known"
    return [_shown(read.messages[at]) for at in read.answers]


def _shown(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message["content"] or json.dumps(calls)


def test_at_least_thirteen_of_the_fifteen_forms_are_taken() -> None:
    assert len(FORMS) == 15
    assert sum(not form.refused for form in FORMS.values()) >= 13


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.refused])
def test_what_is_learnt_of_a_form(name: str) -> None:
    assert learnt(FORMS[name].row) == FORMS[name].learnt


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.refused])
def test_a_form_that_is_not_taken_is_refused_by_the_name_of_its_part(name: str) -> None:
    with pytest.raises(UnsupportedRow, match=FORMS[name].refused):
        learnt(FORMS[name].row)
