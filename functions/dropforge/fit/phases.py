"""The memory and the disk that each phase of a run needs, from the model's shape and the spec.

A phase is a part of the work of the training container or of the server. The constants are estimates, except where a
source is named; docs/limits.md says what was never measured on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dropforge.spec.methods import method_of

from .batch import default_batch
from .maxtext import SEALED_ROWS, padded_length
from .memory import (
    Estimate,
    Step,
    adapter_parameters,
    batch_choices,
    loaded_bytes,
    saved_bytes,
    training_memory,
)
from .shape import ModelShape

if TYPE_CHECKING:
    from dropforge.spec import JobSpec
    from dropforge.spec.machine import Machine

Place = Literal["target", "serve"]

GPU_SHARE = 0.92  # of the memory of a GPU: fragmentation and the CUDA context take the rest
TPU_SHARE = 0.9
VLLM_SHARE = 0.9  # gpu_memory_utilization of vLLM, its default
CHECKPOINTS = 2  # on the disk at once: one is uploaded while the next one is written
STATE_BYTES = 12  # of a trained parameter in a checkpoint: the weight and Adam's two moments, in 32 bits
PROCESS_BYTES = 3_000_000_000  # of host memory: a process with PyTorch and CUDA's libraries, or with JAX
TOKEN_BYTES = 24  # of host memory for a token of the data: its id and its label in 32 bits, and copies of both
TOKENISER_BYTES = 2_400_000_000  # of host memory: eight processes that tokenise
GENERATION_ROWS = 64  # prompts that the evaluation answers at once
GENERATION_TOKENS = 32_768  # tokens of prompts and answers that the evaluation holds at once
ANSWER_TOKENS = 1024  # of a judged answer, at most, where the spec has no limit
LOSS_TOKENS = 2048  # tokens whose logits the evaluation holds at once
VLLM_GRAPHS_BYTES = 1_500_000_000  # CUDA graphs (0.5 to 1.5 GB)
VLLM_TOKENS = 8192  # of a prefill step, vLLM's max_num_batched_tokens for servers
VLLM_CACHE_BYTES = 2_000_000_000  # compiled kernels, on the disk
STREAMER_BYTES = 40_000_000_000  # the Run:ai streamer's buffer in host memory, at most (RUNAI_STREAMER_MEMORY_LIMIT)


@dataclass(frozen=True)
class Need:
    """The need of a phase: bytes of each accelerator, of each host's memory, and of each host's disk."""

    phase: str
    accelerator: int = 0
    host: int = PROCESS_BYTES
    disk: int = 0


@dataclass(frozen=True)
class Row:
    """A phase, its need, and the machine on which it runs. `share` is the usable part of an accelerator's memory."""

    need: Need
    place: Place
    machine: Machine
    share: float

    @property
    def host(self) -> int:
        """The need of host memory, with the files if they are in memory."""
        return self.need.host + (self.need.disk if self.machine.files_in_memory else 0)

    @property
    def accelerator_bytes(self) -> int:
        """The memory of an accelerator that the phase may use."""
        return int(self.machine.accelerator_bytes * self.share)

    @property
    def amounts(self) -> dict[str, tuple[int, int | None]]:
        """The needed and the available bytes of each resource; None where the machine lacks it, or nobody knows."""
        machine = self.machine
        return {
            "accelerator": (self.need.accelerator, self.accelerator_bytes if machine.accelerators else None),
            "host": (self.host, machine.host_bytes),
            "disk": (self.need.disk, None if machine.files_in_memory else machine.disk_bytes),
        }

    @property
    def left(self) -> dict[str, int | None]:
        """The bytes of each resource that stay free; None where the machine lacks it, or its size is unknown."""
        return {name: None if most is None else most - need for name, (need, most) in self.amounts.items()}

    @property
    def short(self) -> list[str]:
        """The resources that the machine has too little of."""
        return [name for name, left in self.left.items() if left is not None and left < 0]


def phase_rows(spec: JobSpec, shape: ModelShape, measured: Machine | None = None) -> list[Row]:
    """Every phase of the run, in order. `measured` replaces the machine that downloads and exports."""
    machine, driver = spec.target.machine, spec.target.driver_machine
    if measured is not None:
        machine, driver = (measured, measured) if driver == machine else (machine, measured)
    if spec.target.trainer == "maxtext":
        rows = [
            Row(need, "target", machine if on_chips else driver, TPU_SHARE)
            for need, on_chips in _maxtext(spec, shape, machine, alone=driver == machine)
        ]
    else:
        rows = [Row(need, "target", machine, GPU_SHARE) for need in _trl(spec, shape, machine)]
    if spec.serve is not None:
        need, machine = _serve(spec, shape, spec.serve.machine(spec)), spec.serve.machine(spec)
        if spec.serve.keeps_machine:  # with the files of the training
            need = replace(need, disk=need.disk + rows[-1].need.disk)
        rows.append(Row(need, "serve", machine, VLLM_SHARE))
    return rows


def chosen_step(spec: JobSpec, shape: ModelShape, machine: Machine) -> tuple[Step, Estimate]:
    """The first step that fits a GPU, for rows of max_length tokens; the smallest step if none fits."""
    training = spec.training
    usable = int(machine.accelerator_bytes * GPU_SHARE)
    whole = training.adapter.type == "none"
    batches = batch_choices(training.per_device_train_batch_size, training.gradient_checkpointing, default_batch("trl"))
    for batch, checkpointing in batches:
        step = Step(
            batch,
            training.max_length,
            checkpointing,
            shards=machine.devices,
            size=4 if whole else 2,
            autocast=whole,
            fused=spec.model.attn_implementation != "eager",
        )
        estimate = training_memory(shape, training, step)
        if estimate.total <= usable:
            break
    return step, estimate


def evaluation_bytes(spec: JobSpec, shape: ModelShape, size: int, most: int = GENERATION_ROWS) -> int:
    """Bytes that scoring a model takes beside its weights: a generation's cache and layer, or a loss's logits.

    A generation answers `most` rows at once.
    """
    longest = spec.training.max_length
    loss = max(LOSS_TOKENS, longest) * shape.vocabulary * (size + 4)
    if spec.evaluation is None:
        return loss
    row = longest + (spec.evaluation.max_new_tokens or min(ANSWER_TOKENS, longest))
    rows = max(1, min(most, spec.evaluation.max_rows, GENERATION_TOKENS // row))
    layer = rows * longest * (3 * shape.intermediate + 4 * shape.hidden) * size
    return max(loss, rows * row * shape.key_value_bytes(size) + layer)


def resident_bytes(weights: int, beside: int, usable: int, shape: ModelShape, size: int) -> int:
    """The weights of a saved model that stay on a GPU with `beside` more bytes; the rest stays in host memory."""
    least = size * (shape.embedding * (1 if shape.tied else 2) + 2 * shape.linear // shape.layers)
    return max(min(weights, usable - beside), min(weights, least))


def _trl(spec: JobSpec, shape: ModelShape, machine: Machine) -> Iterator[Need]:
    """The phases of containers/train_trl."""
    training, whole = spec.training, spec.training.adapter.type == "none"
    step, estimate = chosen_step(spec, shape, machine)
    sharded, processes = machine.devices > 1, PROCESS_BYTES * machine.accelerators
    data = _data_bytes(spec)
    trained = shape.parameters if whole else adapter_parameters(shape, training.adapter)
    files, exported = shape.file_bytes, shape.file_bytes + (0 if whole else 4 * trained)
    checkpoint = STATE_BYTES * trained // machine.hosts
    last = 4 * shape.parameters if sharded and whole else 0  # the last checkpoint has the whole state, too
    yield Need("download", disk=files + checkpoint)
    yield Need("tokenise", host=PROCESS_BYTES + TOKENISER_BYTES + data, disk=files + checkpoint)
    loading = step.size * shape.parameters if sharded else 0  # a rank reads the weights for all ranks of its host
    host = processes + loading + data * machine.accelerators
    yield Need("train", estimate.total, host, files + checkpoint)
    disk = files + CHECKPOINTS * checkpoint + last
    yield Need("checkpoint", estimate.weights + estimate.optimiser, processes + last, disk)
    usable, beside = int(machine.accelerator_bytes * GPU_SHARE), evaluation_bytes(spec, shape, shape.saved_bytes)
    resident = resident_bytes(files, beside, usable * machine.accelerators, shape, shape.saved_bytes)
    offloaded = files - resident
    compared = beside + -(-resident // (1 if resident + beside <= usable else machine.accelerators))
    alone = loaded_bytes(shape, training.adapter, Step(1, 1, False, size=step.size))
    before = alone + evaluation_bytes(spec, shape, step.size)
    scored = 0 if spec.evaluation is None else before if not sharded or before <= usable else compared
    disk = files + checkpoint + last + exported
    yield Need("merge", 0, PROCESS_BYTES + _merge_bytes(shape, whole), disk)
    yield Need("evaluate", max(scored, compared), processes + offloaded, disk)
    yield Need("export", compared, processes + offloaded, disk)
    yield Need("upload", 0, PROCESS_BYTES, disk)


def _merge_bytes(shape: ModelShape, whole: bool) -> int:
    """Of host memory: merge.py holds one tensor, with the copies that the sum or the rounding takes."""
    if whole:
        return 6 * shape.embedding
    return max(12 * shape.largest_projection, shape.saved_bytes * shape.embedding)


def _maxtext(spec: JobSpec, shape: ModelShape, machine: Machine, *, alone: bool) -> Iterator[tuple[Need, bool]]:
    """The phases of containers/train_maxtext, and whether the phase is on the chips' hosts.

    `alone`: one machine does all. Else a head converts, and the hosts of the chips share checkpoints in the bucket.
    """
    starts = method_of(spec.training.method).starts_from_base
    files = shape.file_bytes if starts else 0
    imported = 4 * shape.parameters if starts else 0
    checkpoint = STATE_BYTES * shape.parameters
    data = _data_bytes(spec)
    yield Need("download", disk=files + (checkpoint if alone else 0)), False
    host = PROCESS_BYTES + TOKENISER_BYTES + data
    yield Need("tokenise", host=host, disk=files + (checkpoint if alone else 0)), False
    if starts:
        yield Need("convert", host=PROCESS_BYTES + 8 * shape.parameters, disk=files + imported), False
    loaded = PROCESS_BYTES + 4 * shape.parameters // machine.hosts + data
    on_disk = files + imported if alone else 0
    yield Need("train", maxtext_memory(spec, shape, machine), loaded, on_disk + (checkpoint if alone else 0)), True
    saved = PROCESS_BYTES + checkpoint // machine.hosts  # Orbax copies the state to the host, and writes from there
    state = 16 * shape.parameters // machine.devices
    yield Need("checkpoint", state, saved, on_disk + (CHECKPOINTS * checkpoint if alone else 0)), True
    # The chips judge the held-out rows before and after the training, in the trainer's process.
    kept = PROCESS_BYTES + data
    yield (
        Need(
            "evaluate", judging_memory(spec, shape, machine), kept, on_disk + (CHECKPOINTS * checkpoint if alone else 0)
        ),
        True,
    )
    trained = checkpoint if alone else 4 * shape.parameters  # a head downloads the weights alone
    disk = files + imported + trained + shape.file_bytes
    compared = 4 * shape.parameters + evaluation_bytes(spec, shape, 4, SEALED_ROWS)  # in 32 bits, by PyTorch
    yield Need("export", 0, PROCESS_BYTES + max(8 * shape.parameters, compared), disk), False
    yield Need("upload", 0, PROCESS_BYTES, disk), False


def maxtext_memory(spec: JobSpec, shape: ModelShape, machine: Machine) -> int:
    """Bytes of a chip in a step of MaxText: all chips share weights, gradients and Adam's moments."""
    training, tokens = spec.training, _maxtext_tokens(spec)
    frozen = 4 * method_of(training.method).frozen_beside(training.adapter.type)  # in 32 bits, without a gradient
    accumulated = 4 if training.gradient_accumulation_steps > 1 else 0
    layer = tokens * saved_bytes(shape, training.adapter, 4) // 2  # the whole model's, computed in 16 bits
    kept = (
        layer * shape.layers
        if training.gradient_checkpointing is False
        else (2 * tokens * shape.hidden * shape.layers + layer)
    )
    state = (16 + accumulated + frozen) * shape.parameters // machine.devices
    return state + _gathered_bytes(shape) + kept + 8 * tokens * shape.vocabulary


def judging_memory(spec: JobSpec, shape: ModelShape, machine: Machine) -> int:
    """Bytes of a chip in a forward pass over held-out rows, in batches of the training's size.

    The trainer's weights and moments stay; there are no gradients, and one layer's activations at a time. The logits
    and their logarithms have 32 bits (containers/train_maxtext/hooks.py).
    """
    tokens = _maxtext_tokens(spec)
    layer = tokens * saved_bytes(shape, spec.training.adapter, 4) // 2
    state = STATE_BYTES * shape.parameters // machine.devices
    return state + _gathered_bytes(shape) + layer + 8 * tokens * shape.vocabulary


def _maxtext_tokens(spec: JobSpec) -> int:
    """The tokens of a chip in a forward pass."""
    batch = spec.training.per_device_train_batch_size or default_batch("maxtext")
    return batch * method_of(spec.training.method).sequences_per_row * padded_length(spec.training.max_length, tpu=True)


def _gathered_bytes(shape: ModelShape) -> int:
    """Weights that a chip holds in full, in 16 bits: the embeddings, the current layer, and the next one."""
    return 2 * (shape.embedding * (1 if shape.tied else 2) + 2 * shape.linear // shape.layers)


def _serve(spec: JobSpec, shape: ModelShape, machine: Machine) -> Need:
    """vLLM with one request of max_model_len tokens: fewer cannot be promised to clients."""
    serve, devices = spec.serve, machine.accelerators
    assert serve is not None, "the caller passes only specs that serve"
    cache = serve.max_model_len * shape.key_value_bytes(2) // devices
    profile = VLLM_TOKENS * 2 * (4 * shape.hidden + 3 * shape.intermediate // devices)
    logits = serve.max_num_seqs * shape.vocabulary * 6
    accelerator = shape.file_bytes // devices + cache + profile + logits + VLLM_GRAPHS_BYTES
    # On a GPU, the weights are streamed from the bucket; on a TPU, they are downloaded.
    streams = serve.streams_weights
    buffer = min(shape.file_bytes, STREAMER_BYTES) if streams else 0
    disk = VLLM_CACHE_BYTES + (0 if streams else shape.file_bytes)
    return Need("serve", accelerator, PROCESS_BYTES * devices + buffer, disk)


def _data_bytes(spec: JobSpec) -> int:
    """The tokenised rows in host memory, if the spec limits them; a data set without a limit counts as empty."""
    from dropforge.spec import SyntheticDataset

    dataset = spec.dataset
    rows = dataset.rows if isinstance(dataset, SyntheticDataset) else dataset.limit or 0
    sequences = rows * method_of(spec.training.method).sequences_per_row
    return sequences * spec.training.max_length * TOKEN_BYTES
