"""What the last sweep did, and what it could not do: kept in the runs bucket for the page Health of the console."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, ValidationError

from dropforge.base.errors import Malformed, NotFound, first_problem
from dropforge.context import Context
from dropforge.stages.answers import Swept

OBJECT = "runs/swept.json"
KEPT = 100  # names or problems of a kind; the log has all of them


class Findings(BaseModel):
    """The end of a sweep, how many names each list of its answer had, and the first KEPT of each."""

    model_config = ConfigDict(frozen=True)  # a later version may have more fields

    ended: datetime
    counts: dict[str, int]
    deleted: list[str] = []
    deleting: list[str] = []
    restarted: list[str] = []
    resubmitted: list[str] = []
    problems: list[str] = []


def of(answer: Swept, ended: datetime) -> Findings:
    """Return the findings of a sweep that has ended."""
    lists = {name: list(value) for name, value in answer.model_dump().items()}
    counts = {name: len(value) for name, value in lists.items()}
    return Findings(ended=ended, counts=counts, **{name: value[:KEPT] for name, value in lists.items()})


def read(context: Context) -> Findings | None:
    """Return the findings of the last sweep; None before the first one. Raises Malformed."""
    try:
        return Findings.model_validate_json(context.store.read(OBJECT).data)
    except NotFound:
        return None
    except ValidationError as error:
        raise Malformed(f"gs://{context.store.bucket.name}/{OBJECT}: {first_problem(error)}") from None


def write(context: Context, found: Findings) -> None:
    """Keep the findings. Another sweep that ends at the same time may win: both are good."""
    try:
        generation = context.store.read(OBJECT).generation
    except NotFound:
        generation = 0
    context.store.write(OBJECT, found.model_dump_json().encode(), generation)
