"""TRL's trainer with the spec's settings. Imports transformers: import this module only when training begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from chat import Encoded
from datasets import Dataset
from peft import LoraConfig
from plan import Plan
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl import SFTConfig, SFTTrainer

from dropforge.spec import JobSpec

LOGGING_STEPS = 10


class RowOrder(torch.utils.data.Sampler[int]):
    """Which row comes when, by the seed and the epoch alone: the same in every rank, in one process that takes as many
    rows per step, and in an attempt that resumes. (Of those that come with the trainer, one forgets the epoch when
    several ranks resume, and the other draws from whatever state the generators are in.)
    """

    def __init__(self, lengths: Sequence[int], rows_per_step: int, seed: int, *, group_by_length: bool) -> None:
        self.epoch = 0
        self._lengths = list(lengths)
        self._rows_per_step = rows_per_step
        self._seed = seed
        self._group_by_length = group_by_length

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self._group_by_length:
            yield from get_length_grouped_indices(self._lengths, self._rows_per_step, generator=generator)
        else:
            yield from torch.randperm(len(self._lengths), generator=generator).tolist()


class Trainer(SFTTrainer):  # type: ignore[misc]
    """An SFTTrainer that takes rows in RowOrder."""

    def __init__(self, *, group_by_length: bool, **options: Any) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        self.row_order = RowOrder(
            [len(ids) for ids in self.train_dataset["input_ids"]],
            self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            self.args.seed,
            group_by_length=group_by_length,
        )
        self.add_callback(_TellEpoch(self.row_order))

    def _get_train_sampler(self, train_dataset: Any = None) -> RowOrder:
        return self.row_order

    def total_steps(self) -> int:
        """The optimiser steps that training will make."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        updates = max(1, -(-len(self.get_train_dataloader()) // self.args.gradient_accumulation_steps))
        return int(-(-updates * self.args.num_train_epochs // 1))


class _TellEpoch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, order: RowOrder) -> None:
        self._order = order

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._order.epoch = int(state.epoch or 0)


def build_trainer(model: Any, spec: JobSpec, rows: Encoded, tokenizer: Any, plan: Plan, directory: Path) -> Trainer:
    """The spec's settings, and the plan's where the spec leaves them open."""
    training = spec.training
    arguments = SFTConfig(
        output_dir=str(directory),
        max_steps=training.max_steps or -1,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_ratio,  # below 1 it is a share of the steps
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        # Here and not in FSDP's configuration: accelerate's wrapper forgets the state of the generators, so that
        # what it computes again has other dropout masks.
        activation_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing=plan.gradient_checkpointing,
        packing=plan.packing,
        max_length=training.max_length if plan.packing else None,  # the rows are cut already
        bf16=plan.device.bf16,
        use_cpu=plan.device.kind == "cpu",
        dataloader_pin_memory=plan.device.kind == "cuda",
        save_strategy="steps",
        save_steps=training.checkpoint_steps,
        save_total_limit=2,
        logging_steps=LOGGING_STEPS,
        include_num_input_tokens_seen="non_padding",
        seed=training.seed,
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(
        model=model,
        args=arguments,
        # Ids and labels are ours: the same code renders the prompts of training, evaluation and serving.
        train_dataset=Dataset.from_dict({"input_ids": rows.input_ids, "labels": rows.labels}),
        processing_class=tokenizer,
        peft_config=lora_config(spec),
        group_by_length=plan.group_by_length,
    )


def lora_config(spec: JobSpec) -> LoraConfig | None:
    """PEFT's configuration of the adapter; None for full fine-tuning."""
    adapter = spec.training.adapter
    if adapter.type == "none":
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
    )
