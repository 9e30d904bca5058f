"""Real (non-padding) tokens per second: the training container's settings against tutorial 001's own.

Same model (4 million parameters), same rows with a long tail of lengths, same LoRA (r 8 on q and v), one thread, in
turns. Tutorial 001: batches of one row accumulated over two, eager attention, gradient checkpointing, loss on the
whole sequence. Its fp16 has no counterpart on a CPU; both train in fp32.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = 400  # 50 batches of 8 are one whole group of the length-grouped sampler: no length is seen more often
REPEATS = 3
HIDDEN, LAYERS = 256, 4


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT / "containers" / "train_trl"))
    import torch
    from train import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as directory:
        base = make_model(Path(directory) / "base")
        rows = make_rows()
        lengths = sorted(len(row["question"] + row["context"]) for row in rows)
        print(f"{ROWS} rows; characters p50 {lengths[ROWS // 2]}, p95 {lengths[ROWS * 95 // 100]}, max {lengths[-1]}")
        rates: dict[str, list[float]] = {"tutorial 001": [], "train_trl": []}
        for _ in range(REPEATS):
            rates["tutorial 001"].append(run_tutorial(base, rows, directory))
            rates["train_trl"].append(run_container(base, rows, directory))
    for name, found in rates.items():
        spread = f"{min(found):.0f}-{max(found):.0f}"
        print(f"{name:13} {statistics.median(found):7.0f} tokens/s (median of {REPEATS}, {spread})")
    ratio = statistics.median(rates["train_trl"]) / statistics.median(rates["tutorial 001"])
    print(f"ratio         {ratio:7.2f} (goal: at least 2)")


def make_model(directory: Path) -> Path:
    """Random weights: speed does not depend on what a model knows."""
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    from dropforge_local import tiny

    tokenizer = AutoTokenizer.from_pretrained(tiny.base_model(ROOT / "build" / "tiny"))
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=512,
        layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Gemma3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_rows() -> list[dict[str, str]]:
    """Questions with the schemas of other tables around their own, as many as a Pareto distribution says."""
    from dropforge_local import tiny

    rng = random.Random(0)
    rows = tiny.house_rows(ROWS + 2)
    schemas = sorted({row["context"] for row in rows})
    for row in rows:
        others = rng.sample(schemas, min(10, int(rng.paretovariate(1.1)) - 1))
        contexts = [*others, row["context"]]
        rng.shuffle(contexts)
        row["context"] = "; ".join(contexts)
    return rows


def run_container(base: Path, rows: list[dict[str, str]], directory: str) -> float:
    """The container's own plan and trainer, with nothing that the spec could leave open said."""
    import chat
    import rows as data
    import train
    from plan import find_device, make_plan, shape_of

    from dropforge.artifacts import Source
    from dropforge.spec import parse_spec

    spec = parse_spec(json.dumps(job_spec()).encode())
    tokenizer = chat.load_tokenizer(str(base), trust_remote_code=False)
    split = data.prepare(rows[:ROWS], spec.dataset, None, seed=0)
    encoded = chat.encode(tokenizer, split.train, spec.training.max_length, "rows")
    shape = shape_of(str(base), trust_remote_code=False)
    plan = make_plan(spec, shape, find_device(), encoded.lengths)
    source = Source(uri="gs://bench/base", revision="0")
    inputs = train.Inputs(str(base), source, source, tokenizer, split, encoded, None, plan)
    trainer = train.build_trainer(train.load_base(inputs, spec), spec, inputs, Path(directory) / "ours")
    return tokens_per_second(trainer)


def run_tutorial(base: Path, rows: list[dict[str, str]], directory: str) -> float:
    """Tutorial 001's arguments, in the names that TRL has for them now."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    template = "Question: {question}\nContext: {context}\nAnswer: {answer}"
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"),
        args=SFTConfig(
            output_dir=f"{directory}/tutorial",
            num_train_epochs=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            activation_checkpointing=True,
            gradient_checkpointing=True,
            max_grad_norm=0.3,
            learning_rate=2e-4,
            weight_decay=0.001,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            max_length=512,
            packing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            include_num_input_tokens_seen="non_padding",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"text": template.format(**row)} for row in rows[:ROWS]]),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return tokens_per_second(trainer)


def job_spec() -> dict[str, Any]:
    adapter = {"type": "lora", "r": 8, "alpha": 16, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    return {
        "api_version": "dropforge/v1",
        "name": "bench",
        "model": {"source": "gs://bench/base"},
        "dataset": {
            "source": "gs://bench/rows.jsonl",
            "columns": {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}"},
        },
        "training": {"adapter": adapter, "max_length": 512, "checkpoint_steps": 1000},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }


def tokens_per_second(trainer: Any) -> float:
    """Tokens that were not padding, over the trainer's own clock."""
    result = trainer.train()
    return float(trainer.state.num_input_tokens_seen / result.metrics["train_runtime"])
