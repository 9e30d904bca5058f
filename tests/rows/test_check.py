"""The check of a data set: each kind of fault is named with its row, and what is named is what the training does."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containers.common.errors import JobError
from containers.common.rows import prepare
from dropforge.rows.check import MAX_KINDS, Report, check, check_sample
from dropforge.rows.damage import damage_of
from dropforge.rows.files import BadFile
from dropforge.rows.sources import rows_of
from dropforge.rows.split import evaluation_dataset, rows_to_hold_out_one
from dropforge.spec import Dataset, Evaluation

SEED = 42
Rows = Sequence[dict[str, Any]]


def dataset(**fields: Any) -> Dataset:
    return Dataset.model_validate({"source": "gs://data/x.jsonl", **fields})


def pairs(count: int = 60, **changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Good rows; `_7={"completion": ""}` changes row 7."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"How many orders are above {number}?", "completion": f"SELECT {number};"} for number in range(count)
    ]
    for place, fields in changed.items():
        rows[int(place[1:])] |= fields
    return rows


def checked(rows: Iterable[dict[str, Any]], evaluation: Evaluation | None = None, **fields: Any) -> Report:
    return check(dataset(**fields), rows, evaluation or Evaluation(), SEED)


def told(report: Report) -> list[tuple[str, int | None, str]]:
    return [(each.level, each.row, each.message) for each in report.findings]


def only(report: Report) -> tuple[str, int | None, int]:
    [found] = report.findings
    assert found.fix
    return found.level, found.row, found.rows


def test_a_good_data_set_has_no_finding() -> None:
    report = checked([{**row, "id": number, "mood": None} for number, row in enumerate(pairs())])
    assert told(report) == []
    assert not report.is_faulty
    assert report.scan.columns == {"prompt": "used", "completion": "used", "id": "harmless", "mood": "empty"}
    assert (report.scan.form, report.scan.rows, report.scan.usable) == ("prompt_completion", 60, 60)
    assert (report.train, report.held_out, report.scan.answers) == (57, 3, 60)
    assert report.verdict == "gs://data/x.jsonl: 60 rows, prompt_completion, 60 usable; good"


# What a row has, the level, and a word of the message.
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty answer": ({"completion": " "}, "fault", "the completion is empty"),
    "null": ({"completion": None}, "fault", "'completion' is null"),
    "nan": ({"completion": float("nan")}, "fault", "NaN"),
    "surrogate": ({"completion": "a\ud83d"}, "fault", "surrogate"),
    "short": ({"completion": "7"}, "note", "one character"),
    "replacement": ({"completion": "caf\ufffd"}, "fault", "U+FFFD"),
    "mojibake": ({"prompt": "Wo ist das Caf\u00c3\u00a9?"}, "fault", "Latin-1"),
    "control": ({"prompt": "Where\x00is it"}, "fault", "U+0000"),
    "mark": ({"prompt": "\ufeffWhere is it"}, "fault", "byte order mark"),
    "label": ({"reward": 0.5}, "refused", "'reward'"),
    "weight": ({"weight": 0.5}, "refused", "weight"),
    "unknown": ({"mood": "good"}, "note", "mood"),
    "tools": ({"tools": [{"name": "x"}]}, "refused", "'tools'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_row_is_named_by_its_row_and_kind(name: str) -> None:
    fields, level, word = FAULTS[name]
    report = checked(pairs(_7=fields))
    [found] = report.findings
    assert (found.level, word in str(found)) == (level, True)
    assert found.fix
    if name != "unknown":
        assert (found.rows, found.row) == (1, 7)
    assert report.is_faulty is (level != "note")


def test_no_message_has_the_text_of_a_row() -> None:
    secret = "zebra42"
    for fields, _, _ in FAULTS.values():
        row = {name: f"{secret} {value}" if isinstance(value, str) else value for name, value in fields.items()}
        report = checked(pairs(_7={"prompt": f"{secret} two", **row}, _9={"prompt": f"{secret} two"}))
        assert secret not in str(report.findings) + report.verdict


def test_faults_of_one_kind_are_one_finding() -> None:
    report = checked(pairs(_3={"completion": ""}, _9={"completion": " "}, _11={"completion": None}))
    assert [(each.rows, each.row) for each in report.findings] == [(2, 3), (1, 11)]
    assert report.scan.unusable == 3


def test_the_number_of_kinds_is_bounded() -> None:
    rows = [{"messages": [{"role": "a" * (1 + number % 15) + chr(97 + number // 15)}]} for number in range(300)]
    assert len({row["messages"][0]["role"] for row in rows}) > MAX_KINDS
    assert len(checked(rows, evaluation=None).findings) <= MAX_KINDS + 3


def test_more_than_a_tenth_of_unusable_rows_is_refused_as_the_training_does() -> None:
    for bad in (6, 7):
        rows = pairs(60, **{f"_{number}": {"completion": ""} for number in range(bad)})
        report = checked(rows)
        assert report.is_refused is (bad == 7) is not is_trainable(rows)
    assert "7 of the 60 rows cannot be trained on" in report.verdict


def test_rows_that_their_author_leaves_out_are_counted() -> None:
    report = checked(pairs(_3={"weight": 0}))
    assert (report.scan.left_out, report.scan.usable, report.scan.unusable, told(report)) == (1, 59, 0, [])


def test_empty_answers_before_the_last_are_a_fault() -> None:
    turns = [("user", "one two"), ("assistant", ""), ("user", "three"), ("assistant", "four")]
    talk = {"messages": [{"role": role, "content": text} for role, text in turns]}
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in pairs()
    ]
    report = checked([*rows, talk])
    assert only(report) == ("fault", 60, 1)
    assert report.scan.answers == 62
    talk["messages"][1]["weight"] = 0  # type: ignore[assignment]
    assert told(checked([*rows, talk])) == []


def test_repeated_rows_are_counted_exactly_and_after_normalising() -> None:
    rows = pairs()
    rows[20] = rows[11]
    assert only(checked(rows, NONE)) == ("note", 20, 1)
    rows[30] = {"prompt": rows[12]["prompt"].upper() + "  ", "completion": rows[12]["completion"]}
    assert [(each.row, each.rows) for each in checked(rows, NONE).findings] == [(20, 1), (20, 2)]
    rows[40] = {"prompt": rows[13]["prompt"], "completion": "SELECT another;"}
    assert ("note", 40, "the prompt of an earlier row and another answer") in told(checked(rows, NONE))


NONE = Evaluation(source="gs://data/other.jsonl")


def test_many_repeated_rows_are_a_fault() -> None:
    assert only(check(dataset(), pairs(60) + pairs(7), None, SEED)) == ("fault", 60, 7)


def test_one_text_in_every_row_is_refused() -> None:
    report = checked(pairs(1) * 60)
    assert report.is_refused
    assert "all 60 usable rows are the same text" in str(report.findings)


def split_of(rows: Rows, evaluation: Evaluation | None, **fields: Any) -> tuple[int, int]:
    split = prepare(rows, dataset(**fields), evaluation, SEED)
    return len(split.train), len(split.held_out)


def is_trainable(rows: Rows, evaluation: Evaluation | None = None, **fields: Any) -> bool:
    try:
        prepare(rows, dataset(**fields), evaluation or Evaluation(), SEED)
    except JobError:
        return False
    return True


@given(st.integers(0, 2**32), st.integers(20, 90), st.floats(0.01, 0.5), st.none() | st.integers(2, 100))
def test_the_split_is_that_of_the_training(seed: int, count: int, fraction: float, limit: int | None) -> None:
    draw = random.Random(seed)
    rows = pairs(count)
    for row in draw.sample(rows, draw.randrange(3)):
        row["completion"] = ""
    rows += draw.choices(rows, k=draw.randrange(5))
    evaluation = Evaluation(holdout_fraction=fraction)
    report = checked(rows, evaluation, limit=limit)
    trainable = is_trainable(rows, evaluation, limit=limit)
    # The training judges the rows within dataset.limit; the check judges all of them.
    assert report.is_refused is not trainable or limit is not None
    if trainable:
        assert (report.train, report.held_out) == split_of(rows, evaluation, limit=limit)


@pytest.mark.parametrize("share", [0.05, 0.29, 1 / 3, 0.07, 0.5])
def test_the_least_rows_of_which_one_is_held_out(share: float) -> None:
    least = rows_to_hold_out_one(share)
    assert (int(least * share), int((least - 1) * share)) == (1, 0)


def test_leaks_into_the_held_out_rows_are_found() -> None:
    rows = pairs()
    order = [*range(60)]
    random.Random(SEED).shuffle(order)
    held, trained = order[0], sorted(order[10:13])
    rows[trained[0]] = {**rows[held], "completion": "SELECT other;"}
    rows[trained[1]] = {**rows[held], "prompt": rows[held]["prompt"].upper()}
    found = {each.message: (each.level, each.row) for each in checked(rows).findings}
    assert found["the prompt of a held-out row"] == ("note", trained[0])
    near = next(each for message, each in found.items() if message.startswith("the prompt of a held-out row, but"))
    assert near == ("fault", trained[1])
    assert (checked(rows).train, checked(rows).held_out) == split_of(rows, Evaluation())


def test_leaks_from_another_source_are_found() -> None:
    evaluation, rows = Evaluation(source="gs://data/judge.jsonl"), pairs()
    other = evaluation_dataset(dataset(), evaluation)
    assert other is not None
    judge = [*pairs(90)[60:], {"prompt": rows[5]["prompt"].lower(), "completion": "x y"}, rows[8], {"prompt": "no"}]
    report = check(dataset(), rows, evaluation, SEED, (other, judge))
    found = [(each.level, each.row, each.pointer) for each in report.findings]
    assert ("note", 8, "/dataset/source") in found
    assert ("fault", 5, "/dataset/source") in found
    assert ("fault", 32, "/evaluation/source") in found
    assert (report.train, report.held_out) == (59, 32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "it has no rows"),
        (pairs(5), "rows are left to train on"),
        (pairs(15), "less than one row"),
        ([{"chosen": "a", "rejected": "b"}] * 60, "chosen and rejected"),
        ([{"question;answer": "a;b"}] * 60, "separated by ';'"),
        ([{"first": "a", "second": "b"}] * 60, "the columns first, second"),
    ],
)
def test_what_the_training_refuses_is_refused(rows: Rows, message: str) -> None:
    report = checked(rows)
    assert report.is_refused
    assert any(message in problem.message and problem.expected for problem in report.problems)
    assert not is_trainable(rows)
    assert report.scan.rows == len(rows)


def test_templates_choose_the_columns() -> None:
    columns = {"prompt": "{question.text}", "completion": "{answer}"}
    rows = [{"question": {"text": row["prompt"]}, "answer": row["completion"], "label": 1} for row in pairs()]
    report = checked(rows, columns=columns)
    assert (told(report), report.scan.form) == ([], "columns")
    assert report.scan.columns == {"question": "used", "answer": "used", "label": "harmless"}


def test_a_sample_says_nothing_about_the_number_of_rows() -> None:
    good = check_sample(dataset(), "gs://data/x.jsonl", pairs(3))
    assert (told(good), good.verdict) == ([], "gs://data/x.jsonl: first 3 rows, prompt_completion, 3 usable; good")
    few = check_sample(dataset(), "gs://data/x.jsonl", pairs(3, _1={"completion": ""}))
    assert (few.is_faulty, few.problems) == (True, [])
    bad = check_sample(dataset(), "gs://data/x.jsonl", pairs(3, _1={"rejected": "no"}), "/evaluation/source")
    assert [problem.pointer for problem in bad.problems] == ["/evaluation/source"]


TEXTS = {
    "french": "L\u2019\u00e9t\u00e9 \u00e0 Gen\u00e8ve, \u00abno\u00ebl\u00bb co\u00fbte 5\u202f\u20ac\u2026",
    "german": "Spa\u00df \u2013 Stra\u00dfe, \u00c4rger\u2026 \u201e\u00d6l\u201c",
    "polish": "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144",
    "portuguese": "N\u00c3O \u00c9\u2026 S\u00c3O \u00c2NGULOS",
    "vietnamese": "Ti\u1ebfng Vi\u1ec7t \u0111\u1eb9p",
    "russian": "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?",
    "greek": "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03c3\u03b5 \u03cc\u03bb\u03bf\u03c5\u03c2",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "hindi": "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "chinese": "\u4f60\u597d\uff0c\u4e16\u754c",
    "japanese": "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c",
    "korean": "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "emoji": "Great \U0001f600 and \U0001f44d\U0001f3fd",
    "caf\u00e9": "caf\u00e9\u2026\u201d \u2014 \u00a75 \u00b0C \u00bd",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_any_language_is_undamaged_and_read_wrongly_it_is_damaged(name: str) -> None:
    text = TEXTS[name]
    assert damage_of(text) == ""
    assert damage_of(text + "\ta\r\n\nb") == ""
    assert "Latin-1" in damage_of(text.encode().decode("latin-1"))
    as_windows = "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in text.encode())
    assert "Latin-1" in damage_of(as_windows)
    assert "U+FFFD" in damage_of(text.encode().decode("ascii", "replace"))


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_printable_ascii_is_undamaged(text: str) -> None:
    assert damage_of(text) == ""


LINES = [json.dumps(row) for row in pairs(3)]
FILES: dict[str, tuple[str, bytes]] = {
    "lines": ("x.jsonl", "\n".join(LINES).encode()),
    "mark": ("x.jsonl", b"\xef\xbb\xbf\n" + "\r\n".join(LINES).encode() + b"\r\n\n"),
    "old": ("x.jsonl", "\r".join(LINES).encode()),
    "list": ("x.json", json.dumps(pairs(3), indent=1).encode()),
    "list in one line": ("x.json", b"\xef\xbb\xbf" + json.dumps(pairs(3)).encode() + b"\n"),
    "lines named json": ("x.json", "\n".join(LINES).encode()),
    "csv": ("x.csv", "\n".join(["prompt,completion", *(",".join(row.values()) for row in pairs(3))]).encode()),
    "old csv": ("x.csv", "\r".join(["prompt,completion", *(",".join(row.values()) for row in pairs(3))]).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_row_by_row(name: str) -> None:
    suffix, content = FILES[name]
    assert [*rows_of(io.BytesIO(content), suffix)] == pairs(3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n', "line 2 of the data set is not UTF-8 text: byte 0xe9 at byte 10"),
        ("x.jsonl", '{"a": 1}'.encode("utf-16"), "UTF-16"),
        ("x.csv", b"a,b\n1,2\n3\n", "line 3 of the data set has 1 fields"),
        ("x.json", b'[{"a": 1}, {"a": ]', "row 1 of the data set is not JSON"),
        ("x.json", b'[{"a": 1} {"a": 2}]', "row 1 of the data set follows 0 commas"),
        ("x.json", b'[{"a": 1}', "row 1 of the data set is not JSON"),
        ("x.json", b"[1]", "row 0 of the data set is a number"),
        ("x.jsonl", b"[1]\n", "line 1 of the data set is a list"),
        ("x.jsonl", b'{"a": 1}\n{', "line 2 of the data set is not JSON"),
    ],
)
def test_a_broken_file_is_named_by_its_line_or_row(name: str, content: bytes, message: str) -> None:
    with pytest.raises(BadFile) as caught:
        [*rows_of(io.BytesIO(content), name)]
    assert message in f"{caught.value} {caught.value.hint}"


def test_what_comes_before_a_broken_line_is_checked() -> None:
    lines = [f"{json.dumps(row)}\n".encode() for row in pairs(60, _7={"completion": ""})]
    report = check(dataset(), rows_of(io.BytesIO(b"".join([*lines, b"{\n"])), "x.jsonl"), Evaluation(), SEED)
    assert [(each.level, each.row) for each in report.findings] == [("refused", None), ("fault", 7)]
    assert report.scan.rows == 60
