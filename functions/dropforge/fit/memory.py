"""The memory of a training step on one accelerator, from the model's shape and the spec.

The formulas were counted with saved-tensor hooks on the real classes, and compared with peaks on a CPU
(docs/measurements.md). No GPU has measured them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dropforge.spec.machine import GIB
from dropforge.spec.methods import method_of

from .shape import ModelShape

if TYPE_CHECKING:
    from dropforge.spec.sections import Adapter, Training

# TRL 1.16 computes the output layer in tiles of so many tokens and entries of the vocabulary
# (trl/kernels/chunked_logprob.py). A kernel works in place on a GPU; PyTorch's operations on a CPU make copies.
TILE_TOKENS, TILE_ENTRIES = 4096, 32_768
_CPU_COPIES = 9
_GRADIENT = 4  # bytes of a trained parameter, in 32 bits
# Bytes of a trained parameter in the optimiser's state: Adam's two moments in 32 bits, or in 8 bits with a constant for
# each block of 256; Adafactor has the means of rows and columns. A paged state may leave the accelerator's memory. It
# counts here, because training is slow without it.
_STATES = {
    "adamw_torch_fused": 8.0,
    "paged_adamw_32bit": 8.0,
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "adafactor": 1.0,
}
_NF4 = 4.127 / 8  # bytes of a weight in 4 bits with doubly quantised block constants


@dataclass(frozen=True)
class Step:
    """One micro-step of one device: `batch` sequences of `length` tokens. `shards` devices share the weights.

    size: bytes of a loaded weight. autocast: a whole model keeps 32 bits and computes in 16. fused: the attention keeps
    no scores. on_cpu: there is no kernel for the output layer.
    """

    batch: int
    length: int
    checkpointing: bool
    shards: int = 1
    size: int = 2
    autocast: bool = False
    fused: bool = True
    on_cpu: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak of a training step, by purpose. `layer` is what the backward pass of one layer holds."""

    weights: int
    optimiser: int
    gradients: int
    activations: int
    logits: int
    layer: int

    @property
    def total(self) -> int:
        """Gradients grow while activations shrink: the peak is before the backward pass, or at its end."""
        forward, backward = self.activations + self.logits, self.gradients + self.layer
        return self.weights + self.optimiser + max(forward, backward)

    def __str__(self) -> str:
        parts = (
            f"weights {_gib(self.weights)}",
            f"optimiser {_gib(self.optimiser)}",
            f"the larger of activations {_gib(self.activations)} with logits {_gib(self.logits)} "
            f"and gradients {_gib(self.gradients)} with a layer {_gib(self.layer)}",
        )
        return f"{' + '.join(parts)} = {_gib(self.total)}"


def training_memory(shape: ModelShape, training: Training, step: Step) -> Estimate:
    """Bytes at the peak of a training step. Counts only the terms that grow with the model and the batch."""
    adapter, method = training.adapter, method_of(training.method)
    step = replace(step, batch=step.batch * method.sequences_per_row)
    weights = loaded_bytes(shape, adapter, step) * (1 + method.frozen_beside(adapter.type))
    trained = shape.parameters if adapter.type == "none" else adapter_parameters(shape, adapter)
    optimiser, gradients = optimiser_bytes(shape, training, trained), _GRADIENT * trained
    if adapter.type != "none":
        weights += _GRADIENT * trained  # the adapter itself, in 32 bits
    if step.shards > 1:
        # A shard of everything; in full, the embeddings, the current layer, and the next layer that is being fetched.
        whole = (1 if shape.tied else 2) * shape.embedding + 2 * shape.linear // shape.layers
        weights = weights // step.shards + step.size * whole
        optimiser, gradients = optimiser // step.shards, gradients // step.shards
    layer = step.tokens * saved_bytes(shape, adapter, step.size)
    if not step.fused:
        layer += 2 * step.batch * shape.heads * step.length**2 * step.size
    kept = step.tokens * shape.hidden * step.size * shape.layers
    logits = output_bytes(shape, step)
    if adapter.type == "none":
        logits += 4 * shape.embedding  # the gradient of the output layer is the first
    if step.checkpointing:
        return Estimate(weights, optimiser, gradients, kept, max(logits, layer), layer)
    return Estimate(weights, optimiser, gradients, layer * shape.layers, logits, layer)


def optimiser_bytes(shape: ModelShape, training: Training, trained: int) -> int:
    """Bytes of the optimiser's state for `trained` parameters. The trainer keeps an embedding's moments in 32 bits."""
    each = _STATES[training.optim]
    embedding = shape.embedding if training.adapter.type == "none" and training.optim.endswith("8bit") else 0
    return int(each * (trained - embedding) + _STATES["adamw_torch_fused"] * embedding)


def output_bytes(shape: ModelShape, step: Step) -> int:
    """Bytes that the backward pass of the output layer holds: a tile of logits, and the gradient of the last layer."""
    entry = 4 * _CPU_COPIES if step.on_cpu else step.size
    entries = min(shape.vocabulary, TILE_ENTRIES) if step.on_cpu else TILE_ENTRIES
    return min(step.tokens, TILE_TOKENS) * entries * entry + 4 * step.tokens * shape.hidden


def loaded_bytes(shape: ModelShape, adapter: Adapter, step: Step) -> int:
    """The bytes of the base model's weights, as they are loaded to train."""
    if adapter.type == "qlora":
        return int(shape.linear * _NF4) + step.size * (shape.parameters - shape.linear)
    return (step.size + (2 if step.autocast and step.shards == 1 else 0)) * shape.parameters


def least_bytes(parameters: int, training: Training) -> int:
    """The least that training a model of so many parameters takes on all accelerators together, without activations."""
    frozen = method_of(training.method).frozen_beside(training.adapter.type)
    if training.adapter.type == "none":
        return int((4 * (1 + frozen) + _STATES[training.optim] + _GRADIENT) * parameters)
    return int(parameters * (1 + frozen) * (_NF4 if training.adapter.type == "qlora" else 2))


def adapter_parameters(shape: ModelShape, adapter: Adapter) -> int:
    """The parameters of the spec's adapter; 0 without an adapter."""
    return 0 if adapter.type == "none" else shape.adapter_parameters(adapter.r, adapter.target_modules)


def saved_bytes(shape: ModelShape, adapter: Adapter, size: int) -> int:
    """Bytes that a layer saves of each token for the backward pass, without recomputing and with fused attention.

    Counted with saved-tensor hooks on Llama, Gemma 1, Gemma 3 and Qwen 3 (docs/measurements.md): exact for an adapter
    on a model in 16 or 32 bits, and for a whole model in 32; under autocast a whole model saves less. An adapter in 32
    bits on a model in 16 keeps its inputs twice.
    """
    if adapter.type == "none":
        hidden, intermediate, query, key_value = 24, 16, 8, 8
        extra_hidden, extra_heads = 16, 8
    else:
        with_dropout, without = ((48, 14, 12, 4), (28, 10, 8, 4)) if size == 2 else ((48, 20, 16, 8), (16, 16, 8, 8))
        hidden, intermediate, query, key_value = with_dropout if adapter.dropout else without
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
    return saved + 28 * adapter.r


def batch_choices(batch_size: int | None, checkpointing: bool | str, default: int) -> list[tuple[int, bool]]:
    """Batch sizes with and without gradient checkpointing, in the order of preference, within the spec's settings."""
    batches = [batch_size] if batch_size is not None else [default >> k for k in range(default.bit_length())]
    # Recomputing costs a third of the speed; a batch of 1 costs a GPU more.
    modes = [False, True] if checkpointing == "auto" else [bool(checkpointing)]
    choices = [(batch, mode) for mode in modes for batch in batches if mode or batch > 1 or len(batches) == 1]
    return choices or [(batches[-1], modes[-1])]


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
