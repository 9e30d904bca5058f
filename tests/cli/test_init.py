"""`init` writes specs that `validate` accepts, and looks at a local file of rows."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dropforge.rows.split import MIN_TRAIN_ROWS
from dropforge.spec import registry
from dropforge_cli.init import ANSWERS, columns_of

from .conftest import Run
from .test_calling import Terminal


def written(dropforge: Run, *options: str) -> dict[str, Any]:
    result = dropforge("init", "job.json", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == "job.json\n"
    checked = dropforge("validate", "job.json")
    assert checked.exit_code == 0, checked.output
    document: dict[str, Any] = json.loads(Path("job.json").read_text())
    return document


def csv(rows: int = 30, head: str = "ticket,team", name: str = "tickets.csv") -> str:
    Path(name).write_text("".join(f"{line}\n" for line in [head, *(f'"ticket {n}, late",{n}' for n in range(rows))]))
    return name


@pytest.mark.parametrize("target", registry.PLATFORMS)
@pytest.mark.parametrize("serve", ["--serve", "--no-serve"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gs://local-data/tiny-qwen3"])
def test_every_target_gets_a_valid_spec(dropforge: Run, target: str, serve: str, model: str) -> None:
    document = written(dropforge, "--target", target, serve, "--model", model)
    assert document["target"]["type"] == target
    assert (document["serve"] is None) is (serve == "--no-serve")


def test_a_csv_file_proposes_its_columns(dropforge: Run) -> None:
    document = written(dropforge, "--data", csv(), "--answer", "team", "--bucket", "p-data")
    assert document["name"] == "tickets"
    assert document["dataset"] == {
        "source": "gs://p-data/tickets.csv", "columns": {"prompt": "{ticket}", "completion": "{team}"},
    }  # fmt: skip
    assert document["evaluation"]["holdout_fraction"] * 30 >= 1


def test_the_next_commands_are_printed(dropforge: Run) -> None:
    result = dropforge("init", "--data", csv(name="my tickets.csv"), "--answer", "team", "--bucket", "p-data")
    assert "next: dropforge put 'my tickets.csv' 'gs://p-data/my tickets.csv'\n" in result.stderr
    assert "next: dropforge submit my-job.json --watch\n" in result.stderr


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": []}, None),
        ({"prompt": "p", "completion": "c", "id": 1}, None),
        ({"text": "t"}, None),
        ({"id": 1, "size": "q", "in": "c", "answer": "a"}, ("Size: {size}\nIn: {in}", "{answer}")),
        ({"Answer": "a", "question": "q"}, ("{question}", "{Answer}")),
        ({"a_b": "x", "c d": "y", "sql": "z"}, ("A b: {a_b}\nC d: {c d}", "{sql}")),
        ({"instruction": "in full", "output": "o"}, None),
        ({"question": "q q", "context": "c", "answer": "a"}, ("Question: {question}\nContext: {context}", "{answer}")),
        ({"text": "t t", "label": "l"}, ("{text}", "{label}")),
        ({"messages": [{"role": "user", "content": "q q"}, {"role": "assistant", "content": "a"}], "pages": 3}, None),
    ],
)
def test_columns_are_proposed_by_their_names(row: dict[str, Any], columns: tuple[str, str] | None) -> None:
    proposed = columns_of(row, Path("rows.csv"))
    assert proposed == (columns and {"prompt": columns[0], "completion": columns[1]})
    assert "answer" in ANSWERS


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("a,b\n1,2\n", "few.csv", f"few.csv has 1 row of data; expected at least {MIN_TRAIN_ROWS}"),
        ("a,b\n", "head-only.csv", f"head-only.csv has no row of data; expected at least {MIN_TRAIN_ROWS}"),
        ("", "empty.csv", "empty.csv has no row of data"),
        (
            "a;b\n" + "1;2\n" * 9,
            "semicolons.csv",
            "the columns of semicolons.csv are separated by ';'; expected commas",
        ),
        ("a,b\n" + "1,2\n" * 9, "commas.tsv", "are separated by ','; expected commas, or tabs in a .tsv"),
        ("a,b\n1,2\n", "tickets", "tickets has no extension of a data file; expected a name ending in .jsonl, .json"),
        ("a,b\n1,2,3\n", "long.csv", "long.csv: line 2 of the data set has 3 fields; the header has 2 columns"),
        (None, "none.xlsx", "the data none.xlsx cannot be read: No such file"),
        (
            "a{b,team\n" + "a,b\n" * 9,
            "head.csv",
            "the column 'a{b' of head.csv cannot be in a template",
        ),
        ('{"a": 1}\n{"a": \n', "bad.jsonl", "bad.jsonl: line 2 of the data set is not JSON: Expecting value"),
        ("ticket,team\n" + "a,b\n" * 9, "own.csv", "no name says which has the answers\nhint: say it: --answer team"),
        ("prompt,chosen,rejected\n" + "a,b,c\n" * 9, "pairs.csv", "pairs.csv has the column 'chosen': not each"),
        (
            "question,good,rejected_response\n" + "a,b,c\n" * 9,
            "more.csv",
            "more.csv has the column 'rejected_response'",
        ),
        ("prompt,completion,label\n" + "a,b,1\n" * 9, "kto.csv", "kto.csv has the column 'label'"),
        ("a\n" + "1\n" * 9, "one.csv", "one.csv has the columns a; expected a question and an answer"),
        (
            "[1, 2, 3, 4, 5, 6, 7, 8]",
            "list.json",
            "list.json: row 0 of the data set is a number; expected a list of objects",
        ),
        (None, "none.csv", "the data none.csv cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused(
    dropforge: Run, content: str | None, name: str, expected: str
) -> None:
    if content is not None:
        Path(name).write_text(content)
    result = dropforge("init", "--data", name)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert not Path("my-job.json").exists()


def test_a_compressed_file_needs_a_name_that_says_it(dropforge: Run) -> None:
    Path("rows.csv").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 9))
    result = dropforge("init", "--data", "rows.csv")
    assert result.exit_code == 1
    assert "error: rows.csv is compressed by gzip; expected a name that ends in .gz" in result.stderr
    assert not Path("my-job.json").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv.gz", gzip.compress(b"ticket,team\n" + b"a,b\n" * 9)),
        ("rows.tsv", b"ticket\tteam\n" + b"a, and more\tb\n" * 9),
        ("rows.jsonl.gz", gzip.compress(b'{"ticket": "a", "team": "b"}\n' * 5) * 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the time of its packing is in a .gz file
)
def test_columns_are_proposed_for_files_of_each_format(dropforge: Run, name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    result = dropforge("init", "--data", name, "--answer", "team", "--bucket", "my-data")
    assert result.exit_code == 0, result.output
    dataset = json.loads(Path("my-job.json").read_text())["dataset"]
    assert dataset == {"source": f"gs://my-data/{name}", "columns": {"prompt": "{ticket}", "completion": "{team}"}}


def test_a_folder_is_proposed_as_a_folder_and_its_files_must_be_of_one_format(dropforge: Run) -> None:
    folder = Path("tickets")
    folder.mkdir()
    assert "the folder tickets has no file" in dropforge("init", "--data", "tickets").stderr
    for name in ("b.csv", "a.csv"):
        (folder / name).write_text("ticket,answer\n" + "a,b\n" * 5)
    (folder / "_SUCCESS").write_text("")
    result = dropforge("init", "--data", "tickets", "--bucket", "my-data")
    assert result.exit_code == 0, result.output
    assert json.loads(Path("my-job.json").read_text())["dataset"]["source"] == "gs://my-data/tickets/"
    assert "next: dropforge put tickets gs://my-data/tickets/" in result.stderr
    (folder / "c.jsonl").write_text("{}")
    refused = dropforge("init", "--data", "tickets", "--force")
    assert "tickets/c.jsonl is a .jsonl file, and tickets/a.csv a .csv file; expected files of" in refused.stderr
    (folder / "c.jsonl").rename(folder / "c.csv")
    assert "c.csv has no row of data" in dropforge("init", "--data", "tickets", "--force").stderr


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.zst"])
def test_no_column_is_proposed_for_a_file_that_only_the_training_reads(dropforge: Run, name: str) -> None:
    Path(name).write_bytes(b"PAR1")
    result = dropforge("init", "--data", name, "--bucket", "my-data")
    assert result.exit_code == 0, result.output
    assert f"note: only the training reads {name}" in result.stderr
    assert json.loads(Path("my-job.json").read_text())["dataset"] == {"source": f"gs://my-data/{name}"}
    assert "only the training reads" in dropforge("init", "--data", name, "--force", "--answer", "a").stderr


def test_another_encoding_is_refused_with_the_command_that_mends_it(dropforge: Run) -> None:
    Path("latin.csv").write_bytes(("ticket,team\n" + "café,a\n" * 9).encode("latin-1"))
    result = dropforge("init", "--data", "latin.csv")
    assert "error: latin.csv: line 2 of the data set is not UTF-8 text: byte 0xe9 at byte 3 of it" in result.stderr
    command = result.stderr.split("`")[1]
    subprocess.run(f"{command} latin.csv > new.csv", shell=True, check=True)
    assert Path("new.csv").read_text(encoding="utf-8") == "ticket,team\n" + "café,a\n" * 9
    assert dropforge("init", "--data", "new.csv", "--answer", "team").exit_code == 0


def test_an_existing_file_stays(dropforge: Run) -> None:
    Path("job.json").write_text("mine")
    result = dropforge("init", "job.json")
    assert (result.exit_code, Path("job.json").read_text()) == (1, "mine")
    assert "--force" in result.stderr
    assert dropforge("init", "job.json", "--force").exit_code == 0


def test_an_invalid_answer_leaves_no_file(dropforge: Run) -> None:
    result = dropforge("init", "--model", "not a model")
    assert result.exit_code == 1
    assert "/model/source: not a source" in result.stderr
    assert os.listdir() == []


def test_a_price_that_is_unknown_leaves_the_budget_out_and_says_so(dropforge: Run) -> None:
    result = dropforge("init", "job.json", "--target", "gke", "--no-serve")
    assert "note: the spec has no budget: the budget cannot be enforced" in result.stderr
    assert "max_cost_usd" not in json.loads(Path("job.json").read_text())["limits"]


def test_questions_in_a_terminal(dropforge: Run) -> None:
    terminal = Terminal("init", "job.json")
    for question, answer in (
        ("Where to train", ""),
        ("Base model", "Qwen/Qwen3-0.6B"),
        ("Data", csv()),
        ("Serve the model", "n"),
        ("Column of the answers", "team"),
    ):
        terminal.wait_for(question)
        terminal.type(answer)
    terminal.wait_for("dropforge submit job.json")
    assert terminal.code() == 0
    assert json.loads(Path("job.json").read_text())["serve"] is None
