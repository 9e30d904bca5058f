"""The effective batch: the rows and tokens of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .maxtext import BATCH_SIZE

if TYPE_CHECKING:
    from dropforge.spec import JobSpec
    from dropforge.spec.methods import Trainer

ROWS_PER_STEP = 8  # rows in one device's batch of train_trl, where the spec has no number


@dataclass(frozen=True)
class Batch:
    """An optimiser step: `per_device` sequences, `accumulation` times, on `devices` devices.

    unit: a sequence is a row of the data set, or a block of several rows as the spec asks (packing true). Without a
    batch size in the spec, MaxText's trainer decides by the rows' lengths: a sequence is either.
    """

    per_device: int
    accumulation: int
    devices: int
    length: int
    unit: Literal["rows", "blocks", "sequences"]
    sequences_per_row: int = 1

    @property
    def sequences(self) -> int:
        return self.per_device * self.accumulation * self.devices

    @property
    def tokens(self) -> int:
        """The most tokens of a step, with padding."""
        return self.sequences * self.sequences_per_row * self.length

    def __str__(self) -> str:
        devices = f"{self.devices} device{'' if self.devices == 1 else 's'}"
        factors = f"{self.per_device} x {self.accumulation} accumulated x {devices}"
        return f"{self.sequences} {self.unit}, at most {self.tokens:,} tokens ({factors})"


def default_batch(trainer: Trainer) -> int:
    """The rows of one device, where the spec has no number."""
    return BATCH_SIZE if trainer == "maxtext" else ROWS_PER_STEP


def batch_of(spec: JobSpec) -> Batch:
    """The effective batch of a spec. Without a batch size in the spec, a step of train_trl has about that many rows."""
    from dropforge.spec.methods import method_of

    training, target = spec.training, spec.target
    method = method_of(training.method)
    per_device = training.per_device_train_batch_size or default_batch(target.trainer)
    accumulation, devices = training.gradient_accumulation_steps, target.machine.devices
    unit: Literal["rows", "blocks", "sequences"] = "blocks" if training.packing is True else "rows"
    chooses = training.packing == "auto" and training.per_device_train_batch_size is None
    if target.trainer == "maxtext" and method.data == "rows" and chooses:
        unit = "sequences"
    return Batch(per_device, accumulation, devices, training.max_length, unit, method.sequences_per_row)
