"""The device plan: its choices, and the refusal, with the arithmetic, of a model that does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from containers.common.errors import BAD_CONFIG, JobError
from containers.train_trl.plan import Device, Plan, estimate, keep_rows_per_step, make_plan
from dropforge.fit.shape import ModelShape
from dropforge.spec import JobSpec
from dropforge.spec.machine import GIB

L4 = Device("cuda", "NVIDIA L4", 24 * GIB, bf16=True)
CPU = Device("cpu", "cpu", 16 * GIB, bf16=False)
GEMMA_2B = ModelShape(2_506_172_416, 1_981_808_640, 18, 2048, 16384, 8, 256_000, 2048, 256)
GEMMA_12B = ModelShape(11_766_034_176, 10_758_389_760, 48, 3840, 15360, 16, 262_208, 4096, 2048, True, True)
QWEN_4B = ModelShape(4_022_468_096, 3_633_315_840, 36, 2560, 9728, 32, 151_936, 4096, 1024, True)
LLAMA_8B = ModelShape(8_030_261_248, 6_979_321_856, 32, 4096, 14336, 32, 128_256, 4096, 1024)
TINY = ModelShape(200_000, 147_000, 2, 64, 256, 4, 632, 128, 64)
LENGTHS = [60] * 50 + [200] * 5


def training(adapter: str = "qlora", dropout: float = 0.0, **changes: Any) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "gemma",
        "model": {"source": "google/gemma-2b"},
        "dataset": {"source": "gs://data/x.jsonl"},
        "training": {
            "adapter": {"type": adapter, **({"dropout": dropout} if dropout else {})},
            "max_length": 512,
            **changes,
        },
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }
    return JobSpec.model_validate_json(json.dumps(document))


def plan(device: Device = L4, shape: ModelShape = GEMMA_2B, lengths: list[int] = LENGTHS, **changes: Any) -> Plan:
    return make_plan(training(**changes), shape, device, lengths)


def test_tutorial_001_fits_its_gpu_in_bf16_packed_and_without_recomputing() -> None:
    chosen = plan()
    assert (chosen.dtype, chosen.packing, chosen.gradient_checkpointing) == ("bfloat16", True, False)
    assert chosen.attention == "sdpa"
    assert chosen.threads is None


def test_a_cpu_trains_in_fp32_by_length_on_one_thread() -> None:
    chosen = plan(CPU, TINY)
    assert (chosen.dtype, chosen.packing, chosen.group_by_length, chosen.threads) == ("float32", False, True, 1)
    assert (chosen.batch_size, chosen.gradient_accumulation_steps) == (8, 1)


def test_flash_attention_is_used_where_it_is_installed_and_not_against_the_spec() -> None:
    device = Device("cuda", "NVIDIA H200", 140 * GIB, bf16=True, flash_attention=True)
    assert plan(device).attention == "flash_attention_2"
    eager = training().model_copy(
        update={"model": training().model.model_copy(update={"attn_implementation": "eager"})}
    )
    assert make_plan(eager, GEMMA_2B, device, LENGTHS).attention == "eager"


def test_a_packed_step_holds_about_as_many_rows_as_a_padded_one() -> None:
    chosen = plan(lengths=[128] * 100)
    assert chosen.packing
    assert chosen.batch_size * chosen.gradient_accumulation_steps == 2  # 2 blocks of 512 tokens = 8 rows of 128


@pytest.mark.parametrize("asked", [1, 2, 8])
def test_a_batch_of_the_spec_counts_rows(asked: int) -> None:
    """Blocks of 512 tokens would hold 4 rows of 128 each."""
    chosen = plan(lengths=[128] * 100, per_device_train_batch_size=asked, gradient_accumulation_steps=2)
    assert not chosen.packing
    assert chosen.rows_per_step(1) == asked * 2
    assert plan(
        lengths=[128] * 100, per_device_train_batch_size=asked, packing=True
    ).packing  # the spec asks for blocks


@pytest.mark.parametrize(
    ("shape", "without_dropout", "with_dropout"),
    [
        (GEMMA_2B, 239_112, 353_800),
        (GEMMA_12B, 358_124, 512_748),
        (QWEN_4B, 227_048, 333_544),
        (LLAMA_8B, 295_496, 451_144),
    ],
)
def test_activations_are_those_that_hooks_counted(shape: ModelShape, without_dropout: int, with_dropout: int) -> None:
    """Bytes of a token and a layer, counted with saved-tensor hooks on the real shapes (docs/measurements.md)."""
    for dropout, counted in ((0.0, without_dropout), (0.1, with_dropout)):
        spec = training("lora", dropout)
        estimated = estimate(shape, spec, L4, 1, 1024, checkpointing=False).activations
        assert estimated / (1024 * shape.layers) == pytest.approx(counted, rel=0.01)


def test_rows_as_long_as_a_block_are_not_packed() -> None:
    assert not plan(lengths=[500] * 100).packing


def test_what_the_spec_says_is_what_is_done() -> None:
    chosen = plan(per_device_train_batch_size=3, gradient_checkpointing=True, packing=False)
    assert (chosen.batch_size, chosen.gradient_checkpointing, chosen.packing) == (3, True, False)


def test_recomputing_starts_when_memory_is_short_and_the_step_keeps_its_rows() -> None:
    small = Device("cuda", "small", 8 * GIB, bf16=True)
    chosen = plan(small, packing=False, lengths=[500] * 100)
    assert chosen.batch_size * chosen.gradient_accumulation_steps == 8
    assert chosen.gradient_checkpointing or chosen.batch_size < 8
    assert chosen.estimate.total < 8 * GIB


def test_qlora_needs_a_quarter_of_the_weights_of_lora() -> None:
    lora, qlora = (estimate(GEMMA_2B, training(kind), L4, 1, 512, True) for kind in ("lora", "qlora"))
    assert lora.weights - lora.gradients == 2 * GEMMA_2B.parameters  # beside the adapter, as large as its gradients
    assert qlora.weights < 0.45 * lora.weights  # the embeddings stay in 16 bits


def test_ranks_hold_a_share_of_the_weights_each() -> None:
    h200 = Device("cuda", "NVIDIA H200", 140 * GIB, bf16=True)
    spec = training("none", gradient_checkpointing=True, per_device_train_batch_size=1)
    with pytest.raises(JobError):
        make_plan(spec, GEMMA_12B, h200, LENGTHS)
    chosen = make_plan(spec, GEMMA_12B, h200, LENGTHS, shards=8)
    assert chosen.estimate.optimiser == 8 * GEMMA_12B.parameters // 8
    assert chosen.estimate.gradients == 4 * GEMMA_12B.parameters // 8
    assert chosen.estimate.weights > 4 * GEMMA_12B.parameters // 8  # and the gathered layers


def test_a_resumed_run_keeps_the_rows_of_its_steps() -> None:
    chosen = plan(CPU, TINY)
    assert chosen.rows_per_step(1) == 8
    for rows, processes, expected in ((16, 1, (8, 2)), (8, 2, (4, 1)), (24, 2, (6, 2)), (8, 8, (1, 1))):
        kept = keep_rows_per_step(chosen, rows, processes)
        assert (kept.batch_size, kept.gradient_accumulation_steps) == expected
        assert kept.rows_per_step(processes) == rows
    for rows, processes in ((16, 3), (8, 16)):
        with pytest.raises(JobError, match=f"steps of {rows} rows, which {processes} processes cannot share") as caught:
            keep_rows_per_step(chosen, rows, processes)
        assert caught.value.exit_code == BAD_CONFIG


def test_full_fine_tuning_of_12_billion_parameters_does_not_fit_on_an_l4() -> None:
    with pytest.raises(JobError) as caught:
        plan(shape=GEMMA_12B, adapter="none")
    assert caught.value.exit_code == BAD_CONFIG
    assert (
        "11.77 billion parameters) does not fit on NVIDIA L4: weights 65.7 GiB + optimiser 87.7 GiB"
        in caught.value.message
    )
    assert "available 22.1 GiB of 24.0 GiB" in caught.value.message
    assert "qlora" in caught.value.hint
