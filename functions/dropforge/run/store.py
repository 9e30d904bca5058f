"""The runs bucket: every run's record, ledger and spec, and what else is kept of it.

Every write carries a generation precondition, so that two functions can never overwrite each other unseen
(https://cloud.google.com/storage/docs/request-preconditions).
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from dropforge.base import names
from dropforge.base.errors import Conflict, NotFound
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.spec import JobSpec

from .record import Ledger, LedgerEntry, Record, ResourceState, utc_now

M = TypeVar("M", bound=BaseModel)
UPDATE_TRIES = 12
KNOWN = 500  # objects that a process remembers: records and ledgers of a few KB each


class Versioned(NamedTuple):
    """An object's bytes and the generation they were read at."""

    data: bytes
    generation: int


class Known(NamedTuple):
    """What an object said when it was last read or written, and its generation then."""

    content: Any
    generation: int


class RunStore:
    """The runs bucket. It remembers the objects it has seen last: a change of one is written without reading it again.

    That is safe, as every write says which generation it replaces; one that turns out to be old is read then.
    """

    def __init__(self, client: Any, bucket: str) -> None:
        self.bucket = client.bucket(bucket)
        self._spec = lru_cache(KNOWN)(self._read_spec)
        self._known: OrderedDict[str, Known] = OrderedDict()  # the newest last; its methods are atomic

    def create(self, record: Record) -> bool:
        """Write a new run's record; False when the run exists already. One that is not over is marked first."""
        if not record.state.is_terminal:
            self.mark_open(record)
        return self._put(names.record_object(record.run), record, 0)

    def record(self, run: str) -> Record:
        """As it is now. Raises NotFound."""
        return self._load(names.record_object(run), Record).content  # type: ignore[no-any-return]

    def find(self, run: str) -> Record | None:
        try:
            return self.record(run)
        except NotFound:
            return None

    def update(self, run: str, change: Callable[[Record], Record]) -> Record:
        """Apply `change` to the record, again on each conflict; `change` must be free of effects.

        Raises NotFound, Conflict after many lost races, and whatever `change` raises.
        """
        return self._change(names.record_object(run), Record, change)

    def spec(self, run: str) -> JobSpec:
        """The accepted spec of a run, which never changes. Raises NotFound."""
        return self._spec(run)

    def ledger(self, run: str) -> Ledger:
        """As it is now; empty for a run that has none."""
        try:
            return self._load(names.ledger_object(run), Ledger).content  # type: ignore[no-any-return]
        except NotFound:
            return Ledger(run=run)

    def intend(self, run: str, kind: str, name: str, attempt: int) -> bool:
        """Note that a resource is about to be created; False: that was noted. Returns only once it is durable."""
        entry = LedgerEntry(kind=kind, name=name, attempt=attempt, state=ResourceState.INTENDED, intended=utc_now())

        def change(ledger: Ledger) -> Ledger:
            found = ledger.find(name)
            return ledger if found and found.state is not ResourceState.GONE else ledger.with_entry(entry)

        return self._change_ledger(run, change).find(name) is entry

    def intend_all(
        self, run: str, resources: Iterable[tuple[str, str]], attempt: int, is_wanted: Callable[[Record], bool]
    ) -> bool:
        """Note kinds and names of resources that are about to be created; False: they must not be, any more.

        The record is read after the ledger was written, and teardown reads the ledger after it has written the record:
        one of both sees the other. What was noted in vain stays so: others may have made it meanwhile, by this note. It
        is looked at by the teardown that is to come or, of a run that is over, by the sweep.
        """
        news = [name for kind, name in resources if self.intend(run, kind, name, attempt)]
        record = self.record(run)
        if is_wanted(record):
            return True
        if news:
            self.mark_open(record)
        return False

    def keep(self, run: str, name: str) -> None:
        """Note that a resource which has trained serves from now on. Returns only once that is durable."""

        def change(ledger: Ledger) -> Ledger:
            found = ledger.find(name)
            return ledger if found is None or found.kept else ledger.with_entry(found.model_copy(update={"kept": True}))

        self._change_ledger(run, change)

    def note(self, run: str, name: str, state: ResourceState) -> None:
        """Note that a resource was seen to exist, or seen to be gone."""

        def change(ledger: Ledger) -> Ledger:
            found = ledger.find(name)
            if found is None or found.state in (state, ResourceState.GONE):
                return ledger
            field = "created" if state is ResourceState.CREATED else "gone"
            return ledger.with_entry(found.model_copy(update={"state": state, field: utc_now()}))

        self._change_ledger(run, change)

    def put_new(self, name: str, data: bytes, content_type: str = "application/json") -> bool:
        """Write an object that must not exist; False when it does."""
        return self.write(name, data, 0, content_type)

    def write(self, name: str, data: bytes, generation: int, content_type: str = "application/json") -> bool:
        """Write an object if its generation is still `generation` (0: it does not exist); False otherwise."""
        return self._write(name, data, generation, content_type) is not None

    def read(self, name: str) -> Versioned:
        """Raises NotFound."""
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
        """Object names under a prefix, in order, each with the time at which the bucket took it."""
        fields = "items(name,timeCreated),nextPageToken"
        blobs = self.bucket.client.list_blobs(self.bucket, prefix=prefix, fields=fields)
        return ((blob.name, blob.time_created) for blob in blobs)

    def runs(self) -> Iterator[str]:
        """Every run's id."""
        blobs = self.bucket.client.list_blobs(self.bucket, prefix="runs/", delimiter="/")
        for page in blobs.pages:
            yield from filter(names.is_run_id, sorted(prefix.split("/")[1] for prefix in page.prefixes))

    def exists(self, run: str) -> bool:
        """Whether a run has a record."""
        return bool(self.bucket.blob(names.record_object(run)).exists(timeout=TIMEOUT_SECONDS))

    def has_spec(self, run: str) -> bool:
        """Whether a run's spec was accepted."""
        return bool(self.bucket.blob(names.spec_object(run)).exists(timeout=TIMEOUT_SECONDS))

    def open_runs(self) -> Iterator[tuple[str, datetime]]:
        """The ids of the runs that are not over, or have left something, each with the time since when."""
        fields = "items(name,timeCreated),nextPageToken"
        for blob in self.bucket.client.list_blobs(self.bucket, prefix=names.OPEN_PREFIX, fields=fields):
            yield blob.name.removeprefix(names.OPEN_PREFIX), blob.time_created

    def mark_open(self, record: Record) -> None:
        """Mark a run as one that the sweep looks at."""
        self.put_new(names.open_object(record.run), record.source.encode(), "text/plain")

    def close(self, run: str) -> None:
        """Take the mark from a run that is over and has left nothing."""
        from google.api_core.exceptions import NotFound as Missing

        with suppress(Missing):
            self.bucket.blob(names.open_object(run)).delete(timeout=TIMEOUT_SECONDS)

    def _change_ledger(self, run: str, change: Callable[[Ledger], Ledger]) -> Ledger:
        name = names.ledger_object(run)
        return self._change(name, Ledger, change, new=Ledger(run=run))

    def _change(self, name: str, model: type[M], change: Callable[[M], M], new: M | None = None) -> M:
        changed: M | None = self._change_known(name, change)
        if changed is not None:
            return changed
        for attempt in range(UPDATE_TRIES):
            try:
                before, generation = self._load(name, model)
            except NotFound:
                if new is None:
                    raise
                before, generation = new, 0
            after = change(before)
            if after is before or self._put(name, after, generation):
                return after
            time.sleep(random.uniform(0, 0.01 * 2**attempt))  # lost the race: whoever won, let them finish
        raise Conflict(f"gs://{self.bucket.name}/{name} kept changing through {UPDATE_TRIES} tries")

    def _change_known(self, name: str, change: Callable[[M], M]) -> M | None:
        """What is written of an object as it was last seen; None when it was not, or says something else by now."""
        known = self._known.pop(name, None)
        if known is None:
            return None
        try:
            after = change(known.content)
        except Exception:  # noqa: BLE001  # what the object says now decides: it is read, and raises again if it must
            return None
        if after is known.content:
            return None  # likewise: nothing to be done may be old, too
        return after if self._put(name, after, known.generation) else None

    def _load(self, name: str, model: type[BaseModel]) -> Known:
        """Read an object and remember it. Raises NotFound."""
        data, generation = self.read(name)
        return self._remember(name, Known(model.model_validate_json(data), generation))

    def _put(self, name: str, content: BaseModel, generation: int) -> bool:
        """Write an object if its generation is still `generation`, and remember it; False otherwise."""
        written = self._write(name, content.model_dump_json().encode(), generation)
        if written is None:
            return False
        self._remember(name, Known(content, written))
        return True

    def _remember(self, name: str, known: Known) -> Known:
        self._known[name] = known
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return known

    def _write(self, name: str, data: bytes, generation: int, content_type: str = "application/json") -> int | None:
        """The generation that was written; None when the one there was not `generation`."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self.bucket.blob(name)
        try:
            blob.upload_from_string(
                data, content_type=content_type, if_generation_match=generation, timeout=TIMEOUT_SECONDS
            )
        except PreconditionFailed:
            return None
        return int(blob.generation)

    def _read_spec(self, run: str) -> JobSpec:
        return JobSpec.model_validate_json(self.read(names.spec_object(run)).data)


def open_store() -> RunStore:
    """The runs bucket of this deployment; one store for as long as its client lives."""
    from dropforge.base.settings import settings
    from dropforge.cloud.clients import storage

    return _store(storage(), settings().runs_bucket)


@lru_cache(maxsize=4)
def _store(client: Any, bucket: str) -> RunStore:
    return RunStore(client, bucket)
