"""A training container that trains nothing: it reports, commits a model and ends, or fails as the seed decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from google.api_core.exceptions import PreconditionFailed

from dropforge.run.proof import VARIABLE, is_document_proved, with_proof
from dropforge.run.series import Progress, Series, series_object

from . import hostile
from .events import Events
from .functions import Functions
from .manifests import iso, manifest
from .storage import Storage
from .world import World

CHECKPOINT_SECONDS = 60.0
REPORT_SECONDS = (40.0, 100.0)  # between two reports of progress
HELD_SECONDS = 1.0  # the longest time for which the event of the start waits for the end (containers/common/report.py)
STUCK = frozenset({"stuck", "hung"})  # it hangs from its start or repeats a step; or it hangs between two steps
ENDS = frozenset({"succeeded", "failed", "preempted"})
GRACE_SECONDS = 8.0  # at most, until a preempted machine has ended
DEADLINE_MARGIN_SECONDS = 30.0  # how long before its deadline a container saves a checkpoint and stops
PREEMPTED, CODE_ERROR = 75, 70  # exit codes of dropforge's containers
KILLED = 137  # of a container that SIGKILL ended
# Last digits of the seeds in which a host of an attempt with several hosts may fail, and how often. Chance of its own
# draws that, and kept seeds that revealed a defect end in other digits: their lives stay the same.
HOST_FAILS, HOST_FAILS_RATE = (1, 9), 0.5


# Starts a server: with its environment, with whether it is deleted, and with what to call once it answers.
Serving = Callable[[Mapping[str, str], Callable[[], bool], Callable[[], None]], None]


@dataclass
class Work:
    """The training of a run: the machine seconds that it takes, and the seconds that its last checkpoint saves.

    `fate_after` is how long an attempt runs until it meets its fate, in seconds; 0: a random part of what is left.
    `checkpoint_every` is the time between two events of checkpoints, in seconds; 0: there are no such events.
    """

    total: float
    metric: float
    saved: float = 0.0
    reports: bool = False  # its progress, all the time
    fates: list[str] = field(default_factory=list)  # the fates of the first attempts, if they are not random
    fate_after: float = 0.0
    checkpoint_every: float = 0.0


@dataclass
class Container:
    """A training container as its platform sees it: its environment and its possible ends."""

    environment: Mapping[str, str]
    is_over: Callable[[], bool]
    end: Callable[[int | None], None]  # with an exit code
    die: Callable[[], None]  # without a report
    take: Callable[[], None]  # its machine is preempted after its last report
    lose: Callable[[], None]  # its machine is lost before its last report
    hosts: int = 1
    fail: Callable[[int], None] = lambda code: None  # one of its hosts ends with an exit code, and the others wait


class Trainer:
    """The program in every training container."""

    serve: Serving | None = None  # the program of a server; None: a server answers as soon as it is there

    def __init__(self, world: World, functions: Functions, storage: Storage, events: Events, bucket: str) -> None:
        self.world = world
        self.functions = functions  # a container calls `access`
        self.storage = storage
        self.events = events
        self.bucket = bucket
        self.work: dict[str, Work] = {}
        self.is_hostile: Callable[[str], bool] = lambda run: hostile.is_due(world)
        self.is_bounded = hostile.is_bounded(world)

    def start(self, container: Container) -> None:
        """Start the container's command."""
        self.train(container)
        environment = container.environment
        run, attempt = environment["DROPFORGE_RUN"], int(environment["DROPFORGE_ATTEMPT"])
        if self.is_hostile(run):
            acts = hostile.Hostile(
                self.world,
                self.storage,
                self.events,
                self.bucket,
                run,
                attempt,
                environment[VARIABLE],
                bounded=self.is_bounded,
            )
            acts.begin(lambda: sorted(set(self.work) - {run}), container.is_over)

    def train(self, container: Container) -> None:
        """Begin the training."""
        _Attempt(self, container).begin()


class _Attempt:
    def __init__(self, trainer: Trainer, container: Container) -> None:
        environment = container.environment
        self.trainer = trainer
        self.world = trainer.world
        self.container = container
        self.run, self.number = environment["DROPFORGE_RUN"], int(environment["DROPFORGE_ATTEMPT"])
        self.key = environment[VARIABLE]
        self.deadline = float(environment["DROPFORGE_DEADLINE"])
        self.work = trainer.work.setdefault(self.run, Work(total=120.0, metric=0.9))
        self.began = self.world.now
        self.sequence = 0
        self.series: Series | None = None
        self.start: dict[str, Any] | None = None  # the event of the start, while it waits for the end
        self.waits = False  # for a host that has failed

    def begin(self) -> None:
        self._start()
        left = self.work.total - self.work.saved
        if self.world.happens(self.world.faults.sudden):
            left = min(left, self.world.random.uniform(0, HELD_SECONDS))
        halfway = self.began + (self.work.fate_after or left * self.world.random.random())
        fate = self.work.fates.pop(0) if self.work.fates else self._fate()
        endings = {
            "preempted": self._stop,
            "lost_machine": lambda: self._vanish("lost_machine", self.container.lose),
            "silent": lambda: self._vanish("silent", self.container.die),
            "code_error": self._break,
            "killed": lambda: self.container.end(KILLED),
        }
        if fate in endings:
            self._at(halfway, endings[fate])
        elif fate in STUCK:
            self.world.fact("fault", what="stuck", run=self.run, attempt=self.number)
            if fate == "stuck" and self.work.reports and self.world.random.random() < 0.5:
                self._repeat()
            elif self.work.reports:
                self._hang(halfway, random.Random(f"{self.world.history.seed} {self.run} {self.number}"))
        else:
            if not self.work.reports:
                self._at(halfway, lambda: self._progress(1))
            self._at(self.began + left, self._commit)
        if self.work.reports and fate not in STUCK:
            self._go_on()
        if self.work.checkpoint_every:
            self._at(self.began + self.work.checkpoint_every, self._checkpoint)
        self._perhaps_fail_a_host(left)
        self._at(self.deadline - DEADLINE_MARGIN_SECONDS, self._run_out)

    def _start(self) -> None:
        """Hold the event of the start."""
        self.start = {**self._stamp(), "resumed_step": int(self.work.saved)}
        self._at(self.began + HELD_SECONDS, self._send_start)

    def _send_start(self) -> None:
        if (start := self.start) is not None:
            self.start = None
            self._send("started", start)

    def _go_on(self) -> None:
        """Report progress repeatedly."""
        self._progress(int(self.work.saved + self.world.now - self.began))
        self._at(self.world.now + self.world.random.uniform(*REPORT_SECONDS), self._go_on)

    def _hang(self, when: float, draw: random.Random) -> None:
        """Report progress repeatedly, but no longer after `when`."""
        if self.world.now < when:
            self._progress(int(self.work.saved + self.world.now - self.began))
            self._at(self.world.now + draw.uniform(*REPORT_SECONDS), lambda: self._hang(when, draw))

    def _repeat(self) -> None:
        """Report the same step repeatedly."""
        self._progress(int(self.work.saved))
        self._at(self.world.now + self.world.random.uniform(*REPORT_SECONDS), self._repeat)

    def _checkpoint(self) -> None:
        """Report a checkpoint repeatedly."""
        step = int(self.work.saved + self.world.now - self.began)
        self._tell("checkpoint", step=step, uri=f"gs://{self.trainer.bucket}/checkpoints/{self.run}/{step}")
        self._at(self.world.now + self.work.checkpoint_every, self._checkpoint)

    def _progress(self, step: int) -> None:
        """Write the series with a further point."""
        if self.world.happens(self.world.faults.dropped):
            return self.world.fact("fault", what="dropped", run=self.run, attempt=self.number, type="progress")
        now = datetime.fromtimestamp(self.world.now, UTC)
        if self.series is None:
            self.series = Series(run=self.run, attempt=self.number, began=now, written=now)
        self.series.add(Progress(attempt=self.number, time=now, step=step, total_steps=5000))
        sequence = self._stamp()["sequence"]
        self.world.fact("told", run=self.run, attempt=self.number, sequence=sequence, type="progress", step=step)
        name = series_object(self.run, self.number)
        self.trainer.storage.put(self.trainer.bucket, name, self.series.encoded(self.key))

    def _fate(self) -> str:
        """The failure of this attempt; "" if it succeeds."""
        for fate in ("stuck", "preempted", "lost_machine", "silent", "code_error"):
            if self.world.happens(getattr(self.world.faults, fate)):
                return fate
        return ""

    def _at(self, when: float, event: Callable[[], None]) -> None:
        """Call an action later, if the container still runs then and does not wait for a host."""

        def guarded() -> None:
            if not self.container.is_over() and not self.waits:
                event()

        self.world.scheduler.at(when, guarded)

    def _stop(self) -> None:
        """SIGTERM: save a checkpoint."""
        self.work.saved += self.world.now - self.began
        self._tell("preempted", step=int(self.work.saved))
        self._end(PREEMPTED)
        self._at(self.world.now + GRACE_SECONDS * self.world.random.random(), self.container.take)

    def _run_out(self) -> None:
        """The deadline is near: save a checkpoint and stop."""
        self.work.saved += self.world.now - self.began
        self._tell("failed", error_class="deadline", message="stopped before the deadline")
        self._end(PREEMPTED)

    def _vanish(self, fault: str, end: Callable[[], None]) -> None:
        self.work.saved += (self.world.now - self.began) // CHECKPOINT_SECONDS * CHECKPOINT_SECONDS
        self.world.fact("fault", what=fault, run=self.run, attempt=self.number)
        end()

    def _break(self) -> None:
        self._tell("failed", error_class="code", message="ValueError: chaos")
        self._end(CODE_ERROR)

    def _perhaps_fail_a_host(self, left: float) -> None:
        """Maybe one of several hosts fails while the others wait for it in a collective."""
        own = random.Random(f"{self.world.history.seed} {self.run} {self.number} hosts")
        is_due = self.world.strike is None and self.world.history.seed % 10 in HOST_FAILS
        if self.container.hosts > 1 and is_due and own.random() < HOST_FAILS_RATE:
            error_class = own.choice(("infrastructure", "code", ""))  # "": the event is lost
            self._at(self.began + left * own.random(), lambda: self._fail_a_host(error_class))

    def _fail_a_host(self, error_class: str) -> None:
        if self.world.now >= self.world.calm:
            return
        self.world.fact("fault", what="host_failed", run=self.run, attempt=self.number)
        self.work.saved += (self.world.now - self.began) // CHECKPOINT_SECONDS * CHECKPOINT_SECONDS
        if error_class:
            self._tell("failed", error_class=error_class, message="host 1: chaos")
        self.waits = True
        self.container.fail(CODE_ERROR)

    def _commit(self) -> None:
        """Write the manifest last and once; another attempt's manifest stays."""
        name, storage = f"models/{self.run}/MANIFEST.json", self.trainer.storage
        data = with_proof(self.key, name, manifest(self.run, self.number, self.world.now, self.work.metric))
        present = storage.find(self.trainer.bucket, name)
        is_forged = present is not None and not is_document_proved(self.key, name, present.data)
        try:
            storage.put(self.trainer.bucket, name, data, present.generation if present and is_forged else 0)
        except PreconditionFailed:
            self._tell("failed", error_class="code", message="another attempt has committed")
            return self._end(CODE_ERROR)
        uri = f"gs://{self.trainer.bucket}/models/{self.run}/MANIFEST.json"
        self._tell("succeeded", manifest_uri=uri, metrics={"exact_match": self.work.metric})
        self._end(0)

    def _end(self, exit_code: int) -> None:
        """End the process a moment after its last report."""
        delay = self.world.random.uniform(0.1, 4)
        self._at(self.world.now + delay, lambda: self.container.end(exit_code))

    def _stamp(self) -> dict[str, Any]:
        self.sequence = max(self.sequence + 1, int(self.world.now * 1000))
        return {"sequence": self.sequence, "time": iso(self.world.now)}

    def _tell(self, kind: str, **details: Any) -> None:
        """Send an event after the event of the start. An end takes a start that still waits with it."""
        stamp = self._stamp()
        if kind not in ENDS:
            self._send_start()
        elif self.start is not None:
            details["started"], self.start = self.start, None
        self._send(kind, {**stamp, **details})

    def _send(self, kind: str, details: dict[str, Any]) -> None:
        event = {"run": self.run, "attempt": self.number, "type": kind, **details}
        about = {key: event[key] for key in ("run", "attempt", "sequence", "type")}
        self.world.fact("told", **about, step=details.get("step"))
        self.trainer.events.job_event(event, self.key)
