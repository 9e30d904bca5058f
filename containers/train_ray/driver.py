"""The driver on the head of a Ray cluster: containers/train_maxtext's driver, with training on the workers.

    DROPFORGE_TPU_ACCELERATOR=tpu-v6e-slice DROPFORGE_TPU_TOPOLOGY=4x4 DROPFORGE_TPU_HOSTS=4 python ray_driver.py

The other variables, the events, exit codes, stages and artifacts are those of containers/train_maxtext.
"""

from __future__ import annotations

import time
from typing import Any

from containers.common.checkpoints import CheckpointStore
from containers.common.report import Reporter
from containers.train_maxtext import driver, watch
from containers.train_maxtext.driver import Notes, Trainer
from containers.train_maxtext.stages import AFTER_TRAIN
from containers.train_maxtext.work import Work
from dropforge.base.log import log

from .shared_checkpoints import SharedCheckpoints

POLL_SECONDS = 2.0


class Watch(watch.Watch):
    """Reports the steps of the workers, and the checkpoints that they write to the bucket."""

    def __init__(self, work: Work, checkpoints: CheckpointStore, reporter: Reporter, period: int, notes: Notes) -> None:
        super().__init__(work, checkpoints, reporter, period, notes)
        self._shared = SharedCheckpoints.from_environment()
        self._notes_by_step = {checkpoints.saved_step: notes}
        self._step = checkpoints.saved_step
        self._poll_at = 0.0

    def __call__(self) -> None:
        for line in self._lines():
            self._report(line)
        if self._step - self._saved >= self._period and time.monotonic() >= self._poll_at:
            self._poll()

    def save_last(self) -> None:
        self()
        self._poll()

    def _report(self, report: dict[str, Any]) -> None:
        self._step = report["step"]
        super()._report(report)

    def _begin(self, report: dict[str, Any]) -> None:
        """The workers start, or restart after a worker was lost: continue with the notes of that step."""
        step = report["step"]
        if step > self._saved:
            self._save(step)
        self._notes = self._notes_by_step.get(step, {})
        self._latest = {"loss": self._notes.get("train_loss"), "tokens": 0, "seconds": 0.0}
        self._reports = {}
        self._work.note(self._notes)
        super()._begin(report)

    def _poll(self) -> None:
        """Save the notes of a checkpoint that the workers wrote since the last poll."""
        self._poll_at = time.monotonic() + POLL_SECONDS
        try:
            step = self._shared.newest(self._step)  # a later step is none of these workers'
        except Exception as error:  # noqa: BLE001  (training continues; the next poll lists again)
            log(f"the bucket was not listed: {error!r}", stage="train", severity="WARNING")
            return
        if step > self._saved:
            self._save(step)

    def _save(self, step: int) -> None:
        """Report the checkpoint of the workers, write its notes, and delete older checkpoints."""
        notes = self._notes_by_step[step] = self._note(step)
        self._checkpoints.saved_step = step
        self._reporter.checkpointed(step, self._shared.step_uri(step))
        try:
            self._shared.write_notes(step, notes)
            self._shared.prune(step)
        except Exception as error:  # noqa: BLE001  (the checkpoint is complete without its notes)
            log(f"the notes of step {step} were not written: {error!r}", stage="train", severity="WARNING")
        self._saved = step


def resume(work: Work, checkpoints: CheckpointStore) -> Notes:
    """Find the newest checkpoint, which the workers will read; returns its notes."""
    work.forget("train", *AFTER_TRAIN)
    shared = SharedCheckpoints.from_environment()
    checkpoints.saved_step = shared.settle()
    notes = shared.read_notes(checkpoints.saved_step) if checkpoints.saved_step else {}
    work.note(notes)
    return notes


def main() -> int:
    """Run one attempt. The environment is the only input."""
    return driver.main(Trainer("containers.train_ray.train", resume, Watch))
