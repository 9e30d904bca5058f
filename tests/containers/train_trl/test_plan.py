"""The device plan: its choices, and the refusal, with the arithmetic, of a model that does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from containers.common.errors import BAD_CONFIG, JobError
from containers.train_trl.plan import GIB, Device, ModelShape, Plan, estimate, keep_rows_per_step, make_plan
from dropforge.spec import JobSpec

L4 = Device("cuda", "NVIDIA L4", 24 * GIB, bf16=True)
CPU = Device("cpu", "cpu", 16 * GIB, bf16=False)
GEMMA_2B = ModelShape(2_506_172_416, 1_981_808_640, 18, 2048, 16384, 8, 256_000)
GEMMA_12B = ModelShape(11_766_034_176, 10_758_389_760, 48, 3840, 15360, 16, 262_208)
TINY = ModelShape(200_000, 147_000, 2, 64, 256, 4, 632)
LENGTHS = [60] * 50 + [200] * 5


def training(adapter: str = "qlora", **changes: Any) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "gemma",
        "model": {"source": "google/gemma-2b"},
        "dataset": {"source": "gs://data/x.jsonl"},
        "training": {"adapter": {"type": adapter}, "max_length": 512, **changes},
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
    assert lora.weights == 2 * GEMMA_2B.parameters
    assert qlora.weights < 0.45 * lora.weights  # the embeddings stay in 16 bits


def test_ranks_hold_a_share_of_the_weights_each() -> None:
    h200 = Device("cuda", "NVIDIA H200", 140 * GIB, bf16=True)
    spec = training("none", gradient_checkpointing=True, per_device_train_batch_size=1)
    with pytest.raises(JobError):
        make_plan(spec, GEMMA_12B, h200, LENGTHS)
    chosen = make_plan(spec, GEMMA_12B, h200, LENGTHS, shards=8)
    assert chosen.estimate.trained == 14 * GEMMA_12B.parameters // 8
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
    assert "11.77 billion parameters) does not fit on NVIDIA L4: weights 43.8 GiB + gradients" in caught.value.message
    assert "available 22.1 GiB of 24.0 GiB" in caught.value.message
    assert "qlora" in caught.value.hint
