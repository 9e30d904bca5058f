"""The frame of every attempt: its environment, stop requests, last event and exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dropforge.base.log import log
from dropforge.base.names import spec_object
from dropforge.cloud.clients import Clients
from dropforge.cloud.container_secrets import load_secrets
from dropforge.run import artifacts
from dropforge.run.artifacts import Manifest
from dropforge.spec import JobSpec, parse_spec

from .checkpoints import CheckpointStore
from .errors import DONE, JobError
from .host import THIS_MACHINE, Host
from .job import Job
from .outcome import Outcome, outcome_of
from .redactor import Redactor
from .report import FLUSH_SECONDS, Reporter
from .stop import EVENT_SECONDS, UPLOAD_MARGIN_SECONDS, UPLOAD_SECONDS, Stopped, StopRequest


@dataclass(frozen=True)
class Attempt:
    """The job of this process and the objects that every step of it uses. `client` is Cloud Storage's.

    `given_spec` returns the spec that came with the run's token; None: the spec is in the runs bucket.
    """

    job: Job
    directory: Path
    redact: Redactor
    stop: StopRequest
    reporter: Reporter
    client: Any
    checkpoints: CheckpointStore
    given_spec: Callable[[], Any]
    host: Host = THIS_MACHINE

    def resend_success(self) -> bool:
        """Send the success event of an earlier attempt that committed the model; returns whether there is one."""
        committed = artifacts.read_manifest(self.client, self.job.bucket, self.job.run, self.job.key)
        if committed is None:
            return False
        log("the model is committed already", stage="train", run=self.job.run, attempt=committed.attempt)
        if self.job.world.machine == 0:
            self.reporter.succeeded(committed)
        return True

    def load_spec(self) -> JobSpec:
        """The run's job spec; the redactor learns its secrets. Raises InvalidSpec."""
        spec = parse_spec(self._spec_document())
        self.redact.learn(spec.secrets)
        return spec

    def _spec_document(self) -> bytes:
        if (given := self.given_spec()) is not None:
            return json.dumps(given).encode()
        stored = self.client.bucket(self.job.bucket).blob(spec_object(self.job.run))
        return bytes(stored.download_as_bytes())

    def succeed(self, manifest: Manifest) -> None:
        """Report the committed model. From here on a request to stop comes too late: ending takes less time."""
        self.stop.disarm()
        self.reporter.succeeded(manifest)
        log("succeeded", stage="train", run=self.job.run, attempt=manifest.attempt, metrics=manifest.metrics)

    def fail(self, error: JobError) -> None:
        """Report the end of an attempt whose main thread is stuck; the caller then ends the process."""
        conclude(self.job, Outcome.failed(error), self.directory, self.reporter)
        self.reporter.close()


Run = Callable[[Attempt], Outcome]
WorkDirectory = Callable[[Job], AbstractContextManager[Path]]


def run_attempt(run: Run, work_directory: WorkDirectory) -> int:
    """Run one attempt and report its end; returns the exit code. The environment is the only input."""
    return run_attempt_on(THIS_MACHINE, Clients(), StopRequest(), run, work_directory)


def run_attempt_on(host: Host, clients: Clients, stop: StopRequest, run: Run, work_directory: WorkDirectory) -> int:
    """`run_attempt` on a machine whose environment the clients have, and whose requests to stop `stop` gets."""
    try:
        job = Job.from_environment(clients.environment)
    except JobError as error:
        log(error.message, stage="train", severity="ERROR", hint=error.hint)
        return error.exit_code
    redact = Redactor(job.key)
    reporter = Reporter(job, redact, clients, host=host)
    try:
        with work_directory(job) as directory:

            def run_armed() -> Outcome:
                return _run_armed(run, job, directory, clients, redact, stop, reporter, host)

            outcome = outcome_of(run_armed, job, stop, redact)
            return conclude(job, outcome, directory, reporter)
    finally:
        reporter.close(EVENT_SECONDS if stop.reason == "preempted" else FLUSH_SECONDS)


def _run_armed(
    run: Run,
    job: Job,
    directory: Path,
    clients: Clients,
    redact: Redactor,
    stop: StopRequest,
    reporter: Reporter,
    host: Host,
) -> Outcome:
    """Listen for stop requests while `run` runs; a stop request first waits for the checkpoint that is uploading."""
    stop.arm(job.deadline, wake=not job.world.sharded)  # the process that started the ranks forwards the request
    # An import that a stop request interrupts may keep its lock, and the last event would wait for that lock.
    with stop.deferred():
        client = clients.storage()
        reporter.connect()
    load_secrets(clients, os.environ)
    checkpoints = CheckpointStore(client, job, reporter, host)
    try:
        return run(Attempt(job, directory, redact, stop, reporter, client, checkpoints, clients.run_spec, host))
    except Stopped as request:
        checkpoints.wait(max(UPLOAD_SECONDS, stop.seconds_left(job.grace_seconds) - UPLOAD_MARGIN_SECONDS))
        step = checkpoints.saved_step
        if job.world.first_here:
            log("stopped", stage="train", run=job.run, severity="WARNING", reason=request.reason, saved_step=step)
        return Outcome.stopped(request.reason, step, stop.agreed)
    finally:
        stop.disarm()


def conclude(job: Job, outcome: Outcome, directory: Path, reporter: Reporter) -> int:
    """Report the outcome, or, in a rank, leave it to the process that started the rank; returns the exit code."""
    world = job.world
    if world.rank is not None:
        outcome.write(directory, world.rank)
        # Ranks that stop together end with 0: the launcher then has no rank to kill and no error to print.
        return DONE if outcome.agreed else outcome.exit_code
    if world.machine == 0 or outcome.is_local_news:
        reporter.ended(outcome)
    return outcome.exit_code


def exit_now(code: int) -> NoReturn:
    """End the process without joining threads: an abandoned transfer or gRPC must not keep the container alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
