"""The work directory of one run, which the driver and the stages share.

DIRECTORY/job.json              the input of every stage: the spec, and the notes of the attempt before
DIRECTORY/stages/<stage>.json   a stage's result or its error; a stage with a result does not run again
DIRECTORY/logs/<stage>.log      all that the stage printed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.common.errors import code_error
from dropforge.spec import JobSpec

Result = dict[str, Any]


class Entry:
    """A class attribute of Work: the path of a file or folder in the work directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, work: Work, owner: type[Work]) -> Path:
        return work.directory / self._name


@dataclass(frozen=True)
class Work:
    """The paths of a work directory, and the results in it."""

    directory: Path

    base = Entry("base")  # the base model from a bucket; the Hub's models are in the Hub's own cache
    rows = Entry("rows.npz")
    held_out = Entry("held_out.json")
    sealed = Entry("sealed.json")
    imported = Entry("imported")
    progress = Entry("progress.jsonl")
    exported = Entry("export")

    @property
    def training(self) -> Path:
        return self.directory / "training"

    @property
    def checkpoints(self) -> Path:
        """MaxText's `checkpoint_dir`: one directory per step, which gets its number when it is complete."""
        return self.training / "run" / "checkpoints"

    @property
    def spec(self) -> JobSpec:
        return JobSpec.model_validate_json(json.dumps(self._job["spec"]))

    @property
    def secrets(self) -> list[str]:
        """The names of the environment variables that hold secrets."""
        return list(self._job["secrets"])

    @property
    def notes(self) -> dict[str, Any]:
        """The notes beside the checkpoint that this attempt resumes."""
        return dict(self._job["notes"])

    @property
    def _job(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "job.json").read_text()))

    def begin(self, spec: Mapping[str, Any], secrets: list[str]) -> None:
        """Start or continue the work on a spec. Results of another spec are deleted."""
        for directory in ("stages", "logs"):
            (self.directory / directory).mkdir(parents=True, exist_ok=True)
        if (self.directory / "job.json").exists() and self._job["spec"] == spec:
            return
        for path in (self.directory / "stages").glob("*.json"):
            path.unlink()
        write_json(self.directory / "job.json", {"spec": spec, "secrets": secrets, "notes": {}})

    def note(self, notes: Mapping[str, Any]) -> None:
        write_json(self.directory / "job.json", {**self._job, "notes": notes})

    def trained(self) -> Result | None:
        """The result of a complete train stage, if its checkpoint is still here."""
        result = self.result("train")
        if result is None or "error" in result or result["stopped"]:
            return None
        return result if (self.checkpoints / str(result["step"])).is_dir() else None

    def result(self, stage: str) -> Result | None:
        """The result or error of a stage, or None."""
        path = self._result_path(stage)
        return dict(json.loads(path.read_text())) if path.exists() else None

    def done(self, stage: str) -> Result:
        """The result of a stage that succeeded. Raises JobError if it did not."""
        result = self.result(stage)
        if result is None or "error" in result:
            raise code_error(f"stage {stage!r} has no result; expected it to run earlier", "the driver has a bug")
        return result

    def write_result(self, stage: str, result: Mapping[str, Any]) -> None:
        write_json(self._result_path(stage), result)

    def forget(self, *stages: str) -> None:
        for stage in stages:
            self._result_path(stage).unlink(missing_ok=True)

    def log_path(self, stage: str) -> Path:
        return self.directory / "logs" / f"{stage}.log"

    def _result_path(self, stage: str) -> Path:
        return self.directory / "stages" / f"{stage}.json"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write the file completely or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2))
    temporary.rename(path)
