"""The plan's peak of training memory against the peak that this machine measures, on a CPU in 32 bits.

Three sizes of a model of the class Qwen 3, whole and with LoRA, with and without gradient checkpointing. Each case is a
process of its own: it trains a tiny model first, so that libraries are loaded, then the case's model with the
container's own trainer. The peak is the growth of resident memory (VmHWM) since just before the model was made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20
LENGTH, BATCH, STEPS = 512, 4, 2
VOCABULARY = 8192
SIZES = {"small": (4, 512, 1536), "medium": (8, 640, 1920), "large": (12, 768, 2304)}  # layers, hidden, intermediate
ADAPTERS: dict[str, dict[str, Any]] = {
    "whole": {"type": "none"},
    "lora": {"type": "lora", "r": 16},
}


def main() -> None:
    print("model, adapter, checkpointing: measured and planned MiB, error")
    errors = []
    for size in SIZES:
        for adapter in ADAPTERS:
            for checkpointing in (False, True):
                measured, planned, parameters = in_a_process(size, adapter, checkpointing)
                errors.append(planned / measured - 1)
                name = f"{parameters / 1e6:.0f} M, {adapter}, {'recomputed' if checkpointing else 'kept'}"
                print(f"{name:36} {measured / MIB:7.0f} {planned / MIB:7.0f} {errors[-1]:+7.0%}", flush=True)
    print(f"largest error {max(errors, key=abs):+.0%}")


def in_a_process(size: str, adapter: str, checkpointing: bool) -> tuple[int, int, int]:
    """Measured bytes, planned bytes and parameters of a case."""
    # Freed memory goes back to the system at once: the peak is that of live tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bench.phases", size, adapter, str(int(checkpointing))]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured, planned, parameters = json.loads(result.stdout.splitlines()[-1])
    return measured, planned, parameters


def measure(size: str, adapter: str, checkpointing: bool) -> tuple[int, int, int]:
    """Train a case in this process; see `in_a_process`."""
    from containers.train_trl.plan import Device, estimate, shape_of
    from containers.train_trl.train import quiet_libraries
    from dropforge.spec import parse_spec

    quiet_libraries()
    spec = parse_spec(json.dumps(job_spec(ADAPTERS[adapter], checkpointing)).encode())
    device = Device("cpu", "cpu", 2**40, bf16=False)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        train(make_model(directory / "warm", 1, 128, 256), spec, device, directory)
        path = make_model(directory / "model", *SIZES[size])
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        train(path, spec, device, directory)
        measured = resident("VmHWM") - before
        shape = shape_of(str(path), trust_remote_code=False)
    planned = estimate(shape, spec, device, BATCH, LENGTH, checkpointing).total
    return measured, planned, shape.parameters


def train(path: Path, spec: Any, device: Any, directory: Path) -> None:
    """Train a saved model for STEPS steps of rows of one length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from containers.common.token_rows import TokenRows
    from containers.train_trl.methods.sft import build_trainer
    from containers.train_trl.plan import make_plan, shape_of

    lengths = [LENGTH] * (BATCH * STEPS)
    rows = TokenRows.of([[7 + row % 90] * LENGTH for row in range(len(lengths))])
    columns = {"input_ids": rows, "labels": rows}
    plan = make_plan(spec, shape_of(str(path), trust_remote_code=False), device, lengths)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=plan.attention)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_files())
    build_trainer(model, spec, columns, tokenizer, plan, directory / "trainer").train()


def make_model(directory: Path, layers: int, hidden: int, intermediate: int) -> Path:
    """Write a Qwen 3 with random weights: its memory does not depend on them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def tokenizer_files() -> Path:
    from dropforge_local import tiny

    return tiny.base_model(Path(__file__).resolve().parent.parent / "build" / "tiny")


def job_spec(adapter: dict[str, Any], checkpointing: bool) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "bench",
        "model": {"source": "gs://bench/base"},
        "dataset": {"source": "gs://bench/rows.jsonl"},
        "training": {
            "adapter": adapter,
            "max_length": LENGTH,
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "gradient_checkpointing": checkpointing,
            "checkpoint_steps": 1000,
            "packing": False,
        },
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }


def resident(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3] == "1")))
