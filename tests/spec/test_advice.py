"""Doubtful settings are told before money is spent, and sound specs are not commented on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dropforge.spec import parse_spec
from dropforge.spec.advice import advice
from dropforge_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]


def document(**changes: Any) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "tiny",
        "model": {"source": "Qwen/Qwen3-0.6B"},
        "dataset": {"source": "b-mc2/sql-create-context"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training": {"learning_rate": 0.09}}, "0.09 is so high"),
        ({"training": {"adapter": {"type": "none"}, "learning_rate": 0.01}}, "1e-6 to 5e-5 for all weights"),
        ({"training": {"learning_rate": 1e-5}}, "1e-05 is so low that the adapter may learn nothing"),
        ({"model": {"source": "meta-llama/Llama-3.2-1B"}}, "is gated on the Hugging Face Hub"),
        ({"model": {"source": "google/gemma-2b"}}, "name a token in `secrets`: HF_TOKEN"),
    ],
)
def test_a_doubtful_setting_is_told_by_validate(
    changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where nobody has started a local stack
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(document(**changes)))
    result = CliRunner().invoke(cli, ["validate", str(path)])
    assert result.exit_code == 0, result.output
    (note,) = [line for line in result.stderr.splitlines() if "note:" in line]
    assert expected in note


def test_a_usual_spec_has_no_notes() -> None:
    full = {"adapter": {"type": "none"}, "learning_rate": 1e-5}
    token = {"model": {"source": "google/gemma-2b"}, "secrets": {"HF_TOKEN": "hf-token"}}
    for changes in ({}, {"training": full}, token, {"model": {"source": "gs://bucket/gemma"}}):
        assert advice(parse_spec(json.dumps(document(**changes)).encode())) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.json")), ids=lambda path: path.stem)
def test_the_examples_follow_the_advice(path: Path) -> None:
    assert advice(parse_spec(path.read_bytes())) == []
