"""A training container whose frame is real: containers/common runs around a training loop that only waits.

So faults strike what a container asks: its token, the spec, the list of checkpoints, uploads, markers, the series, the
export, the manifest and the events; and a signal, a preemption or a deadline comes at any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from containers.common.attempt import Attempt, run_attempt_on
from containers.common.job import Job
from containers.common.outcome import Outcome
from containers.common.publish import MODEL, Provenance, publish
from containers.common.report import ProgressMeter
from containers.serve_vllm.serve import find_model
from dropforge.base.log import log
from dropforge.run.artifacts import Source, download_files, files_below
from dropforge.run.proof import VARIABLE

from .container_clients import ContainerClients
from .trainer import GRACE_SECONDS, KILLED, STUCK, Container, Trainer, Work
from .virtual_host import Program, VirtualStop
from .world import World

STEP_SECONDS = 20.0
SAVE_STEPS = 3  # between two checkpoints
RESTART_SECONDS = 10.0  # of a server that has ended
TRAINER, SERVER = "trainer@chaos", "server@chaos"  # cloud.deployment
_SOURCE = Source(uri="acme/tiny", revision="0")


class RealTrainer(Trainer):
    """Starts a `Training` in every training container, and a `Server` in every container of Cloud Run's services."""

    def train(self, container: Container) -> None:
        Training(self, container).begin()

    def serve(self, environment: Mapping[str, str], is_over: Callable[[], bool], answers: Callable[[], None]) -> None:
        Server(self, environment, is_over, answers).begin()


class Training:
    """One container: the fate that chance gives it, and its program."""

    def __init__(self, trainer: RealTrainer, container: Container) -> None:
        self.world: World = trainer.world
        self.container = container
        # One machine stands for all: what several machines hand to each other has tests of its own.
        several = ("DROPFORGE_NUM_MACHINES", "DROPFORGE_MAIN_ADDRESS")
        self.environment = {name: value for name, value in container.environment.items() if name not in several}
        self.run, self.number = self.environment["DROPFORGE_RUN"], int(self.environment["DROPFORGE_ATTEMPT"])
        self.work = trainer.work.setdefault(self.run, Work(total=120.0, metric=0.9))
        name = f"train-{self.run}-{self.number}"
        self.program = Program(self.world, name, self.run, container.is_over, self._killed)
        self.stop = VirtualStop(self.program, self._kill)
        storage, events = trainer.storage, trainer.events
        self.clients = ContainerClients(self.program, self.environment, trainer.functions, storage, events, TRAINER)
        self.fate = ""

    def begin(self) -> None:
        """Start the program, and plan its fate."""
        world = self.world
        halfway = self.work.fate_after or self.work.total * world.random.random()
        self.fate = self.work.fates.pop(0) if self.work.fates else self._drawn_fate()
        struck = {
            "preempted": self._preempt,
            "lost_machine": lambda: self._vanish(self.container.lose),
            "silent": lambda: self._vanish(self.container.die),
            "killed": self._kill,
        }
        if self.fate in struck:
            world.after(halfway, lambda: None if self.container.is_over() else struck[self.fate]())
        elif self.fate:
            what = "code_error" if self.fate == "code_error" else "stuck"
            world.fact("fault", what=what, run=self.run, attempt=self.number)
        self.breaks_at = world.now + halfway if self.fate == "code_error" else math.inf
        self.program.start("main", self._main)

    def _main(self) -> None:
        clients = cast(Any, self.clients)
        code = run_attempt_on(self.program.host, clients, self.stop, self._train, _directory)
        self.program.kill()  # the end of a process ends its threads
        self._end(code)

    def _train(self, attempt: Attempt) -> Outcome:
        """The steps of every trainer of containers/, in their order."""
        if attempt.resend_success():
            return Outcome.done()
        spec, store = attempt.load_spec(), attempt.checkpoints
        store.resume(attempt.directory)
        step, last = store.saved_step, max(1, math.ceil(self.work.total / STEP_SECONDS))
        attempt.reporter.started(step, "cpu")
        meter = ProgressMeter(attempt.reporter, last, attempt.host.clock.monotonic)
        meter.begin(step, 0)
        while step < last or self.fate in STUCK:
            attempt.host.clock.sleep(STEP_SECONDS)
            if self.world.now > self.breaks_at:
                raise ValueError("chaos")
            if self.fate in STUCK:
                continue
            step += 1
            meter.step(step, step, None)
            if step % SAVE_STEPS == 0:
                self._save(attempt, step)
        store.wait()
        exported = attempt.directory / "export"
        _write(exported / MODEL / "model.safetensors", f"{self.run} {self.number}")
        _write(exported / MODEL / "config.json", "{}")
        metrics: dict[str, float | None] = {"exact_match": self.work.metric}
        provenance = Provenance(_SOURCE, _SOURCE)
        attempt.succeed(publish(attempt.client, attempt.job, exported, spec, provenance, metrics, [], attempt.host))
        return Outcome.done()

    def _save(self, attempt: Attempt, step: int) -> None:
        local = attempt.directory / f"saved-{step}"
        for name in ("adapter.safetensors", "optimizer.pt"):
            _write(local / name, f"{name} {self.run} {self.number} {step}")
        attempt.checkpoints.save(step, local, {"step": step})

    def _drawn_fate(self) -> str:
        for fate in ("stuck", "preempted", "lost_machine", "silent", "code_error"):
            if self.world.happens(getattr(self.world.faults, fate)):
                return fate
        return ""

    def _preempt(self) -> None:
        """SIGTERM, and the end of the machine at the end of its grace."""
        self.stop.deliver()
        grace = float(self.environment.get("DROPFORGE_GRACE_SECONDS") or GRACE_SECONDS)
        self.world.after(grace, self._take)

    def _take(self) -> None:
        if not self.container.is_over():
            self.program.kill()
            self.container.take()

    def _vanish(self, end: Any) -> None:
        self.world.fact("fault", what=self.fate, run=self.run, attempt=self.number)
        self.program.kill()
        end()

    def _kill(self) -> None:
        """SIGKILL."""
        self.program.kill()
        self._killed()

    def _killed(self) -> None:
        self._end(KILLED)

    def _end(self, code: int) -> None:
        """The platform sees the end a moment later."""
        delay = self.world.random.uniform(0.1, 4)
        self.world.after(delay, lambda: None if self.container.is_over() else self.container.end(code))


class Server:
    """A server's start: it finds the committed model, downloads its files, and answers. The platform restarts it."""

    def __init__(
        self,
        trainer: RealTrainer,
        environment: Mapping[str, str],
        is_over: Callable[[], bool],
        answers: Callable[[], None],
    ) -> None:
        self.trainer, self.environment, self.is_over, self.answers = trainer, environment, is_over, answers
        self.uri = environment["DROPFORGE_MODEL_URI"]
        self.run = self.uri.rsplit("/", 1)[1]

    def begin(self) -> None:
        """Start the program, unless the service is deleted."""
        if self.is_over():
            return
        trainer = self.trainer
        program = Program(trainer.world, f"serve-{self.run}", self.run, self.is_over, self._restart)
        clients = ContainerClients(
            program, self.environment, trainer.functions, trainer.storage, trainer.events, SERVER
        )
        program.start("main", lambda: self._start(program, clients))

    def _start(self, program: Program, clients: ContainerClients) -> None:
        client = clients.storage()
        try:
            manifest = find_model(client, self.uri, self.environment[VARIABLE])
            files = files_below(manifest, manifest.serve_path)
            with _temporary() as directory:
                download_files(client, f"{self.uri}/{manifest.serve_path}", directory, files, program.host.threads)
        except Exception as error:  # noqa: BLE001  # whatever ends a container
            log(f"{type(error).__name__}: {error}", stage="serve", severity="ERROR")
            self._restart()
        else:
            self.answers()

    def _restart(self) -> None:
        self.trainer.world.after(RESTART_SECONDS, self.begin)


@contextmanager
def _directory(job: Job) -> Iterator[Path]:
    with _temporary() as directory:
        yield directory


@contextmanager
def _temporary() -> Iterator[Path]:
    with TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
