"""A hostile training container: it attacks the objects of other runs with all that its token may do, and forges objects
and job events, which it proves with the key of its own run.

In some seeds the token has the boundary that the function `access` sets: the container tries to read, list, replace,
delete and write ahead what other runs write. In the others, a container has somehow got a token without a boundary: it
forges objects about other runs, which no function may take for theirs. It does not destroy objects there, because a
proof cannot prevent that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from dropforge.run.events import MAX_JOB_EVENT_BYTES
from dropforge.run.proof import with_proof
from dropforge.run.series import series_object
from dropforge.spec import JobSpec
from dropforge.stages.access import boundary
from dropforge_local.iam.boundary import Boundary
from dropforge_local.iam.policy import described

from . import forgeries
from .events import Events
from .forged_series import broken_series, series_of
from .forgeries import BASE, FIRST_SEQUENCE, NOBODY
from .manifests import manifest
from .storage import Storage
from .world import World

# Last digits of the seeds whose training containers are hostile. Kept seeds that revealed a defect end in other digits.
SEEDS = (2, 8)
UNBOUNDED = 8  # of these, the last digit of the seeds whose hostile containers have a token without a boundary
ACTS = 6  # of an attempt
WITHIN_SECONDS = 200.0
LIST_PREFIX = "storage.googleapis.com/objectListPrefix"


def is_due(world: World) -> bool:
    """Whether the trainers of this life are hostile: in some random seeds, and in no life of one fault."""
    return world.strike is None and world.history.seed % 10 in SEEDS


def is_bounded(world: World) -> bool:
    """Whether the tokens of this life's hostile trainers have the boundary that the function `access` sets."""
    return world.history.seed % 10 != UNBOUNDED


class Hostile:
    """The acts of one attempt, drawn from a source of its own: other seeds keep their histories."""

    def __init__(
        self,
        world: World,
        storage: Storage,
        events: Events,
        bucket: str,
        run: str,
        attempt: int,
        key: str,
        *,
        bounded: bool,
    ) -> None:
        self._world = world
        self._storage = storage
        self._events = events
        self._bucket = bucket
        self._run = run
        self._attempt = attempt
        self._key = key
        self._boundary = Boundary(boundary(bucket, run, self._spec(), is_trainer=True)) if bounded else None
        self._draw = random.Random(f"hostile {world.history.seed} {run} {attempt}")

    def begin(self, others: Callable[[], list[str]], is_over: Callable[[], bool]) -> None:
        """Plan the acts against the `others`, the runs that exist when the act is due."""

        def act() -> None:
            if not is_over():
                victim = self._draw.choice(others() or [NOBODY])
                on_objects = self._forge_object if self._boundary is None else self._attack_object
                self._draw.choice((on_objects, self._forge_event, self._forge_series))(victim)

        for _ in range(ACTS):
            self._world.after(self._draw.uniform(0, WITHIN_SECONDS), act)

    def _spec(self) -> JobSpec:
        record = json.loads(self._storage.get(self._bucket, f"runs/{self._run}/record.json").data)
        return JobSpec.model_validate(record["spec"])

    def _attack_object(self, victim: str) -> None:
        """Replace, delete, read or list what another run has written, or write what it may write next."""
        ahead = (
            f"models/{victim}/MANIFEST.json",
            f"models/{victim}/attempt-{self._present_attempt(victim) + 1}/model/config.json",
            f"machines/{victim}/attempt-{self._present_attempt(victim)}/status.json",
            f"checkpoints/{victim}/step-00000001/_COMPLETE",
            f"runs/{victim}/record.json",
        )
        stored = self._storage.objects[self._bucket]
        written = [name for name in stored if name.startswith((*forgeries.places(victim), "keys/"))]
        does = self._draw.choice(("create", "delete", "get", "list"))
        name = self._draw.choice(sorted({*written, *ahead}))
        place = f"projects/_/buckets/{self._bucket}"
        resource, attributes = f"{place}/objects/{name}", {}
        if does == "list":
            resource, attributes = place, {LIST_PREFIX: name.partition("/")[0] + self._draw.choice(("/", f"/{victim}"))}
        assert self._boundary is not None, "the caller has looked"
        allowed = self._boundary.allows(f"storage.objects.{does}", described(resource, attributes))
        self._world.fact("hostile", run=self._run, victim=victim, name=name, does=does, allowed=allowed)
        if allowed and does == "create":
            self._storage.put(self._bucket, name, b"{}")
        elif allowed and does == "delete" and name in stored:
            self._storage.remove(self._bucket, name)

    def _forge_object(self, victim: str) -> None:
        """Write an object where a token without a boundary may write: below checkpoints/, models/ and machines/."""
        record = {"run": victim, "name": "x", "source": "x", "state": "CANCELLED", "history": [], "attempts": []}
        status = {"run": victim, "attempt": 1, "error_class": "code", "message": "forged", "exit_code": 1}
        present = self._present_attempt(victim)
        forged_status = {**status, "attempt": present, "time": "2026-01-01T00:00:00Z"}
        forged_model = {**manifest(victim, present, self._world.now, 1.0), "base": BASE}
        name, content = self._draw.choice(
            (
                (f"machines/{victim}/record.json", record),
                (f"checkpoints/{victim}/record.json", record),
                (f"machines/runs/{victim}/record.json", record),
                (f"machines/open/{victim}", {}),
                (f"machines/{NOBODY}/attempt-1/status.json", status),
                (f"machines/{victim}/attempt-{present}/status.json", forged_status),
                (f"models/{victim}/MANIFEST.json", forged_model),
                (f"machines/{self._run}/attempt-{self._attempt + 1}/status.json", status),
                (f"models/{NOBODY}/MANIFEST.json", {**record, "attempt": 1}),
                (f"models/{victim}/attempt-99/model/config.json", {}),
                (f"checkpoints/{NOBODY}/step-00000001/COMMITTED", {}),
            )
        )
        of_victim = (f"machines/{victim}/attempt-", f"models/{victim}/MANIFEST")
        if name.startswith(of_victim) and self._storage.find(self._bucket, name) is not None:
            return  # to replace what the victim wrote is to destroy it
        self._world.fact("hostile", run=self._run, victim=victim, name=name)
        self._storage.put(self._bucket, name, with_proof(self._key, name, content))

    def _forge_series(self, victim: str) -> None:
        """Write a series about an attempt of the victim, or a broken series about the own next attempt.

        With a boundary of its token, a container can write only the latter.
        """
        run, attempt = self._run, self._attempt + 1
        data = self._draw.choice(broken_series(run, attempt, self._key))
        if self._boundary is None and self._draw.random() < 0.5:
            run, attempt = victim, self._present_attempt(victim) + self._draw.randrange(2)
            key = self._draw.choice((self._key, "", "0" * 64))
            data = series_of(run, attempt, self._world.now, key)
        name = series_object(run, attempt)
        self._world.fact("hostile", run=self._run, victim=victim, name=name)
        if self._storage.find(self._bucket, name) is None:  # to replace what the victim wrote is to destroy it
            self._storage.put(self._bucket, name, data)

    def _present_attempt(self, victim: str) -> int:
        """The number of the victim's attempt that runs now: the trainer's account may read records."""
        record = self._storage.find(self._bucket, f"runs/{victim}/record.json")
        attempts = json.loads(record.data).get("attempts") if record else []
        return int(attempts[-1]["number"]) if attempts else 1

    def _forge_event(self, victim: str) -> None:
        """Publish a job event that no function may keep."""
        sequence = FIRST_SEQUENCE + self._world.id()
        event = {"run": victim, "attempt": 1, "sequence": sequence, "time": "2026-01-01T00:00:00Z"}
        event |= {"type": "checkpoint", "step": 1, "uri": "gs://forged"}
        failed = {"type": "failed", "error_class": "code", "message": "forged"}
        present = {"attempt": self._present_attempt(victim)}
        uri = f"gs://{self._bucket}/models/{victim}/MANIFEST.json"
        forged: dict[str, Any] = event | self._draw.choice(
            (
                {"attempt": 900, **failed},
                {"attempt": 900, "type": "succeeded", "manifest_uri": uri},
                {**present, "type": "started", "resumed_step": 0},
                {**present, "type": "succeeded", "manifest_uri": uri},
                {**present, **failed, "started": {"sequence": sequence, "time": event["time"], "resumed_step": 9}},
                {**present, "type": "preempted", "step": 1},
                {**present, **failed},
                {**present, "step": 9},
                {"attempt": 0, **failed},
                {"run": NOBODY, **failed},
                {"run": f"../{victim}", **failed},
                {"run": self._run, "attempt": self._attempt + 500, **failed},
                {"step": -1},
                {"uri": 1},
                {"sequence": sequence * 100},
                {**failed, "message": "x" * MAX_JOB_EVENT_BYTES},
                {**failed, "error_class": "forged"},
                {"type": "cancelled"},
            )
        )
        self._world.fact("hostile", run=self._run, victim=victim, sequence=sequence)
        self._events.forge(forged, self._key)
