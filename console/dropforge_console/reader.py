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
from dropforge.run.events import Started, read_job_events
from dropforge.run.index import READERS, read_summary, uncollected
from dropforge.run.record import Record
from dropforge.run.series import Kept, Progress, SeriesReader
from dropforge.run.spans import Span, spans_of, steps_of
from dropforge.run.store import RunStore
from dropforge.run.summary import Summary
from dropforge.spec import JobSpec

T = TypeVar("T")

PAGE = 1000  # records that one request lists
KEPT = 200  # runs whose record, whose samples, or whose manifest in short are kept
JOURNALS = 20  # runs whose events are kept; those of a long run take some 20 MB


class Run(NamedTuple):
    """A run as its page shows it. `spec` is None for a rejected run, and for a spec that this version cannot read."""

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

    Each event is read once: the names grow with attempt and sequence. A series is read again when its object has
    changed.
    """

    def __init__(self, store: RunStore, run: str) -> None:
        self.starts: list[Started] = []
        self._store = store
        self._run = run
        self._readers: dict[int, SeriesReader] = {}
        self._kept: dict[int, Kept] = {}
        self._points: dict[int, list[Progress]] = {}
        self._finished: set[int] = set()  # the attempts whose series no longer changes
        self._last = names.events_prefix(run)
        self._lock = threading.Lock()

    @property
    def progress(self) -> list[Progress]:
        # A copy of the values, in one operation: another thread may add an attempt meanwhile.
        return [*chain.from_iterable(list(self._points.values()))]

    @property
    def series(self) -> dict[int, Kept]:
        """The series by attempt."""
        return dict(self._kept)

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
            events = pool.map(lambda name: read_job_events(self._store.read(name).data, self._run), new)
            self.starts += [event for event in chain.from_iterable(events) if isinstance(event, Started)]
        self._last = new[-1]
        return True

    def _read_series(self, attempt: int) -> bool:
        """Read the series of an attempt, if it has changed. While the object is no series, the one before counts."""
        reader = self._readers.setdefault(attempt, self._store.series_reader(self._run, attempt))
        kept = reader.read()
        known = self._kept.get(attempt)
        if kept is None or (known is not None and kept.generation == known.generation):
            return False
        with uncollected():
            self._kept[attempt], self._points[attempt] = kept, kept.series.points()
        return True


class Reader:
    """Reads what changed since the last look. `refresh` has one caller at a time; the other methods have any number."""

    def __init__(self, store: RunStore, endpoints: EndpointStore) -> None:
        self.store = store
        self.unreadable: dict[str, str] = {}  # the runs and endpoints that this version cannot read, and why
        self._named = endpoints
        self._generations: dict[str, int] = {}  # of the records, at the last look
        self._endpoint_generations: dict[str, int] = {}
        self._summaries: dict[str, Summary] = {}
        self._newest: list[Summary] = []
        self._records = Cache(self._read_run)
        self._endpoints: dict[str, EndpointRecord] = {}
        self._journals: dict[str, Journal] = {}
        self._samples = Cache(self._read_samples)
        self._committed = Cache(self._read_committed)
        self._lock = threading.Lock()

    def refresh(self, watched: Collection[str] = ()) -> set[str]:
        """Read what changed: summaries, endpoints, and the events of the watched runs; return the names of both."""
        changed = {*self._refresh_runs(), *self._refresh_endpoints()}
        return {*changed, *(run for run in watched if self._has_events(run))}

    def _refresh_runs(self) -> set[str]:
        """The first look lists the summaries. The next looks list the generations, and read the changed records."""
        known: dict[str, Summary] = {}
        if self._generations:
            present = self.store.generations(sorted(self._generations)[PAGE::PAGE])
        else:
            present = self._list_summaries(known)
        changed = {run for run, generation in present.items() if self._generations.get(run) != generation}
        with ThreadPoolExecutor(READERS) as pool:
            read = [summary for summary in pool.map(self._read_summary, changed - known.keys()) if summary]
        if changed:
            self._summaries = self._summaries | known | {summary.run: summary for summary in read}
            self._newest = sorted(self._summaries.values(), key=lambda run: run.created, reverse=True)
        self._generations = present
        return changed

    def _list_summaries(self, known: dict[str, Summary]) -> dict[str, int]:
        """Add the summaries that can be believed to `known`; return the generation of every record."""
        present = {}
        with uncollected():
            for listed in self.store.listed():
                present[listed.run] = listed.generation
                if summary := listed.summary:
                    known[listed.run] = summary
        return present

    def _refresh_endpoints(self) -> set[str]:
        blobs = self.store.bucket.client.list_blobs(
            self.store.bucket,
            prefix=names.ENDPOINTS_PREFIX,
            match_glob=names.endpoint_object("*"),
            fields="items(name,generation),nextPageToken",
        )
        present = {name: int(blob.generation) for blob in blobs if (name := names.endpoint_of_object(blob.name))}
        known = self._endpoint_generations
        changed = {name for name, generation in present.items() if known.get(name) != generation}
        with ThreadPoolExecutor(READERS) as pool:
            read = pool.map(self._read_endpoint, changed)
            self._endpoints = self._endpoints | {record.name: record for record in read if record}
        self._endpoint_generations = present
        return changed

    def runs(self) -> list[Summary]:
        """The summary of every run, newest first."""
        return self._newest

    def endpoints(self) -> list[EndpointRecord]:
        """Every named endpoint, by name."""
        return sorted(self._endpoints.values(), key=lambda endpoint: endpoint.name)

    def knows(self, run: str) -> bool:
        """Whether the last look has seen the run. This method reads nothing."""
        return run in self._summaries

    def find(self, run: str) -> Run | None:
        """A run that the last look has seen, read now unless this process has its record."""
        return self._records.of(run, self._generations.get(run)) if self.knows(run) else None

    def found(self, runs: Iterable[str]) -> list[Run]:
        """Those of the runs that can be read."""
        with ThreadPoolExecutor(READERS) as pool:
            return [run for run in pool.map(self.find, runs) if run is not None]

    def before(self, run: Run) -> Run | None:
        """The newest run of the same name that is older."""
        record = run.record
        older = (each.run for each in self.runs() if each.name == record.name and each.created < record.created)
        return next(filter(None, map(self.find, older)), None)

    def journal(self, run: str) -> Journal:
        """The events of a run, as of now."""
        with self._lock:
            journal = self._journals.pop(run, None) or Journal(self.store, run)
            self._journals[run] = journal  # the newest is last
            while len(self._journals) > JOURNALS:
                del self._journals[next(iter(self._journals))]
        journal.refresh(self._attempt(run))
        return journal

    def spans(self, record: Record) -> list[Span]:
        """The spans of a run's trace so far."""
        return spans_of(record, steps_of(self.journal(record.run).series))

    def samples(self, run: str) -> list[dict[str, Any]]:
        """The held-out rows of a run with the answers before and after the training; empty without such rows."""
        return self._samples.of(run, self._generations.get(run))

    def committed(self, runs: Iterable[str]) -> dict[str, Committed]:
        """The facts about the model of each of these runs that has a readable manifest."""
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(lambda run: (run, self._committed.of(run, self._generations.get(run))), runs)
            return {run: committed for run, committed in found if committed is not None}

    def _read_samples(self, run: str) -> list[dict[str, Any]]:
        """The rows of samples.json. A container has written it: what is no row is left out."""
        client, bucket = self.store.bucket.client, self.store.bucket.name
        try:
            manifest = read_manifest(client, bucket, run)
            found = json.loads(read_artifact(client, bucket, manifest, "samples.json")) if manifest else []
        except (NotFound, Malformed, ValueError, RecursionError):
            return []
        return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []

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

    def _read_summary(self, run: str) -> Summary | None:
        return self._noting(run, lambda: read_summary(self.store, run))

    def _read_run(self, run: str) -> Run | None:
        try:
            return Run(self.store.record(run), self._spec(run))
        except (NotFound, Malformed):  # `unreadable` has it since the last look, or will have it after the next
            return None

    def _read_endpoint(self, endpoint: str) -> EndpointRecord | None:
        return self._noting(endpoint, lambda: self._named.record(endpoint))

    def _noting(self, subject: str, read: Callable[[], T]) -> T | None:
        """The result of a read; None for a missing object, and for a malformed object, which `unreadable` then has."""
        try:
            return read()
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
        return self._summaries[run].attempt if run in self._summaries else 0
