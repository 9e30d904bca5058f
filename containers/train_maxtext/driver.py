"""The MaxText training container: fine-tunes the model of one job spec on TPUs and commits it to the runs bucket.

    DROPFORGE_PROJECT=p DROPFORGE_RUN=demo-0123456789ab DROPFORGE_ATTEMPT=1 DROPFORGE_RUNS_BUCKET=b \\
    DROPFORGE_JOB_EVENTS_TOPIC=projects/p/topics/job-events DROPFORGE_WORK_DIRECTORY=/work \\
    python -m containers.train_maxtext.driver

The environment, events, exit codes and artifacts are those of containers/train_trl. The results of finished stages stay
in DROPFORGE_WORK_DIRECTORY (a data disk; by default a temporary directory), so that a restarted container continues
there. On another machine, training resumes from the checkpoints in the bucket.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.common.attempt import Attempt, exit_now, run_attempt
from containers.common.checkpoints import NOTES, CheckpointStore
from containers.common.errors import config_error, missing
from containers.common.job import Job
from containers.common.outcome import Outcome
from containers.common.stop import UPLOAD_MARGIN_SECONDS, UPLOAD_SECONDS, Stopped
from dropforge.base.log import log
from dropforge.run.artifacts import Manifest
from dropforge.spec import JobSpec
from dropforge.spec.methods import method_of

from .maxtext_settings import on_tpu
from .methods import load_method
from .stages import AFTER_TRAIN, MODULES, Runner
from .watch import Watch
from .work import Work

WORK_DIRECTORY = "DROPFORGE_WORK_DIRECTORY"
END_SECONDS = 5.0  # for a process without anything to save

Notes = dict[str, Any]


def resume(work: Work, checkpoints: CheckpointStore) -> Notes:
    """Put the bucket's newest checkpoint where MaxText looks for it; returns the checkpoint's notes.

    If training is complete, its own checkpoint is still there.
    """
    if trained := work.trained():
        checkpoints.saved_step = trained["step"]
        return work.notes
    work.forget("train", *AFTER_TRAIN)
    # A checkpoint that only this disk has may be incomplete, or of a step that was never reported.
    shutil.rmtree(work.checkpoints, ignore_errors=True)
    downloads = work.directory / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    notes: Notes = {}
    if checkpoint := checkpoints.resume(downloads):
        notes = json.loads((checkpoint / NOTES).read_text())
        (checkpoint / NOTES).unlink()
        work.checkpoints.mkdir(parents=True)
        checkpoint.rename(work.checkpoints / str(checkpoints.saved_step))
    work.note(notes)
    return notes


@dataclass(frozen=True)
class Trainer:
    """The train stage: its module, how an attempt resumes, and how the driver watches it.

    The default trains on this machine; containers/train_ray trains on a cluster.
    """

    module: str = MODULES["train"]
    resume: Callable[[Work, CheckpointStore], Notes] = resume
    watch: type[Watch] = Watch


def main(trainer: Trainer = Trainer()) -> int:
    """Run one attempt. The environment is the only input."""
    return run_attempt(lambda attempt: run(attempt, trainer), work_directory)


def run(attempt: Attempt, trainer: Trainer) -> Outcome:
    """One attempt from start to end. Its only result is the committed manifest."""
    job, checkpoints = attempt.job, attempt.checkpoints
    if attempt.resend_success():
        return Outcome.done()
    spec = attempt.load_spec()
    attempt.redact.guard_output()
    check_spec(spec)
    work = Work(attempt.directory)
    work.begin(spec.model_dump(mode="json", by_alias=True), list(spec.secrets))
    notes = trainer.resume(work, checkpoints)
    # Only the image decides the device: the train stage counts the chips, because counting takes them.
    attempt.reporter.started(checkpoints.saved_step, "tpu" if on_tpu() else "cpu")
    log("started", stage="train", run=job.run, resumed_step=checkpoints.saved_step)
    runner = Runner(work, job, attempt.redact, {**MODULES, "train": trainer.module})
    watch = trainer.watch(work, checkpoints, attempt.reporter, spec.training.checkpoint_steps, notes)
    attempt.succeed(run_stages(spec, runner, watch, lambda: attempt.stop.seconds_left(job.grace_seconds)))
    checkpoints.wait()
    return Outcome.done()


def run_stages(spec: JobSpec, runner: Runner, watch: Watch, seconds_left: Callable[[], float]) -> Manifest:
    """Run, in order, every stage without a result. Raises JobError, and Stopped when no process is left."""
    try:
        runner.run("prepare")
        # A checkpoint has all weights.
        if not watch.saved_step and method_of(spec.training.method).starts_from_base:
            runner.run("import")
        train(runner, watch, seconds_left)
        for stage in AFTER_TRAIN:
            result = runner.run(stage)
        return Manifest.model_validate(result["manifest"])
    except Stopped:
        runner.end(END_SECONDS)
        raise


def train(runner: Runner, watch: Watch, seconds_left: Callable[[], float]) -> None:
    """Run the train stage; `watch` reports its steps and uploads its checkpoints. Raises JobError and Stopped."""
    try:
        result = runner.run("train", watch)
    except Stopped:
        if runner.end(max(END_SECONDS, seconds_left() - UPLOAD_SECONDS - UPLOAD_MARGIN_SECONDS), watch):
            watch.save_last()
        raise
    watch.save_last()
    if result["stopped"]:  # the stage's process got the signal before this process, or instead of it
        raise Stopped("preempted")


def check_spec(spec: JobSpec) -> None:
    """Refuse a spec that this container cannot train, before any download. Raises JobError."""
    load_method(spec.training.method)
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


@contextmanager
def work_directory(job: Job) -> Iterator[Path]:
    """The directory in which the stages of this run work."""
    if disk := os.environ.get(WORK_DIRECTORY):
        directory = Path(disk) / job.run
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="dropforge-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    exit_now(main())
