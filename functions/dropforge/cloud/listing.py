"""What the cloud lists, independent of every ledger: the shape of a listed resource, and parallel listing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple, TypeVar

from dropforge.base import names
from dropforge.base.errors import CloudError, DropforgeError, ErrorClass
from dropforge.base.settings import Settings

from .classify import classify, client_errors
from .context import Cloud

P = TypeVar("P")

LISTERS = 8  # parallel listings: a place that does not answer must not delay the others


class Listed(NamedTuple):
    """A resource of a run that the cloud lists, with the ledger's kind and name. The labels name its owner."""

    kind: str
    name: str
    labels: dict[str, str]
    created: datetime | None = None

    @property
    def run(self) -> str:
        return self.labels.get(names.RUN_LABEL, "")

    @property
    def endpoint(self) -> str:
        """The named endpoint that the resource belongs to; "" for a resource of a run."""
        return self.labels.get(names.ENDPOINT_LABEL, "")

    @property
    def attempt(self) -> int | None:
        """The attempt that the resource trains for; None for an endpoint."""
        text = self.labels.get(names.ATTEMPT_LABEL, "")
        return int(text) if text.isdecimal() else None


Entry = Listed | CloudError  # the error says what the listing lacks


class Unlisted(DropforgeError):
    """Raised at the end of a listing for the places that could not be listed; the other places were listed before."""

    def __init__(self, problems: list[CloudError]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def list_places(
    cloud: Cloud, places: Iterable[P], list_place: Callable[[P], Iterable[Entry]], *, is_used: bool = True
) -> Iterator[Listed]:
    """The resources of all places, which are listed in parallel.

    Raises Unlisted at the end if a place failed or is incomplete.
    """
    problems = []
    for entries in cloud.threads.map(lambda place: _entries(list_place, place), places, LISTERS):
        for entry in entries:
            if isinstance(entry, CloudError):
                problems.append(entry)
            else:
                yield entry
    raise_unlisted(cloud, problems, is_used=is_used)


def raise_unlisted(cloud: Cloud, problems: Iterable[CloudError], *, is_used: bool) -> None:
    """Raise Unlisted for the problems that matter.

    A deployment that does not use a kind needs neither the permission to list it nor the API: such a problem is logged
    once.
    """
    serious = []
    for problem in problems:
        if is_used or problem.error_class not in (ErrorClass.PERMISSION, ErrorClass.CONFIG):
            serious.append(problem)
        elif problem.message not in cloud.logged:
            cloud.logged.add(problem.message)
            cloud.log(problem.message, stage="sweep")
    if serious:
        raise Unlisted(serious)


def is_of_deployment(labels: dict[str, str], settings: Settings) -> bool:
    """Whether labels say that a resource belongs to a run of this deployment: a project may have several."""
    of_dropforge = labels.get(names.MANAGED_BY) == "dropforge"
    is_run = names.is_run_id(labels.get(names.RUN_LABEL, ""))
    return of_dropforge and is_run and labels.get(names.DEPLOYMENT_LABEL) == settings.deployment


def is_named_endpoint(labels: dict[str, str], settings: Settings) -> bool:
    """Whether labels say that a resource belongs to a named endpoint of this deployment."""
    of_dropforge = labels.get(names.MANAGED_BY) == "dropforge"
    is_named = names.is_endpoint_name(labels.get(names.ENDPOINT_LABEL, ""))
    return of_dropforge and is_named and labels.get(names.DEPLOYMENT_LABEL) == settings.deployment


def unreachable(places: Iterable[str], kinds: str) -> list[CloudError]:
    """An error for each place that an answer may lack."""
    return [
        CloudError(ErrorClass.TRANSIENT, f"the list of {kinds} lacks {place}, which Google could not reach")
        for place in places
    ]


def _entries(list_place: Callable[[P], Iterable[Entry]], place: P) -> list[Entry]:
    """The entries of one place, up to its first error."""
    entries: list[Entry] = []
    try:
        entries.extend(list_place(place))
    except CloudError as error:
        entries.append(error)
    except client_errors() as error:
        entries.append(classify(error))
    return entries
