"""What the engine knows of a workflow, a revision and an execution, as its callers see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Revision:
    """A deployed version of a workflow: its source, its user environment variables, its service account ("" for the
    default)."""

    workflow: str
    revision_id: str
    source: str
    environment: Mapping[str, str]
    created: float
    service_account: str = ""


@dataclass(frozen=True)
class WorkflowRecord:
    """A workflow with its current revision. `settings` holds the API's fields that the engine does not interpret."""

    name: str
    revision: Revision
    created: float
    updated: float
    labels: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ExecutionRecord:
    """An execution. `state` is ACTIVE, QUEUED, SUCCEEDED, FAILED or CANCELLED; times are seconds since the epoch."""

    name: str
    workflow: str
    revision_id: str
    state: str
    argument: str
    result: str | None
    error: Mapping[str, Any] | None
    labels: Mapping[str, str]
    created: float
    started: float | None
    ended: float | None
    steps: int
    external_steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    current_steps: Sequence[Mapping[str, str]] = ()

    @property
    def id(self) -> str:
        return self.name.rsplit("/", 1)[-1]

    @property
    def is_finished(self) -> bool:
        return self.state not in ("ACTIVE", "QUEUED")
