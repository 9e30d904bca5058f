"""Supervised fine-tuning: the model learns the assistant's answers of conversations, or whole plain texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from trl import SFTConfig, SFTTrainer

from containers.common import evaluation
from containers.common import rows as data
from containers.common.evaluation import Score
from containers.common.publish import Description, Metrics, describe_fine_tuning
from containers.common.tokenise import Tokeniser, encode_split
from dropforge.spec import Dataset, JobSpec

from ..plan import Plan
from ..trainer import OrderedRows, lora_config, shared_settings
from . import Columns, Examples


def read_examples(spec: JobSpec, tokeniser: Tokeniser, client: Any, directory: Path) -> Examples:
    """Conversations and plain texts, as token ids with labels. Raises JobError."""
    assert isinstance(spec.dataset, Dataset), "the spec's validation refuses other data"
    split, source = data.load_split(spec.dataset, spec.evaluation, spec.training.seed, client, directory)
    evaluation.check_gate(spec, split)
    split, encoded, held_out = encode_split(tokeniser, split, spec)
    return Examples(
        source=source,
        columns={"input_ids": encoded.input_ids, "labels": encoded.labels},
        lengths=encoded.lengths,
        split=split,
        held_out=held_out,
        dropped=split.dropped,
        truncated=encoded.truncated,
        answers=(encoded.given, encoded.learnt),
    )


class Trainer(OrderedRows, SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer, with the rows in RowOrder."""


def build_trainer(model: Any, spec: JobSpec, columns: Columns, tokenizer: Any, plan: Plan, directory: Path) -> Trainer:
    """The trainer with the spec's settings, or the plan's where the spec has none."""
    arguments = SFTConfig(
        **shared_settings(spec, plan, directory),
        # Not in FSDP's configuration: accelerate's wrapper loses the state of the generators, so that the recomputed
        # activations would have other dropout masks.
        activation_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        max_length=spec.training.max_length if plan.packing else None,  # unpacked rows are cut already
    )
    return Trainer(
        model=model,
        args=arguments,
        # dropforge makes ids and labels: the same code renders the prompts of training, evaluation and serving.
        train_dataset=as_dataset(columns),
        processing_class=tokenizer,
        peft_config=lora_config(spec, model),
        group_by_length=plan.group_by_length,
    )


def as_dataset(columns: Columns) -> datasets.Dataset:
    """The columns without a copy of their token ids."""
    table = {name: pa.LargeListArray.from_arrays(rows.starts, rows.values) for name, rows in columns.items()}
    return datasets.Dataset(pa.table(table))


def evaluate(model: Any, tokenizer: Any, examples: Examples, max_new_tokens: int) -> Score:
    """Loss, and the share of held-out answers that the model reproduces exactly."""
    assert examples.held_out is not None
    return evaluation.evaluate(model, tokenizer, examples.split.held_out, examples.held_out, max_new_tokens)


def metrics(before: Score, after: Score) -> Metrics:
    return evaluation.compare(before, after)


def describe(spec: JobSpec) -> Description:
    return describe_fine_tuning(spec)
