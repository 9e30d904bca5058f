"""TPU VMs: what the startup script (platforms/tpu_vm/startup.sh) does on each boot.

The script starts the container, writes its end down, and becomes a server if the run's record says so. The machine
continues to run, and is paid for, after its container has ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

from dropforge.run.proof import with_proof

from .events import Events
from .storage import Storage
from .trainer import Container
from .world import World

# The exit codes whose end the container has published itself; the script publishes any other end.
REPORTED = frozenset({0, 64, 65, 66, 70, 75, 76})
OVER = frozenset({"TEARING_DOWN", "SUCCEEDED", "FAILED", "CANCELLED"})


class Machine:
    """One boot of a node. `metadata` is all that it knows. It does nothing once it is `off`."""

    def __init__(self, world: World, storage: Storage, events: Events, metadata: dict[str, str]) -> None:
        self.world = world
        self.storage = storage
        self.events = events
        self.metadata = metadata
        self.off = False
        self.serves = False
        self.container_ended = False

    def boot(self, launched: Callable[[Container], None], take: Callable[[], None], lose: Callable[[], None]) -> None:
        """Run the machine's role. `take` preempts the machine with notice, `lose` without."""
        if self.metadata["dropforge-role"] == "serve":
            self._serve(float(self.metadata["dropforge-deadline"]))
            return
        lines = self.metadata["dropforge-env"].splitlines()
        environment = dict(line.split("=", 1) for line in lines)
        launched(Container(environment, lambda: self.off or self.container_ended, self._ended, self._died, take, lose))

    def _ended(self, exit_code: int | None) -> None:
        self.container_ended = True
        code = 137 if exit_code is None else exit_code
        if not self.world.happens(self.world.faults.unwritten):
            self._write_status(code)
        if code not in REPORTED:
            self._tell("infrastructure", f"the container was killed (exit code {code})")
        if code == 0 and "dropforge-server-image" in self.metadata:
            self._wait_for_word()

    def _died(self) -> None:
        """The container and the script die; the machine continues to run."""
        self.container_ended = True

    def _write_status(self, code: int) -> None:
        known = code in REPORTED
        status = {
            "run": self._run,
            "attempt": self._attempt,
            "time": self._now(),
            "step": "container",
            "exit_code": code,
            "error_class": None if known else "infrastructure",
            "message": "" if known else f"the container was killed (exit code {code})",
        }
        name = f"machines/{self._run}/attempt-{self._attempt}/status.json"
        data = with_proof(self.metadata["dropforge-run-key"], name, status)
        self.storage.put(self.metadata["dropforge-runs-bucket"], name, data)

    def _tell(self, error_class: str, message: str) -> None:
        sequence = int(self.world.now * 1000)
        event = {"run": self._run, "attempt": self._attempt, "sequence": sequence, "time": self._now()}
        told = {**event, "type": "failed", "error_class": error_class, "message": message}
        self.events.job_event(told, self.metadata["dropforge-run-key"])

    def _wait_for_word(self) -> None:
        """Wait until the run's record says whether this machine serves."""
        deadline = float(self.metadata["dropforge-server-deadline"])
        if self.off or self.world.now > deadline:
            return
        word = self._word()
        if word == "wait":
            self.world.after(self.world.random.uniform(3, 6), self._wait_for_word)
        elif word == "serve":
            self._serve(deadline)

    def _word(self) -> str:
        bucket = self.metadata["dropforge-runs-bucket"]
        record = json.loads(self.storage.get(bucket, f"runs/{self._run}/record.json").data)
        states = {entered["state"] for entered in record["history"]}
        is_latest = record["attempts"][-1]["number"] == self._attempt
        if is_latest and "DEPLOYING" in states:
            return "serve"
        return "wait" if is_latest and not states & OVER else "end"

    def _serve(self, deadline: float) -> None:
        """Load the model and answer requests until the deadline."""
        world = self.world
        if world.happens(world.faults.unready):
            return

        def answer(does: bool) -> None:
            self.serves = does and not self.off

        ready = world.now + world.duration(world.faults.slow_start, (60, 1800), (5, 90))
        if ready < deadline:
            world.scheduler.at(ready, lambda: answer(True))
            world.scheduler.at(deadline, lambda: answer(False))

    @property
    def _run(self) -> str:
        return self.metadata["dropforge-run"]

    @property
    def _attempt(self) -> int:
        return int(self.metadata["dropforge-attempt"])

    def _now(self) -> str:
        return datetime.fromtimestamp(self.world.now, UTC).isoformat()
