"""Real (non-padding) tokens per second: the settings of the training container and of tutorials 000 and 001.

Same model (4 million parameters), same rows with a long tail of lengths, same LoRA, 1 process, 1 thread, by turns.
Tutorial 000: batches of 8 rows accumulated over 8, LoRA r 16 on all linear layers. Tutorial 001: batches of 1 row
accumulated over 2, r 8 on q and v. Both: no packing, eager attention, gradient checkpointing, loss on the whole
sequence. bf16 and 001's fp16 have no counterpart on a CPU; all train in fp32.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = 400  # 50 batches of 8 are a whole group of the length-grouped sampler, so every length occurs equally often
REPEATS = 3
HIDDEN, LAYERS = 256, 4
# The arguments of each tutorial in the current names of TRL, its LoRA, and the goal for the ratio.
TUTORIALS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "000": (
        {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 8,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
        },
        {"r": 16, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"},
        2.5,
    ),
    "001": (
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "learning_rate": 2e-4,
            "weight_decay": 0.001,
            "lr_scheduler_type": "cosine",
        },
        {"r": 8, "alpha": 16, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
        2.0,
    ),
}


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from containers.train_trl.train import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as directory:
        base = make_model(Path(directory) / "base")
        rows = make_rows()
        lengths = sorted(len(row["question"] + row["context"]) for row in rows)
        print(f"{ROWS} rows; characters p50 {lengths[ROWS // 2]}, p95 {lengths[ROWS * 95 // 100]}, max {lengths[-1]}")
        for name, (settings, adapter, goal) in TUTORIALS.items():
            tutorial, container = [], []
            for _ in range(REPEATS):
                tutorial.append(run_tutorial(base, rows, directory, settings, adapter))
                container.append(run_container(base, rows, directory, adapter))
            show(f"tutorial {name}", tutorial)
            show("train_trl", container)
            ratio = statistics.median(container) / statistics.median(tutorial)
            print(f"ratio         {ratio:7.2f} (goal: at least {goal})")


def show(name: str, rates: list[float]) -> None:
    spread = f"{min(rates):.0f}-{max(rates):.0f}"
    print(f"{name:13} {statistics.median(rates):7.0f} tokens/s (median of {REPEATS}, {spread})")


def make_model(directory: Path) -> Path:
    """Write a model with random weights: the speed does not depend on the weights."""
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
    """Return questions; a Pareto distribution gives the number of other tables' schemas around their own schema."""
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


def run_container(base: Path, rows: list[dict[str, str]], directory: str, adapter: dict[str, Any]) -> float:
    """Train with the container's own plan and trainer; the spec leaves all optional settings open."""
    from containers.common import chat
    from containers.common import rows as data
    from containers.common.evaluation import AnswerLimit
    from containers.train_trl import train
    from containers.train_trl.methods import Examples
    from containers.train_trl.methods.sft import build_trainer
    from containers.train_trl.plan import find_device, make_plan, shape_of
    from dropforge.run.artifacts import Source
    from dropforge.spec import Dataset, parse_spec

    spec = parse_spec(json.dumps(job_spec(adapter)).encode())
    tokenizer = chat.load_tokenizer(str(base), trust_remote_code=False)
    assert isinstance(spec.dataset, Dataset)
    split = data.prepare(rows[:ROWS], spec.dataset, None, seed=0)
    encoded = chat.encode(tokenizer, split.train, spec.training.max_length, "rows")
    shape = shape_of(str(base), trust_remote_code=False)
    plan = make_plan(spec, shape, find_device(), encoded.lengths)
    source = Source(uri="gs://bench/base", revision="0")
    columns = {"input_ids": encoded.input_ids, "labels": encoded.labels}
    examples = Examples(source, columns, encoded.lengths, split, None, 0, 0)
    model = train.load_base(train.Inputs(str(base), source, tokenizer, examples, plan, AnswerLimit(0, 0)), spec, None)
    return tokens_per_second(build_trainer(model, spec, columns, tokenizer, plan, Path(directory) / "container"))


def run_tutorial(
    base: Path, rows: list[dict[str, str]], directory: str, settings: dict[str, Any], adapter: dict[str, Any]
) -> float:
    """Train with the arguments of a tutorial."""
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
            activation_checkpointing=True,
            gradient_checkpointing=True,
            max_grad_norm=0.3,
            warmup_steps=0.03,
            max_length=512,
            packing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            include_num_input_tokens_seen="non_padding",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"text": template.format(**row)} for row in rows[:ROWS]]),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=LoraConfig(
            r=adapter["r"],
            lora_alpha=adapter["alpha"],
            lora_dropout=adapter["dropout"],
            target_modules=adapter["target_modules"],
            task_type="CAUSAL_LM",
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return tokens_per_second(trainer)


def job_spec(adapter: dict[str, Any]) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "bench",
        "model": {"source": "gs://bench/base"},
        "dataset": {
            "source": "gs://bench/rows.jsonl",
            "columns": {"prompt": "Question: {question}\nContext: {context}", "completion": "{answer}"},
        },
        "training": {"adapter": {"type": "lora", **adapter}, "max_length": 512, "checkpoint_steps": 1000},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
    }


def tokens_per_second(trainer: Any) -> float:
    """Return the non-padding tokens per second of the trainer's own clock."""
    result = trainer.train()
    return float(trainer.state.num_input_tokens_seen / result.metrics["train_runtime"])
