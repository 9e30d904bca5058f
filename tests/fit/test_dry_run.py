"""The dry run: every phase of the full-size examples against its machine, by the real models' configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dropforge.fit.batch import batch_of
from dropforge.fit.known import KNOWN_MODELS
from dropforge.fit.maxtext import SEALED_ROWS
from dropforge.fit.phases import Row, phase_rows
from dropforge.fit.plan import phase_problems
from dropforge.fit.shape import ModelShape, shape_of
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.machine import GIB
from dropforge.stages.admission import fit_problems

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.json"))
BY_NAME = {path.stem: json.loads(path.read_text()) for path in EXAMPLES}
L4, GKE, TPU, RAY = "cloud-run-gemma-2b-qlora", "gke-gemma-3-12b-fsdp", "tpu-vm-qwen3-4b", "ray-llama3-8b-sft"
H100 = {"type": "gke", "accelerator": "nvidia-h100-80gb", "placements": [{"region": "us-central1"}]}
TRL = ["download", "tokenise", "train", "checkpoint", "merge", "evaluate", "export", "upload"]
MAXTEXT = ["download", "tokenise", "convert", "train", "checkpoint", "evaluate", "export", "upload"]


def spec_of(name: str, **changes: Any) -> JobSpec:
    """An example with changes: a dict changes the fields of a part, any other value replaces the part."""
    document = json.loads(json.dumps(BY_NAME[name]))
    for part, change in changes.items():
        document[part] = {**document[part], **change} if isinstance(change, dict) and document.get(part) else change
    return parse_spec(json.dumps(document).encode())


def on_h100(model: str, adapter: str, method: str = "sft", **target: Any) -> JobSpec:
    document = {**BY_NAME[GKE], "model": {"source": model}, "target": {**H100, **target}, "serve": None}
    document["training"] = {"method": method, "adapter": {"type": adapter}, "max_length": 512}
    document["evaluation"] = {"holdout_fraction": 0.05}
    return parse_spec(json.dumps(document).encode())


def shape_for(spec: JobSpec) -> ModelShape:
    shape = shape_of(KNOWN_MODELS[spec.model.source].config)
    assert shape is not None
    return shape


def row_of(spec: JobSpec, phase: str) -> Row:
    return next(row for row in phase_rows(spec, shape_for(spec)) if row.need.phase == phase)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_phase_of_a_full_size_example_fits_its_machine(path: Path) -> None:
    spec = parse_spec(path.read_bytes())
    rows = phase_rows(spec, shape_for(spec))
    phases = list(TRL if spec.target.trainer == "trl" else MAXTEXT)
    if spec.training.method == "pretrain":
        phases.remove("convert")
    assert [row.need.phase for row in rows] == phases + (["serve"] if spec.serve else [])
    assert {row.need.phase: row.short for row in rows if row.short} == {}
    assert fit_problems(spec, shape_for(spec)) == []
    assert all(row.left["host"] is not None for row in rows)  # no example relies on a memory that nobody knows


@pytest.mark.parametrize(
    ("example", "phase", "gigabytes"),
    [  # the needs that were worked out by hand from the same configurations (docs/training.md)
        (L4, "train", 5.6),
        (GKE, "train", 110),
        (TPU, "train", 12.4),
        (RAY, "train", 15.5),
        (GKE, "evaluate", 40),
        (TPU, "evaluate", 10),
        (RAY, "evaluate", 13.5),
        (RAY, "serve", 18.5),
    ],
)
def test_the_accelerator_needs_what_arithmetic_says(example: str, phase: str, gigabytes: float) -> None:
    assert row_of(spec_of(example), phase).need.accelerator / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_the_disk_holds_two_checkpoints_and_the_weights_before_and_after() -> None:
    tpu = shape_for(spec_of(TPU))
    checkpoint, base = 12 * tpu.parameters, tpu.file_bytes
    assert row_of(spec_of(TPU), "checkpoint").need.disk == base + 4 * tpu.parameters + 2 * checkpoint
    assert row_of(spec_of(TPU), "export").need.disk == base + 4 * tpu.parameters + checkpoint + base
    whole = on_h100("meta-llama/Llama-3.1-8B", "none")
    assert row_of(whole, "checkpoint").need.disk == pytest.approx((2 + 24) * 8.03e9, rel=0.01)


@pytest.mark.parametrize("example", [TPU, RAY])
def test_maxtext_evaluates_on_the_chips_and_compares_the_export_on_the_host(example: str) -> None:
    """As containers/train_maxtext does: the trainer's process judges the held-out rows; PyTorch loads the export."""
    spec = spec_of(example)
    shape = shape_for(spec)
    train, evaluate, export = (row_of(spec, phase) for phase in ("train", "evaluate", "export"))
    assert evaluate.machine == train.machine == spec.target.machine
    assert train.need.accelerator > evaluate.need.accelerator > 12 * shape.parameters // spec.target.machine.devices
    assert evaluate.need.host < 2 * shape.parameters  # no copy of the weights
    assert evaluate.need.disk == row_of(spec, "checkpoint").need.disk
    assert (export.machine, export.need.accelerator) == (spec.target.driver_machine, 0)
    assert export.need.host > 8 * shape.parameters


def test_many_held_out_rows_and_long_answers_cost_maxtext_no_host_memory() -> None:
    """The host answers a few rows after the training, however many the chips judge."""
    few, many = (spec_of(TPU, evaluation={"max_rows": rows}) for rows in (SEALED_ROWS, 2000))
    assert row_of(many, "export").need == row_of(few, "export").need
    assert row_of(many, "evaluate").need == row_of(few, "evaluate").need


def test_logits_of_a_large_batch_are_counted_in_the_evaluation_on_the_chips() -> None:
    one, four = (spec_of(TPU, training={"per_device_train_batch_size": batch}) for batch in (1, 4))
    more = row_of(four, "evaluate").need.accelerator - row_of(one, "evaluate").need.accelerator
    assert more > 3 * 1024 * 8 * shape_for(one).vocabulary


@pytest.mark.parametrize(
    ("example", "training", "expected"),
    [
        (L4, {}, "2 rows, at most 1,024 tokens"),
        (L4, {"packing": True}, "2 blocks, at most 1,024 tokens"),
        (L4, {"per_device_train_batch_size": None}, "16 rows, at most 8,192 tokens"),
        (TPU, {}, "8 blocks, at most 16,384 tokens"),
        (TPU, {"packing": "auto"}, "8 rows, at most 16,384 tokens"),
        # MaxText packs short rows where the spec has no batch size: the plan does not know their lengths.
        (TPU, {"packing": "auto", "per_device_train_batch_size": None}, "8 sequences, at most 16,384 tokens"),
    ],
)
def test_a_step_is_told_in_the_unit_of_the_spec(example: str, training: dict[str, Any], expected: str) -> None:
    assert str(batch_of(spec_of(example, training=training))).startswith(expected)


def test_files_on_cloud_run_count_as_memory_unless_there_is_a_disk() -> None:
    in_memory, on_disk = (row_of(spec_of(L4, target={"disk_gib": disk}), "merge") for disk in (None, 20))
    assert in_memory.left["disk"] is None
    assert in_memory.host == on_disk.host + on_disk.need.disk
    assert on_disk.left["disk"] == 20 * GIB - on_disk.need.disk


REFUSED: list[tuple[str, Callable[[], JobSpec], str, str, str]] = [
    (
        "qlora of 14 billion parameters on an L4: the files do not fit beside what the GPU cannot hold",
        lambda: spec_of(L4, model={"source": "Qwen/Qwen3-14B"}, serve=None),
        "/target/disk_gib",
        "phase 'evaluate' does not fit the host memory",
        "target.disk_gib 56",
    ),
    (
        "its endpoint",
        lambda: spec_of(L4, model={"source": "Qwen/Qwen3-14B"}, target={"disk_gib": 60}),
        "/serve",
        "phase 'serve' does not fit the memory of the accelerator",
        "serve.accelerator 'nvidia-rtx-pro-6000'",
    ),
    (
        "qlora of 70 billion parameters on an H100, with the default disk",
        lambda: on_h100("meta-llama/Llama-3.1-70B", "qlora"),
        "/target/ephemeral_storage_gib",
        "phase 'merge' does not fit the disk",
        "target.ephemeral_storage_gib 26",
    ),
    (
        "qlora of 70 billion parameters on an H100, with too little memory for the layers that the GPU cannot hold",
        lambda: on_h100("meta-llama/Llama-3.1-70B", "qlora", ephemeral_storage_gib=300, memory_gib=64),
        "/target/memory_gib",
        "phase 'evaluate' does not fit the host memory",
        "target.memory_gib",
    ),
    (
        "lora of 70 billion parameters on an H100",
        lambda: on_h100("meta-llama/Llama-3.1-70B", "lora", ephemeral_storage_gib=300),
        "/model/source",
        "phase 'evaluate' does not fit the memory of the accelerator",
        "training.adapter.type 'qlora' or target.accelerator_count 4",
    ),
    (
        "all weights of 8 billion parameters with the default disk",
        lambda: on_h100("meta-llama/Llama-3.1-8B", "none", accelerator_count=8),
        "/target/ephemeral_storage_gib",
        "phase 'checkpoint' does not fit the disk",
        "target.ephemeral_storage_gib 225",
    ),
    (
        "a batch that needs larger GPUs",
        lambda: spec_of(GKE, target={"accelerator": "nvidia-h100-80gb"}, training={"gradient_checkpointing": False}),
        "/model/source",
        "phase 'train' does not fit the memory of the accelerator",
        "training.gradient_checkpointing true or training.per_device_train_batch_size 4 or target.accelerator",
    ),
    (
        "a family that is not converted",
        lambda: spec_of(TPU, model={"source": "google/gemma-2b"}),
        "/model/source",
        "cannot convert this type of model to MaxText and back",
        "one of llama, qwen3",
    ),
    (
        "a model that is too large for the chips",
        lambda: spec_of(
            TPU,
            model={"source": "Qwen/Qwen3-8B"},
            target={"data_disk_gib": 1000, "placements": [{"zone": "us-central1-a"}]},
        ),
        "/model/source",
        "phase 'train' does not fit the memory of the accelerator",
        "target.accelerator_type 'v5p-8'",
    ),
    (
        "a data disk that is too small",
        lambda: spec_of(TPU, target={"data_disk_gib": 100}),
        "/target/data_disk_gib",
        "phase 'checkpoint' does not fit the disk",
        "target.data_disk_gib 113",
    ),
    (
        "a head that is too small",
        lambda: spec_of(RAY, target={"head_memory_gib": 32}),
        "/target/head_memory_gib",
        "phase 'convert' does not fit the host memory",
        "target.head_memory_gib 63",
    ),
    (
        "a context that the endpoint's GPU cannot hold",
        lambda: spec_of(RAY, serve={"max_model_len": 65_536, "memory_gib": 24}),
        "/serve",
        "phase 'serve' does not fit the memory of the accelerator",
        "serve.accelerator_count 2",
    ),
    (
        "an endpoint that takes fewer tokens than the rows have",
        lambda: spec_of(L4, serve={"max_model_len": 256}),
        "/serve/max_model_len",
        "the endpoint takes fewer tokens",
        "at least training.max_length, 512",
    ),
]


@pytest.mark.parametrize(
    ("make", "pointer", "message", "mend"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_phase_that_does_not_fit_is_refused_with_what_would_do(
    make: Callable[[], JobSpec], pointer: str, message: str, mend: str
) -> None:
    spec = make()
    problems = {problem.pointer: problem for problem in fit_problems(spec, shape_for(spec))}
    assert pointer in problems, problems
    problem = problems[pointer]
    assert message in problem.message
    assert mend in (problem.expected or ""), problem
    assert "billion parameters" in (problem.found or "") or "phase" not in problem.message


@pytest.mark.parametrize("make", [case[1] for case in REFUSED[:12]], ids=[case[0] for case in REFUSED[:12]])
def test_every_change_that_a_refusal_names_would_do(make: Callable[[], JobSpec]) -> None:
    """The changes are applied as they are written, one at a time; the refused resource is no longer short."""
    spec = make()
    for problem in phase_problems(spec, shape_for(spec)):
        for change in (problem.expected or "").split(" or "):
            if not change.startswith(("target.", "serve.", "training.")):
                continue
            document = spec.model_dump(mode="json", by_alias=True)
            path, *others = change.split(", ")
            part = path.split(".")[0]
            for words in (path, *(f"{part}.{other}" for other in others)):
                field, _, value = words.partition(" ")
                *parts, last = field.split(".")
                node = document
                for name in parts:
                    node = node[name]
                node[last] = json.loads(value.replace("'", '"'))
            changed = parse_spec(json.dumps(document).encode())
            left = phase_problems(changed, shape_for(changed))
            assert (problem.pointer, problem.message) not in [(each.pointer, each.message) for each in left], change


def test_a_refusal_names_no_change_that_the_target_does_not_take() -> None:
    """A checkpoint of all weights needs a larger disk than Cloud Run has, and more memory than beside 8 CPUs."""
    training, model = {"adapter": {"type": "none"}}, {"source": "meta-llama/Llama-3.1-70B"}
    spec = spec_of(L4, model=model, training=training, target={"disk_gib": 100})
    assert row_of(spec, "checkpoint").need.disk > 1000 * GIB
    found = "".join(problem.expected or "" for problem in phase_problems(spec, shape_for(spec)))
    assert "disk_gib" not in found
    assert "target.memory_gib" not in found
