"""What can go wrong, by who must react.

WorkflowError      raised inside a workflow; `except` catches it (unless it is a limit)
DeployError        the source is refused; carries every problem found, with line and column
EngineError        the caller of the engine asked for something impossible
    NotFound / InvalidArgument / FailedPrecondition / ResourceExhausted
LeaseLost          another engine has taken over the database
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import decisions


class WorkflowError(Exception):
    """An error as workflow code sees it: `value` is what `except: as:` binds."""

    def __init__(self, value: Any, *, context: str | None = None, catchable: bool = True) -> None:
        super().__init__(context)
        self.value = value
        self.context = context
        self.catchable = catchable
        self.trace: list[int] = []  # marks of the steps it passed through, innermost first


def system_error(tag: str, message: str, *, prefix: bool = True, **fields: Any) -> WorkflowError:
    """An error that the interpreter raises: {"tags", "message"} and what the kind adds."""
    text = f"{tag}: {message}" if prefix else message
    tags = [tag, *decisions.EXTRA_TAGS.get(tag, [])]
    return WorkflowError({"message": text, "tags": tags, **fields}, context=text)


def limit_error(message: str, *tags: str) -> WorkflowError:
    """Exhausting a resource ends the execution: documented as not catchable."""
    text = f"ResourceLimitError: {message}"
    value = {"message": text, "tags": ["ResourceLimitError", *tags]}
    return WorkflowError(value, context=text, catchable=False)


@dataclass(frozen=True)
class Problem:
    """One finding of the deploy-time checks."""

    message: str
    line: int = 1
    column: int = 1
    step: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        where = f" in step {self.step}:" if self.step else ""
        return f"{self.line}:{self.column}: {self.severity}:{where} {self.message}"


class DeployError(Exception):
    """The source cannot be deployed. `str()` reads like the service's message; `problems` has them all."""

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
    """A request that the engine refuses; `status` is the canonical google.rpc code name."""

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
    """Another engine holds the database's lease: this one must stop."""
