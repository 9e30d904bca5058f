"""A platform with named endpoints, whose services have revisions, shares, and instances that cost money.

It behaves as Cloud Run does: writes carry the version that was read, and a revision without a share has no instance
unless it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud.classify import classify, client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.named import Candidate, Counted, Fence, Reached, Share, check_owner, no_fence, owner_labels
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Waits

from .world import LOCATION, PROJECT, World, broken

KIND = "chaos.dropforge.dev/NamedService"
IDLE_SECONDS = 900.0  # without a share, an instance ends so long after its last request
T = TypeVar("T")


@dataclass
class Revision:
    """A revision. `asked` is when its instance, which has no share, ends unless it gets another request."""

    name: str
    number: int
    run: str
    ready: float  # when it answers; infinite: never
    asked: float


@dataclass
class Service:
    """The service of an endpoint. `version` changes with each write."""

    name: str
    endpoint: str
    labels: dict[str, str]
    created: float
    revisions: dict[str, Revision] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    suspended: bool = False
    version: int = 0

    def paying(self, now: float) -> set[str]:
        """The revisions that have instances."""
        if self.suspended:
            return set()
        return {each.name for each in self.revisions.values() if each.asked > now or self.shares.get(each.name)}

    def copied(self) -> Service:
        """The service as a client reads it; its later changes change no copy."""
        revisions = {name: replace(each) for name, each in self.revisions.items()}
        return replace(self, labels=dict(self.labels), revisions=revisions, shares=dict(self.shares))


class NamedCloud:
    """See `NamedServer` and `Server` for the contract of each verb.

    `bad` are the runs whose models fail half of their requests.
    """

    keeps_instances = False
    keeps_revisions = True
    serve: dict[str, Any]

    def __init__(self, world: World, bad: set[str]) -> None:
        self.world = world
        self.bad = bad
        self.serve = {"type": "cloud_run"}
        self.services: dict[str, Service] = {}
        own: Any = self
        self.platforms = Platforms(named=lambda _: own, all=lambda: [own], owner=lambda _: own, server=lambda _: own)

    # The protocol of named endpoints

    def drain_seconds(self, cloud: Cloud) -> int:
        return 0

    def region(self, deployment: Deployment) -> str:
        return LOCATION

    def service_name(self, deployment: Deployment, existing: str = "") -> str:
        return _service(deployment.endpoint)

    def why_whole(self, service: str) -> str:
        return ""

    def deploy(
        self, cloud: Cloud, candidate: Candidate, shares: list[Share], fence: Fence = no_fence
    ) -> Reached | Waits:
        name = self.service_name(candidate.deployment)
        found = self._read(name)
        if found is not None:
            check_owner(name, found.labels, cloud.settings, candidate.endpoint)
        revision = names.named_revision(candidate.endpoint, candidate.number)
        if found is None or revision not in found.revisions:
            if self.world.lasts(f"stockout of {revision}", self.world.faults.stockout / 2):
                return Waits("no capacity")
            version = None if found is None else found.version
            fence()
            self._call("named.deploy", lambda: self._add(name, version, candidate, cloud), changes=True)
        return self._reached(name, revision) or Waits("the revision starts")

    def find(self, cloud: Cloud, service: str, number: int) -> Reached | None:
        return self._reached(service, names.named_revision(_endpoint(service), number), is_ready=False)

    def is_lost(self, cloud: Cloud, service: str, revision: str) -> bool:
        return False

    def resources(self, service: str, revision: str) -> list[str]:
        return [service]

    def shift(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        wanted = {share.revision: share.percent for share in shares if share.percent}
        found = self._existing(service)
        if lacking := set(wanted) - set(found.revisions):
            raise CloudError(ErrorClass.CONFIG, f"revision {sorted(lacking)[0]} does not exist any more")
        if found.shares != wanted:
            fence()
            self._write(service, found.version, lambda now: self._share(now, wanted))
        return self._existing(service).shares == wanted

    def counted(self, cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
        found, seconds = self._existing(service), self.world.now - since.timestamp()
        counts = {}
        for name, percent in found.shares.items():
            requests = int(percent * seconds / 60)
            errors = requests // 2 if found.revisions[name].run in self.bad else 0
            counts[name] = Counted(requests=requests, errors=errors, latency_ms=100.0)
        return counts

    def prune(self, cloud: Cloud, service: str, kept: set[str], last: int) -> None:
        found = self._read(service)
        for revision in list(found.revisions.values()) if found else []:
            if revision.name not in kept and revision.number <= last:
                self._call("named.prune", lambda name=revision.name: self._prune(service, name), changes=True)  # type: ignore[misc]

    def suspend(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        if (found := self._read(service)) is None:
            return True
        if not found.suspended:
            fence()
            self._write(service, found.version, lambda now: self._scale(now, stops=True))
        return (now := self._read(service)) is None or now.suspended

    def resume(self, cloud: Cloud, service: str, candidates: list[Candidate], fence: Fence = no_fence) -> bool:
        found = self._existing(service)
        if found.suspended:
            fence()
            self._write(service, found.version, lambda now: self._scale(now, stops=False))
        return not self._existing(service).suspended

    def delete(self, cloud: Cloud, service: str) -> bool:
        return self.teardown(cloud, KIND, service)

    # What the sweep calls

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        found = self._call("named.list", lambda: list(self.services.values()))
        for service in found:
            yield Listed(KIND, service.name, dict(service.labels), datetime.fromtimestamp(service.created, UTC))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        if self._read(name) is None:
            return True
        self._call("named.delete", lambda: self.forget(name), changes=True)
        return self._read(name) is None

    # The service's side: see `Place` of endpoint_lives.py

    def settings(self, own: Settings) -> Settings:
        return own

    def clients(self) -> dict[str, Callable[..., Any]]:
        post = SimpleNamespace(post=self._complete)
        return {"endpoint": lambda audience, key="": post}

    def shown(self, endpoint: str) -> dict[str, Any] | None:
        found = self.services.get(_service(endpoint))
        return {"shares": found.shares, "suspended": found.suspended} if found else None

    def plan_harm(self, endpoint: str, seconds: float) -> None:
        draw = self.world.random
        if draw.random() < self.world.faults.deleted * 2:
            self.world.after(draw.random() * seconds, partial(self.forget, _service(endpoint)))

    def _complete(self, url: str, **_: Any) -> Any:
        def answer() -> Any:
            status = self.complete(url)
            return SimpleNamespace(status_code=status, text="", json=lambda: {"choices": [{"message": {}}]})

        return self.world.effect("endpoint", answer, error=broken)

    def complete(self, url: str) -> int:
        """The status of a completion at the address of a revision."""
        for service in self.services.values():
            for revision in service.revisions.values():
                if url.startswith(_url(revision.name)):
                    if service.suspended:
                        return 503
                    self._ask(service, revision)
                    if revision.ready > self.world.now:
                        return 503
                    self.world.fact("answered", endpoint=service.endpoint, revision=revision.name)
                    return 200
        return 404

    def forget(self, name: str) -> None:
        """Delete a service."""
        if (service := self.services.pop(name, None)) is not None:
            self.world.fact("paying", endpoint=service.endpoint, revisions=0)
            self.world.fact("forgotten", endpoint=service.endpoint)

    def _add(self, name: str, version: int | None, candidate: Candidate, cloud: Cloud) -> None:
        service, world = self.services.get(name), self.world
        if (None if service is None else service.version) != version:
            return  # another caller was faster: the next call looks again
        if service is None:
            labels = owner_labels(cloud.settings, candidate.endpoint)
            service = self.services[name] = Service(name, candidate.endpoint, labels, world.now)
        never = world.happens(world.faults.unready)
        start = float("inf") if never else world.now + world.duration(world.faults.slow_start, (300, 900), (10, 90))
        revision = names.named_revision(candidate.endpoint, candidate.number)
        made = Revision(revision, candidate.number, candidate.deployment.run, start, world.now)
        service.revisions[revision] = made
        service.shares = service.shares or {revision: 100}
        self._ask(service, made)

    def _ask(self, service: Service, revision: Revision) -> None:
        """Start an instance for a request, or keep it."""
        revision.asked = self.world.now + IDLE_SECONDS
        self.world.after(IDLE_SECONDS, lambda: self._note(service))
        self._changed(service)

    def _share(self, service: Service, wanted: dict[str, int]) -> None:
        service.shares = wanted
        for revision in service.revisions.values():
            revision.asked = self.world.now
        self._changed(service)
        self.world.fact("shares", endpoint=service.endpoint, shares=dict(wanted))

    def _scale(self, service: Service, *, stops: bool) -> None:
        service.suspended = stops
        for revision in service.revisions.values():
            revision.asked = self.world.now
        self._changed(service)

    def _prune(self, service: str, name: str) -> None:
        found = self.services.get(service)
        if found is not None and name in found.revisions and not found.shares.get(name):
            del found.revisions[name]
            self._changed(found)

    def _changed(self, service: Service) -> None:
        service.version += 1
        self._note(service)

    def _note(self, service: Service) -> None:
        if self.services.get(service.name) is service:
            number = len(service.paying(self.world.now))
            self.world.fact("paying", endpoint=service.endpoint, revisions=number)

    # Calls

    def _reached(self, service: str, revision: str, *, is_ready: bool = True) -> Reached | None:
        found = self._read(service)
        each = found.revisions.get(revision) if found else None
        if each is None or (is_ready and each.ready > self.world.now):
            return None
        return Reached(revision, _url(revision), f"http://{_endpoint(service)}.named.chaos")

    def _existing(self, service: str) -> Service:
        if (found := self._read(service)) is None:
            raise CloudError(ErrorClass.CONFIG, f"{service} does not exist any more")
        return found

    def _read(self, service: str) -> Service | None:
        def read() -> Service | None:
            found = self.services.get(service)
            return found.copied() if found else None

        return self._call("named.get", read)

    def _write(self, service: str, version: int, change: Callable[[Service], None]) -> None:
        def write() -> None:
            found = self.services.get(service)
            if found is not None and found.version == version:
                change(found)

        self._call("named.update", write, changes=True)

    def _call(self, name: str, action: Callable[[], T], *, changes: bool = False) -> T:
        try:
            return self.world.effect(name, action, changes=changes)
        except client_errors() as error:
            raise classify(error) from error


def _service(endpoint: str) -> str:
    return f"projects/{PROJECT}/locations/{LOCATION}/services/{names.named_endpoint(endpoint)}"


def _endpoint(service: str) -> str:
    return service.rpartition("/")[2].removeprefix(names.named_endpoint(""))


def _url(revision: str) -> str:
    return f"http://{revision}.chaos"
