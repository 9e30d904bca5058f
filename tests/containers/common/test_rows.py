"""Rows: every format becomes a conversation; unusable data is refused with the value and the expectation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from containers.common import rows
from containers.common.errors import BAD_DATA, JobError
from containers.common.rows import normalise, prepare
from dropforge.rows import Row, files
from dropforge.spec import Dataset, Evaluation

PLAIN = Dataset(source="gs://data/x.jsonl")
EVALUATION = Evaluation(holdout_fraction=0.1)


def dataset(**fields: Any) -> Dataset:
    return Dataset.model_validate({"source": "gs://data/x.jsonl", **fields})


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(count)]


def only(raw: list[dict[str, Any]], description: Dataset = PLAIN) -> Row:
    (row,) = normalise(raw, description).rows
    return row


@pytest.mark.parametrize(
    "raw",
    [
        {"prompt": "two?", "completion": "2"},
        {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]},
        {"prompt": [{"role": "user", "content": "two?"}], "completion": [{"role": "assistant", "content": "2"}]},
        # A message after the last answer teaches nothing.
        {"messages": [{"role": r, "content": c} for r, c in [("user", "two?"), ("assistant", "2"), ("user", "ok")]]},
    ],
)
def test_the_format_is_detected_and_becomes_a_conversation(raw: dict[str, Any]) -> None:
    row = only([raw])
    assert row.prompt == [{"role": "user", "content": "two?"}]
    assert row.answer == "2"


def test_templates_are_filled_from_the_columns() -> None:
    columns = {"prompt": "Question: {q}\nContext: {c}", "completion": "{a}", "system": "Answer in {{SQL}}."}
    row = only([{"q": "how many?", "c": "CREATE TABLE t", "a": 3}], dataset(columns=columns))
    assert row.prompt == [
        {"role": "system", "content": "Answer in {SQL}."},
        {"role": "user", "content": "Question: how many?\nContext: CREATE TABLE t"},
    ]
    assert row.answer == "3"


def test_plain_text_stays_text() -> None:
    row = only([{"text": "once upon a time"}])
    assert (row.messages, row.text) == ((), "once upon a time")


FORMATS = Path(__file__).parents[3] / "docs" / "data-formats.md"
ASKED = {"role": "user", "content": "The lamp arrived broken"}
SYSTEM = {"role": "system", "content": "Name the team."}


@pytest.mark.parametrize(
    ("heading", "prompt", "learnt"),
    [
        (
            "Columns: your own names",
            [SYSTEM, {"role": "user", "content": "Product: lamp\nThe lamp arrived broken"}],
            "returns",
        ),
        ("Prompt and completion", [{"role": "user", "content": "Which team? The lamp arrived broken"}], "returns"),
        ("Messages: conversations", [SYSTEM, ASKED], "returns"),
        ("Text", [], "The team returns handles lamps that arrive broken."),
    ],
)
def test_the_examples_of_the_page_teach_what_the_page_says(heading: str, prompt: list[Any], learnt: str) -> None:
    section = FORMATS.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    first, *templates = re.findall(r"```json\n(.*?)```", section, re.S)
    spec = {name: value for template in templates for name, value in json.loads(f"{{{template}}}").items()}
    row = only([json.loads(first)], dataset(**spec))
    assert (list(row.messages[:-1]), row.text or row.answer) == (prompt, learnt)


def test_every_form_of_the_page_has_an_example() -> None:
    sections = re.findall(r"^## (.*)$", FORMATS.read_text(), re.M)
    assert sections == [
        "Columns: your own names", "Prompt and completion", "Messages: conversations", "Text", "All forms",
        "Fields that no form reads", "What is refused", "Check your data",
    ]  # fmt: skip


def test_a_template_that_names_a_missing_column_says_which_there_are() -> None:
    columns = {"prompt": "{question}", "completion": "{sql}"}
    with pytest.raises(
        JobError, match=r"question, answer; dataset\.columns\.completion names the column 'sql'"
    ) as caught:
        normalise([{"question": "a", "answer": "b"}], dataset(columns=columns))
    assert caught.value.exit_code == BAD_DATA


@pytest.mark.parametrize("template", ["{a[0]}", "{a!r}", "{a:>9}", "{0}", "{", "{}"])
def test_templates_hold_names_and_nothing_else(template: str) -> None:
    with pytest.raises(JobError, match="completion"):
        normalise([{"a": "x"}], dataset(columns={"prompt": "{a}", "completion": template}))


def test_unknown_columns_are_listed() -> None:
    with pytest.raises(JobError, match="has the columns ticket, team; expected messages or conversations") as caught:
        normalise([{"ticket": "a", "team": "b"}], PLAIN)
    assert "dataset.columns" in caught.value.hint


def test_one_character_rows_are_refused() -> None:
    # Tutorial 000 applies `sample["prompt"][0]` to a string instead of a list.
    raw = [{"prompt": "CSIWD"[n % 5], "completion": "S"} for n in range(50)]
    with pytest.raises(JobError, match=r"50 of 50 rows.*row 0: the prompt is a text of 1 characters; expected more"):
        normalise(raw, PLAIN)


def test_a_few_bad_rows_are_dropped_and_counted() -> None:
    raw: list[dict[str, Any]] = [*pairs(95), *[{"prompt": "question", "completion": None}] * 5]
    good, dropped, _ = normalise(raw, PLAIN)
    assert (len(good), dropped) == (95, 5)


def test_the_same_row_again_and_again_is_refused() -> None:
    with pytest.raises(JobError, match="all 40 rows are the same text of 15 characters"):
        prepare([{"prompt": "question", "completion": "answer"}] * 40, PLAIN, None, seed=0)


def test_no_rows_at_all() -> None:
    with pytest.raises(JobError, match="has no rows"):
        prepare([], PLAIN, None, seed=0)


def test_too_few_rows_to_hold_one_out() -> None:
    with pytest.raises(JobError, match=r"holdout_fraction 0\.05 of 12 rows.*expected at least 20 rows"):
        prepare(pairs(12), PLAIN, Evaluation(), seed=0)


def test_too_few_rows_to_train_on() -> None:
    with pytest.raises(JobError, match="5 rows are left to train on"):
        prepare(pairs(5), PLAIN, None, seed=0)


def test_the_split_is_the_same_for_the_same_seed_and_within_the_limit() -> None:
    first, again, other = (prepare(pairs(100), dataset(limit=50), EVALUATION, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other
    assert (len(first.held_out), len(first.train)) == (5, 45)


def test_a_limit_above_the_number_of_rows_takes_all() -> None:
    assert len(prepare(pairs(30), dataset(limit=1000), None, seed=0).train) == 30


def test_no_held_out_row_is_trained_on_even_when_it_appears_twice() -> None:
    split = prepare(pairs(40) * 3, PLAIN, EVALUATION, seed=0)
    assert not {row.content for row in split.held_out} & {row.content for row in split.train}
    assert len(split.train) < 108


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a": 2}\n'),
        ("x.json", '[{"a": 1}, {"a": 2}]'),
        ("x.json", '{"a": 1}\n{"a": 2}\n'),
        ("x.csv", "\ufeffa\n1\n2\n"),
    ],
)
def test_files_are_read_by_their_suffix(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert [str(row["a"]) for row in rows._READERS[path.suffix](path)] == ["1", "2"]


def test_parquet_is_read(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "x.parquet"
    datasets.Dataset.from_list(pairs(3)).to_parquet(str(path))
    raw = rows._READERS[".parquet"](path)
    assert (len(raw), raw[2]["prompt"]) == (3, "question 2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2 of the data set is not JSON: Expecting value at character 7"),
        (b'{"a": 1}\n[1]\n', "line 2 of the data set is a list of 1; expected an object"),
        (b'{"a": "\xff"}\n', "not UTF-8"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(JobError, match=message):
        rows._READERS[".jsonl"](path)


def test_a_field_of_a_csv_may_be_long_but_not_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"a,b\n1,{'x' * 200_000}\n")
    (row,) = rows._READERS[".csv"](path)
    assert len(row["b"]) == 200_000
    monkeypatch.setattr(files, "MAX_CSV_FIELD", 1000)
    with pytest.raises(JobError, match="line 2 of the data set has a field of more than 1000 characters") as caught:
        rows._READERS[".csv"](path)
    assert "a quote that is not closed" in caught.value.hint
    assert "xx" not in caught.value.message  # a message quotes no row
    path.write_text('a,b\n1,"x\n')
    with pytest.raises(JobError, match="the data set is not CSV: unexpected end of data"):
        rows._READERS[".csv"](path)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 1 / 49, 0.07])
def test_the_rows_that_are_enough_to_hold_one_out_are_told_exactly(share: float) -> None:
    evaluation = Evaluation(holdout_fraction=share)
    with pytest.raises(JobError) as caught:
        rows._held_out_count(1, evaluation)
    told = re.search(r"at least (\d+) rows", caught.value.message)
    assert told
    enough = int(told[1])
    assert rows._held_out_count(enough, evaluation) == 1
    with pytest.raises(JobError):
        rows._held_out_count(enough - 1, evaluation)


def test_a_json_document_that_is_no_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([1, 2]))
    with pytest.raises(JobError, match="expected a list of objects"):
        rows._READERS[".json"](path)


def conversation(*answers: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, answer in enumerate(answers):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append({"role": "assistant", "content": f"answer {number}", **answer})
    return {"messages": messages}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (conversation({"weight": 0.5}), "a message whose weight is a number; expected 0 or 1"),
        (conversation({"audio": {"id": "a"}}), "a message with the field 'audio' (an object with 1 fields)"),
        (conversation({"content": [{"type": "image_url", "image_url": {}}]}), "of the type 'image_url'; expected text"),
        ({**conversation({}), "score": 2}, "has the field 'score' (a number)"),
        ({"prompt": "ask me", "completion": "yes", "rating": 1}, "has the field 'rating' (a number)"),
        ({"prompt": "ask me", "completion": "yes", "tools": [{"name": "f"}]}, "the field 'tools' (a list of 1)"),
    ],
)
def test_rows_with_parts_that_training_would_lose_are_refused_by_name(row: dict[str, Any], problem: str) -> None:
    """One such row among thousands is enough: without its calls, it teaches an empty answer."""
    kind = "messages" if "messages" in row else "prompt_completion"
    good = conversation({}) if kind == "messages" else {"prompt": "question", "completion": "answer"}
    with pytest.raises(JobError, match=re.escape(problem)) as caught:
        rows.normalise([good] * 99 + [row], dataset(format=kind))
    assert "row 99" in caught.value.message
    assert caught.value.error_class == "data"


def test_answers_of_weight_zero_are_read_and_not_learnt() -> None:
    row = only([conversation({"weight": 0}, {"weight": 1}, {"weight": 0})])
    assert [message["content"] for message in row.messages] == ["question 0", "answer 0", "question 1", "answer 1"]
    assert row.muted == {1}
    plain = only([conversation({}, {})])
    assert plain.muted == frozenset()
    raw = [conversation({"weight": 0})]
    with pytest.raises(JobError, match="has no answer of the assistant with a weight above 0"):
        rows.normalise(raw, PLAIN)


@pytest.mark.parametrize(
    ("first", "second", "column"),
    [
        ({"prompt": "question", "completion": "answer"}, {"prompt": "question"}, "completion"),
        ({"text": "some text"}, {"other": "text"}, "text"),
        (conversation({}), {"other": "text"}, "messages"),
    ],
)
def test_a_row_without_its_column_is_an_error_of_the_data(first: Any, second: Any, column: str) -> None:
    with pytest.raises(JobError, match=f"row 1: the column '{column}' is missing") as caught:
        rows.normalise([first, second], PLAIN)
    assert caught.value.error_class == "data"


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    """Many answers to one prompt: a held-out answer must not be learnt from its siblings."""
    raw = [{"prompt": f"question {number // 4}", "completion": f"answer {number}"} for number in range(160)]
    split = prepare(raw, PLAIN, EVALUATION, seed=0)
    assert not {row.question for row in split.held_out} & {row.question for row in split.train}
    same = [{"prompt": "the same question", "completion": f"answer {number}"} for number in range(100)]
    with pytest.raises(JobError, match="95 with the prompt of a held-out row"):
        prepare(same, PLAIN, Evaluation(holdout_fraction=0.05), seed=0)


def test_a_row_keeps_its_number_in_the_data_set_when_rows_are_shuffled() -> None:
    raw = pairs(40)
    split = prepare(raw, PLAIN, Evaluation(holdout_fraction=0.2), seed=3)
    for row in [*split.train, *split.held_out]:
        assert raw[row.number]["completion"] == row.answer
    talks = [conversation({}) for _ in range(40)]
    talks[17]["images"] = ["a.png"]
    with pytest.raises(JobError, match=r"row 17 of .* has the field 'images'"):
        prepare(talks, PLAIN, None, seed=3)


def test_rows_of_another_data_set_are_evaluated_and_all_others_trained_on() -> None:
    from dropforge.rows.split import evaluation_dataset

    evaluation = Evaluation(source="gs://data/other.jsonl", max_rows=10)
    other = [*pairs(5), *[{"prompt": f"unseen {n}", "completion": f"answer {n}"} for n in range(40)]]
    split = prepare(pairs(30), PLAIN, evaluation, 1, (other, PLAIN))
    assert len(split.held_out) == 10
    assert split == prepare(pairs(30), PLAIN, evaluation, 1, (other, PLAIN))
    held_out = {row.question for row in split.held_out}
    assert len(split.train) == 30 - len(held_out & {only([row]).question for row in pairs(30)})
    assert not held_out & {row.question for row in split.train}

    hub = dataset(source="owner/name", revision="v1", config="small", limit=100)
    same = evaluation_dataset(hub, Evaluation(split="test"))
    assert same == hub.model_copy(update={"split": "test", "limit": None})
    elsewhere = evaluation_dataset(hub, evaluation)
    assert elsewhere == dataset(source="gs://data/other.jsonl")
    assert evaluation_dataset(hub, EVALUATION) is None
