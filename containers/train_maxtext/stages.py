"""What the stages share: a work directory, a result file for each, and how the driver runs them one by one.

    DIRECTORY/job.json              what every stage reads: the spec, and notes of the attempt before
    DIRECTORY/stages/<stage>.json   what a stage did, or why it failed; a stage that has done its work is not run again
    DIRECTORY/logs/<stage>.log      all that it printed

A stage is a process of its own: JAX takes its platform, and all chips of the host, once per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import INTERNAL, OUT_OF_MEMORY, Job, JobError, classify, config_error, out_of_memory

from dropforge.base.errors import ErrorClass
from dropforge.base.log import log
from dropforge.spec import JobSpec

# The second half of the export stage, "check", has an interpreter and so a process of its own.
AFTER_TRAIN = ("verify", "export", "check", "publish")
STAGES = ("prepare", "import", "train", *AFTER_TRAIN)
SCRIPTS = {
    "prepare": "prepare.py",
    "import": "import_hf.py",
    "verify": "verify.py",
    "export": "export_hf.py",
    "check": "check.py",
    "publish": "publish.py",
}
# The stage that trains, by training.method; the other stages are the same for all methods.
TRAIN_SCRIPTS = {"sft": "sft.py", "pretrain": "sft.py"}
# The interpreter that has PyTorch, where it is not this one: MaxText's own environment pins other versions.
TORCH_PYTHON = "DROPFORGE_TORCH_PYTHON"

POLL_SECONDS = 0.2
LOG_TAIL_BYTES = 6000

Result = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """The work directory of one run, by name of what is in it."""

    directory: Path

    @property
    def base(self) -> Path:
        """The base model, if it is not the Hub's own cache: what `save_pretrained` wrote."""
        return self.directory / "base"

    @property
    def rows(self) -> Path:
        return self.directory / "rows.npz"

    @property
    def held_out(self) -> Path:
        return self.directory / "held_out.json"

    @property
    def imported(self) -> Path:
        return self.directory / "imported"

    @property
    def training(self) -> Path:
        return self.directory / "training"

    @property
    def checkpoints(self) -> Path:
        """MaxText's `checkpoint_dir`: one directory for each step, named by it once it is whole."""
        return self.training / "run" / "checkpoints"

    @property
    def progress(self) -> Path:
        return self.directory / "progress.jsonl"

    @property
    def exported(self) -> Path:
        return self.directory / "export"

    @property
    def spec(self) -> JobSpec:
        return JobSpec.model_validate_json(json.dumps(self._job["spec"]))

    @property
    def secrets(self) -> list[str]:
        """Names of environment variables that are secret."""
        return list(self._job["secrets"])

    @property
    def notes(self) -> dict[str, Any]:
        """What the attempt before this one noted beside the checkpoint that this one goes on from."""
        return dict(self._job["notes"])

    @property
    def _job(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "job.json").read_text()))

    def begin(self, spec: Mapping[str, Any], secrets: list[str]) -> None:
        """Begin, or go on with, the work on a spec. Results that were made for another one are forgotten."""
        for directory in ("stages", "logs"):
            (self.directory / directory).mkdir(parents=True, exist_ok=True)
        if (self.directory / "job.json").exists() and self._job["spec"] == spec:
            return
        self.forget(*STAGES)
        write_json(self.directory / "job.json", {"spec": spec, "secrets": secrets, "notes": {}})

    def note(self, notes: Mapping[str, Any]) -> None:
        write_json(self.directory / "job.json", {**self._job, "notes": notes})

    def trained(self) -> Result | None:
        """The result of a train stage that reached its end, if its checkpoint is still here."""
        result = self.result("train")
        if result is None or "error" in result or result["stopped"]:
            return None
        return result if (self.checkpoints / str(result["step"])).is_dir() else None

    def result(self, stage: str) -> Result | None:
        """What a stage has left, or None."""
        path = self._result_path(stage)
        return dict(json.loads(path.read_text())) if path.exists() else None

    def done(self, stage: str) -> Result:
        """The result of a stage that has done its work."""
        result = self.result(stage)
        if result is None or "error" in result:
            raise JobError(ErrorClass.CODE, INTERNAL, f"stage {stage!r} has no result; expected it to have run before")
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
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2))
    temporary.rename(path)


def stage_main(stage: str, run: Callable[[Work], Result]) -> int:
    """The process of one stage: its argument is the work directory. Returns the exit code."""
    work = Work(Path(sys.argv[1]))
    try:
        work.write_result(stage, run(work))
    except Exception as error:  # noqa: BLE001  (whatever it is, the driver is told what it means)
        failure = classify_stage(error)
        traceback.print_exc()
        work.write_result(stage, {"error": describe(failure)})
        return failure.exit_code
    return 0


def describe(failure: JobError) -> dict[str, Any]:
    return {
        "error_class": str(failure.error_class),
        "exit_code": failure.exit_code,
        "message": failure.message,
        "hint": failure.hint,
    }


def classify_stage(error: Exception) -> JobError:
    """As for any container; XLA says that memory is short in the text of an error of its own."""
    if "RESOURCE_EXHAUSTED" in str(error) and type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        hint = (
            "lower training.per_device_train_batch_size or training.max_length, or use an accelerator with more chips"
        )
        return JobError(ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY, f"{type(error).__name__}: {error}"[:3000], hint)
    return classify(error)


class Runner:
    """Runs the stages of one attempt as processes."""

    def __init__(self, work: Work, job: Job, redact: Callable[[str], str]) -> None:
        self.work = work
        self._job = job
        self._redact = redact
        self.seconds: dict[str, float] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, stage: str, script: str = "", watch: Callable[[], None] = lambda: None) -> Result:
        """The result of a stage, which is run unless it has done its work already. `watch` is called meanwhile.

        Raises JobError when it failed, and Stopped when this process is told to stop; the stage's process then runs on
        until `end`.
        """
        known = self.work.result(stage)
        if known is not None and "error" not in known:
            log("done already", stage=stage, run=self._job.run)
            return known
        self.work.forget(stage)
        began = time.monotonic()
        with self.work.log_path(stage).open("wb") as output:
            command = [self._python(stage), str(Path(__file__).parent / (script or SCRIPTS[stage]))]
            self.process = subprocess.Popen(
                [*command, str(self.work.directory)],
                env=self._environment(stage),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        while self.process.poll() is None:
            watch()
            time.sleep(POLL_SECONDS)
        watch()
        self.seconds[stage] = round(time.monotonic() - began, 1)
        result = self.conclude(stage)
        log("done", stage=stage, run=self._job.run, seconds=self.seconds[stage])
        return result

    def conclude(self, stage: str) -> Result:
        """What the process that has ended left. Raises JobError when that is not a good result."""
        assert self.process is not None
        code, result = self.process.returncode, self.work.result(stage)
        if code == 0 and result is not None:
            return result
        if result is None or "error" not in result:
            failure = died(stage, code)
        else:
            error = result["error"]
            failure = JobError(ErrorClass(error["error_class"]), error["exit_code"], error["message"], error["hint"])
        if failure.exit_code == INTERNAL:
            print(self._redact(self.log_tail(stage)), file=sys.stderr, flush=True)
        raise failure

    def end(self, seconds: float, watch: Callable[[], None] = lambda: None) -> bool:
        """Ask the running process to end, kill it after `seconds`; whether it ended by itself."""
        if self.process is None or self.process.poll() is not None:
            return True
        self.process.terminate()
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            watch()
            time.sleep(POLL_SECONDS)
        ended = self.process.poll() is not None
        self.process.kill()
        self.process.wait()
        return ended

    def log_tail(self, stage: str) -> str:
        path = self.work.log_path(stage)
        return path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace") if path.exists() else ""

    def _python(self, stage: str) -> str:
        return (os.environ.get(TORCH_PYTHON) if stage == "check" else None) or sys.executable

    def _environment(self, stage: str) -> dict[str, str]:
        """Secrets are for the stage that downloads; from then on nothing may come from anywhere else."""
        # The Hub's cache is work like any other: where a container is started again, results point into it.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HOME": str(self.work.directory / "hub")}
        if stage == "prepare":
            return environment
        for name in self.work.secrets:
            environment.pop(name, None)
        # MaxText falls back to stubs of its Google Cloud clients: all its files are local, uploads are the driver's.
        environment |= {"HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": "TRUE", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if stage in ("import", "export"):
            environment["JAX_PLATFORMS"] = "cpu"
        return environment


def died(stage: str, code: int) -> JobError:
    """A process that left no result was ended from outside."""
    if code == -9:
        return out_of_memory(f"stage {stage!r} was killed (signal 9): the host's memory was too small for it")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return JobError(
        ErrorClass.INFRASTRUCTURE,
        INTERNAL,
        f"stage {stage!r} ended {how} and left no result",
        "the container's log has the end of what it printed; it is tried again",
    )


def train_script(method: str) -> str:
    """The script that trains by `method`. Raises JobError for one that this container does not know."""
    if script := TRAIN_SCRIPTS.get(method):
        return script
    raise config_error(f"training.method is {method!r}; expected one of {', '.join(sorted(TRAIN_SCRIPTS))}")
