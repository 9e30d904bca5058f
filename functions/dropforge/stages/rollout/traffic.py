"""The requests to named endpoints, as the platform counts them: how many, how many failed, and how long they took."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

from dropforge.base.errors import DropforgeError
from dropforge.base.redact import cut, redact
from dropforge.cloud.classify import client_errors
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord, EndpointState
from dropforge.platforms.named import Counted

INTERVAL = timedelta(hours=1)
EVERY = timedelta(minutes=1)  # as often as the metrics are written
READERS = 8


class Traffic(NamedTuple):
    """The requests of the last hour by endpoint and by the cloud's name of the revision; the endpoints that cannot be
    counted, and why."""

    counted: dict[str, dict[str, Counted]]
    problems: dict[str, str]

    def of(self, record: EndpointRecord, revision: str) -> Counted | None:
        """The requests to a revision; None if nobody knows."""
        counted = self.counted.get(record.name)
        return None if counted is None else counted.get(revision, Counted())


def traffic(context: Context, records: Iterable[EndpointRecord]) -> Traffic:
    """Ask each platform for the requests of the endpoints that serve."""
    found = Traffic({}, {})
    serving = [record for record in records if record.state is EndpointState.SERVING]
    with ThreadPoolExecutor(READERS) as pool:
        for record, answer in zip(serving, pool.map(lambda each: _counted(context, each), serving), strict=True):
            if isinstance(answer, str):
                found.problems[record.name] = answer
            else:
                found.counted[record.name] = answer
    return found


def _counted(context: Context, record: EndpointRecord) -> dict[str, Counted] | str:
    """The requests by revision, or why they are unknown."""
    import requests

    server = context.platforms.named(record.type)
    if server.why_whole(record.service):
        return f"{record.type} counts none; vLLM does (docs/observability.md)"
    failures: tuple[type[Exception], ...] = (*client_errors(), requests.RequestException, DropforgeError)
    try:
        return server.counted(context.cloud, record.service, context.now() - INTERVAL)
    except failures as error:
        return cut(redact(f"{type(error).__name__}: {error}"), 300)
