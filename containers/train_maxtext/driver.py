"""The MaxText training container: fine-tunes the model of one job spec on TPUs and leaves it, committed, in the runs
bucket. The same environment, events, exit codes and artifacts as containers/train_trl, whose modules it shares.

    DROPFORGE_PROJECT=p DROPFORGE_RUN=demo-0123456789ab DROPFORGE_ATTEMPT=1 DROPFORGE_RUNS_BUCKET=b \\
    DROPFORGE_JOB_EVENTS_TOPIC=projects/p/topics/job-events DROPFORGE_WORK_DIRECTORY=/work python driver.py

Work that a stage has done stays in DROPFORGE_WORK_DIRECTORY (a data disk; without it, a temporary directory), so that
a container which is started again there goes on; training also goes on elsewhere, from checkpoints in the bucket.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import NOTES, CheckpointStore
from job import Job, JobError, Redactor, config_error, missing
from outcome import Outcome, outcome_of
from report import FLUSH_SECONDS, ProgressMeter, Reporter
from stages import AFTER_TRAIN, Runner, Work, train_script
from stop import EVENT_SECONDS, UPLOAD_MARGIN_SECONDS, UPLOAD_SECONDS, Stopped, StopRequest
from train import is_committed, load_spec

from dropforge.base.log import log
from dropforge.cloud.clients import Clients
from dropforge.cloud.container_secrets import load_secrets
from dropforge.run.artifacts import Manifest
from dropforge.spec import JobSpec

WORK_DIRECTORY = "DROPFORGE_WORK_DIRECTORY"
END_SECONDS = 5.0  # for a process that has nothing to save


def main(argv: Sequence[str] | None = None) -> int:
    """Run one attempt. There are no arguments: what it must know is in the environment."""
    try:
        job = Job.from_environment()
    except JobError as error:
        log(error.message, stage="train", severity="ERROR", hint=error.hint)
        return error.exit_code
    redact, stop = Redactor(), StopRequest()
    reporter = Reporter(job, redact)
    try:
        with work_directory(job) as directory:
            outcome = outcome_of(lambda: run(job, directory, reporter, stop, redact), job, stop, redact)
            reporter.ended(outcome)
            return outcome.exit_code
    finally:
        reporter.close(EVENT_SECONDS if stop.reason == "preempted" else FLUSH_SECONDS)


def run(job: Job, directory: Path, reporter: Reporter, stop: StopRequest, redact: Redactor) -> Outcome:
    """One attempt from top to bottom: the committed manifest is its only result."""
    stop.arm(job.deadline)
    clients = Clients()
    load_secrets(clients, os.environ)
    client = clients.storage()
    checkpoints = CheckpointStore(client, job, reporter)
    try:
        if is_committed(client, job, reporter):
            return Outcome.done()
        spec = load_spec(client, job)
        redact.learn(spec.secrets)
        redact.guard_output()
        check_spec(spec)
        work = Work(directory)
        work.begin(spec.model_dump(mode="json", by_alias=True), list(spec.secrets))
        notes = resume(work, checkpoints)
        reporter.started(checkpoints.saved_step, device())
        log("started", stage="train", run=job.run, resumed_step=checkpoints.saved_step)
        runner = Runner(work, job, redact)
        watch = Watch(work, checkpoints, reporter, spec.training.checkpoint_steps, notes)
        manifest = run_stages(spec, runner, watch, lambda: stop.seconds_left(job.grace_seconds))
        stop.disarm()
        reporter.succeeded(manifest)
        log("succeeded", stage="train", run=job.run, attempt=manifest.attempt, metrics=manifest.metrics)
        checkpoints.wait()
        return Outcome.done()
    except Stopped as request:
        checkpoints.wait(max(UPLOAD_SECONDS, stop.seconds_left(job.grace_seconds) - UPLOAD_MARGIN_SECONDS))
        step = checkpoints.saved_step
        log("stopped", stage="train", run=job.run, severity="WARNING", reason=request.reason, saved_step=step)
        return Outcome.stopped(request.reason, step, stop.agreed)
    finally:
        stop.disarm()
        checkpoints.close()


def run_stages(spec: JobSpec, runner: Runner, watch: Watch, seconds_left: Callable[[], float]) -> Manifest:
    """Every stage that has not done its work yet, in order. Raises JobError, and Stopped with no process left."""
    try:
        runner.run("prepare")
        # A checkpoint has all weights, and pre-training begins without any.
        if not watch.saved_step and spec.training.method != "pretrain":
            runner.run("import")
        train(spec, runner, watch, seconds_left)
        for stage in AFTER_TRAIN:
            result = runner.run(stage)
        return Manifest.model_validate(result["manifest"])
    except Stopped:
        runner.end(END_SECONDS)
        raise


def train(spec: JobSpec, runner: Runner, watch: Watch, seconds_left: Callable[[], float]) -> None:
    """The train stage; its steps become events, and its checkpoints go to the bucket meanwhile."""
    try:
        result = runner.run("train", train_script(spec.training.method), watch)
    except Stopped:
        if runner.end(max(END_SECONDS, seconds_left() - UPLOAD_SECONDS - UPLOAD_MARGIN_SECONDS), watch):
            watch.last()
        raise
    watch.last()
    if result["stopped"]:  # it was told before this process was, or instead of it
        raise Stopped("preempted")


class Watch:
    """Looks, while the trainer runs, for what it has told and saved since the last look."""

    def __init__(
        self, work: Work, checkpoints: CheckpointStore, reporter: Reporter, period: int, notes: dict[str, Any]
    ) -> None:
        self._work = work
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._period = period
        self._notes = notes
        self._meter: ProgressMeter | None = None
        self._told = work.progress.stat().st_size if work.progress.exists() else 0
        self._saved = checkpoints.saved_step
        self._before = {"loss": notes.get("train_loss"), "tokens": 0, "seconds": 0.0}
        self._steps_told: dict[int, dict[str, Any]] = {}  # since the last checkpoint

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is in the bucket, or on its way there."""
        return self._saved

    def __call__(self) -> None:
        for line in self._lines():
            self._tell(line)
        for step in self._steps():
            if step > self._saved and step % self._period == 0:
                self._save(step)

    def last(self) -> None:
        """The checkpoint that training ended with, whatever its step."""
        self()
        if (steps := self._steps()) and steps[-1] > self._saved:
            self._save(steps[-1])

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._work.progress.exists():
            return
        with self._work.progress.open("rb") as file:
            file.seek(self._told)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._told += len(line)
                yield json.loads(line)

    def _tell(self, told: dict[str, Any]) -> None:
        if self._meter is None:  # the trainer's first words
            self._meter = ProgressMeter(self._reporter, told["total_steps"])
            self._meter.begin(told["step"], 0)
            if told["loss_before"] is not None:
                self._notes = {**self._notes, "loss_before": told["loss_before"]}
            return
        self._steps_told[told["step"]] = told
        self._meter.note(told["loss"], None)
        self._meter.step(told["step"], told["tokens"], None)

    def _steps(self) -> list[int]:
        """The steps whose checkpoint is whole: Orbax gives a directory its number last."""
        found = self._work.checkpoints.iterdir() if self._work.checkpoints.exists() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal())

    def _save(self, step: int) -> None:
        self._checkpoints.save(step, self._work.checkpoints / str(step), self._note(step))
        for stale in self._steps():
            if stale < step and stale != self._checkpoints.saved_step:
                shutil.rmtree(self._work.checkpoints / str(stale))

    def _note(self, step: int) -> dict[str, Any]:
        """What an attempt that goes on from the step must know; what was told until then is forgotten."""
        self._saved = step
        reached = [told for told in self._steps_told if told <= step]
        now = self._steps_told[max(reached)] if reached else self._before
        self._before = now
        self._steps_told = {told: fields for told, fields in self._steps_told.items() if told > step}
        return {
            "train_loss": now["loss"],
            "loss_before": self._notes.get("loss_before"),
            "tokens": self._notes.get("tokens", 0) + now["tokens"],
            "train_seconds": self._notes.get("train_seconds", 0.0) + now["seconds"],
        }


def resume(work: Work, checkpoints: CheckpointStore) -> dict[str, Any]:
    """Put the newest checkpoint of the bucket where MaxText looks for it; returns the notes that came with it.

    Where training is done already, its own checkpoint is still there.
    """
    if trained := work.trained():
        checkpoints.saved_step = trained["step"]
        return work.notes
    work.forget("train", *AFTER_TRAIN)
    # What is here and not in the bucket may be torn, or of a step that nobody was told of.
    shutil.rmtree(work.checkpoints, ignore_errors=True)
    downloads = work.directory / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    notes: dict[str, Any] = {}
    if found := checkpoints.resume(downloads):
        notes = json.loads((found / NOTES).read_text())
        (found / NOTES).unlink()
        work.checkpoints.mkdir(parents=True)
        found.rename(work.checkpoints / str(checkpoints.saved_step))
    work.note(notes)
    return notes


def check_spec(spec: JobSpec) -> None:
    """Refuse what this container does not do, before anything is downloaded."""
    train_script(spec.training.method)
    if spec.training.adapter.type != "none":
        raise config_error(
            f"training.adapter.type is {spec.training.adapter.type!r}; on TPUs every weight is trained",
            'set training.adapter to {"type": "none"}, or use a target with GPUs',
        )
    if unset := [name for name in spec.secrets if not os.environ.get(name)]:
        raise missing(
            f"the secrets {', '.join(unset)} are not in the container's environment",
            "the control plane gives them by DROPFORGE_SECRETS; check `secrets` and the deployment",
        )


def device() -> str:
    """What this image is for; the chips themselves are counted by the stage that takes them."""
    from prepare import on_tpu

    return "tpu" if on_tpu() else "cpu"


@contextmanager
def work_directory(job: Job) -> Iterator[Path]:
    """Where the stages of this run work."""
    if given := os.environ.get(WORK_DIRECTORY):
        directory = Path(given) / job.run
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="dropforge-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    code = main()
    # Threads of a transfer that was given up, or of gRPC, must not keep a container that has said its last word.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
