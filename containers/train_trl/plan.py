"""Decides how to train on this machine, from the device, the model's shape and the rows' lengths."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from containers.common.errors import config_error
from dropforge.fit.batch import default_batch
from dropforge.fit.configuration import NoConfiguration, read_shape
from dropforge.fit.memory import Estimate, Step, batch_choices, training_memory
from dropforge.fit.phases import GPU_SHARE, evaluation_bytes, resident_bytes
from dropforge.fit.shape import ModelShape
from dropforge.spec import JobSpec
from dropforge.spec.machine import GIB

SMALL_MODEL = 50_000_000  # parameters; below, a second thread makes training slower


@dataclass(frozen=True)
class Device:
    """The device of this process."""

    kind: Literal["cuda", "cpu"]
    name: str
    memory_bytes: int
    bf16: bool
    flash_attention: bool = False


@dataclass(frozen=True)
class Plan:
    """Every setting that depends on the device."""

    device: Device
    dtype: str
    attention: str | None
    batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    packing: bool
    threads: int | None
    estimate: Estimate

    @property
    def group_by_length(self) -> bool:
        return not self.packing

    def rows_per_step(self, processes: int) -> int:
        """Rows, or packed blocks, of one optimiser step."""
        return self.batch_size * self.gradient_accumulation_steps * processes


def find_device(processes: int = 1) -> Device:
    """The GPU of this process, or else the CPU with this process's share of the container's memory."""
    import torch

    if not torch.cuda.is_available():
        return Device("cpu", "cpu", host_memory() // processes, bf16=False)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    from importlib.util import find_spec

    flash = find_spec("flash_attn") is not None and properties.major >= 8
    return Device("cuda", properties.name, properties.total_memory, torch.cuda.is_bf16_supported(), flash)


def host_memory() -> int:
    """Bytes of memory that this container may still take, by the limits of the machine and the control group."""
    available = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    limit = next(iter(_lines("/sys/fs/cgroup/memory.max")), "max")
    if limit.isdecimal():
        # Not memory.current: it counts the page cache of downloads, which the kernel frees on demand.
        stat = dict(line.split() for line in _lines("/sys/fs/cgroup/memory.stat"))
        available.append(int(limit) - int(stat.get("anon", 0)) - int(stat.get("shmem", 0)))
    return min(available, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def shape_of(directory: str, trust_remote_code: bool) -> ModelShape:
    """The model's shape, from its configuration alone: loads no weights."""
    try:
        return read_shape(json.loads((Path(directory) / "config.json").read_text()), directory)
    except NoConfiguration:  # a type whose layers dropforge does not know: count them on the meta device
        return shape_on_meta(directory, trust_remote_code)


def empty_model(directory: str, trust_remote_code: bool) -> Any:
    """The model on the meta device, where tensors have no memory. Raises JobError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise config_error(f"model.source is not a causal language model that can be loaded: {error}") from None


def shape_on_meta(directory: str, trust_remote_code: bool) -> ModelShape:
    """The model's shape, counted in its class."""
    import torch

    model = empty_model(directory, trust_remote_code)
    config = model.config
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    names = {name.rpartition(".")[2] for name, _ in model.get_decoder().named_modules()}
    return ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(module.weight.numel() for module in linear),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", 4 * text.hidden_size),
        heads=text.num_attention_heads,
        vocabulary=text.vocab_size,
        query=text.num_attention_heads * head_size,
        key_value=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size,
        normalised_heads="q_norm" in names,
        normalised_outputs="pre_feedforward_layernorm" in names,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        saved_bytes=(config.dtype or torch.float32).itemsize,
        model_type=config.model_type,
    )


def make_plan(spec: JobSpec, shape: ModelShape, device: Device, lengths: list[int], shards: int = 1) -> Plan:
    """The fastest plan that fits each of `shards` devices. Raises JobError with the arithmetic if no plan fits."""
    training = spec.training
    mean = sum(lengths) / len(lengths)
    packing = training.packing
    if packing == "auto":
        # On a GPU, blocks of mixed rows have no padding; on a CPU, the block mask costs more than padding. A batch size
        # in the spec counts rows: blocks would put more rows into a step than the spec says.
        packing = device.kind == "cuda" and mean < training.max_length / 2 and _is_auto(spec)
    length = training.max_length if packing else min(training.max_length, max(lengths))
    accumulation = training.gradient_accumulation_steps
    tried: list[Plan] = []
    start = _default_batch(packing, length / mean)
    for batch, checkpointing in batch_choices(
        training.per_device_train_batch_size, training.gradient_checkpointing, start
    ):
        estimated = estimate(shape, spec, device, batch, length, checkpointing, shards)
        steps = accumulation * max(1, start // batch) if _is_auto(spec) else accumulation
        plan = Plan(
            device=device,
            dtype=_dtype(spec, device),
            attention=_attention(spec, device),
            batch_size=batch,
            gradient_accumulation_steps=steps,
            gradient_checkpointing=checkpointing,
            packing=bool(packing),
            threads=1 if device.kind == "cpu" and shape.parameters < SMALL_MODEL else None,
            estimate=estimated,
        )
        if estimated.total <= device.memory_bytes * GPU_SHARE:
            return plan
        tried.append(plan)
    raise _does_not_fit(spec, shape, device, tried[-1])


def keep_rows_per_step(plan: Plan, rows: int, processes: int) -> Plan:
    """The plan with the checkpoint's `rows` rows per step, so that other devices train the same remaining steps.

    Raises JobError if `processes` cannot share the rows evenly.
    """
    share, rest = divmod(rows, processes)
    if rest or not share:
        raise config_error(
            f"the checkpoint was trained in steps of {rows} rows, which {processes} processes cannot share evenly",
            "resume with a number of processes that divides the rows, or submit the job again to train from the start",
        )
    batch = next(size for size in range(min(plan.batch_size, share), 0, -1) if share % size == 0)
    return replace(plan, batch_size=batch, gradient_accumulation_steps=share // batch)


def estimate(
    shape: ModelShape, spec: JobSpec, device: Device, batch: int, length: int, checkpointing: bool, shards: int = 1
) -> Estimate:
    """Bytes at the peak of a training step on this device."""
    size = 2 if _dtype(spec, device) == "bfloat16" else 4
    autocast = device.bf16 and spec.training.adapter.type == "none"
    fused, on_cpu = _attention(spec, device) != "eager", device.kind == "cpu"
    step = Step(batch, length, checkpointing, shards, size, autocast, fused, on_cpu)
    return training_memory(shape, spec.training, step)


def _is_auto(spec: JobSpec) -> bool:
    return spec.training.per_device_train_batch_size is None


def _default_batch(packing: bool, rows_per_block: float) -> int:
    """The rows of a step, or blocks for about as many rows."""
    rows = default_batch("trl")
    return max(1, round(rows / rows_per_block)) if packing else rows


def _dtype(spec: JobSpec, device: Device) -> str:
    """The type of the loaded weights. Full fine-tuning keeps 32 bits under autocast: 16 bits lose small updates."""
    return "bfloat16" if device.bf16 and spec.training.adapter.type != "none" else "float32"


def _attention(spec: JobSpec, device: Device) -> str | None:
    chosen = spec.model.attn_implementation
    if chosen != "auto":
        return chosen
    return "flash_attention_2" if device.flash_attention and device.bf16 else "sdpa"


def _does_not_fit(spec: JobSpec, shape: ModelShape, device: Device, plan: Plan) -> Exception:
    return config_error(
        f"{spec.model.source} ({shape.parameters / 1e9:.2f} billion parameters) does not fit on {device.name}: "
        f"{plan.estimate} at batch size {plan.batch_size} and {spec.training.max_length} tokens; "
        f"available {_gib(int(device.memory_bytes * GPU_SHARE))} of {_gib(device.memory_bytes)}",
        "use a smaller model, a qlora adapter, a lower training.max_length, or a target with more memory",
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def use_threads(plan: Plan) -> None:
    """Apply the plan's thread count to this process."""
    import torch

    if plan.threads is not None:
        torch.set_num_threads(plan.threads)


def device_map(device: Device, *, spread: bool = False) -> Any:
    """The device map of a whole model: this process's GPU; with `spread`, also the next GPUs if it does not fit."""
    import torch

    if device.kind == "cpu":
        return None
    return "sequential" if spread else {"": torch.cuda.current_device()}


def device_map_of(directory: Path, device: Device, spec: JobSpec, *, spread: bool = False) -> Any:
    """The device map of a saved model in its own precision, with room for the evaluation beside it.

    Layers for which the GPU has no room stay in host memory: a model that was trained in 4 bits may not fit in 16.
    """
    shape = shape_of(str(directory), spec.model.trust_remote_code)
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    usable, beside = int(device.memory_bytes * GPU_SHARE), evaluation_bytes(spec, shape, shape.saved_bytes)
    if device.kind == "cpu" or spread or weights + beside <= usable:
        return device_map(device, spread=spread)
    resident = resident_bytes(weights, beside, usable, shape, shape.saved_bytes)
    return divided_map(directory, resident, host_memory(), spec.model.trust_remote_code)


def divided_map(directory: Path, gpu_bytes: int, host_bytes: int, trust_remote_code: bool) -> dict[str, int | str]:
    """The device of each layer: the first GPU up to `gpu_bytes`, then host memory."""
    import torch
    from accelerate import infer_auto_device_map
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, trust_remote_code=trust_remote_code)
    model.tie_weights()
    limits: dict[int | str, int] = {0: gpu_bytes, "cpu": host_bytes}
    divided: dict[str, int | str] = infer_auto_device_map(model, limits, list(model._no_split_modules or ()))
    return divided


def dtype_of(name: str) -> Any:
    import torch

    return getattr(torch, name)
