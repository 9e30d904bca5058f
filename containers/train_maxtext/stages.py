"""The stages of an attempt: each runs as a process, because JAX takes its platform and all chips once per process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from containers.common.errors import (
    BAD_CONFIG,
    BAD_DATA,
    OUT_OF_MEMORY,
    JobError,
    classify,
    infrastructure_error,
    out_of_memory,
)
from containers.common.job import Job
from dropforge.base.errors import ErrorClass
from dropforge.base.log import log

from .maxtext_settings import on_tpu
from .work import Result, Work

# The module of each stage. "check" is the second half of the export: it needs another interpreter.
MODULES = {
    "prepare": "containers.train_maxtext.prepare",
    "import": "containers.train_maxtext.import_hf",
    "train": "containers.train_maxtext.train",
    "verify": "containers.train_maxtext.verify",
    "export": "containers.train_maxtext.export_hf",
    "check": "containers.train_maxtext.check",
    "publish": "containers.train_maxtext.publish",
}
AFTER_TRAIN = ("verify", "export", "check", "publish")
# The variable that names the interpreter with PyTorch: MaxText's own environment pins other versions.
TORCH_PYTHON = "DROPFORGE_TORCH_PYTHON"
# MaxText uses stubs of its Google Cloud clients: all its files are local, and the driver uploads.
OFFLINE = {"HF_HUB_OFFLINE": "1", "DECOUPLE_GCLOUD": "TRUE", "TF_CPP_MIN_LOG_LEVEL": "2"}

POLL_SECONDS = 0.2
LOG_READ, LOG_TAIL = 1_000_000, 6000  # characters


def stage_main(stage: str, run: Callable[[Work], Result]) -> int:
    """The main function of a stage's process. Its argument is the work directory; returns the exit code."""
    work = Work(Path(sys.argv[1]))
    try:
        work.write_result(stage, run(work))
    except Exception as error:  # noqa: BLE001  (the driver reports the class of any error)
        failure = classify_stage(error)
        traceback.print_exc()
        work.write_result(stage, {"error": failure.to_json()})
        return failure.exit_code
    return 0


def classify_stage(error: Exception) -> JobError:
    """As `classify`, and for XLA, which reports exhausted memory only in the text of its own error."""
    if "RESOURCE_EXHAUSTED" in str(error) and type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        hint = (
            "lower training.per_device_train_batch_size or training.max_length, or use an accelerator with more chips"
        )
        return JobError(ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY, f"{type(error).__name__}: {error}", hint)
    return classify(error)


class Runner:
    """Runs the stages of one attempt as processes."""

    def __init__(
        self, work: Work, job: Job, redact: Callable[[str], str], modules: Mapping[str, str] = MODULES
    ) -> None:
        self.work = work
        self.seconds: dict[str, float] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._job = job
        self._redact = redact
        self._modules = modules

    def run(self, stage: str, watch: Callable[[], None] = lambda: None) -> Result:
        """The result of a stage. Runs it unless it has a result already, and calls `watch` while it runs.

        Raises JobError if the stage fails. Raises Stopped on a request to stop: the stage's process then continues
        until `end`.
        """
        known = self.work.result(stage)
        if known is not None and "error" not in known:
            log("done already", stage=stage, run=self._job.run)
            return known
        self.work.forget(stage)
        began = time.monotonic()
        self.process = self._start(stage)
        while self.process.poll() is None:
            watch()
            time.sleep(POLL_SECONDS)
        watch()
        self.seconds[stage] = round(time.monotonic() - began, 1)
        result = self.conclude(stage)
        log("done", stage=stage, run=self._job.run, seconds=self.seconds[stage])
        return result

    def conclude(self, stage: str) -> Result:
        """The result that the ended process left. Raises JobError if it failed."""
        assert self.process is not None
        code, result = self.process.returncode, self.work.result(stage)
        if code == 0 and result is not None:
            return result
        if result is None or "error" not in result:
            failure = killed(stage, code)
        else:
            failure = JobError.from_json(result["error"])
        if failure.exit_code not in (BAD_CONFIG, BAD_DATA):  # those say all that a user can mend
            print(self.log_tail(stage), file=sys.stderr, flush=True)
        raise failure

    def end(self, seconds: float, watch: Callable[[], None] = lambda: None) -> bool:
        """Ask the running process to end, and kill it after `seconds`; returns whether it ended without a kill."""
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
        """The end of a stage's output; redacted before it is cut, because half a secret is not recognised."""
        path = self.work.log_path(stage)
        text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
        return self._redact(text[-LOG_READ:])[-LOG_TAIL:]

    def _start(self, stage: str) -> subprocess.Popen[bytes]:
        python = (os.environ.get(TORCH_PYTHON) if stage == "check" else None) or sys.executable
        with self.work.log_path(stage).open("wb") as output:
            return subprocess.Popen(
                [python, "-m", self._modules[stage], str(self.work.directory)],
                env=self._environment(stage),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _environment(self, stage: str) -> dict[str, str]:
        """Only the stage that downloads gets the secrets; the stages after it work offline."""
        # The Hub's cache is in the work directory: the results of a restarted container point into it.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HOME": str(self.work.directory / "hub")}
        if stage == "prepare":
            return environment
        for name in self.work.secrets:
            environment.pop(name, None)
        environment |= OFFLINE
        if stage in ("import", "export"):
            environment["JAX_PLATFORMS"] = "cpu"
        elif stage == "train" and on_tpu():
            # JAX fails then without chips. By itself it would train on the CPU of a machine that is paid for its chips.
            environment["JAX_PLATFORMS"] = "tpu,cpu"
        return environment


def killed(stage: str, code: int) -> JobError:
    """The error of a process that left no result: something outside ended it."""
    if code == -9:
        return out_of_memory(f"stage {stage!r} was killed (signal 9): the host's memory was too small for it")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return infrastructure_error(
        f"stage {stage!r} ended {how} and left no result",
        "the container's log has the end of its output; dropforge tries the run again",
    )
