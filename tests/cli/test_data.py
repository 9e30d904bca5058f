"""`dropforge data check`: files, objects and specs; with a model, by the trainer's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from containers.common import chat
from containers.common.rows import prepare
from dropforge.spec import Dataset, Evaluation
from dropforge_cli import data as command
from dropforge_cli import data_tokens
from dropforge_local import tiny

from ..deployments import clients
from .conftest import ROOT, Deployed, Run

ROWS = [{"prompt": f"How many orders are above {number}?", "completion": f"SELECT {number};"} for number in range(60)]
COLUMNS = {"prompt": "{ticket}", "completion": "{team}"}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def spec(**changes: Any) -> str:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "evaluation": {},
        "serve": None,
        **changes,
    }
    Path("job.json").write_text(json.dumps(document))
    return "job.json"


@pytest.fixture(scope="session")
def model() -> str:
    return str(tiny.base_model(ROOT / "build" / "tiny"))


def test_a_good_file_has_no_fault(dropforge: Run) -> None:
    Path("rows.jsonl").write_text(lines(ROWS))
    result = dropforge("data", "check", "rows.jsonl")
    assert result.exit_code == 0, result.output
    for told in ("rows.jsonl  60 rows, form prompt_completion", "57 rows to train on, 3 held out", "no fault found"):
        assert told in result.output


def test_a_fault_is_named_with_its_row_and_the_exit_status_is_1(dropforge: Run) -> None:
    Path("rows.csv").write_text("ticket,team,row\n" + "lamp arrived,returns,1\n" * 30 + "lamp is late,\ufffd,2\n" * 3)
    result = dropforge("data", "check", spec(dataset={"source": "rows.csv", "columns": COLUMNS}))
    assert result.exit_code == 1
    assert "fault: 3 rows: the text has the replacement character U+FFFD (the first: row 30)" in result.output
    assert "ticket (used), team (used), row (harmless)" in result.output
    assert "  fix: read the source in its own encoding" in result.output
    assert "late" not in result.output


def test_programs_get_json(dropforge: Run) -> None:
    Path("rows.json").write_text(json.dumps([*ROWS, {**ROWS[0], "rejected": "no"}]))
    result = dropforge("data", "check", "rows.json", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"], told["rows"], told["usable"]) == (1, False, 61, 60)
    assert told["columns"] == {"prompt": "used", "completion": "used", "rejected": "refused"}
    [finding] = told["findings"]
    assert (finding["level"], finding["row"], finding["rows"]) == ("refused", 60, 1)
    assert (told["tokens"], told["run"], sum(told["estimated_lengths"].values())) == (None, None, 60)


def test_an_object_of_a_bucket_is_read(deployed: Deployed) -> None:
    bucket = clients.storage().create_bucket("p-data")
    bucket.blob("rows.jsonl").upload_from_string(lines(ROWS))
    bucket.blob("judge.jsonl").upload_from_string(lines(ROWS[:2]))
    evaluation = {"source": "gs://p-data/judge.jsonl"}
    path = spec(dataset={"source": "gs://p-data/rows.jsonl"}, evaluation=evaluation)
    told = json.loads(deployed.run("data", "check", path, "--json").stdout)
    assert (told["ok"], told["train"], told["held_out"]) == (True, 58, 2)
    assert told["run"]["steps"] == 8  # of 8 rows
    missing = deployed.run("data", "check", "gs://p-data/none.jsonl")
    assert (missing.exit_code, "none.jsonl" in missing.output) == (1, True)


def test_parquet_is_read(dropforge: Run) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(ROWS), "rows.parquet")
    assert "60 rows, form prompt_completion" in dropforge("data", "check", "rows.parquet").output
    Path("bad.parquet").write_bytes(b"PAR1")
    bad = dropforge("data", "check", "bad.parquet")
    assert (bad.exit_code, "the data set is not a complete .parquet file" in bad.output) == (1, True)


@pytest.mark.parametrize(
    ("source", "told"), [("none.jsonl", "No such file"), ("rows.xlsx", "expected a name ending in .jsonl, .json")]
)
def test_what_cannot_be_read_is_told(dropforge: Run, source: str, told: str) -> None:
    Path("rows.xlsx").write_bytes(b"x")
    result = dropforge("data", "check", source)
    assert (result.exit_code, told in result.output) == (1, True)


def test_random_tokens_have_no_rows(dropforge: Run) -> None:
    examples = [path for path in (ROOT / "examples").rglob("*.json") if '"synthetic"' in path.read_text()]
    assert "there are no rows to check" in dropforge("data", "check", examples[0]).output


def test_the_token_ids_are_those_of_the_trainer(dropforge: Run, model: str) -> None:
    Path("rows.jsonl").write_text(lines(ROWS))
    path = spec(dataset={"source": "rows.jsonl"}, training={"max_length": 32})
    told = json.loads(dropforge("data", "check", path, "--model", model, "--show", "2", "--json").stdout)["tokens"]
    split = prepare(ROWS, Dataset(source="gs://data/rows.jsonl"), Evaluation(), 42)
    encoded = chat.encode(chat.load_tokenizer(model, False), split.train, 32, "rows")
    assert (told["rows"], told["tokens"]) == (57, len(encoded.input_ids.values))
    assert told["learnt"] == (encoded.labels.values != chat.IGNORED).sum()
    assert (told["cut"], told["dropped"]) == (encoded.truncated, encoded.dropped)
    assert (told["answers_given"], told["answers_learnt"]) == (encoded.given, encoded.learnt)
    assert sum(told["lengths"].values()) == 57
    for shown, row in zip(told["shown"], split.train, strict=False):
        [asked, answer] = shown["parts"]
        assert (shown["row"], asked["is_learnt"], answer["is_learnt"]) == (row.number, False, True)
        assert row.answer in answer["text"]
        assert row.messages[0]["content"] in asked["text"]
    assert len(told["shown"]) == 2


def test_the_template_of_the_spec_is_tried_and_makes_the_token_ids(dropforge: Run, model: str) -> None:
    Path("rows.jsonl").write_text(lines(ROWS))
    turns = "{% for m in messages %}{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    template = f"{turns}{{% if add_generation_prompt %}}assistant> {{% endif %}}"
    options = ("--model", model, "--show", "1", "--json")
    path = spec(dataset={"source": "rows.jsonl"}, model={"source": "owner/tiny-1m", "chat_template": template})
    [shown] = json.loads(dropforge("data", "check", path, *options).stdout)["tokens"]["shown"]
    asked, _ = shown["parts"]
    assert asked["text"].startswith("user> ")
    assert asked["text"].endswith("assistant> ")
    path = spec(dataset={"source": "rows.jsonl"}, model={"source": "owner/tiny-1m", "chat_template": turns})
    refused = dropforge("data", "check", path, *options)
    assert refused.exit_code == 1
    assert "model.chat_template ignores add_generation_prompt" in refused.stdout


def test_rows_are_shown_with_what_is_learnt(dropforge: Run, model: str) -> None:
    Path("rows.jsonl").write_text(lines(ROWS))
    output = dropforge("data", "check", "rows.jsonl", "--model", model, "--show", "1").output
    assert "\u27e6SELECT " in output
    assert "57 of 57 answers are learnt whole" in output


def test_what_the_model_cannot_take_is_refused(dropforge: Run, model: str) -> None:
    Path("rows.jsonl").write_text(lines([{**row, "prompt": row["prompt"] + " very" * 200} for row in ROWS]))
    path = spec(dataset={"source": "rows.jsonl"}, training={"max_length": 64})
    result = dropforge("data", "check", path, "--model", model)
    assert result.exit_code == 1
    assert "are longer than training.max_length 64" in result.output
    assert "  fix: raise training.max_length (the median row has" in result.output
    assert "cut" in result.output  # in the histogram


def test_rows_are_drawn_as_the_training_shuffles_them(
    dropforge: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MODEL_ROWS", 40)
    Path("rows.jsonl").write_text(lines(ROWS))
    path = spec(dataset={"source": "rows.jsonl"})
    told = json.loads(dropforge("data", "check", path, "--model", model, "--show", "40", "--json").stdout)
    split = prepare(ROWS, Dataset(source="gs://data/rows.jsonl", limit=40), Evaluation(), 42)
    assert [row["row"] for row in told["tokens"]["shown"]] == [row.number for row in split.train]
    assert told["train"] == 57
    assert told["run"]["tokens"] == round(told["tokens"]["tokens"] * 57 / len(split.train))


def test_without_transformers_lengths_are_estimated(
    dropforge: Run, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_tokens, "find_spec", lambda name: None if name == "transformers" else True)
    Path("rows.jsonl").write_text(lines(ROWS))
    result = dropforge("data", "check", "rows.jsonl", "--model", model)
    assert result.exit_code == 0
    assert "estimated as 4 characters each: transformers is not installed" in result.output


def test_submit_tells_the_verdict_in_one_line(deployed: Deployed) -> None:
    rows = [*ROWS, ROWS[3]]
    clients.storage().create_bucket("p-data").blob("rows.jsonl").upload_from_string(lines(rows))
    path = spec(dataset={"source": "gs://p-data/rows.jsonl"})
    result = deployed.run("submit", path)
    assert result.exit_code == 0, result.output
    verdict = "gs://p-data/rows.jsonl: first 61 rows, prompt_completion, 61 usable; 1 row: the same text as row 3"
    assert f"job.json: data: {verdict} (the first: row 60)" in result.stderr
