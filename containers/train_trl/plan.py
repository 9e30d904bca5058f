"""Decides how to train on this machine, from the device, the model's shape and the rows' lengths."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from containers.common.errors import config_error
from dropforge.spec import JobSpec

GIB = 2**30
ROWS_PER_STEP = 8  # rows in one device's batch, where the spec has no number
SMALL_MODEL = 50_000_000  # parameters; below, a second thread makes training slower
USABLE_MEMORY = 0.92  # share of the device's memory: fragmentation and the CUDA context take the rest
LOADED_SHARE = 0.75  # of a GPU's memory for the weights of a model that answers; caches and logits take the rest
GENERATION_LOGITS_ROWS = 2048  # tokens whose logits exist at once: the trainer's LM head works in chunks


@dataclass(frozen=True)
class Device:
    """The device of this process."""

    kind: Literal["cuda", "cpu"]
    name: str
    memory_bytes: int
    bf16: bool
    flash_attention: bool = False


@dataclass(frozen=True)
class ModelShape:
    """The quantities that decide a model's memory. `linear` counts the weights that 4-bit loading quantises.

    `query` and `key_value` are the widths of the projections: heads times the size of a head. `normalised_heads`: the
    queries and keys are normalised (Qwen 3, Gemma 3). `normalised_outputs`: each block's output is, too (Gemma 3).
    """

    parameters: int
    linear: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    query: int
    key_value: int
    normalised_heads: bool = False
    normalised_outputs: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes that training needs at its peak, by purpose."""

    weights: int
    trained: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.activations + self.logits

    def __str__(self) -> str:
        parts = [
            f"weights {_gib(self.weights)}",
            f"gradients and optimiser {_gib(self.trained)}",
            f"activations {_gib(self.activations)}",
            f"logits {_gib(self.logits)}",
        ]
        return f"{' + '.join(parts)} = {_gib(self.total)}"


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
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise config_error(f"model.source is not a causal language model that can be loaded: {error}") from None
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
    for batch, checkpointing in _choices(spec, packing, length / mean):
        estimated = estimate(shape, spec, device, batch, length, checkpointing, shards)
        steps = (
            accumulation * max(1, _default_batch(packing, length / mean) // batch) if _is_auto(spec) else accumulation
        )
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
        if estimated.total <= device.memory_bytes * USABLE_MEMORY:
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
    """Bytes at the peak of a training step. Counts only the terms that grow with the model and the batch."""
    adapter = spec.training.adapter
    size = 2 if _dtype(spec, device) == "bfloat16" else 4
    tokens = batch * length
    if adapter.type == "none":
        # Weights, gradients and Adam's two moments in 32 bits, and the 16-bit copy for autocast.
        weights, trained = 4 * shape.parameters, (12 + (2 if device.bf16 else 0)) * shape.parameters
    else:
        weights = size * shape.parameters
        if adapter.type == "qlora":
            # 4 bits and block constants (double quantised: 0.127 bits); other weights stay in 16 or 32 bits.
            weights = int(shape.linear * 4.127 / 8) + size * (shape.parameters - shape.linear)
        trained = 16 * _adapter_parameters(shape, adapter.r)
    if shards > 1:
        # A shard of everything; in full, the embeddings, the current layer, and the next layer that is being fetched.
        whole = 2 * shape.vocabulary * shape.hidden + 2 * shape.linear // shape.layers
        weights, trained = weights // shards + size * whole, trained // shards
    per_layer = tokens * saved_bytes(shape, spec, size)
    if device.kind == "cpu" or _attention(spec, device) in (None, "eager"):
        per_layer += 2 * batch * shape.heads * length * length * size // (8 if device.kind == "cuda" else 1)
    kept = tokens * shape.hidden * size * shape.layers
    activations = kept + per_layer if checkpointing else per_layer * shape.layers
    logits = min(tokens, GENERATION_LOGITS_ROWS) * shape.vocabulary * 4 * 2
    return Estimate(weights, trained, activations, logits)


def saved_bytes(shape: ModelShape, spec: JobSpec, size: int) -> int:
    """Bytes that a layer saves of each token for the backward pass, without recomputing and with fused attention.

    Counted with saved-tensor hooks on Llama, Gemma 1, Gemma 3 and Qwen 3 (docs/measurements.md): exact for an adapter
    on a model in 16 bits and for a whole model in 32; under autocast a whole model saves less.
    """
    adapter = spec.training.adapter
    if adapter.type == "none":
        hidden, intermediate, query, key_value = 24, 16, 8, 8
        extra_hidden, extra_heads = 16, 8
    else:
        hidden, intermediate, query, key_value = (48, 14, 12, 4) if adapter.dropout else (28, 10, 8, 4)
        extra_hidden, extra_heads = 8, 4
    if shape.normalised_outputs:
        hidden += extra_hidden
    if shape.normalised_heads:
        query, key_value = query + extra_heads, key_value + extra_heads
    saved = (
        hidden * shape.hidden + intermediate * shape.intermediate + query * shape.query + key_value * shape.key_value
    )
    if adapter.type == "none":
        return saved
    # In 32 bits, an adapter's training was measured at up to 1.45 times the count.
    return (saved + 28 * adapter.r) * (3 if size == 4 else 2) // 2


def _adapter_parameters(shape: ModelShape, r: int) -> int:
    """Parameters of an all-linear adapter: r rows and columns for each of a layer's seven projections."""
    attention = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key_value)
    return r * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))


def _is_auto(spec: JobSpec) -> bool:
    return spec.training.per_device_train_batch_size is None


def _default_batch(packing: bool, rows_per_block: float) -> int:
    """Blocks for about ROWS_PER_STEP rows: a packed step should have as many rows as a padded step."""
    return max(1, round(ROWS_PER_STEP / rows_per_block)) if packing else ROWS_PER_STEP


def _choices(spec: JobSpec, packing: bool, rows_per_block: float) -> list[tuple[int, bool]]:
    """Batch sizes and gradient checkpointing in the order of preference, within the spec's settings."""
    fixed = spec.training.per_device_train_batch_size
    if fixed is None:
        start = _default_batch(packing, rows_per_block)
        batches = [start // 2**k for k in range(int(math.log2(start)) + 1)]
    else:
        batches = [fixed]
    checkpointing = spec.training.gradient_checkpointing
    # Recomputing costs a third of the speed; a batch of 1 costs a GPU more.
    modes = [False, True] if checkpointing == "auto" else [checkpointing]
    choices = [(batch, mode) for mode in modes for batch in batches if mode or batch > 1 or len(batches) == 1]
    return choices or [(batches[-1], modes[-1])]


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
        f"available {_gib(int(device.memory_bytes * USABLE_MEMORY))} of {_gib(device.memory_bytes)}",
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


def device_map_of(directory: Path, device: Device, *, spread: bool = False) -> Any:
    """The device map of a saved model in its own precision. Layers for which the GPUs have no room stay in host memory.

    A model that was trained in 4 bits may not fit on its GPU in 16.
    """
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if device.kind == "cpu" or weights < device.memory_bytes * LOADED_SHARE:
        return device_map(device, spread=spread)
    return "sequential" if spread else "auto"


def dtype_of(name: str) -> Any:
    import torch

    return getattr(torch, name)
