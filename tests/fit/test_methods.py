"""A method is one file: another one, registered here, goes through parsing, batch, phase plan and price."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge.base.errors import InvalidSpec
from dropforge.fit.batch import batch_of
from dropforge.fit.memory import least_bytes
from dropforge.fit.phases import Need, phase_rows
from dropforge.money.limits import most_usd
from dropforge.money.plan import make_plan
from dropforge.spec import JobSpec, job_spec_schema, parse_spec
from dropforge.spec.methods import METHODS
from dropforge.spec.parse import forget_platforms
from dropforge_cli.deployment import placeholders

from .test_dry_run import BY_NAME, GKE, L4, TPU, on_h100, shape_for, spec_of

PAIRS = """
from dropforge.spec.methods import Method

METHOD = Method(
    title="preference tuning",
    trainers=("trl", "maxtext"),
    data="rows",
    starts_from_base=True,
    metrics=("loss",),
    sequences_per_row=2,
    frozen_models=1,
)
"""
HELD_OUT = {"holdout_fraction": 0.1, "gate": None}


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A method whose rows are pairs of answers, with a frozen reference beside a whole model."""
    module = f"pairs_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(PAIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "pairs", module)
        forget_platforms()
        yield
    forget_platforms()
    sys.modules.pop(module, None)


def changed(name: str, method: str, **parts: Any) -> bytes:
    """An example without an evaluation, by another method, with other parts."""
    return json.dumps(
        {**BY_NAME[name], "evaluation": None, "training": {**BY_NAME[name]["training"], "method": method}, **parts}
    ).encode()


def trained(name: str, method: str, **training: Any) -> JobSpec:
    return spec_of(name, training={"method": method, **training}, evaluation=HELD_OUT)


def needs(spec: JobSpec) -> dict[str, Need]:
    return {row.need.phase: row.need for row in phase_rows(spec, shape_for(spec)) if row.place == "target"}


def test_a_method_is_in_the_spec_as_long_as_it_is_registered(pairs: None) -> None:
    assert trained(L4, "pairs").training.method == "pairs"
    assert job_spec_schema()["$defs"]["Training"]["properties"]["method"]["enum"] == [*METHODS]


def test_an_unregistered_method_is_refused_with_the_registered_ones() -> None:
    with pytest.raises(InvalidSpec, match="expected one of sft, pretrain"):
        trained(L4, "pairs")


def test_a_gate_needs_a_metric_of_the_method(pairs: None) -> None:
    gate = {**HELD_OUT, "gate": {"metric": "exact_match", "min": 0.5}}
    with pytest.raises(InvalidSpec, match="preference tuning does not measure this") as refused:
        spec_of(L4, training={"method": "pairs"}, evaluation=gate)
    assert refused.value.problems[0].pointer == "/evaluation/gate/metric"
    assert spec_of(L4, training={"method": "sft"}, evaluation=gate)


def test_data_of_another_kind_is_refused_with_the_methods_that_take_it(pairs: None) -> None:
    with pytest.raises(InvalidSpec, match=r"synthetic data teaches no answers.*training\.method 'pretrain'"):
        parse_spec(changed(TPU, "pairs", dataset={"type": "synthetic", "rows": 10}))
    with pytest.raises(InvalidSpec, match=r"training\.method 'sft' or 'pairs'"):
        parse_spec(changed(TPU, "pretrain"))


@pytest.mark.parametrize("example", [L4, GKE, TPU])
def test_the_sequences_of_a_row_count_in_the_batch_and_in_the_memory(pairs: None, example: str) -> None:
    rows, doubled = (trained(example, method, per_device_train_batch_size=1) for method in ("sft", "pairs"))
    assert batch_of(doubled).tokens == 2 * batch_of(rows).tokens
    assert batch_of(doubled).sequences == batch_of(rows).sequences
    one, two = needs(rows), needs(doubled)
    assert one.keys() == two.keys()
    assert two["train"].accelerator > one["train"].accelerator
    assert two["download"] == one["download"]


def test_a_frozen_model_takes_memory_beside_a_whole_model_and_none_beside_an_adapter(pairs: None) -> None:
    whole = {"adapter": {"type": "none"}, "per_device_train_batch_size": 1, "max_length": 64}
    one, two = (trained(GKE, method, **whole) for method in ("sft", "pairs"))
    shape, devices = shape_for(one), one.target.machine.devices
    frozen = needs(two)["checkpoint"].accelerator - needs(one)["checkpoint"].accelerator
    assert 4 * shape.parameters // devices <= frozen < 5 * shape.parameters // devices
    assert least_bytes(100, two.training) - least_bytes(100, one.training) == 400
    adapters = [trained(GKE, method, per_device_train_batch_size=1) for method in ("sft", "pairs")]
    assert adapters[0].training.adapter.type != "none"
    assert len({needs(each)["checkpoint"].accelerator for each in adapters}) == 1
    assert len({least_bytes(100, each.training) for each in adapters}) == 1


def test_a_machine_that_is_too_small_for_the_method_is_refused(pairs: None) -> None:
    """The same spec fits with one model in memory and one sequence a row."""
    short = {}
    for method in ("sft", "pairs"):
        spec = on_h100("Qwen/Qwen3-4B", "none", method)
        short[method] = [row.need.phase for row in phase_rows(spec, shape_for(spec)) if "accelerator" in row.short]
    assert short == {"sft": [], "pairs": ["train", "checkpoint"]}


def test_a_spec_with_the_method_has_a_plan_and_a_price(pairs: None) -> None:
    spec = trained(L4, "pairs")
    plan = make_plan(spec, placeholders(), "specs/a.json", shape=shape_for(spec))
    assert json.loads(spec.model_dump_json())["training"]["method"] == "pairs"
    assert plan.batch == batch_of(spec)
    assert plan.phases == phase_rows(spec, shape_for(spec))
    assert most_usd(spec) == most_usd(trained(L4, "sft"))
