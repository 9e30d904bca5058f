"""The protocol of a target: the operations on the training resources of an attempt.

Each verb is a short call. No verb waits for the cloud longer than a few seconds or keeps state in memory.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Protocol

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.cloud.run_access import BUCKET_VARIABLE, REQUEST_VARIABLE, URL_VARIABLE
from dropforge.run.proof import ACCESS_NAME, proof
from dropforge.run.proof import VARIABLE as KEY_VARIABLE
from dropforge.run.record import Record
from dropforge.spec import JobSpec

from .prices import HourlyPrice

NO_KEY = ""  # of a launch that creates nothing: the names of its resources need no key


@dataclass(frozen=True)
class Launch:
    """An attempt: all inputs for the creation of its resources. `key` is the run's (run/proof.py), or NO_KEY."""

    run: str
    attempt: int
    placement: int
    spec: JobSpec
    settings: Settings
    deadline: datetime
    timeout_seconds: int
    key: str = field(repr=False, kw_only=True)


class Phase(StrEnum):
    """The phase of an attempt, as the cloud reports it."""

    PENDING = "pending"  # accepted, not running yet
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # ended by itself with exit code 0
    FAILED = "failed"
    GONE = "gone"  # the resource does not exist


class Waits(NamedTuple):
    """An answer of a platform: not yet. `reason` is why, in the cloud's own words where it gives any."""

    reason: str


@dataclass(frozen=True)
class Status:
    """The status of an attempt's cloud resource.

    `is_paid` says that the attempt is pending and already has some of its machines. `starting` says what a machine that
    runs does before the container runs: it pulls an image, or attaches a volume.
    """

    phase: Phase
    message: str = ""
    error_class: ErrorClass | None = None
    exit_code: int | None = None
    ended: datetime | None = None
    hint: str = ""
    is_paid: bool = False
    starting: str = ""

    @property
    def wait_reason(self) -> str:
        """Why the container does not run yet; "" if the cloud gives no reason, or if it runs or has ended."""
        return self.message if self.phase is Phase.PENDING else self.starting


class Target(Protocol):
    """A place where training runs. Verbs raise CloudError when a Google API refuses or fails."""

    @abstractmethod
    def regions(self, spec: JobSpec) -> list[str]:
        """The placements' regions or zones, in the order in which attempts try them."""

    @abstractmethod
    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        """The price of the attempt's machines for an hour."""

    @abstractmethod
    def resources(self, launch: Launch) -> list[Resource]:
        """The resources that `provision` creates, in order. Pure: the same for the same launch."""

    @abstractmethod
    def provision(self, cloud: Cloud, launch: Launch) -> Waits | None:
        """Advance towards a running attempt; None once it is launched. A repeated call creates nothing twice."""

    @abstractmethod
    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        """Read the attempt's status once."""

    @abstractmethod
    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """Every training resource of every run in the project, as the cloud lists them.

        Raises Unlisted at the end if some places could not be listed.
        """

    @abstractmethod
    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        """Delete a resource; True once a read shows that it does not exist. A missing resource is a success."""


def launch_of(record: Record, spec: JobSpec, settings: Settings, *, key: str) -> Launch:
    """The latest attempt of a record, as its target needs it. `key` is the run's, or NO_KEY."""
    attempt = record.attempts[-1]
    return Launch(
        run=record.run,
        attempt=attempt.number,
        placement=attempt.placement,
        spec=spec,
        settings=settings,
        deadline=attempt.deadline,
        timeout_seconds=max(1, int((attempt.deadline - attempt.started).total_seconds())),
        key=key,
    )


def container_variables(launch: Launch) -> dict[str, str]:
    """The environment variables of every training container."""
    settings = launch.settings
    return {
        "DROPFORGE_PROJECT": settings.project,
        "DROPFORGE_RUN": launch.run,
        "DROPFORGE_ATTEMPT": str(launch.attempt),
        BUCKET_VARIABLE: settings.runs_bucket,
        "DROPFORGE_JOB_EVENTS_TOPIC": settings.topic(settings.job_events_topic),
        "DROPFORGE_DEADLINE": str(int(launch.deadline.timestamp())),
        **key_variable(launch.key),
        **access_variables(launch.run, settings, launch.key),
    }


def key_variable(key: str) -> dict[str, str]:
    """The variable by which a container of a run proves that it belongs to the run."""
    return {KEY_VARIABLE: key} if key else {}


def access_variables(run: str, settings: Settings, key: str) -> dict[str, str]:
    """The variables by which a container of a run gets access to the run's objects (stages/access.py)."""
    if not key or not settings.access_url:
        return {}
    request = {"run": run, "proof": proof(key, ACCESS_NAME, run.encode())}
    return {
        BUCKET_VARIABLE: settings.runs_bucket,
        URL_VARIABLE: settings.access_url,
        REQUEST_VARIABLE: json.dumps(request),
    }


def run_labels(launch: Launch) -> dict[str, str]:
    """The labels that say which run and attempt own a training resource."""
    owner = {names.ATTEMPT_LABEL: str(launch.attempt), names.DEPLOYMENT_LABEL: launch.settings.deployment}
    return names.labels(launch.run, launch.spec.labels, **owner)


def secret_references(launch: Launch) -> str:
    """DROPFORGE_SECRETS for a container that reads its secrets itself: full version names by variable, as JSON."""
    project = launch.settings.project
    return json.dumps({name: names.secret_version(project, secret) for name, secret in launch.spec.secrets.items()})


# Exit codes of dropforge's training containers (docs/training.md).
EXIT_CLASSES = {
    64: ErrorClass.CONFIG,
    65: ErrorClass.DATA,
    66: ErrorClass.PERMISSION,
    70: ErrorClass.CODE,
    75: ErrorClass.PREEMPTED,
    76: ErrorClass.OUT_OF_MEMORY,
    137: ErrorClass.INFRASTRUCTURE,  # SIGKILL from outside
    143: ErrorClass.INFRASTRUCTURE,  # SIGTERM that was not handled
}


def class_of_exit(code: int) -> ErrorClass:
    """The error class that a training container's exit code stands for."""
    return EXIT_CLASSES.get(code, ErrorClass.CODE)
