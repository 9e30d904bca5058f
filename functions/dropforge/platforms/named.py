"""The protocol of named endpoints: a service with one URL, whose revisions are the models of runs."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud.context import Cloud
from dropforge.run.record import Stored

from .serving import Deployment
from .training import Waits


@dataclass(frozen=True)
class Candidate:
    """A model that is put behind a name: the id of its rollout, the number of its revision, and its deployment.

    `service` is the service that the record of the endpoint names; "": it names none yet.
    """

    rollout: str
    number: int
    deployment: Deployment
    service: str = ""

    @property
    def endpoint(self) -> str:
        return self.deployment.endpoint


class Share(NamedTuple):
    """The percent of the requests that a revision gets, by the cloud's name of the revision and by its number."""

    revision: str
    number: int
    percent: int


class Reached(NamedTuple):
    """A revision that can be called before it gets a share: the cloud's name, its URL, and the URL of the endpoint.

    A token for the endpoint's URL is valid for the revision's.
    """

    revision: str
    url: str
    endpoint_url: str


class Counted(Stored):
    """The requests that a revision has got, those of them that failed with a status of 500 or more, and the 95th
    percentile of their latencies in milliseconds (None: no request)."""

    requests: int = 0
    errors: int = 0
    latency_ms: float | None = None

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0


def count(requests: Iterable[tuple[str, bool, int]], latencies: Iterable[tuple[str, float]]) -> dict[str, Counted]:
    """The counts by revision. `requests` tell the revision, whether the answers were errors, and how many there were.

    Of several latencies of a revision, in ms, the longest counts.
    """
    total, errors, longest = Counter[str](), Counter[str](), dict[str, float]()
    for revision, is_error, number in requests:
        total[revision] += number
        errors[revision] += number if is_error else 0
    for revision, latency in latencies:
        longest[revision] = max(longest.get(revision, 0.0), latency)
    return {
        revision: Counted(requests=total[revision], errors=errors[revision], latency_ms=longest.get(revision))
        for revision in total
    }


class RevisionGone(CloudError):
    """The revision that is to get requests does not exist any more: somebody has deleted it, or the endpoint.

    `left` has the ids of the rollouts that made the endpoint's revisions; None: unknown.
    """

    def __init__(self, message: str, hint: str = "", left: Set[str] | None = None) -> None:
        super().__init__(ErrorClass.CONFIG, message, hint)
        self.left = left


# Raises Conflict if the caller may not change a service any more. A verb calls it after it has read the version of the
# service that it then replaces: if another caller moves the requests later, that write is refused.
Fence = Callable[[], None]


def no_fence() -> None:
    """The fence of a caller that nobody supersedes."""


class NamedServer(Protocol):
    """A place that has named endpoints. Verbs raise CloudError when a Google API refuses or fails.

    `service` is the full resource name of the endpoint's service, which `service_name` gives. No verb moves a share
    but `shift`. `keeps_instances`: a revision without a share keeps its instances, which cost money. `keeps_revisions`:
    a revision without a share can be promoted again, and a suspended endpoint keeps its resources.
    """

    keeps_instances: bool
    keeps_revisions: bool

    @abstractmethod
    def drain_seconds(self, cloud: Cloud) -> int:
        """How long the revision before must stay after `shift`: for clients that have its address, and its answers."""

    @abstractmethod
    def region(self, deployment: Deployment) -> str:
        """The region of the endpoint."""

    @abstractmethod
    def service_name(self, deployment: Deployment, existing: str = "") -> str:
        """The full resource name of the service of the named endpoint that gets the model.

        `existing` is the service that the endpoint has: a platform with several kinds of services keeps it, if it is
        in the same place.
        """

    @abstractmethod
    def why_whole(self, service: str) -> str:
        """Why a revision of the endpoint gets every request or none; "" if it may have a share."""

    @abstractmethod
    def deploy(
        self, cloud: Cloud, candidate: Candidate, shares: list[Share], fence: Fence = no_fence
    ) -> Reached | Waits:
        """Advance towards a revision that runs and has no share; `shares` are those of the revisions before.

        The first revision of an endpoint has the whole share of a URL that nobody knows yet.
        """

    @abstractmethod
    def find(self, cloud: Cloud, service: str, number: int) -> Reached | None:
        """A revision that `deploy` has made; None if the cloud does not have it any more."""

    @abstractmethod
    def is_lost(self, cloud: Cloud, service: str, revision: str) -> bool:
        """Whether the URL does not lead to the revision that serves, and only a rollout that resumes can mend that.

        False where the platform itself starts instances again.
        """

    @abstractmethod
    def resources(self, service: str, revision: str) -> list[str]:
        """The full names of the resources without which the revision does not serve, as `Server.listed` lists them."""

    @abstractmethod
    def shift(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        """Advance towards these shares; True once the platform reports them. Raises RevisionGone."""

    @abstractmethod
    def counted(self, cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
        """The requests that the platform has counted since a time. The keys are the cloud's names of the revisions.

        A count may be minutes late. A revision without a request may be missing.
        """

    @abstractmethod
    def prune(self, cloud: Cloud, service: str, kept: set[str], last: int) -> None:
        """Delete the revisions whose names are not in `kept`. What cannot be deleted yet stays.

        The revisions with a number above `last` stay: the next rollout may have begun.
        """

    @abstractmethod
    def suspend(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        """End every instance of the endpoint, and start none for requests; True once the platform reports that.

        `shares` are those of the revision that serves. The URL and the revisions stay. A service that does not exist
        has no instances.
        """

    @abstractmethod
    def resume(self, cloud: Cloud, service: str, candidates: list[Candidate], fence: Fence = no_fence) -> bool:
        """Let the endpoint have instances again; True once the platform reports that. A repeat changes nothing.

        An endpoint that `is_lost` gets another instance in the place of the one that ended.

        The first of `candidates` is the revision that serves; the others are kept for a rollback.
        """

    @abstractmethod
    def delete(self, cloud: Cloud, service: str) -> bool:
        """Delete the endpoint with all its revisions; True once a read shows that it does not exist."""


def owner_labels(settings: Settings, endpoint: str) -> dict[str, str]:
    """The labels that say whose the service of a named endpoint is. It belongs to no run."""
    return {
        names.MANAGED_BY: "dropforge",
        names.ENDPOINT_LABEL: endpoint,
        names.DEPLOYMENT_LABEL: settings.deployment,
    }


def revision_labels(candidate: Candidate) -> dict[str, str]:
    """The labels of a revision, which bills show: the labels of its run's spec, its run and its rollout."""
    deployment = candidate.deployment
    owner = owner_labels(deployment.settings, candidate.endpoint)
    return names.labels(deployment.run, deployment.spec.labels, **{**owner, names.ROLLOUT_LABEL: candidate.rollout})


def check_owner(name: str, labels: Mapping[str, str], settings: Settings, endpoint: str) -> None:
    """Raise CloudError if the labels of a resource do not say that it is of this deployment's endpoint of that name."""
    if any(labels.get(key) != value for key, value in owner_labels(settings, endpoint).items()):
        message = f"{name} exists and belongs to {dict(labels)!r}"
        raise CloudError(ErrorClass.CONFIG, message, "delete it, or choose another name for the endpoint")
