"""The engine's errors, by who must react.

WorkflowError      a workflow raised it; `except` catches it, unless it is a limit
DeployError        the compiler refuses the source; holds every problem with line and column
EngineError        the engine refuses the request of its caller
    NotFound / InvalidArgument / FailedPrecondition / ResourceExhausted
LeaseLost          another engine has taken over the database; this engine must stop
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import decisions


class WorkflowError(Exception):
    """An error of a workflow. `except: as:` binds `value`; the API shows `context`."""

    def __init__(self, value: Any, *, context: str | None = None, catchable: bool = True) -> None:
        super().__init__(context)
        self.value = value
        self.context = context
        self.catchable = catchable
        self.trace: list[int] = []  # marks of the steps that it passed, innermost first


def system_error(tag: str, message: str, *, prefix: bool = True, **fields: Any) -> WorkflowError:
    """An error of the interpreter: a map with tags, message and `fields`."""
    text = f"{tag}: {message}" if prefix else message
    tags = [tag, *decisions.EXTRA_TAGS.get(tag, [])]
    return WorkflowError({"message": text, "tags": tags, **fields}, context=text)


def limit_error(message: str, *tags: str) -> WorkflowError:
    """A ResourceLimitError. It ends the execution: the documentation says that `except` does not catch it."""
    text = f"ResourceLimitError: {message}"
    value = {"message": text, "tags": ["ResourceLimitError", *tags]}
    return WorkflowError(value, context=text, catchable=False)


@dataclass(frozen=True)
class Problem:
    """A mistake or a warning of the deploy-time checks."""

    message: str
    line: int = 1
    column: int = 1
    step: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        where = f" in step {self.step}:" if self.step else ""
        return f"{self.line}:{self.column}: {self.severity}:{where} {self.message}"


class DeployError(Exception):
    """The source has mistakes. `str()` reads like the service's message, about the first of `problems`."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        first = problems[0]
        where = f"error in step {first.step}: " if first.step else ""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        code = "" if "(Code: " in first.message else " (Code: 3)"
        super().__init__(
            f"failed to build: {where}{first.message}{code} (line {first.line}, column {first.column}){more}"
        )


class EngineError(Exception):
    """The engine refuses a request; `status` is the name of its google.rpc.Code."""

    status = "INTERNAL"


class NotFound(EngineError):
    status = "NOT_FOUND"


class InvalidArgument(EngineError):
    status = "INVALID_ARGUMENT"


class FailedPrecondition(EngineError):
    status = "FAILED_PRECONDITION"


class ResourceExhausted(EngineError):
    status = "RESOURCE_EXHAUSTED"


class LeaseLost(Exception):
    """Another engine holds the database's lease."""
