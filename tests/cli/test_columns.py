"""`dropforge submit` looks at the columns of the data, and judges them as the training container does."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from containers.common.errors import JobError
from containers.common.rows import load_rows, normalise
from dropforge.rows.sample import SAMPLE_BYTES, first_bytes, problems_of, samples_of
from dropforge.spec import Dataset, JobSpec, parse_spec
from dropforge_cli.deployment import connect
from dropforge_cli.main import cli
from dropforge_local.stack.config import StackInfo

from ..deployments import clients
from .conftest import EXAMPLE, Deployed

BUCKET = "data"
TEMPLATES = {"prompt": "Question: {question}", "completion": "{answer}"}
ROWS = [{"question": f"q {number}", "answer": f"a {number}"} for number in range(12)]
LINES = "\n".join(json.dumps(row) for row in ROWS)
MESSAGES = [
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": str(n)}]} for n in ROWS
]


def csv_of(head: str, separator: str = ",", end: str = "\n") -> str:
    return end.join([head, *(f"q {number}{separator}a {number}" for number in range(12))]) + end


GOOD: dict[str, str | bytes] = {
    "tabs.tsv": csv_of("question\tanswer", "\t"),
    "packed.csv.gz": gzip.compress(csv_of("question,answer").encode()),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "plain.csv": csv_of("question,answer"),
    "mark.csv": "\ufeff" + csv_of("question,answer"),
    "windows.csv": csv_of('"question","answer"', end="\r\n"),
    "more.csv": csv_of('question,answer,"a name\nof two lines"', end=",more\n").replace('lines",more', 'lines"'),
    "lines.jsonl": LINES,
    "mark.jsonl": "\ufeff\n" + LINES,
    "list.json": json.dumps(ROWS, indent=2),
    "lines.json": LINES,
}
BAD: dict[str, str | bytes] = {
    "commas.tsv": csv_of("question,answer"),
    "other.csv.gz": gzip.compress(csv_of("question,reply").encode()),
    "other.csv": csv_of("question,reply"),
    "blank.csv": csv_of("question, answer"),
    "case.csv": csv_of("Question,answer"),
    "headless.csv": csv_of("q,a"),
    "semicolons.csv": csv_of("question;answer", ";"),
    "tabs.csv": csv_of("question\tanswer", "\t"),
    "other.jsonl": LINES.replace('"answer"', '"reply"'),
    "other.json": json.dumps([{"reply": "no", **row} for row in MESSAGES]),
}


def spec_of(uri: str | list[str], columns: dict[str, str] | None = TEMPLATES, **dataset: Any) -> JobSpec:
    document = json.loads(EXAMPLE.read_text())
    document["dataset"] = {"source": uri, **dataset} | ({"columns": columns} if columns else {})
    return parse_spec(json.dumps(document).encode())


def put(name: str, content: str | bytes) -> str:
    storage = clients.storage()
    bucket = storage.bucket(BUCKET)
    if not bucket.exists():
        storage.create_bucket(BUCKET)
    bucket.blob(name).upload_from_string(content)
    return f"gs://{BUCKET}/{name}"


def is_trainable(spec: JobSpec, directory: Path) -> bool:
    """Whether the training container makes rows of the data."""
    assert isinstance(spec.dataset, Dataset)
    try:
        raw, _ = load_rows(spec.dataset, clients.storage(), directory)
        normalise(raw, spec.dataset)
    except JobError:
        return False
    return True


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_the_columns_are_those_that_the_training_container_reads(deployed: Deployed, tmp_path: Path, name: str) -> None:
    spec = spec_of(put(name, {**GOOD, **BAD}[name]))
    assert is_trainable(spec, tmp_path) is (name in GOOD)
    assert (problems_of(samples_of(spec, clients)) == []) is (name in GOOD)


@pytest.mark.parametrize("format", ["auto", "messages", "prompt_completion", "text"])
@pytest.mark.parametrize("row", [*ROWS[:1], *MESSAGES[:1], {"text": "long"}, {"prompt": "why", "completion": "so"}])
def test_the_form_is_the_one_that_the_training_container_finds(
    deployed: Deployed, tmp_path: Path, row: dict[str, Any], format: str
) -> None:
    spec = spec_of(put("form.jsonl", "\n".join([json.dumps(row)] * 12)), None, format=format)
    assert (problems_of(samples_of(spec, clients)) == []) is is_trainable(spec, tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.csv", b""), ("empty.jsonl", b""), ("none.json", b"[]"), ("any.parquet", b"PAR1"), ("any.csv.zst", b"x"),
        ("cut.csv.gz", gzip.compress(b"question,answer\n" + random.Random(1).randbytes(SAMPLE_BYTES).hex().encode())),
        ("two.jsonl.gz", gzip.compress(b'{"question": "why", ') + gzip.compress(b'"answer": "so"}')),
        ("wide.jsonl", b'{"x": "' + b"x" * SAMPLE_BYTES + b'"}'),
        ("wide.json", ('[{"question": "why", "answer": "' + "\u00e9" * SAMPLE_BYTES + '"}]').encode()),
        ("cut.csv", b"question,answer\n" + "\u00e9 and more,yes\n".encode() * SAMPLE_BYTES),
        ("cut.jsonl", b'{"question": "why", "answer": "so"}\n' * SAMPLE_BYTES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the time of its packing is in a .gz file
)  # fmt: skip
def test_what_cannot_be_known_is_left_to_the_container(deployed: Deployed, name: str, content: bytes) -> None:
    assert problems_of(samples_of(spec_of(put(name, content)), clients)) == []
    assert first_bytes("gs://no-such-bucket/a.csv", clients) is None
    assert first_bytes(f"gs://{BUCKET}/no-such-object.csv", clients) is None
    assert first_bytes("owner/rows", clients) is None


FOUND = {
    "any": (b"x", "any has no extension of a data file"),
    "torn.csv.gz": (gzip.compress(b"question,answer\n1,2\n")[:-9], "is not a complete .gz file"),
    "plain.csv.gz": (b"question,answer\n1,2\n", "is not a complete .gz file"),
    "latin.csv": ("question,answer\nn\u00e9,\u00e0\n".encode("latin-1"), "is not UTF-8 text"),
    "quote.csv": (b'"question,answer\n1,2', "is not CSV"),
    "shifted.csv": (b"question,answer\na, b,c\nd,e\n", "line 2 of the data set has 3 fields; the header has 2 columns"),
    "broken.jsonl": (b'{"question": "a", "answer": "b"}\n{"question":\n', "line 2 of the data set is not JSON"),
    "deep.json": (b"[" * 100_000, "row 0 of the data set"),
    "broken.json": (
        b'[{"question": "a", "answer": "b"}, {"question": "a" "answer"',
        "row 1 of the data set is not JSON",
    ),
    "deep.jsonl": (b'{"x":' * 10_000, "line 1 of the data set"),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_broken_file_is_found_before_it_costs(deployed: Deployed, name: str) -> None:
    content, message = FOUND[name]
    [problem] = problems_of(samples_of(spec_of(put(name, content)), clients))
    assert problem.pointer == "/dataset/source"
    assert message in problem.message


def test_each_of_the_first_files_is_looked_at(deployed: Deployed) -> None:
    folder = put("many/a.csv", csv_of("question,answer")).removesuffix("a.csv")
    put("many/b.csv", csv_of("question,reply"))
    for source in (folder, f"{folder}*.csv", [f"{folder}{name}.csv" for name in "ab"]):
        problems = problems_of(samples_of(spec_of(source), clients))
        assert [f"{BUCKET}/many/b.csv" in (problem.expected or "") for problem in problems] == [True]
    put("many/c.tsv", "x")
    [problem] = problems_of(samples_of(spec_of(folder), clients))
    assert "many/c.tsv is a .tsv file, and gs://data/many/a.csv a .csv file" in problem.message


ODD: dict[str, list[dict[str, Any]]] = {
    "label": [{"prompt": "why not", "completion": "so", "label": number % 2 == 0} for number in range(30)],
    "chosen": [{"prompt": "why not", "chosen": "so", "rejected": "no"}] * 30,
    "'role'": [{"messages": [{"role": "narrator", "content": "x"}, *MESSAGES[0]["messages"]]}] * 30,
    "images": [{**MESSAGES[0], "images": ["a.png"]}] * 30,
}


@pytest.mark.parametrize("word", ODD)
def test_rows_that_would_teach_something_else_are_found_before_they_cost(
    deployed: Deployed, tmp_path: Path, word: str
) -> None:
    lines = "\n".join(json.dumps(row) for row in ODD[word])
    spec = spec_of(put("odd.jsonl", lines), None)
    [problem] = problems_of(samples_of(spec, clients))
    assert word.strip("'") in problem.message
    assert not is_trainable(spec, tmp_path)


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_a_command_names_the_column_and_drops_nothing(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if command == "validate":  # which reads data on a local stack only
        stack = replace(connect(None), stack=StackInfo(0, 0, "", "", "", "", {}, ""))
        monkeypatch.setattr("dropforge_cli.specs.find", lambda state: stack)
    uri = put("own.csv", csv_of("question,answer"))
    document = json.loads(EXAMPLE.read_text()) | {
        "dataset": {"source": uri, "columns": {"prompt": "{questoin}", "completion": "{answer}"}}
    }
    (tmp_path / "spec.json").write_text(json.dumps(document))
    result = CliRunner().invoke(cli, [command, str(tmp_path / "spec.json")])
    assert result.exit_code == 1
    assert "/dataset/columns/prompt: the template names the column 'questoin', which the data lacks" in result.output
    assert f"did you mean 'question'? the columns of {uri}: question, answer" in result.output
    specs = clients.storage().list_blobs("p-specs")
    assert [blob.name for blob in specs] == []
