"""Watches the train stage: turns its progress into events, and uploads its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

from containers.common.checkpoints import CheckpointStore
from containers.common.report import ProgressMeter, Reporter
from dropforge.base.log import log

from .work import Work


class Watch:
    """A call reports the progress and saves the checkpoints since the call before. `period` is in steps.

    `notes` come from the checkpoint that the attempt resumes. A request to stop may interrupt a call at any place. So a
    line counts as read, and a checkpoint as saved, once that is done: the next call repeats what was interrupted.
    """

    def __init__(
        self, work: Work, checkpoints: CheckpointStore, reporter: Reporter, period: int, notes: dict[str, Any]
    ) -> None:
        self._work = work
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._period = period
        self._notes = notes
        self._meter: ProgressMeter | None = None
        self._read_bytes = work.progress.stat().st_size if work.progress.exists() else 0
        self._saved = checkpoints.saved_step
        self._latest = {"loss": notes.get("train_loss"), "tokens": 0, "seconds": 0.0}
        self._reports: dict[int, dict[str, Any]] = {}  # by step, since the last checkpoint

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is uploaded or uploading."""
        return self._saved

    def __call__(self) -> None:
        for line in self._lines():
            self._report(line)
        for step in self._steps():
            if step > self._saved and step % self._period == 0:
                self._save(step)

    def save_last(self) -> None:
        """Save the last checkpoint of the training, whatever its step."""
        self()
        if (steps := self._steps()) and steps[-1] > self._saved:
            self._save(steps[-1])

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The complete new lines of the progress file."""
        if not self._work.progress.exists():
            return
        with self._work.progress.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield json.loads(line)
                self._read_bytes += len(line)

    def _report(self, report: dict[str, Any]) -> None:
        if "loss" not in report:
            self._begin(report)
            return
        assert self._meter is not None, "a trainer reports its start before its first step"
        self._reports[report["step"]] = report
        self._meter.note(report["loss"], None)
        if "held_out_loss" in report:
            self._meter.note_held_out(report["held_out_loss"], report["held_out_seconds"])
        tokens = self._notes.get("tokens", 0) + report["tokens"]  # the trainer counts those of this attempt
        self._meter.step(report["step"], tokens, None)

    def _begin(self, report: dict[str, Any]) -> None:
        """The trainer starts after the step of its report."""
        self._meter = ProgressMeter(self._reporter, report["total_steps"])
        self._meter.begin(report["step"], self._notes.get("tokens", 0))
        size = {name: report[name] for name in ("rows_per_step", "tokens_per_step")}
        log("training", stage="train", step=report["step"], total_steps=report["total_steps"], **size)
        if report["loss_before"] is not None:
            before = {name: report[name] for name in ("loss_before", "judged_before")}
            self._notes = {**self._notes, **before}

    def _steps(self) -> list[int]:
        """The steps with a complete checkpoint: Orbax renames a directory to its number last."""
        paths = self._work.checkpoints.iterdir() if self._work.checkpoints.exists() else ()
        return sorted(int(path.name) for path in paths if path.name.isdecimal())

    def _save(self, step: int) -> None:
        self._checkpoints.save(step, self._work.checkpoints / str(step), self._note(step))
        self._saved = step
        for stale in self._steps():
            if stale < step:  # in the bucket: the store has waited for its upload
                shutil.rmtree(self._work.checkpoints / str(stale))

    def _note(self, step: int) -> dict[str, Any]:
        """The notes for an attempt that resumes at `step`. Forgets the reports up to that step."""
        reached = [reported for reported in self._reports if reported <= step]
        latest = self._reports[max(reached)] if reached else self._latest
        self._latest = latest
        self._reports = {reported: fields for reported, fields in self._reports.items() if reported > step}
        return {
            "train_loss": latest["loss"],
            "loss_before": self._notes.get("loss_before"),
            "judged_before": self._notes.get("judged_before"),
            "tokens": self._notes.get("tokens", 0) + latest["tokens"],
            "train_seconds": self._notes.get("train_seconds", 0.0) + latest["seconds"],
        }
