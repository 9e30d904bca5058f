"""Rows: every format becomes a conversation; unusable data is refused with the value and the expectation."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import uuid
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from containers.common import raw_rows, rows
from containers.common.errors import BAD_DATA, JobError
from containers.common.raw_rows import RawRows
from containers.common.read_rows import values_of
from containers.common.rows import normalise, prepare
from dropforge.rows import Row, files, sources, tables
from dropforge.spec import Dataset, Evaluation

BUCKET = "data-bucket"
PLAIN = Dataset(source="gs://data/x.jsonl")
EVALUATION = Evaluation(holdout_fraction=0.1)


def dataset(**fields: Any) -> Dataset:
    return Dataset.model_validate({"source": "gs://data/x.jsonl", **fields})


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(count)]


def read(cloud: Any, directory: Path, files: dict[str, bytes], source: Any = None) -> RawRows:
    """The rows of files of a bucket, with all of them parsed."""
    folder = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    for name, content in files.items():
        cloud.client.bucket(BUCKET).blob(f"{folder.partition(BUCKET)[2][1:]}/{name}").upload_from_string(content)
    uris = [f"{folder}/{name}" for name in ([source] if isinstance(source, str) else source or files)]
    raw, _ = rows.load_rows(dataset(source=uris if len(uris) > 1 else uris[0]), cloud.client, directory)
    values_of(raw, np.arange(len(raw)))
    return raw


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


JSON_LINES, TABLE = b'{"a": 1}\n\n{"a": 2}', [{"a": 1}, {"a": 2}]


def zipped(data: bytes, compression: str) -> bytes:
    with pyarrow.BufferOutputStream() as buffer:
        with pyarrow.CompressedOutputStream(buffer, compression) as file:
            file.write(data)
        return bytes(buffer.getvalue())


def table_in(kind: str, rows: list[dict[str, Any]] = TABLE) -> bytes:
    table, buffer = pyarrow.Table.from_pylist(rows), io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, buffer)
        return buffer.getvalue()
    with (pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file)(buffer, table.schema) as file:
        file.write_table(table)
    return buffer.getvalue()


FILES = {
    "x.jsonl": JSON_LINES,
    "mac.jsonl": JSON_LINES.replace(b"\n", b"\r"),
    "windows.jsonl": b"\xef\xbb\xbf" + JSON_LINES.replace(b"\n", b"\r\n"),
    "x.json": b' [{"a": 1}, {"a": 2}] ',
    "lines.json": JSON_LINES,
    "x.csv": "\ufeffa\n1\n2\n".encode(),
    "x.tsv": b"a\r\n1\r\n2\r\n",
    "x.jsonl.gz": zipped(JSON_LINES, "gzip"),
    "two.jsonl.gz": zipped(JSON_LINES[:9], "gzip") + zipped(JSON_LINES[9:], "gzip"),
    "x.csv.zst": zipped(b"a\n1\n2\n", "zstd"),
    "x.tsv.gz": zipped(b"a\n1\n2\n", "gzip"),
    "x.json.zst": zipped(b'[{"a": 1}', "zstd") + zipped(b',{"a": 2}]', "zstd"),
    "x.parquet": table_in("parquet"),
    "x.arrow": table_in("file"),
    "stream.arrow": table_in("stream"),
}


def test_a_table_has_dates_decimals_and_utf8_as_text_and_other_bytes_are_no_text(cloud: Any, tmp_path: Path) -> None:
    values = {
        "day": date(2026, 11, 29),
        "price": Decimal("1.50"),
        "nothing": math.nan,
        "text": b"x",
        "picture": b"\xff",
    }
    (row,) = read(cloud, tmp_path, {"x.parquet": table_in("parquet", [values])})
    assert row == {"day": "2026-11-29", "price": "1.50", "nothing": None, "text": "x", "picture": {"type": "bytes"}}


def test_an_arrow_stream_that_was_cut_between_two_batches_is_not_complete(cloud: Any, tmp_path: Path) -> None:
    whole = FILES["stream.arrow"]
    assert whole.endswith(tables.STREAM_END)
    with pytest.raises(JobError, match=r"not a complete \.arrow file"):
        read(cloud, tmp_path, {"x.arrow": whole.removesuffix(tables.STREAM_END)})


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.parquet", "x.arrow", "stream.arrow"])
def test_two_columns_of_one_name_are_refused(cloud: Any, tmp_path: Path, name: str) -> None:
    table, buffer = pyarrow.Table.from_arrays([[1], [2], [3]], names=["a", "b", "a"]), io.BytesIO()
    if name.endswith("sv"):
        buffer.write(b"a,b,a\n1,2,3\n".replace(b",", b"\t" if name == "x.tsv" else b","))
    elif name == "x.parquet":
        parquet.write_table(table, buffer)
    else:
        make = pyarrow.ipc.new_stream if name == "stream.arrow" else pyarrow.ipc.new_file
        with make(buffer, table.schema) as file:
            file.write_table(table)
    with pytest.raises(JobError, match="two columns of the same name: a"):
        read(cloud, tmp_path, {name: buffer.getvalue()})


def test_answers_within_a_prompt_are_read_and_not_learnt() -> None:
    asked, answered = ({"role": role, "content": "some words"} for role in ("user", "assistant"))
    row = only([{"system": "Be brief.", "prompt": [asked, answered, asked], "completion": [answered]}])
    assert (len(row.messages), row.muted, row.answers) == (5, frozenset({2}), [4])
    with pytest.raises(JobError, match="the completion has no answer of the assistant"):
        only([{"prompt": [asked, answered], "completion": [asked]}])


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_by_their_names(cloud: Any, tmp_path: Path, name: str) -> None:
    raw = read(cloud, tmp_path, {name: FILES[name]})
    assert [str(row["a"]) for row in raw] == ["1", "2"]
    assert pickle.loads(pickle.dumps(raw))[1] == raw[1]  # another process reads them
    assert raw.many([1, 0]) == [raw[1], raw[0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2 of the data set is not JSON: Expecting value at character 6"),
        (b'{"a": 1}\n\n\n[1]\n', "line 4 of the data set is a list of 1; expected an object"),
        (b'{"a": "\xff"}\n', "not UTF-8"),
    ],
)
def test_malformed_lines_are_named(cloud: Any, tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read(cloud, tmp_path, {"x.jsonl": content})


def test_a_field_of_a_csv_may_be_long_but_not_endless(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = f"a,b\n1,{'x' * 200_000}\n".encode()
    (row,) = read(cloud, tmp_path, {"x.csv": content})
    assert len(row["b"]) == 200_000
    monkeypatch.setattr(files, "MAX_CSV_FIELD", 1000)
    with pytest.raises(JobError, match="line 2 of the data set has a field of more than 1000 characters") as caught:
        read(cloud, tmp_path, {"x.csv": content})
    assert "a quote that is not closed" in caught.value.hint
    assert "xx" not in caught.value.message  # a message quotes no row
    with pytest.raises(JobError, match="the data set is not CSV: unexpected end of data"):
        read(cloud, tmp_path, {"x.csv": b'a,b\n1,"x\n'})


MANY = {"part-10.jsonl": b'{"a": 10}', "part-2.jsonl": b'{"a": 2}\n', "deep/part-1.jsonl": b'{"a": 1}', "_SUCCESS": b""}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("", [10, 2]),
        ("*.jsonl", [10, 2]),
        ("part-?.jsonl", [2]),
        ("**/*.jsonl", [1, 10, 2]),
        ("{deep,none}/part-[0-9].jsonl", [1]),
        (["part-2.jsonl", "part-10.jsonl", "deep/"], [1, 10, 2]),
    ],
)
def test_several_files_are_read_in_the_order_of_their_names(
    cloud: Any, tmp_path: Path, source: Any, wanted: list[int]
) -> None:
    assert [row["a"] for row in read(cloud, tmp_path, MANY, source)] == wanted


@pytest.mark.parametrize(
    ("contents", "source", "message"),
    [
        (MANY, "*.csv", r"no object matches gs://.*/\*\.csv"),
        (MANY, "none/", "the folder gs://.*/none/ has no file"),
        (MANY, "part-2", "the data set 'gs://.*/part-2' does not exist"),
        (MANY, ["part-2.jsonl", "*.jsonl"], "two of the sources name gs://.*/part-2.jsonl"),
        (MANY, "*", "_SUCCESS has no extension of a data file"),
        ({"a.jsonl": b"{}", "b.csv": b"a"}, "", "b.csv is a .csv file, and .*a.jsonl a .jsonl file"),
        ({"a.jsonl": b"{}", "README.md": b"a"}, "", "README.md has no extension of a data file"),
        ({"a.jsonl": b"{}", "b.jsonl": b"\n{}\n{"}, "", "b.jsonl: line 3 of the data set is not JSON"),
        ({"a.csv": b"a\n1", "b.csv": b"a\n1,2"}, "", "b.csv: line 2 of the data set has 2 fields"),
        (
            {"a.jsonl.gz": FILES["x.jsonl.gz"], "b.jsonl.gz": b"{}"},
            "",
            "b.jsonl.gz: the data set is not a complete .gz",
        ),
        (
            {"a.csv.zst": FILES["x.csv.zst"], "b.csv.zst": FILES["x.csv.zst"][:-4]},
            "",
            "b.csv.zst: .* not a complete .zst",
        ),
        (
            {"a.parquet": FILES["x.parquet"], "b.parquet": b"PAR1"},
            "",
            "b.parquet: the data set is not a complete .parquet file",
        ),
        ({"a.arrow": FILES["x.arrow"], "b.arrow": table_in("file", [{"b": 1}])}, "", "differ in the columns a, b"),
        ({"x.parquet.gz": b"x"}, "", r"x.parquet.gz is compressed as a whole"),
    ],
)
def test_one_bad_file_of_many_is_named(
    cloud: Any, tmp_path: Path, contents: dict[str, bytes], source: Any, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        read(cloud, tmp_path, contents, source)


def test_the_number_of_files_and_their_size_have_limits(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"{number}.jsonl.gz": FILES["x.jsonl.gz"] for number in range(3)}
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    with pytest.raises(JobError, match="has more than 2 files"):
        read(cloud, tmp_path, many, "*.gz")
    monkeypatch.setattr(sources, "MAX_FILES", 3)
    monkeypatch.setattr(raw_rows, "MAX_BYTES", 40)
    with pytest.raises(JobError, match="more than 40 bytes when they are unpacked"):
        read(cloud, tmp_path, many, "*.gz")
    monkeypatch.setattr(sources, "MAX_BYTES", 60)
    with pytest.raises(JobError, match=r"the 3 files have .* bytes; expected at most 60"):
        read(cloud, tmp_path, many, "*.gz")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_manifest_names_each_file_with_its_generation_and_a_message_the_row_of_its_file(
    cloud: Any, tmp_path: Path, kind: str
) -> None:
    good, bad = pairs(20), [*pairs(2), {"prompt": "ask me", "completion": " "}]
    contents = {
        name: table_in(kind, raw) if kind == "parquet" else "\n".join(map(json.dumps, raw)).encode()
        for name, raw in ((f"a.{kind}", good), (f"b.{kind}", bad))
    }
    raw = read(cloud, tmp_path, contents, "")
    assert raw.within(22) == f" (row 2 of b.{kind})"
    with pytest.raises(JobError, match=rf"row 22 \(row 2 of b\.{kind}\): "):
        normalise(raw, PLAIN, np.array([22, 0]))

    folder = raw._files[0].rpartition("/")[0]
    blobs = {f"{folder}/{name}": cloud.client.bucket(BUCKET).get_blob(f"{folder[17:]}/{name}") for name in contents}
    _, source = rows.load_rows(dataset(source=f"{folder}/"), cloud.client, tmp_path / "again")
    assert source.files == {uri: f"generation {blob.generation} crc32c {blob.crc32c}" for uri, blob in blobs.items()}
    assert list(source.files) == sorted(source.files)
    assert source.revision.startswith("2 files sha256 ")


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "row 0 of the data set is a number; expected a list of objects"),
        (b'[{"a": 1}, {"a":', "row 1 of the data set is not JSON: Expecting value"),
        (b'[{"a": 1} {"a": 2}]', "row 1 of the data set follows 0 commas"),
        (b'[{"a": 1}] [{"a": 2}]', "text after its list"),
        (b"[" * 100_000, "row 0 of the data set cannot be read: RecursionError"),
        (b'[{"a": "\xff"}]', "not UTF-8"),
    ],
)
def test_a_json_document_that_is_no_list_is_refused(cloud: Any, tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read(cloud, tmp_path, {"x.json": content})


def test_a_json_list_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block may end anywhere in a row."""
    text, wanted = '[ {"a": "x,]} 1"} ,\n{"b": [12, {"c": null}]} ]\n', [{"a": "x,]} 1"}, {"b": [12, {"c": None}]}]
    for size in range(1, len(text) + 1):
        monkeypatch.setattr(files, "BLOCK", size)
        assert list(files.json_rows(io.StringIO(text))) == wanted


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
