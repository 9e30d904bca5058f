"""The trainer's callbacks: progress, checkpoints, stop requests. Imports transformers and torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from containers.common.checkpoints import CheckpointStore
from containers.common.errors import finite
from containers.common.report import Load, ProgressMeter, resident_mib
from containers.common.stop import StopRequest
from containers.common.watchdog import Watchdog
from containers.common.world import World


def load_now() -> Load:
    """The most that this process had on its GPU since the last call, and what it has of the machine's memory."""
    if not torch.cuda.is_available():
        return Load(host_mib=resident_mib())
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return Load(most >> 20, resident_mib(), _busy())


def _busy() -> float | None:
    """The share of the last second in which kernels ran on the GPU, by the driver (NVML); None if it does not tell.

    https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html
    """
    try:
        return float(torch.cuda.utilization()) / 100
    except Exception:  # noqa: BLE001  (the driver's library may be absent, and no training needs it)
        return None


class ReportProgress(TrainerCallback):  # type: ignore[misc]
    """Sends progress events when the meter says that they are due. Raises JobError if the loss is not finite."""

    def __init__(self, meter: ProgressMeter) -> None:
        self._meter = meter

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._meter.begin(state.global_step, int(state.num_input_tokens_seen))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        logs = logs or {}
        # All ranks have the same loss. `train_loss`, logged last, has the steps after the last `loss`, too.
        for name in ("loss", "train_loss"):
            if name in logs:
                finite(logs[name], f"the {name} of step {state.global_step}")
        self._meter.note(logs.get("loss"), logs.get("learning_rate"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            self._meter.step(state.global_step, int(state.num_input_tokens_seen), state.epoch)


class TellWatchdog(TrainerCallback):  # type: ignore[misc]
    """Tells the watchdog of each step, in every rank."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._watchdog.step()


class MeasureHeldOut(TrainerCallback):  # type: ignore[misc]
    """Measures the loss on some held-out rows after every few steps, and after the last step.

    Every rank measures the same rows, because a forward pass of FSDP needs all ranks. It must come before
    ReportProgress, which tells the loss.
    """

    def __init__(self, meter: ProgressMeter, loss_of: Callable[[Any], float], every: int) -> None:
        self._meter = meter
        self._loss_of = loss_of
        self._every = every

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if state.global_step % self._every and state.global_step < state.max_steps:
            return
        began = time.monotonic()
        model.eval()
        loss = self._loss_of(model)
        model.train()
        self._meter.note_held_out(loss, time.monotonic() - began)


class UploadCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Uploads every checkpoint of the trainer, with the notes that a later attempt needs.

    Ranks write shards. The last checkpoint also has the full state, from which the model is exported.
    """

    def __init__(self, store: CheckpointStore, notes: dict[str, Any], world: World) -> None:
        self._store = store
        self._world = world
        self._notes = notes
        self._began = time.monotonic()
        self._seconds_before = float(notes.get("train_seconds", 0.0))

    @property
    def train_seconds(self) -> float:
        """Seconds of training, over all attempts."""
        return self._seconds_before + time.monotonic() - self._began

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        local = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
        last = state.global_step >= state.max_steps
        if self._world.sharded:
            self._gather(local, model, last=last)
        if self._world.first_here:
            self._store.wait()
            _delete_others(local)
            self._store.save(state.global_step, local, {**self._notes, "train_seconds": self.train_seconds})

    def _gather(self, local: Path, model: Any, *, last: bool) -> None:
        from . import ranks

        if last:
            ranks.save_full_state(model, local)
        ranks.wait_for_all()  # each rank writes a part of the checkpoint


def _delete_others(checkpoint: Path) -> None:
    """Delete the older checkpoints beside it, which are in the bucket: the plan counts two (fit/phases.py)."""
    for path in checkpoint.parent.glob("checkpoint-*"):
        if path != checkpoint:
            shutil.rmtree(path)


class StopOnRequest(TrainerCallback):  # type: ignore[misc]
    """Ends training with a checkpoint after the current step of a stop request, in all ranks at once."""

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if _any_rank(self._request.reason is not None, args):
            self._request.agree()
            control.should_save = True
            control.should_training_stop = True


def _any_rank(flag: bool, args: TrainingArguments) -> bool:
    """Whether `flag` is set in any rank. Ranks must leave the loop together: a collective waits for all ranks."""
    if args.world_size == 1:
        return flag
    flags = torch.tensor([int(flag)], device=args.device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags.item())
