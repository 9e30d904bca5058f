"""The findings of the last sweep, kept in the runs bucket for the page Health of the console."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict, ValidationError

from dropforge.base.errors import Malformed, NotFound, first_problem
from dropforge.context import Context
from dropforge.stages.answers import Swept

OBJECT = "runs/swept.json"
KEPT = 100  # names or problems of a kind; the log has all of them


class Findings(Swept):
    """The answer of a sweep with the first KEPT names of each list, the number of names of each list, and the end."""

    model_config = ConfigDict(extra="ignore")  # a later version may have more fields

    ended: datetime
    counts: dict[str, int]


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
    context.store.replace(OBJECT, found.model_dump_json().encode())
