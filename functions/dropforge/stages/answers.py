"""What the stages answer the workflow. main.py turns an answer into JSON; run.workflows.yaml reads the fields.

A field that an answer does not set is not in the JSON: the same status comes from several stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue

from dropforge.base.errors import ErrorClass
from dropforge.run.record import Record, RunError, RunState


class Answer(BaseModel):
    """Base class of the answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The status and the fields that were set."""
        return {"status": self.status, **self.model_dump(mode="json", exclude_unset=True)}


class Running(Answer):
    """The attempt runs until `deadline` (seconds since the epoch) at the latest; look after `wait_seconds`."""

    status = "RUNNING"
    deadline: float
    attempt: int
    wait_seconds: float


class Pending(Answer):
    """The stage is not done: call it again after `wait_seconds`. `remaining` are resources that still exist."""

    status = "PENDING"
    wait_seconds: float
    deadline: float | None = None
    attempt: int | None = None
    remaining: list[str] | None = None


class Waiting(Answer):
    """The attempt has not ended: look again after `wait_seconds`, or when the callback is called."""

    status = "WAITING"
    wait_seconds: float
    deadline: float


class Gate(BaseModel):
    """Whether the model is good enough to be served; `error` says why not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    passed: bool
    metric: str | None = None
    value: float | None = None
    error: RunError | None = None


class Succeeded(Answer):
    """The attempt has succeeded; `serve`: the spec asks for an endpoint."""

    status = "SUCCEEDED"
    gate: Gate
    serve: bool
    attempt: int | None = None


class Failed(Answer):
    """The attempt has failed; `retry`: another attempt follows."""

    status = "FAILED"
    error: RunError | None
    retry: bool = False
    attempt: int | None = None


class Cancelled(Failed):
    """A user requested the end of the run."""

    status = "CANCELLED"


class Superseded(Answer):
    """Another execution owns the run, or the run has ended: the calling execution ends and changes nothing."""

    status = "SUPERSEDED"
    execution: str | None
    state: RunState
    attempt: int | None = None


class Ready(Answer):
    """The endpoint has answered a completion."""

    status = "READY"
    url: str


class Gone(Answer):
    """The cloud answered for every resource in the scope that it does not exist. `cancelled`: a user ended the run."""

    status = "GONE"
    cancelled: bool


class Ended(Answer):
    """The run has ended in `state`: nothing in the scope exists, and the end was reported."""

    status = "ENDED"
    state: RunState


class Granted(Answer):
    """A token of Cloud Storage for the containers of a run, and its seconds to live. No log line has it.

    `spec`: the run's spec, which only a training container gets.
    """

    status = "GRANTED"
    access_token: str
    expires_in: int
    spec: dict[str, JsonValue] | None = None


class Lent(Answer):
    """An identity token for one endpoint. No log line has it."""

    status = "LENT"
    token: str


@dataclass(frozen=True)
class Finding:
    """One answer of preflight. `status` is ok, failed, warning, or not asked; "not asked" never counts as ok.

    `mend` is the fix if the answer is not ok: a command, a section of a page, or Google's page of quotas.
    """

    status: str
    what: str
    message: str
    mend: str = ""


class Checked(Answer):
    """The answers of preflight about a spec."""

    status = "CHECKED"
    findings: list[Finding]


class Swept(Answer):
    """The result of a sweep: names of resources, ids of runs and of rollouts, and descriptions of problems."""

    status = "SWEPT"
    deleted: list[str]
    deleting: list[str]
    restarted: list[str]
    resubmitted: list[str]
    problems: list[str]


# The answers of each function that the workflow calls, by the function's name.
ANSWERS: dict[str, tuple[type[Answer], ...]] = {
    "provision": (Running, Pending, Succeeded, Failed, Cancelled, Superseded),
    "inspect": (Waiting, Succeeded, Failed, Cancelled, Superseded),
    "deploy": (Ready, Pending, Failed, Cancelled, Superseded),
    "teardown": (Gone, Ended, Pending, Superseded),
}


def superseded(record: Record) -> Superseded:
    """The answer to an execution that does not own the run, or that calls after the run's end."""
    return Superseded(execution=record.execution, state=record.state)


def failed(error_class: ErrorClass, message: str, hint: str = "", *, retry: bool = False) -> Failed:
    """A failure with its error; Cancelled for the class CANCELLED."""
    answer = Cancelled if error_class is ErrorClass.CANCELLED else Failed
    return answer(error=RunError(error_class=error_class, message=message, hint=hint), retry=retry)
