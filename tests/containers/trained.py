"""Tiny models of the real classes (same_class.py) that know something: a base, and an adapter that changes its answers.

A random model gives all tokens about the same probability, so no fault changes its answers. These models are trained
until their answers are neither random nor certain, in seconds, without a trainer's code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from containers.common.chat import encode_prompt, load_tokenizer
from dropforge.rows import Row

from . import same_class
from .conftest import ROOT, job_spec

COLUMNS = ("amount", "city", "age", "name", "orders", "users", "model", "user")
BASE_STEPS, ADAPTER_STEPS, BATCH, HELD_OUT = 60, 60, 16, 5  # every fifth row is held out


def rows(ending: str) -> list[Row]:
    """Questions whose answers differ by their ending between base and adapter."""
    return [
        Row(
            (
                {"role": "user", "content": f"How many {table} have {column} above {number}?"},
                {"role": "assistant", "content": f"SELECT COUNT(*) FROM {table} WHERE {column} > {number}{ending}"},
            )
        )
        for number in range(10)
        for table in ("orders", "users")
        for column in COLUMNS
    ]


def held_out() -> list[Row]:
    return rows(" limit 10;")[::HELD_OUT]


def make(family: same_class.Family) -> tuple[Path, Path]:
    """The directories of a base and of an adapter's checkpoint, made once and kept in build/."""
    key = hashlib.sha256(Path(__file__).read_bytes() + Path(same_class.__file__).read_bytes()).hexdigest()[:12]
    directory = ROOT / "build" / "same_class" / f"{family}-trained-{key}"
    if not directory.is_dir():
        temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
        _make(family, temporary / "base", temporary / "checkpoint")
        try:
            temporary.rename(directory)
        except OSError:  # another process created it first
            shutil.rmtree(temporary)
    return directory / "base", directory / "checkpoint"


def int4(model: Any) -> Any:
    """Round the linear layers to 16 levels in groups of 32 weights."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            groups = parameter.data.float().reshape(-1, 32)
            step = groups.abs().amax(-1, keepdim=True) / 7
            parameter.data = ((groups / step).round() * step).reshape(parameter.shape).to(parameter.dtype)
    return model


def _make(family: same_class.Family, base: Path, checkpoint: Path) -> None:
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from containers.train_trl.trainer import lora_config
    from dropforge.spec import parse_spec

    shutil.copytree(same_class.make(ROOT / "build" / "same_class", family), base)
    tokenizer = load_tokenizer(str(base), trust_remote_code=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    _train(model, tokenizer, rows(""), BASE_STEPS, 3e-3)
    for path in base.glob("model*"):
        path.unlink()
    model.to(torch.bfloat16).save_pretrained(base, max_shard_size="200KB")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    spec = parse_spec(json.dumps(job_spec()).encode())
    adapter = get_peft_model(model, lora_config(spec, model))
    _train(adapter, tokenizer, rows(" limit 10;"), ADAPTER_STEPS, 5e-3)
    adapter.save_pretrained(checkpoint)


def _train(model: Any, tokenizer: Any, examples: list[Row], steps: int, rate: float) -> None:
    import torch

    kept = [row for index, row in enumerate(examples) if index % HELD_OUT]
    sequences = [(encode_prompt(tokenizer, row.prompt), _answer(tokenizer, row)) for row in kept]
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _, batch in zip(range(steps), _batches(sequences), strict=False):
        length = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids, labels = torch.zeros((len(batch), length), dtype=torch.long), torch.full((len(batch), length), -100)
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.eval()


def _answer(tokenizer: Any, row: Row) -> list[int]:
    return [*tokenizer(row.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _batches(sequences: list[Any]) -> Iterator[list[Any]]:
    import random

    chance = random.Random(0)
    while True:
        yield chance.sample(sequences, BATCH)
