"""Settings and contexts for tests, of an imaginary deployment or of the deployment that the environment names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from google.api_core.exceptions import NotFound, PreconditionFailed

from dropforge.base.clock import Clock, utc_now
from dropforge.base.log import Log, log
from dropforge.base.settings import Settings
from dropforge.cloud.clients import Clients
from dropforge.cloud.context import Cloud
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.run.store import RunStore


def settings_with(**changes: Any) -> Settings:
    """Return settings with `changes`; every other required value is "x"."""
    return Settings(**{**dict.fromkeys(REQUIRED, "x"), **changes})


REQUIRED = (
    "project",
    "location",
    "specs_bucket",
    "runs_bucket",
    "workflow",
    "requests_topic",
    "job_events_topic",
    "run_events_topic",
    "train_trl_image",
    "serve_vllm_image",
    "trainer_service_account",
    "server_service_account",
)
SETTINGS = settings_with()


class TestClock(Clock):
    """A clock whose time the test sets and whose `sleep` returns at once."""

    __test__ = False

    def __init__(self, now: datetime | Callable[[], datetime] = utc_now) -> None:
        self.now = now if callable(now) else lambda: now  # type: ignore[method-assign]

    def sleep(self, seconds: float) -> None:
        return


class Memory:
    """A storage client whose buckets share a single dictionary from name to data and generation."""

    def __init__(self, name: str = "runs") -> None:
        self.name, self.objects, self.client = name, dict[str, tuple[bytes, int]](), self
        self.metadata: dict[str, dict[str, str]] = {}

    def bucket(self, name: str) -> Memory:
        return self

    def blob(self, name: str, generation: int | None = None) -> Blob:
        return Blob(self, name)

    def get_blob(self, name: str, **_: Any) -> Blob | None:
        if name not in self.objects:
            return None
        return self._present(name)

    def list_blobs(self, bucket: object, prefix: str = "", **_: Any) -> Blobs:
        return Blobs(self._present(name) for name in sorted(self.objects) if name.startswith(prefix))

    def _present(self, name: str) -> Blob:
        found = Blob(self, name)
        found.generation, found.metadata = self.objects[name][1], self.metadata.get(name)
        return found


class Blobs(list["Blob"]):
    """A listing of a single page."""

    @property
    def pages(self) -> Iterator[SimpleNamespace]:
        """The page, as the client gives it: with the JSON of the answer."""
        items = [
            {
                "name": blob.name,
                "generation": str(blob.generation),
                "metageneration": str(blob.metageneration),
                "metadata": blob.metadata or {},
            }
            for blob in self
        ]
        return iter([SimpleNamespace(raw_page={"items": items})])


class Blob:
    """An object of a bucket in memory."""

    def __init__(self, bucket: Memory, name: str) -> None:
        self.objects, self.name = bucket.objects, name
        self.generation, self.metageneration = 0, 1
        self.metadata: dict[str, str] | None = None
        self._described = bucket.metadata
        self.time_created = self.updated = utc_now()
        self.size = len(self.objects.get(name, (b"", 0))[0])

    def upload_from_string(self, data: bytes, content_type: str = "", *, if_generation_match: int, **_: Any) -> None:
        if self.objects.get(self.name, (b"", 0))[1] != if_generation_match:
            raise PreconditionFailed("generation")
        self.generation = if_generation_match + 1
        self.objects[self.name] = (data, self.generation)
        self._described[self.name] = self.metadata or {}

    def download_as_bytes(self, **_: Any) -> bytes:
        if self.name not in self.objects:
            raise NotFound(self.name)
        data, self.generation = self.objects[self.name]
        return data

    def exists(self, **_: Any) -> bool:
        return self.name in self.objects

    def delete(self, **_: Any) -> None:
        if self.objects.pop(self.name, None) is None:
            raise NotFound(self.name)


def cloud_with(settings: Settings = SETTINGS, now: Any = utc_now, write: Log = log, **clients: Any) -> Cloud:
    """Return a cloud with these clients: a keyword names a method of Clients, its value is the result."""
    made = {name: lambda *_, client=client: client for name, client in clients.items()}
    return Cloud(settings, SimpleNamespace(**made), clock=TestClock(now), log=write)  # type: ignore[arg-type]


def context_with(
    settings: Settings = SETTINGS, now: Any = utc_now, platforms: Platforms | None = None, **clients: Any
) -> Context:
    """Return a context with these clients; see `cloud_with`."""
    return Context(cloud_with(settings, now, **clients), platforms or Platforms())


@cache
def here() -> Context:
    """Return the context of the deployment that the environment names; `forget` drops it."""
    return Context(Cloud(Settings.from_environment(os.environ), _clients()))


def intend(store: RunStore, run: str, kind: str, name: str, attempt: int) -> None:
    """Enter the intent to create a resource in the ledger of a run."""
    record = store.recall(run)
    assert record is not None
    assert store.intend_all(record, [(kind, name)], attempt, lambda _: True)


def forget() -> None:
    """Drop the context and the clients, so that the next use creates them for the current environment."""
    here.cache_clear()
    _clients.cache_clear()


@cache
def _clients() -> Clients:
    return Clients()


class _Present:
    """The clients of the environment; a client created after `forget` stays until the next `forget`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_clients(), name)


clients: Any = _Present()


class Bound:
    """A target or a server whose methods in VERBS get a cloud with the present clients; `listed` takes the settings."""

    VERBS = frozenset({"provision", "inspect", "deploy", "why_not_ready", "exists", "teardown"})

    def __init__(self, adapter: Any, settings: Settings = SETTINGS) -> None:
        self.adapter, self.settings = adapter, settings

    def listed(self, settings: Settings) -> Any:
        return self.adapter.listed(present(settings))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.adapter, name)
        return partial(value, present(self.settings)) if name in self.VERBS else value


def present(settings: Settings = SETTINGS) -> Cloud:
    """Return a cloud with `settings` and the clients of the present environment."""
    return Cloud(settings, _clients())
