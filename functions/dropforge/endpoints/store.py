"""The records of named endpoints in the runs bucket. Every write carries a generation precondition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.clock import Clock
from dropforge.base.errors import Conflict, Malformed, NotFound, first_problem
from dropforge.run.store import UPDATE_TRIES, RunStore, Versioned

from .record import EndpointRecord

PAUSE_SECONDS = 0.05  # after a lost race; it grows with each try


class EndpointStore:
    """The records of named endpoints. It keeps nothing in memory: they are read and written seldom."""

    def __init__(self, bucket: RunStore, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock

    def names(self) -> Iterator[str]:
        """The name of every endpoint that has a record, also of retired ones."""
        found = map(names.endpoint_of_object, self._bucket.names(names.ENDPOINTS_PREFIX))
        return (endpoint for endpoint in found if endpoint)

    def record(self, endpoint: str) -> EndpointRecord:
        """The present record of an endpoint. Raises NotFound, and Malformed for an object that is not its record."""
        return self._read(endpoint)[0]

    def find(self, endpoint: str) -> EndpointRecord | None:
        """The present record of an endpoint; None if there is none."""
        try:
            return self.record(endpoint)
        except NotFound:
            return None

    def create(self, record: EndpointRecord) -> None:
        """Write the record of a new endpoint, unless the endpoint has a record."""
        self._bucket.put_new(names.endpoint_object(record.name), record.model_dump_json().encode())

    def update(self, endpoint: str, change: Callable[[EndpointRecord], EndpointRecord]) -> EndpointRecord:
        """Apply `change` to the record, again after each conflict; `change` must have no side effects.

        Raises NotFound, Conflict after many lost races, and the exceptions of `change`.
        """
        name = names.endpoint_object(endpoint)
        for attempt in range(UPDATE_TRIES):
            before, found = self._read(endpoint)
            after = change(before)
            if after is before or self._bucket.write(name, after.model_dump_json().encode(), found.generation):
                return after
            self._clock.sleep(PAUSE_SECONDS * (attempt + 1))
        raise Conflict(f"the record of endpoint {endpoint} kept changing through {UPDATE_TRIES} tries")

    def _read(self, endpoint: str) -> tuple[EndpointRecord, Versioned]:
        name = names.endpoint_object(endpoint)
        found = self._bucket.read(name)
        try:
            record = EndpointRecord.model_validate_json(found.data)
        except ValidationError as error:
            problem = first_problem(error)
            raise Malformed(f"{name} is not the record of an endpoint that this version reads: {problem}") from None
        if record.name != endpoint:
            raise Malformed(f"{name} is the record of endpoint {record.name!r}; expected the endpoint in its name")
        return record, found
