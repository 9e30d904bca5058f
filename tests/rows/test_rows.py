"""Rows as people have them: each form is read as it says, and no field is lost without a word."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.row_forms import EXAMPLES, learnt

from dropforge.rows import FORMS, LeftOut, Reader, Row, UnsupportedRow, UnusableRow, columns_of, form_of
from dropforge.rows.conversation import THOUGHTS
from dropforge.rows.fields import HARMLESS, MEANING
from dropforge.spec import Dataset

Q, A = {"role": "user", "content": "which team?"}, {"role": "assistant", "content": "returns"}


def dataset(**fields: Any) -> Dataset:
    return Dataset.model_validate({"source": "gs://data/x.jsonl", **fields})


def reader_of(row: dict[str, Any], **fields: Any) -> Reader:
    described = dataset(**fields)
    return Reader(form_of(columns_of([row]), described), described.ignore)


def read(row: dict[str, Any], **fields: Any) -> Row:
    return reader_of(row, **fields)(row)


def talk(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def shown(row: Row) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in row.messages]


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_found_by_its_columns_and_by_its_name(name: str) -> None:
    row = read(EXAMPLES[name])
    assert row == read(EXAMPLES[name], format=name)
    assert learnt(row) in ("returns", "How can I help?; returns", "The team returns handles lamps.")


def test_the_forms_are_those_of_the_spec() -> None:
    schema = Dataset.model_json_schema()["properties"]["format"]["enum"]
    assert set(FORMS) == set(schema) - {"auto", "columns"} == set(EXAMPLES)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (talk({**Q, "role": "developer"}, Q, A), ["system: which team?", "user: which team?", "assistant: returns"]),
        (
            talk({"from": "human", "value": "hi you"}, {"from": "gpt", "value": "yes"}),
            ["user: hi you", "assistant: yes"],
        ),
        (
            talk({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, A),
            ["user: a\nb", "assistant: returns"],
        ),
        (
            talk(Q, {"role": "assistant", "content": None, "refusal": "I cannot."}),
            ["user: which team?", "assistant: I cannot."],
        ),
        (talk(Q, A, system="Name it."), ["system: Name it.", "user: which team?", "assistant: returns"]),
        (talk(A, Q, A), ["assistant: returns", "user: which team?", "assistant: returns"]),
        (
            {"prompt": "a question", "completion": "so", "system": "Be short."},
            ["system: Be short.", "user: a question", "assistant: so"],
        ),
        ({"instruction": "Name it", "input": None, "output": "x"}, ["user: Name it", "assistant: x"]),
        ({"instruction": "Name it", "input": float("nan"), "output": "x"}, ["user: Name it", "assistant: x"]),
    ],
)
def test_what_people_have_is_read(row: dict[str, Any], expected: list[str]) -> None:
    assert shown(read(row)) == expected


def test_a_greeting_is_read_and_not_learnt() -> None:
    row = read(talk(A, Q, A))
    assert row.answers == [2]


@pytest.mark.parametrize("name", ["weight", "train", "loss", "trainable"])
@pytest.mark.parametrize("off", [0, False])
def test_an_answer_that_its_author_excludes_is_not_learnt(name: str, off: Any) -> None:
    row = read(talk(Q, {**A, name: off}, Q, {**A, name: 1}, Q, {**A, name: None}))
    assert row.answers == [3, 5]
    with pytest.raises(LeftOut):
        read(talk(Q, A, **{name: off}))
    with pytest.raises(LeftOut):
        read({"prompt": "a question", "completion": "so", name: off})


def test_calls_of_tools_are_read_in_every_spelling() -> None:
    arguments = '{"ticket": "lamp"}'
    call = {"id": "c1", "type": "function", "function": {"name": "get_team", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "get_team", "parameters": {"type": "object", "strict": None}}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "returns"}
    whole = read(talk(Q, {"role": "assistant", "content": None, "tool_calls": [call]}, result, A, tools=[tool]))
    assert whole.messages[1]["tool_calls"][0]["function"] == {"name": "get_team", "arguments": {"ticket": "lamp"}}
    assert whole.tools == ({"type": "function", "function": {"name": "get_team", "parameters": {"type": "object"}}},)
    assert whole.answers == [1, 3]
    older = read(talk(Q, {"role": "assistant", "function_call": call["function"]}, functions=[tool["function"]]))
    assert older.messages[1]["tool_calls"][0]["function"] == whole.messages[1]["tool_calls"][0]["function"]
    assert older.tools == whole.tools == read(talk(Q, A, tools=json.dumps([tool]))).tools
    assert "get_team" in older.answer


def test_a_table_has_messages_and_tools_as_json_text() -> None:
    row = read({"messages": json.dumps([Q, A]), "tools": json.dumps([{"name": "get_team"}])})
    assert (row.messages, row.tools[0]["function"]["name"]) == ((Q, A), "get_team")
    with pytest.raises(UnusableRow, match="`messages` is a text of 5 characters, which is not JSON"):
        read({"messages": "hello"})


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_reach_the_template_by_every_name(name: str) -> None:
    row = read(talk(Q, {**A, name: "It is broken."}))
    assert [row.messages[1][each] for each in THOUGHTS] == ["It is broken."] * 3


@pytest.mark.parametrize("name", MEANING)
def test_a_field_that_means_something_is_refused_by_name_or_honoured(name: str) -> None:
    """With a value and without; `dataset.ignore` takes it out of the reading."""
    row = {"question": "which team?", "answer": "returns", name: "something"}
    if name in ("system", "system_prompt"):  # it instructs the model, and is read
        assert read(row).messages[0] == {"role": "system", "content": "something"}
    else:
        with pytest.raises(UnsupportedRow, match=re.escape(name)):
            read(row)
        assert read(row, ignore=[name]).answer == "returns"
    assert read({**row, name: None}).answer == "returns"


def test_other_fields_are_listed_or_say_nothing() -> None:
    row = {"question": "which team?", "answer": "returns", "mood": "sad", "empty": None, **dict.fromkeys(HARMLESS, 1)}
    reader = reader_of(row)
    reader(row)
    reader(row)
    assert list(reader.unused) == ["mood"]
    messages = talk(Q, {**A, "colour": "red"}, pages=3)
    reader = reader_of(messages)
    reader(messages)
    assert sorted(reader.unused) == ["colour", "pages"]


def test_templates_say_what_is_read() -> None:
    row = {"Customer name": "Ann", "answers": {"text": ["returns"]}, "label": False, "rejected": "sales"}
    columns = {"prompt": "For {Customer name}: {{}}", "completion": "{answers.text}"}
    reader = reader_of(row, columns=columns)
    assert shown(reader(row)) == ["user: For Ann: {}", "assistant: returns"]
    assert not reader.unused


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"chosen": [Q, A], "rejected": [Q, A]},
        {"input": {"messages": [Q]}, "preferred_output": [A], "non_preferred_output": [A]},
        {"prompt": "why not", "completion": "so", "label": True},
    ],
)
def test_preferences_are_refused_whatever_else_the_row_has(row: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRow, match="which answers are good and which are bad"):
        form_of(list(row), dataset())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (talk({"role": "narrator", "content": "x"}, A), "the role of a message is 'narrator'"),
        (talk(Q), "no message is an answer"),
        (talk(A), "no question is before the last answer"),
        (talk({"role": "user", "content": "\ud83d"}, A), "half of a character"),
        (talk(Q, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}), "not JSON"),
        ({"prompt": "  ", "completion": "so"}, "the prompt is empty"),
        ({"prompt": "why not", "completion": ""}, "the completion is empty"),
        ({"prompt": float("nan"), "completion": "so"}, "not a number"),
    ],
)
def test_a_row_that_teaches_nothing_says_why(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableRow, match=words):
        read(row)


WORDS = st.sampled_from(["user", "assistant", "tool", "{}"])
FIELDS = st.sampled_from(
    ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "text", "parts",
     "weight", "thinking", "refusal", "function_call"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=20,
)
COLUMNS = st.sampled_from(sorted({each for form in FORMS.values() for each in (*form.columns, *form.optional)}))


@given(st.dictionaries(COLUMNS | st.text(max_size=5), VALUES, max_size=6))
def test_no_row_breaks_the_reader(row: dict[str, Any]) -> None:
    """A row is read, or refused by one of the three words for it; what is read ends with an answer."""
    try:
        made = read(row)
    except (UnusableRow, UnsupportedRow, LeftOut):
        return
    assert made.text or made.messages[-1]["role"] == "assistant"
    assert all(isinstance(message["content"], str) for message in made.messages)
