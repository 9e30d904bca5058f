"""What the cloud lists of ours, whatever ledgers say: the shape of it, and how many places are asked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from typing import NamedTuple, TypeVar

from dropforge.base import names
from dropforge.base.errors import CloudError, DropforgeError, ErrorClass
from dropforge.base.log import log
from dropforge.base.settings import Settings

from .classify import classify, client_errors

P = TypeVar("P")

LISTERS = 8  # places are asked at once: one that does not answer keeps nobody waiting


class Listed(NamedTuple):
    """A resource of a run that the cloud lists. Kind and name are the ledger's; the labels say whose it is."""

    kind: str
    name: str
    labels: dict[str, str]
    created: datetime | None = None

    @property
    def run(self) -> str:
        return self.labels.get(names.RUN_LABEL, "")

    @property
    def attempt(self) -> int | None:
        """The attempt that it trains for; None for an endpoint."""
        text = self.labels.get(names.ATTEMPT_LABEL, "")
        return int(text) if text.isdecimal() else None


Found = Listed | CloudError  # an error stands for what is missing from an answer


class Unlisted(DropforgeError):
    """Places that could not be listed; what the others list has been given before."""

    def __init__(self, problems: list[CloudError]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def each(places: Iterable[P], look: Callable[[P], Iterable[Found]], *, is_used: bool = True) -> Iterator[Listed]:
    """What `look` finds in each of the places. Raises Unlisted at the end, for those that failed or are incomplete."""
    problems = []
    with ThreadPoolExecutor(LISTERS) as pool:
        for answer in pool.map(lambda place: _answer(look, place), places):
            for found in answer:
                if isinstance(found, CloudError):
                    problems.append(found)
                else:
                    yield found
    settle(problems, is_used=is_used)


def settle(problems: Iterable[CloudError], *, is_used: bool) -> None:
    """Raise Unlisted for the problems that matter.

    A deployment that does not use a kind need not be allowed to list it, nor have the API enabled: that is told once.
    """
    matter = []
    for problem in problems:
        if is_used or problem.error_class is not ErrorClass.PERMISSION:
            matter.append(problem)
        else:
            _log_once(problem.message)
    if matter:
        raise Unlisted(matter)


def is_of_run(labels: dict[str, str], settings: Settings) -> bool:
    """Whether labels say that something was made for a run of this deployment.

    A project may have several deployments. What was made before the label was has none.
    """
    ours = labels.get(names.DEPLOYMENT_LABEL, settings.deployment) == settings.deployment
    return labels.get(names.MANAGED_BY) == "dropforge" and names.is_run_id(labels.get(names.RUN_LABEL, "")) and ours


def unreachable(places: Iterable[str], what: str) -> list[CloudError]:
    """A problem for each place that an answer says it may lack."""
    return [
        CloudError(ErrorClass.TRANSIENT, f"the list of {what} lacks {place}, which Google could not reach")
        for place in places
    ]


def _answer(look: Callable[[P], Iterable[Found]], place: P) -> list[Found]:
    """What one place lists, as far as it got."""
    found: list[Found] = []
    try:
        found.extend(look(place))
    except CloudError as error:
        found.append(error)
    except client_errors() as error:
        found.append(classify(error))
    return found


@cache
def _log_once(message: str) -> None:
    log(message, stage="sweep")
