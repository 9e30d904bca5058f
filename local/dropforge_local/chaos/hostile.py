"""A hostile training container: it forges objects and job events about other runs, with all that its account may do.

What the trainer's account can do to another run is not here, because nothing prevents it (docs/security.md, Not
defended): replace its manifest, checkpoints, and the status of its TPU VM, and publish job events about its attempt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from dropforge.run.events import MAX_JOB_EVENT_BYTES

from .events import Events
from .forgeries import FIRST_SEQUENCE, NOBODY
from .storage import Storage
from .world import World

# Last digits of the seeds whose training containers are hostile. Kept seeds that revealed a defect end in other digits.
SEEDS = (2, 8)
ACTS = 6  # of an attempt
WITHIN_SECONDS = 200.0


def is_due(world: World) -> bool:
    """Whether the trainers of this life are hostile: in some random seeds, and in no life of one fault."""
    return world.strike is None and world.history.seed % 10 in SEEDS


class Hostile:
    """The acts of one attempt, drawn from a source of its own: other seeds keep their histories."""

    def __init__(self, world: World, storage: Storage, events: Events, bucket: str, run: str, attempt: int) -> None:
        self._world = world
        self._storage = storage
        self._events = events
        self._bucket = bucket
        self._run = run
        self._attempt = attempt
        self._draw = random.Random(f"hostile {world.history.seed} {run} {attempt}")

    def begin(self, others: Callable[[], list[str]], is_over: Callable[[], bool]) -> None:
        """Plan the acts against the `others`, the runs that exist when the act is due."""

        def act() -> None:
            if not is_over():
                victim = self._draw.choice(others() or [NOBODY])
                self._draw.choice((self._forge_object, self._forge_event))(victim)

        for _ in range(ACTS):
            self._world.after(self._draw.uniform(0, WITHIN_SECONDS), act)

    def _forge_object(self, victim: str) -> None:
        """Write an object where the trainer's account may write: below checkpoints/, models/ and machines/."""
        resource = f"projects/chaos-project/locations/us-central1/jobs/df-{victim}-a1"
        entry = {"kind": "run.googleapis.com/Job", "name": resource, "attempt": 1, "state": "created"}
        ledger = {"run": victim, "entries": [{**entry, "intended": "2026-01-01T00:00:00Z"}]}
        record = {"run": victim, "name": "x", "source": "x", "state": "CANCELLED", "history": [], "attempts": []}
        status = {"run": victim, "attempt": 1, "error_class": "code", "message": "forged", "exit_code": 1}
        name, content = self._draw.choice(
            (
                (f"machines/{victim}/record.json", record),
                (f"machines/{victim}/ledger.json", ledger),
                (f"machines/runs/{victim}/record.json", record),
                (f"machines/open/{victim}", {}),
                (f"machines/{NOBODY}/attempt-1/status.json", status),
                (f"machines/{self._run}/attempt-{self._attempt + 1}/status.json", status),
                (f"models/{NOBODY}/MANIFEST.json", {**record, "attempt": 1}),
                (f"models/{victim}/attempt-99/model/config.json", {}),
                (f"checkpoints/{NOBODY}/step-00000001/COMMITTED", {}),
            )
        )
        self._world.fact("hostile", run=self._run, victim=victim, name=name)
        self._storage.put(self._bucket, name, json.dumps(content).encode())

    def _forge_event(self, victim: str) -> None:
        """Publish a job event that no function may keep."""
        sequence = FIRST_SEQUENCE + self._world.id()
        event = {"run": victim, "attempt": 1, "sequence": sequence, "time": "2026-01-01T00:00:00Z", "type": "progress"}
        event |= {"step": 1, "total_steps": 2}
        failed = {"type": "failed", "error_class": "code", "message": "forged"}
        manifest = f"gs://{self._bucket}/models/{victim}/MANIFEST.json"
        forged: dict[str, Any] = event | self._draw.choice(
            (
                {"attempt": 900, **failed},
                {"attempt": 900, "type": "succeeded", "manifest_uri": manifest},
                {"attempt": 0, **failed},
                {"run": NOBODY, **failed},
                {"run": f"../{victim}", **failed},
                {"run": self._run, "attempt": self._attempt + 500, **failed},
                {"step": -1},
                {"loss": "much"},
                {"sequence": sequence * 100},
                {**failed, "message": "x" * MAX_JOB_EVENT_BYTES},
                {**failed, "error_class": "forged"},
                {"type": "cancelled"},
            )
        )
        self._world.fact("hostile", run=self._run, victim=victim, sequence=sequence)
        self._events.forge(forged)
