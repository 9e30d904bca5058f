"""What all methods' trainers share: the order of the rows, and the spec's settings. Imports transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from dropforge.spec import JobSpec

from .plan import Plan

LOGGING_STEPS = 10


class RowOrder(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """The order of the rows. It depends only on the seed and the epoch.

    It is the same in every rank, in one process that takes as many rows per step, and in an attempt that resumes. The
    trainer's own samplers fail here: one forgets the epoch when several ranks resume, the other draws from the current
    state of the generators.
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


class OrderedRows:
    """Makes a trainer take its rows in RowOrder. A method's trainer inherits from it, and from TRL's trainer."""

    length_column = "input_ids"
    # TRL's trainer has these.
    args: Any
    train_dataset: Any
    add_callback: Callable[[Any], None]
    remove_callback: Callable[[Any], None]
    get_train_dataloader: Callable[[], Any]

    def __init__(self, *, group_by_length: bool, **options: Any) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        self.row_order = RowOrder(
            [len(ids) for ids in self.train_dataset[self.length_column]],
            self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            self.args.seed,
            group_by_length=group_by_length,
        )
        self.add_callback(_SetEpoch(self.row_order))

    def _get_train_sampler(self, train_dataset: Any = None) -> RowOrder:
        return self.row_order

    def total_steps(self) -> int:
        """The number of optimiser steps of the whole training."""
        if self.args.max_steps > 0:
            return int(self.args.max_steps)
        updates = max(1, -(-len(self.get_train_dataloader()) // self.args.gradient_accumulation_steps))
        return int(-(-updates * self.args.num_train_epochs // 1))


class _SetEpoch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, order: RowOrder) -> None:
        self._order = order

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._order.epoch = int(state.epoch or 0)


def shared_settings(spec: JobSpec, plan: Plan, directory: Path) -> dict[str, Any]:
    """Arguments of TrainingArguments: the spec's settings, or the plan's where the spec has none."""
    training = spec.training
    return {
        "output_dir": str(directory),
        "max_steps": training.max_steps or -1,
        "num_train_epochs": training.epochs,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "lr_scheduler_kwargs": training.lr_scheduler_kwargs.model_dump(exclude_none=True) or None,
        # A value below 1 is a share of the steps.
        "warmup_steps": training.warmup_ratio if training.warmup_steps is None else training.warmup_steps,
        "optim": training.optim,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_epsilon": training.adam_epsilon,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "per_device_train_batch_size": plan.batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_checkpointing": plan.gradient_checkpointing,
        "bf16": plan.device.bf16,
        "use_cpu": plan.device.kind == "cpu",
        "dataloader_pin_memory": plan.device.kind == "cuda",
        "save_strategy": "steps",
        "save_steps": training.checkpoint_steps,
        "save_total_limit": 2,
        "logging_steps": LOGGING_STEPS,
        "logging_nan_inf_filter": False,  # the filter would log a loss of 0.0 for NaN
        "include_num_input_tokens_seen": "non_padding",
        "seed": training.seed,
        "report_to": "none",
        "disable_tqdm": True,
    }


def language_model(model: Any) -> str:
    """The name of the module with a model's language layers. A model that also sees images has other modules."""
    decoder = model.get_decoder()
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    return names[decoder]


def freeze_other_parts(model: Any) -> None:
    """Freeze what text cannot train, such as a vision tower: parameters without gradients get no state in the
    optimiser, and ranks cannot resume from such a checkpoint."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    trained = {id(parameter) for module in (decoder, head) if module for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def keep_precision(model: Any, plan: Plan) -> None:
    """Train 32 bits if the plan says so: TRL rounds the adapters of a model in 4 bits to 16 bits on every device."""
    if plan.dtype == "float32":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()


def keep_gradients(model: Any) -> None:
    """Let layers in 4 bits pass gradients after an evaluation, too.

    On a CPU with AVX512-BF16, the first evaluation would pack their weights for a kernel without gradients
    (bitsandbytes 0.50.2: Linear4bit.forward and matmul_4bit).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def trained_parameters(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def lora_config(spec: JobSpec, model: Any) -> LoraConfig | None:
    """PEFT's configuration of the adapter, on the language layers alone; None for full fine-tuning."""
    adapter = spec.training.adapter
    if adapter.type == "none":
        return None
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.use_rslora,
        target_modules=adapter.target_modules,
        exclude_modules=_other_modules(model),
    )


def _other_modules(model: Any) -> str | None:
    """A pattern of every module outside the language model; None where the model has no other part."""
    name = language_model(model)
    parent = name.rpartition(".")[0]
    if not parent:
        return None
    return rf"{re.escape(parent)}\.(?!{re.escape(name.removeprefix(f'{parent}.'))}\.).*"
