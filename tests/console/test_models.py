"""The page Models: the lineage of each model, and values that are read once for each generation of a record."""

from __future__ import annotations

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.artifacts import Source
from dropforge.run.record import Parity, Record, RunError, RunState
from dropforge.run.summary import Summary
from dropforge.spec import parse_spec
from dropforge_console import models
from dropforge_console.reader import KEPT, Cache, Committed, Run

from .test_views import NOW, SPEC, at, attempt, record

BASE_RUN = "base-model-0123456789ab"
GATED = parse_spec(
    b"""{"api_version": "dropforge/v1", "name": "text-to-sql", "model": {"source": "google/gemma-2b"},
    "dataset": {"source": "owner/data"}, "evaluation": {"gate": {"metric": "exact_match", "min": 0.3}},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]}, "serve": null}"""
)


def committed(base: str = "google/gemma-2b", **metrics: float | None) -> Committed:
    return Committed(NOW, Source(uri=base, revision="a" * 40), Source(uri="owner/data", revision="sha256:" + "b" * 64),
                     "attempt-1/model", metrics, 3, 5_100_000_000)  # fmt: skip


def ended(**fields: object) -> Record:
    return record((RunState.TRAINING, 1), (RunState.SUCCEEDED, 20), attempts=[attempt(ended=at(20))], **fields)


def test_a_model_of_a_model_leads_to_its_run() -> None:
    run = Run(ended(), SPEC)
    found = models.model(run, committed(f"gs://runs/models/{BASE_RUN}/attempt-2/model"), [], "runs")
    assert found.base.run == BASE_RUN
    assert found.base.revision == "a" * 12
    assert found.dataset.revision == "b" * 12
    assert models.model(run, committed(f"gs://other/models/{BASE_RUN}/x"), [], "runs").base.run == ""
    assert models.model(run, committed("gs://runs/models/../x"), [], "runs").base.run == ""
    assert found.size == "5.1 GB in 3 files"
    assert found.served == []


def test_the_gate_is_what_decided() -> None:
    error = RunError(error_class=ErrorClass.GATE, message="exact_match is 0.1")
    passed = ended(metrics={"exact_match": 0.9})
    states = [
        models.model(Run(each, spec), committed(), [], "runs").gate.word
        for each, spec in (
            (passed, GATED), (ended(error=error), GATED), (ended(), GATED), (passed, SPEC), (passed, None),
        )
    ]  # fmt: skip
    assert states == ["passed", "not passed", "not decided", "no gate", "no gate"]
    assert models.model(Run(passed, GATED), committed(), [], "runs").gate_rule == "exact match ≥ 0.3"


@pytest.mark.parametrize("state", ["checking", "sealed", "unsealed", "failed"])
def test_each_state_of_the_parity_has_a_shape(state: str) -> None:
    run = Run(ended(parity=Parity.model_validate({"state": state})), SPEC)
    assert models.model(run, committed(), [], "runs").parity.word == state


def test_a_run_without_an_attempt_that_succeeded_has_no_model() -> None:
    failed = attempt(ended=at(3), error=RunError(error_class=ErrorClass.CODE, message="x"))
    assert not Summary.of(record((RunState.FAILED, 1), attempts=[failed])).has_trained
    assert Summary.of(ended()).has_trained


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (5_019, "5.02 kB"), (2.5e12, "2.5 TB")])
def test_sizes_have_units(size: int, text: str) -> None:
    assert models.size_text(size) == text


def test_a_value_is_read_once_for_each_generation() -> None:
    read: list[str] = []

    def value(run: str) -> int:
        read.append(run)
        return len(read)

    kept = Cache(value)
    assert [kept.of("a", 1), kept.of("a", 1), kept.of("a", 2), kept.of("a", 2)] == [1, 1, 2, 2]
    for number in range(KEPT):
        kept.of(f"run-{number}", 1)
    assert kept.of("run-0", 1) == 3
    kept.of("a", 2)
    assert len(read) == KEPT + 3
