"""What can go wrong, by how the caller reacts.

DropforgeError
├── InvalidSpec        the spec is refused: record REJECTED, tell people, never retry
├── NotFound           a run, object or resource that was named does not exist
├── Conflict           somebody else changed the record first: read again, decide again
├── CloudError         a Google API refused or failed; carries an ErrorClass
└── RetryLater         not an error of the run: raise to have the event delivered again
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ErrorClass(StrEnum):
    """Why a run or an attempt failed; decides whether, and where, it is tried again."""

    CONFIG = "config"  # the spec or the deployment is wrong; trying again cannot help
    DATA = "data"  # the data set cannot be trained on
    PERMISSION = "permission"  # an identity lacks a permission
    QUOTA = "quota"  # the project may not have that much; another placement might
    STOCKOUT = "stockout"  # the cloud has none left here; another placement might
    TRANSIENT = "transient"  # try the same thing again
    PREEMPTED = "preempted"  # the machine was taken away; resume from the last checkpoint
    INFRASTRUCTURE = "infrastructure"  # the machine was lost without notice; likewise
    OUT_OF_MEMORY = "out_of_memory"  # host or accelerator memory ran out
    DEADLINE = "deadline"  # limits.max_duration ran out
    BUDGET = "budget"  # limits.max_cost_usd ran out
    STUCK = "stuck"  # the cloud says that it runs, but it makes no progress
    GATE = "gate"  # the model is not good enough to be served
    CODE = "code"  # the training or serving code failed
    CANCELLED = "cancelled"  # somebody asked for it

    @property
    def tries_again(self) -> bool:
        """Whether a further attempt may help, unless the spec's limits.retry says otherwise."""
        return self in _TRIES_AGAIN

    @property
    def moves_on(self) -> bool:
        """Whether the next attempt should use the next placement."""
        return self in (ErrorClass.QUOTA, ErrorClass.STOCKOUT)


_TRIES_AGAIN = frozenset(
    {
        ErrorClass.QUOTA,
        ErrorClass.STOCKOUT,
        ErrorClass.TRANSIENT,
        ErrorClass.PREEMPTED,
        ErrorClass.INFRASTRUCTURE,
    }
)


class DropforgeError(Exception):
    """Base of every error that dropforge raises on purpose."""


class SpecProblem(NamedTuple):
    """One thing that is wrong with a spec. `pointer` is a JSON pointer (RFC 6901); "" is the whole document."""

    pointer: str
    message: str
    found: str | None = None
    expected: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.pointer or '/'}: {self.message}"]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        return "; ".join(parts)


class InvalidSpec(DropforgeError):
    """A job spec that cannot be accepted; `problems` says everything that is wrong with it."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class NotFound(DropforgeError):
    """A run, object or resource that does not exist."""


class Conflict(DropforgeError):
    """A precondition failed: the object changed since it was read."""


class RetryLater(DropforgeError):
    """Work that cannot be done now but will be possible soon; raised so that the event is delivered again."""


class CloudError(DropforgeError):
    """A Google API call that failed, classified; `hint` says what to do about it."""

    def __init__(self, error_class: ErrorClass, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.hint = hint
