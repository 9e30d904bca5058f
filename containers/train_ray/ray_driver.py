"""What a RayJob runs on the head of its cluster: containers/train_maxtext's driver, with training on the workers.

    DROPFORGE_TPU_ACCELERATOR=tpu-v6e-slice DROPFORGE_TPU_TOPOLOGY=4x4 DROPFORGE_TPU_HOSTS=4 python ray_driver.py

The other variables, the events, exit codes, stages and artifacts are those of containers/train_maxtext.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import driver
import stages
from checkpoints import CheckpointStore
from job import Job
from report import Reporter
from shared_checkpoints import STEPS, newest, prune, read_notes, root_of, write_notes
from stages import AFTER_TRAIN, Work

from dropforge.base.log import log

LOOK_SECONDS = 2.0


class Watch(driver.Watch):
    """Tells of the steps, and of the checkpoints that the workers write to the bucket."""

    def __init__(
        self, work: Work, checkpoints: CheckpointStore, reporter: Reporter, period: int, notes: dict[str, Any]
    ) -> None:
        super().__init__(work, checkpoints, reporter, period, notes)
        self._root = root_of(Job.from_environment())
        self._noted = {checkpoints.saved_step: notes}
        self._step = checkpoints.saved_step
        self._look_at = 0.0

    def __call__(self) -> None:
        for line in self._lines():
            self._tell(line)
        if self._step - self._saved >= self._period and time.monotonic() >= self._look_at:
            self._look()

    def last(self) -> None:
        self()
        self._look()

    def _tell(self, told: dict[str, Any]) -> None:
        if "loss" not in told:
            self._begin(told["step"])
        self._step = told["step"]
        super()._tell(told)

    def _begin(self, step: int) -> None:
        """The workers begin, or begin again after one was lost: at `step`, with what was noted of it."""
        if step > self._saved:
            self._save(step)
        self._meter, self._notes = None, self._noted.get(step, {})
        self._before = {"loss": self._notes.get("train_loss"), "tokens": 0, "seconds": 0.0}
        self._steps_told = {}
        self._work.note(self._notes)

    def _look(self) -> None:
        """Find the checkpoint that the workers have made since the last look."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            step = newest(self._root)
        except Exception as error:  # noqa: BLE001  (training goes on; it is looked for again)
            log(f"the bucket was not listed: {error!r}", stage="train", severity="WARNING")
            return
        if step > self._saved:
            self._save(step)

    def _save(self, step: int) -> None:
        """Tell of the checkpoint, and note what belongs to it."""
        notes = self._noted[step] = self._note(step)
        self._checkpoints.saved_step = step
        self._reporter.checkpointed(step, f"{self._root}/{STEPS}/{step}")
        try:
            write_notes(self._root, step, notes)
            prune(self._root, step)
        except Exception as error:  # noqa: BLE001  (the checkpoint counts without its notes)
            log(f"the notes of step {step} were not written: {error!r}", stage="train", severity="WARNING")


def resume(work: Work, checkpoints: CheckpointStore) -> dict[str, Any]:
    """Find the newest checkpoint, which the workers will read; returns the notes that belong to it."""
    work.forget("train", *AFTER_TRAIN)
    root = root_of(Job.from_environment())
    checkpoints.saved_step = newest(root)
    notes = read_notes(root, checkpoints.saved_step) if checkpoints.saved_step else {}
    work.note(notes)
    return notes


stages.TRAIN_SCRIPTS |= dict.fromkeys(stages.TRAIN_SCRIPTS, "ray_train.py")
driver.Watch = Watch  # type: ignore[misc]
driver.resume = resume

if __name__ == "__main__":
    code = driver.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
