"""The errors of dropforge, by the reaction of the caller.

DropforgeError
├── InvalidSpec        the spec is refused: write the record REJECTED, notify people, never retry
├── NotFound           a named run, object or resource does not exist
├── Malformed          a stored object is not what its name says: a finding about that object alone
├── Conflict           another writer changed the record first: read it again, decide again
├── CloudError         a Google API refused or failed; carries an ErrorClass
│   └── OverQuota      it did nothing, for a quota or a rate that frees itself: wait, or ask in another place
└── RetryLater         not an error of the run: raised so that Eventarc delivers the event again
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from .redact import cut


class ErrorClass(StrEnum):
    """Why a run or an attempt failed. The spec's limits.retry says which classes get another attempt."""

    CONFIG = "config"  # the spec or the deployment is wrong; another attempt cannot help
    DATA = "data"  # the data set cannot be trained on
    PERMISSION = "permission"  # an identity lacks a permission
    QUOTA = "quota"  # the project's quota is too small; another placement may have enough
    STOCKOUT = "stockout"  # the cloud has no capacity left here; another placement may have some
    TRANSIENT = "transient"  # a temporary failure; the same call may succeed later
    PREEMPTED = "preempted"  # the cloud took the machine; training resumes from the last checkpoint
    INFRASTRUCTURE = "infrastructure"  # the machine was lost without notice; training resumes from the last checkpoint
    OUT_OF_MEMORY = "out_of_memory"  # host or accelerator memory ran out
    DEADLINE = "deadline"  # limits.max_duration ran out
    BUDGET = "budget"  # limits.max_cost_usd ran out
    STUCK = "stuck"  # the cloud reports a running machine, but training makes no progress
    GATE = "gate"  # the model did not pass the gate and is not served
    PARITY = "parity"  # the endpoint does not answer as the exported model
    CODE = "code"  # the training or serving code failed
    CANCELLED = "cancelled"  # a user requested the end of the run

    @property
    def moves_on(self) -> bool:
        """Whether the next attempt uses the next placement."""
        return self in (ErrorClass.QUOTA, ErrorClass.STOCKOUT)


class DropforgeError(Exception):
    """Base class of all errors that dropforge raises deliberately."""


class SpecProblem(NamedTuple):
    """A problem of a spec. `pointer` is a JSON pointer (RFC 6901); "" is the whole document.

    `expected` is what must be there, or a question that begins with "did you mean".
    """

    pointer: str
    message: str
    found: str | None = None
    expected: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.pointer or '/'}: {self.message}"]
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.expected is not None:
            is_question = self.expected.startswith("did you mean")
            parts.append(self.expected if is_question else f"expected {self.expected}")
        return "; ".join(parts)


class InvalidSpec(DropforgeError):
    """A job spec that dropforge refuses; `problems` lists every problem."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class NotFound(DropforgeError):
    """A run, object or resource that does not exist."""


class Malformed(DropforgeError):
    """A stored object that is not what its name says."""


def first_problem(error: Any) -> str:
    """The first problem in a pydantic.ValidationError: its place and its kind, without the document's text."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{cut('.'.join(map(str, first['loc'])), 200) or 'the document'}: {cut(first['msg'], 200)}"


class Conflict(DropforgeError):
    """A precondition failed: another writer changed the object after it was read."""


class RetryLater(DropforgeError):
    """The work is impossible now and possible soon; raised so that Eventarc delivers the event again."""


class CloudError(DropforgeError):
    """A failed call of a Google API, classified; `hint` says what the reader can do.

    `did_nothing`: Google's answer, or its lack before any request to create something, proves that the call created
    nothing. After a lost answer nobody knows.
    """

    def __init__(self, error_class: ErrorClass, message: str, hint: str = "", *, did_nothing: bool = False) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.hint = hint
        self.did_nothing = did_nothing


class OverQuota(CloudError):
    """Google refused a change for a quota or a rate, and did nothing. The same request may succeed later.

    `is_sure`: an earlier request for the same change did nothing, either.
    """

    def __init__(self, error_class: ErrorClass, message: str, hint: str = "", *, is_sure: bool = True) -> None:
        super().__init__(error_class, message, hint, did_nothing=True)
        self.is_sure = is_sure
