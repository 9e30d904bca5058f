"""Stage `sweep`: endpoints past their ttl are deleted, from the cloud's own listing of what exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import names
from .errors import CloudError
from .listing import Listed, Unlisted
from .log import log
from .runs import RunStore, open_store, utc_now
from .serving import SERVERS, get_server
from .serving.base import Server
from .settings import settings
from .teardown import end_endpoint


def sweep() -> dict[str, Any]:
    """Delete every endpoint whose time is over. Safe to run twice at once; one sweep is enough."""
    store = open_store()
    over = [(server, found) for server, found in _endpoints() if _is_over(store, found)]
    return {"status": "SWEPT", "deleted": [found.name for server, found in over if _end(store, server, found)]}


def _endpoints() -> Iterator[tuple[Server, Listed]]:
    """What the cloud lists of our endpoints, of every kind, whatever ledgers say."""
    for server in map(get_server, SERVERS):
        try:
            yield from ((server, found) for found in server.listed(settings()) if _is_ours(found))
        except Unlisted as error:
            log(str(error), stage="sweep", severity="ERROR")


def _is_ours(found: Listed) -> bool:
    return found.labels.get(names.MANAGED_BY) == "dropforge" and names.EXPIRES_LABEL in found.labels


def _is_over(store: RunStore, found: Listed) -> bool:
    """Past its run's ttl, or past the time on its label, which is the latest at which that can end."""
    expires = found.labels[names.EXPIRES_LABEL]
    if expires.isdecimal() and int(expires) < utc_now().timestamp():  # people can edit labels
        return True
    record = store.find(found.labels.get(names.RUN_LABEL, ""))
    return record is not None and record.endpoint is not None and record.endpoint.expires < utc_now()


def _end(store: RunStore, server: Server, found: Listed) -> bool:
    run = found.labels.get(names.RUN_LABEL, "")
    log("endpoint past its ttl", stage="sweep", run=run, resource=found.name)
    try:
        # By the name that the cloud lists: the ledger may believe it gone.
        if not server.teardown(found.kind, found.name):
            return False
        record = store.find(run)
        return end_endpoint(store, run) if record and record.state.is_terminal else True
    except CloudError as error:  # the others are deleted all the same
        log(error.message, stage="sweep", run=run, severity="ERROR", resource=found.name)
        return False
