"""The runs bucket: the record, ledger, spec and other objects of every run.

Every write carries a generation precondition: a function never overwrites the write of another function unnoticed
(https://cloud.google.com/storage/docs/request-preconditions).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import chain, pairwise
from random import Random, SystemRandom
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.clock import Clock
from dropforge.base.errors import Conflict, Malformed, NotFound, first_problem
from dropforge.base.redact import cut
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.spec import JobSpec

from .proof import key_of_run, new_key
from .record import Cause, Ledger, Record, ResourceState, Source
from .series import Kept, SeriesReader
from .summary import KEY, Summary, read_summary, text_of

T = TypeVar("T")
UPDATE_TRIES = 12
LISTERS = 16  # parallel listings
DAYS = 100  # keys of days that a process remembers
KNOWN = 500  # records that a process remembers, of a few KB each


class Versioned(NamedTuple):
    """The bytes of an object and their generation."""

    data: bytes
    generation: int


class Marks(NamedTuple):
    """The open marks: the time of the mark of each run, and the objects beside them that are no mark of a run."""

    runs: dict[str, datetime]
    strays: list[str]


class Listed(NamedTuple):
    """The record of a run in a listing. `summary` is None if the metadata has none that a reader may believe."""

    run: str
    generation: int
    summary: Summary | None


class Known(NamedTuple):
    """A record at its last read or write, and the generation of its object."""

    record: Record
    generation: int


class RunStore:
    """The runs bucket. It remembers recent records, and writes a change without reading again.

    This is safe: every write names the generation that it replaces. After a failed write, the store reads the object.
    """

    def __init__(self, client: Any, bucket: str, clock: Clock | None = None, chance: Random | None = None) -> None:
        self.bucket = client.bucket(bucket)
        self._clock = clock or Clock()
        self._chance = chance or SystemRandom()
        self._spec = lru_cache(KNOWN)(self._read_spec)
        self._day_key = lru_cache(DAYS)(lambda day: self.read(names.day_key_object(day)).data.decode("ascii"))
        self._keyed = ""  # the last day whose key is known to exist
        self._known: OrderedDict[str, Known] = (
            OrderedDict()
        )  # the newest is last; the methods of OrderedDict are atomic

    def create(self, record: Record) -> bool:
        """Write the record of a new run; False if the run has a record.

        A run that has not ended gets its key and its open mark first.
        """
        if not record.state.is_terminal:
            record = self.with_key(record)
            self.mark_open(record)
        return self._put(record, 0)

    def with_key(self, record: Record) -> Record:
        """The record of a new run with the day of its key (run/proof.py). The key of the day exists on return."""
        return evolve(record, key_day=self._keyed_day(record.created))

    def record(self, run: str) -> Record:
        """The present record of a run. Raises NotFound, and Malformed for an object that is not this run's record."""
        return self._load(run).record

    def record_and_generation(self, run: str) -> tuple[Record, int]:
        """The present record of a run, and the generation of its object. Raises NotFound and Malformed."""
        return self._load(run)

    def find(self, run: str) -> Record | None:
        """The present record of a run; None if it has no record."""
        try:
            return self.record(run)
        except NotFound:
            return None

    def recall(self, run: str) -> Record | None:
        """The record as this process has last read or written it, or the present one; None if the run has none.

        For questions that an old record can answer, such as whether a message belongs to this run at all.
        """
        return self.known(run) or self.find(run)

    def known(self, run: str) -> Record | None:
        """The record as this process has last read or written it; None if it has not. It may be old: whoever acts on
        it ends with a conditional write, which then reads the present record.
        """
        known = self._known.get(run)
        return None if known is None else known.record

    def update(self, run: str, change: Callable[[Record], Record]) -> Record:
        """Apply `change` to the record, again after each conflict; `change` must have no side effects.

        Raises NotFound, Conflict after many lost races, and the exceptions of `change`.
        """
        if (changed := self._change_known(run, change)) is not None:
            return changed
        for attempt in range(UPDATE_TRIES):
            before, generation = self._load(run)
            after = change(before)
            if after is before or self._put(after, generation):
                return after
            # Another writer won the race: let it finish.
            self._clock.sleep(self._chance.uniform(0, 0.01 * 2**attempt))
        where = f"gs://{self.bucket.name}/{names.record_object(run)}"
        raise Conflict(f"{where} kept changing through {UPDATE_TRIES} tries")

    def spec(self, run: str) -> JobSpec:
        """The accepted spec of a run, which never changes. Raises NotFound and Malformed."""
        return self._spec(run)

    def spec_beside(self, run: str) -> JobSpec:
        """The spec in an object of its own, if it is large. Raises NotFound and Malformed."""
        name = names.spec_object(run)
        return _parsed(self.read(name).data, f"gs://{self.bucket.name}/{name}")

    def key(self, run: str) -> str:
        """The run's key (run/proof.py), which never changes.

        Raises NotFound for a run that was never accepted, and if somebody has deleted the key of the run's day.
        """
        record = self.recall(run)
        if record is None or not record.key_day:
            raise NotFound(f"run {run!r} has no key: it was never accepted")
        return key_of_run(self._day_key(record.key_day), run)

    def series(self, run: str, attempt: int, key: str = "") -> Kept | None:
        """The series of an attempt; None if there is none, or none with the proof of `key`."""
        return self.series_reader(run, attempt, key).read()

    def series_reader(self, run: str, attempt: int, key: str = "") -> SeriesReader:
        """A reader for a caller that reads the series of an attempt again and again."""
        return SeriesReader(self.bucket.client, self.bucket.name, run, attempt, key)

    def ledger(self, run: str) -> Ledger:
        """The present ledger of a run; empty if it has no record. Raises Malformed."""
        record = self.find(run)
        return Ledger(run=run) if record is None else record.ledger

    def intend_all(
        self, record: Record, resources: Iterable[tuple[str, str]], attempt: int, is_wanted: Callable[[Record], bool]
    ) -> bool:
        """Enter the intent to create resources, by kind and name; False if the caller must not create them any more.

        Record and intents are one write: no teardown comes between. `record` is as the caller has just read or written
        it; if it has the intents already, this method asks nothing.
        """
        wanted = list(resources)

        def change(latest: Record) -> Record:
            if not is_wanted(latest):
                return latest
            return latest.with_ledger(lambda ledger: ledger.with_intents(wanted, attempt, self._clock.now()))

        return is_wanted(record) if change(record) is record else is_wanted(self.update(record.run, change))

    def keep(self, run: str, resources: Iterable[str]) -> None:
        """Note that training resources, given by name, serve from now on. The note is durable on return."""
        kept = list(resources)
        self._change_ledger(run, lambda ledger: ledger.with_kept(kept))

    def note(self, run: str, resources: Iterable[str], state: ResourceState) -> None:
        """Note that resources, given by name, were seen to exist (CREATED), or seen not to exist (GONE)."""
        noted = list(resources)
        self._change_ledger(run, lambda ledger: ledger.with_state(noted, state, self._clock.now()))

    def _change_ledger(self, run: str, change: Callable[[Ledger], Ledger]) -> None:
        self.update(run, lambda record: record.with_ledger(change))

    def put_new(self, name: str, data: bytes, content_type: str = "application/json") -> bool:
        """Write an object that must not exist; False if it exists."""
        return self.write(name, data, 0, content_type)

    def write(self, name: str, data: bytes, generation: int, content_type: str = "application/json") -> bool:
        """Write an object if its generation is `generation` (0: it does not exist); False otherwise."""
        return self._write(name, data, generation, content_type) is not None

    def try_write(self, name: str, data: bytes, generation: int) -> bool:
        """`write` for an object that many runs share; False also if the bucket takes no write of it now.

        Cloud Storage takes one write of an object a second. Its library would repeat the write for two minutes, while
        the other runs change the object, and the call would keep its function busy for all of that time.
        """
        from google.api_core.exceptions import TooManyRequests

        try:
            return self._write(name, data, generation, retry=None) is not None
        except TooManyRequests:
            return False

    def replace(self, name: str, data: bytes) -> None:
        """Write an object over the present one. Another writer may win: use this where both versions are good."""
        try:
            generation = self.read(name).generation
        except NotFound:
            generation = 0
        self.write(name, data, generation)

    def read(self, name: str) -> Versioned:
        """An object with its generation. Raises NotFound."""
        from google.api_core.exceptions import NotFound as Missing

        blob = self.bucket.blob(name)
        try:
            data = blob.download_as_bytes(timeout=TIMEOUT_SECONDS)
        except Missing:
            raise NotFound(f"gs://{self.bucket.name}/{name} does not exist") from None
        return Versioned(data, int(blob.generation))

    def names(self, prefix: str, start_offset: str | None = None) -> Iterator[str]:
        """Object names under a prefix, in order."""
        blobs = self.bucket.client.list_blobs(
            self.bucket, prefix=prefix, start_offset=start_offset, fields="items(name),nextPageToken"
        )
        return (blob.name for blob in blobs)

    def written(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """Object names under a prefix, in order, each with the time at which the bucket received the object."""
        fields = "items(name,timeCreated),nextPageToken"
        blobs = self.bucket.client.list_blobs(self.bucket, prefix=prefix, fields=fields)
        return ((blob.name, blob.time_created) for blob in blobs)

    def runs(self) -> Iterator[str]:
        """Every run's id."""
        blobs = self.bucket.client.list_blobs(self.bucket, prefix="runs/", delimiter="/")
        for page in blobs.pages:
            yield from filter(names.is_run_id, sorted(prefix.split("/")[1] for prefix in page.prefixes))

    def generations(self, cuts: Sequence[str] = ()) -> dict[str, int]:
        """The generation of every run's record.

        `cuts`, run ids in order, divide the listing into parts, which are listed at once. Any cuts give the same
        result: a caller that knows the runs of a moment ago takes one of each 1,000, as a page has 1,000 objects.
        """
        return {run: int(item["generation"]) for run, item in self._records("name,generation", cuts)}

    def listed(self) -> Iterator[Listed]:
        """Every run's record with its summary, from a listing of 1,000 records a page."""
        for run, item in self._records("name,generation,metageneration,metadata"):
            text = item.get("metadata", {}).get(KEY, "")
            # The control plane never changes the metadata of an object.
            is_as_written = int(item["metageneration"]) == 1
            summary = read_summary(run, text) if text and is_as_written else None
            yield Listed(run, int(item["generation"]), summary)

    def _records(self, fields: str, cuts: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each run with these fields of its record's object, as the API's JSON has them."""
        parts = list(pairwise([None, *map(names.record_object, cuts), None]))
        pages: Iterator[list[dict[str, Any]]]
        with ThreadPoolExecutor(LISTERS) as pool:
            if cuts:
                pages = chain.from_iterable(pool.map(lambda part: list(self._pages(fields, *part)), parts))
            else:
                pages = _ahead(pool, self._pages(fields, None, None))
            for item in chain.from_iterable(pages):
                run = names.run_of_object(item["name"])
                if names.is_run_id(run) and item["name"] == names.record_object(run):
                    yield run, item

    def _pages(self, fields: str, first: str | None, end: str | None) -> Iterator[list[dict[str, Any]]]:
        """The pages of a listing of records, as JSON: a Blob of each object would take a third of the time."""
        blobs = self.bucket.client.list_blobs(
            self.bucket,
            prefix="runs/",
            match_glob=names.record_object("*"),
            start_offset=first,
            end_offset=end,
            fields=f"items({fields}),nextPageToken",
        )
        return (page.raw_page.get("items", []) for page in blobs.pages)

    def exists(self, run: str) -> bool:
        """Whether a run has a record."""
        return bool(self.bucket.blob(names.record_object(run)).exists(timeout=TIMEOUT_SECONDS))

    def has_spec_beside(self, run: str) -> bool:
        """Whether a run has a spec in an object of its own."""
        return bool(self.bucket.blob(names.spec_object(run)).exists(timeout=TIMEOUT_SECONDS))

    def has_cancel(self, run: str, topic: str = "") -> bool:
        """Whether an operator, or a publisher of the run's topic, requested its end before the run had a record."""
        return bool(self._cancels(run, topic))

    def keep_cancel(self, run: str, topic: str, cause: Cause) -> None:
        """Keep the request to end a run that has no record, or not yet."""
        kept = {"cancel_requested": self._clock.now().isoformat(), **cause._asdict()}
        self.put_new(names.cancel_object(run, topic), json.dumps(kept).encode())

    def early_cause(self, run: str, topic: str) -> Cause:
        """Who or what requested the end of a run before the run had a record; nothing without such a request."""
        for name in self._cancels(run, topic):
            kept = json.loads(self.read(name).data)
            return Cause(str(kept.get("text", "")), str(kept.get("person", "")))
        return Cause()

    def _cancels(self, run: str, topic: str) -> list[str]:
        wanted = {names.cancel_object(run), names.cancel_object(run, topic)}
        return [name for name in self.names(f"runs/{run}/cancel") if name in wanted]

    def marks(self) -> Marks:
        """Every open mark, from one listing."""
        marks = Marks({}, [])
        for name, time in self.written(names.OPEN_PREFIX):
            run = name.removeprefix(names.OPEN_PREFIX)
            if names.is_run_id(run):
                marks.runs[run] = time
            else:
                marks.strays.append(name)
        return marks

    def mark_open(self, record: Record) -> None:
        """Write the open mark of a run: the sweep checks the run until the mark is removed."""
        source = Source(text=record.source, topic=record.topic, submitter=record.submitter)
        self.put_new(names.open_object(record.run), source.model_dump_json().encode())

    def close(self, run: str) -> None:
        """Remove the open mark of a run."""
        from google.api_core.exceptions import NotFound as Missing

        with suppress(Missing):
            self.bucket.blob(names.open_object(run)).delete(timeout=TIMEOUT_SECONDS)

    def _change_known(self, run: str, change: Callable[[Record], Record]) -> Record | None:
        """Change the remembered record and write it; None if nothing is remembered, or the object differs by now.

        Meanwhile, other calls of this process still have the record before the change.
        """
        known = self._known.get(run)
        if known is None:
            return None
        try:
            after = change(known.record)
        except Exception:  # noqa: BLE001  # the present object decides: the caller reads it, and `change` may raise again
            return None
        if after is known.record:
            return None  # the remembered record needs no change, but the present one may
        if self._put(after, known.generation):
            return after
        self._known.pop(run, None)
        return None

    def _load(self, run: str) -> Known:
        """Read a record and remember it. The id of a repeated request leads to the run that the request has joined.

        Raises NotFound and Malformed.
        """
        name = names.record_object(run)
        try:
            data, generation = self.read(name)
        except NotFound:
            if not (joined := self._joined(run)):
                raise
            return self._load(joined)
        where = f"gs://{self.bucket.name}/{name}"
        try:
            record = Record.model_validate_json(data)
        except ValidationError as error:
            raise Malformed(f"{where} is not a record that this version reads: {first_problem(error)}") from None
        if run != record.run:
            raise Malformed(f"{where} is the record of {cut(record.run, 80)!r}; expected the run in its name")
        return self._remember(Known(record, generation))

    def _joined(self, run: str) -> str:
        """The run that a repeated request has joined (run/intents.py); "" for another id."""
        try:
            joined = str(json.loads(self.read(names.joined_object(run)).data)["run"])
        except NotFound:
            return ""
        return joined if names.is_run_id(joined) and joined != run else ""

    def _put(self, record: Record, generation: int) -> bool:
        """Write a record if its object's generation is `generation`, and remember it; False otherwise."""
        name, data = names.record_object(record.run), record.model_dump_json().encode()
        written = self._write(name, data, generation, "application/json", text_of(record))
        if written is None:
            return False
        self._remember(Known(record, written))
        return True

    def _remember(self, known: Known) -> Known:
        """Remember what was read or written, as the newest; an answer that was slow replaces no newer record.

        Google does not promise that generations grow. If they do not, the next write fails, and its call reads again.
        """
        run = known.record.run
        before = self._known.pop(run, known)
        self._known[run] = max(before, known, key=lambda each: each.generation)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return known

    def _write(
        self,
        name: str,
        data: bytes,
        generation: int,
        content_type: str = "application/json",
        summary: str = "",
        **options: Any,
    ) -> int | None:
        """Write an object; return its new generation, or None if the generation before was not `generation`.

        `options` are further arguments of Blob.upload_from_string.
        """
        from google.api_core.exceptions import PreconditionFailed

        blob = self.bucket.blob(name)
        if summary:
            blob.metadata = {KEY: summary}
        try:
            blob.upload_from_string(
                data, content_type=content_type, if_generation_match=generation, timeout=TIMEOUT_SECONDS, **options
            )
        except PreconditionFailed:
            return None
        return int(blob.generation)

    def _keyed_day(self, time: datetime) -> str:
        """The day of a time. Its key exists on return: the first call of a day writes the key."""
        day = f"{time:%Y-%m-%d}"
        if day != self._keyed:
            self.put_new(names.day_key_object(day), new_key(self._chance).encode(), "text/plain")
            self._keyed = day
        return day

    def _read_spec(self, run: str) -> JobSpec:
        record = self.recall(run)
        if record is None or record.spec is None:
            return self.spec_beside(run)
        return _parsed(json.dumps(record.spec).encode(), f"/spec of gs://{self.bucket.name}/{names.record_object(run)}")


def _parsed(data: bytes, where: str) -> JobSpec:
    """An accepted spec. Raises Malformed for a spec that another version accepted, and this version refuses."""
    try:
        return JobSpec.model_validate_json(data)
    except ValidationError as error:
        raise Malformed(f"{where} is not a job spec that this version reads: {first_problem(error)}") from None


def _ahead(pool: ThreadPoolExecutor, pages: Iterator[T]) -> Iterator[T]:
    """The pages, while the service makes the next page already."""
    following = pool.submit(next, pages, None)
    while (page := following.result()) is not None:
        following = pool.submit(next, pages, None)
        yield page
