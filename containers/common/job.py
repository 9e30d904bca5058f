"""The job of a training container: one attempt of one run, as the environment describes it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from dropforge.base.names import spec_object
from dropforge.run.proof import VARIABLE

from .errors import config_error
from .world import World, read_world

GRACE_SECONDS = 10  # Cloud Run's, from SIGTERM to SIGKILL

_REQUIRED = ("DROPFORGE_PROJECT", "DROPFORGE_RUN", "DROPFORGE_ATTEMPT", "DROPFORGE_RUNS_BUCKET")
_RUN = re.compile(r"[a-z][a-z0-9-]{0,48}")


@dataclass(frozen=True)
class Job:
    """One attempt of one run. An empty `topic` sends no job events; `deadline` is in Unix seconds.

    `grace_seconds` is the time between SIGTERM and SIGKILL. `key` is the run's key (dropforge/run/proof.py).
    """

    project: str
    run: str
    attempt: int
    bucket: str
    topic: str
    deadline: float | None
    grace_seconds: float
    world: World = field(default_factory=World)
    key: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Job:
        """Raises JobError that names every missing or malformed variable."""
        problems = [f"{name} is not set" for name in _REQUIRED if not environ.get(name)]
        run, attempt = environ.get("DROPFORGE_RUN", ""), environ.get("DROPFORGE_ATTEMPT", "")
        deadline, grace = environ.get("DROPFORGE_DEADLINE", ""), environ.get("DROPFORGE_GRACE_SECONDS", "")
        if run and not _RUN.fullmatch(run):
            problems.append(f"DROPFORGE_RUN is {run!r}; expected a run id")
        if attempt and not (attempt.isdecimal() and 1 <= int(attempt) <= 1000):
            problems.append(f"DROPFORGE_ATTEMPT is {attempt!r}; expected 1 to 1000")
        if deadline and not re.fullmatch(r"\d+(\.\d+)?", deadline):
            problems.append(f"DROPFORGE_DEADLINE is {deadline!r}; expected Unix seconds")
        if grace and not re.fullmatch(r"\d{1,4}", grace):
            problems.append(f"DROPFORGE_GRACE_SECONDS is {grace!r}; expected whole seconds")
        world = read_world(environ, problems)
        if problems:
            raise config_error("; ".join(problems), "the control plane sets these variables")
        return cls(
            project=environ["DROPFORGE_PROJECT"],
            run=run,
            attempt=int(attempt),
            bucket=environ["DROPFORGE_RUNS_BUCKET"],
            topic=environ.get("DROPFORGE_JOB_EVENTS_TOPIC", ""),
            deadline=float(deadline) if deadline else None,
            grace_seconds=float(grace or GRACE_SECONDS),
            key=environ.get(VARIABLE, ""),
            world=world,
        )

    def day(self, client: Any) -> date:
        """The day (UTC) on which the run was accepted: the same in all attempts and on all machines."""
        spec = client.bucket(self.bucket).blob(spec_object(self.run))
        spec.reload()
        accepted: date = spec.time_created.date()
        return accepted
