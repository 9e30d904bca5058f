"""The one reader of the runs bucket in this process: every viewer sees what it has read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from dropforge.base import names
from dropforge.base.errors import Malformed, NotFound
from dropforge.endpoints.record import EndpointRecord
from dropforge.endpoints.store import EndpointStore
from dropforge.run.artifacts import Source, read_artifact, read_manifest
from dropforge.run.events import JobEvent, Progress, Started, read_job_event
from dropforge.run.record import Record
from dropforge.run.series import SeriesReader
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec

T = TypeVar("T")

READERS = 16  # parallel requests; each record, spec or event is one request
RECORDS = "runs/*/record.json"
ENDPOINTS = "endpoints/*/record.json"
KEPT = 200  # runs whose samples, or whose manifest in short, are kept
JOURNALS = 20  # runs whose events are kept; those of a long run take some 20 MB


class Run(NamedTuple):
    """A run as a list shows it. `spec` is None for a rejected run, and for a spec that this version cannot read."""

    record: Record
    spec: JobSpec | None


class Committed(NamedTuple):
    """The facts about a model in the manifest of its run. `size` is in bytes."""

    created: datetime
    base: Source
    dataset: Source
    serve_path: str
    metrics: dict[str, float | None]
    files: int
    size: int


class Cache(Generic[T]):
    """Values about runs. Each is read once for each generation of its run's record, and the least used are dropped."""

    def __init__(self, read: Callable[[str], T]) -> None:
        self._read = read
        self._values: dict[str, tuple[int | None, T]] = {}

    def of(self, run: str, generation: int | None) -> T:
        """Return the value of a run whose record has this generation."""
        kept = self._values.pop(run, None)
        if kept is None or kept[0] != generation:
            kept = generation, self._read(run)
        self._values[run] = kept  # the newest is last
        for oldest in list(self._values)[:-KEPT]:
            self._values.pop(oldest, None)
        return kept[1]


class Journal:
    """The progress of one run: the series of its attempts, and the events of the starts.

    Images from before 2026-11-24 tell their progress by events. Each event is read once: the names grow with attempt
    and sequence. A series is read again when its object has changed.
    """

    def __init__(self, store: RunStore, run: str) -> None:
        self.starts: list[Started] = []
        self._store = store
        self._run = run
        self._told: list[Progress] = []
        self._readers: dict[int, SeriesReader] = {}
        self._generations: dict[int, int] = {}
        self._points: dict[int, list[Progress]] = {}
        self._finished: set[int] = set()  # the attempts whose series no longer changes
        self._last = names.events_prefix(run)
        self._lock = threading.Lock()

    @property
    def progress(self) -> list[Progress]:
        # A copy of the values, in one operation: another thread may add an attempt meanwhile.
        return [*self._told, *chain.from_iterable(list(self._points.values()))]

    def refresh(self, attempt: int) -> bool:
        """Read what is new up to an attempt, the newest of the run; return whether there was anything."""
        with self._lock:
            unfinished = [number for number in range(1, attempt + 1) if number not in self._finished]
            is_changed = any([self._read_events(), *map(self._read_series, unfinished)])
            self._finished.update(range(1, attempt))  # each was read after the next attempt had begun
            return is_changed

    def _read_events(self) -> bool:
        listed = self._store.names(names.events_prefix(self._run), self._last)
        new = [name for name in listed if name != self._last]
        if not new:
            return False
        with ThreadPoolExecutor(READERS) as pool:
            self._add(pool.map(self._event, new))
        self._last = new[-1]
        return True

    def _event(self, name: str) -> JobEvent | None:
        return read_job_event(self._store.read(name).data, self._run)

    def _add(self, events: Iterable[JobEvent | None]) -> None:
        for event in events:
            if isinstance(event, Progress):
                self._told.append(event)
            elif isinstance(event, Started):
                self.starts.append(event)

    def _read_series(self, attempt: int) -> bool:
        """Read the series of an attempt, if it has changed. While the object is no series, the one before counts."""
        reader = self._readers.setdefault(attempt, self._store.series_reader(self._run, attempt))
        kept = reader.read()
        if kept is None or kept.generation == self._generations.get(attempt):
            return False
        self._generations[attempt], self._points[attempt] = kept.generation, kept.series.points()
        return True


class Reader:
    """Reads what changed since the last look. `refresh` has one caller at a time; the other methods have any number."""

    def __init__(self, store: RunStore, endpoints: EndpointStore) -> None:
        self.store = store
        self.unreadable: dict[str, str] = {}  # the runs and endpoints that this version cannot read, and why
        self._named = endpoints
        self._generations: dict[str, int] = {}  # of the objects that were read last
        self._runs: dict[str, Run] = {}
        self._endpoints: dict[str, EndpointRecord] = {}
        self._journals: dict[str, Journal] = {}
        self._samples = Cache(self._read_samples)
        self._committed = Cache(self._read_committed)
        self._lock = threading.Lock()

    def refresh(self, watched: Collection[str] = ()) -> set[str]:
        """Read each new or changed record, and the events of the watched runs; return the names of what changed."""
        present = {**self._list("runs/", RECORDS), **self._list(names.ENDPOINTS_PREFIX, ENDPOINTS)}
        changed = [name for name, generation in present.items() if self._generations.get(name) != generation]
        with ThreadPoolExecutor(READERS) as pool:
            read = [record for record in pool.map(self._read, changed) if record is not None]
        self._runs = {**self._runs, **{run.record.run: run for run in read if isinstance(run, Run)}}
        named = {found.name: found for found in read if isinstance(found, EndpointRecord)}
        self._endpoints = {**self._endpoints, **named}
        self._generations = present
        return {*map(_subject, changed), *(run for run in watched if self._has_events(run))}

    def runs(self) -> list[Run]:
        """Every run, newest first."""
        return sorted(self._runs.values(), key=lambda run: run.record.created, reverse=True)

    def endpoints(self) -> list[EndpointRecord]:
        """Every named endpoint, by name."""
        return sorted(self._endpoints.values(), key=lambda endpoint: endpoint.name)

    def find(self, run: str) -> Run | None:
        return self._runs.get(run)

    def before(self, run: Run) -> Run | None:
        """The newest run of the same name that is older."""
        older = (
            other
            for other in self.runs()
            if other.record.name == run.record.name and other.record.created < run.record.created
        )
        return next(older, None)

    def journal(self, run: str) -> Journal:
        """The events of a run, as of now."""
        with self._lock:
            journal = self._journals.pop(run, None) or Journal(self.store, run)
            self._journals[run] = journal  # the newest is last
            while len(self._journals) > JOURNALS:
                del self._journals[next(iter(self._journals))]
        journal.refresh(self._attempt(run))
        return journal

    def samples(self, run: str) -> list[dict[str, Any]]:
        """The held-out rows of a run with the answers before and after the training; empty without such rows."""
        return self._samples.of(run, self._generations.get(names.record_object(run)))

    def committed(self, runs: Iterable[str]) -> dict[str, Committed]:
        """The facts about the model of each of these runs that has a readable manifest."""
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(
                lambda run: (run, self._committed.of(run, self._generations.get(names.record_object(run)))), runs
            )
            return {run: committed for run, committed in found if committed is not None}

    def _read_samples(self, run: str) -> list[dict[str, Any]]:
        client, bucket = self.store.bucket.client, self.store.bucket.name
        try:
            manifest = read_manifest(client, bucket, run)
            return list(json.loads(read_artifact(client, bucket, manifest, "samples.json"))) if manifest else []
        except (NotFound, Malformed, ValueError):
            return []

    def _read_committed(self, run: str) -> Committed | None:
        try:
            manifest = read_manifest(self.store.bucket.client, self.store.bucket.name, run)
        except Malformed:
            return None
        if manifest is None:
            return None
        files, size = len(manifest.files), sum(file.size for file in manifest.files)
        return Committed(
            manifest.created, manifest.base, manifest.dataset, manifest.serve_path, manifest.metrics, files, size
        )

    def _list(self, prefix: str, glob: str) -> dict[str, int]:
        """The generation of each record, by the object's name."""
        blobs = self.store.bucket.client.list_blobs(
            self.store.bucket, prefix=prefix, match_glob=glob, fields="items(name,generation),nextPageToken"
        )
        return {blob.name: int(blob.generation) for blob in blobs}

    def _read(self, name: str) -> Run | EndpointRecord | None:
        subject = _subject(name)
        try:
            if name.startswith(names.ENDPOINTS_PREFIX):
                return self._named.record(subject)
            return Run(self.store.record(subject), self._spec(subject)) if names.is_run_id(subject) else None
        except NotFound:
            return None
        except Malformed as error:
            self.unreadable[subject] = str(error)
            return None

    def _spec(self, run: str) -> JobSpec | None:
        try:
            return self.store.spec(run)
        except (NotFound, Malformed):
            return None

    def _has_events(self, run: str) -> bool:
        journal = self._journals.get(run)
        return journal is not None and journal.refresh(self._attempt(run))

    def _attempt(self, run: str) -> int:
        """The number of the newest attempt of a run; 0 before the first."""
        return self._runs[run].record.attempt if run in self._runs else 0


def _subject(name: str) -> str:
    """The run or the endpoint in the name of a record."""
    return name.split("/")[1]
