"""Part of stage `sweep`: what the cloud lists and nobody owns. The cloud's lists decide, and then the records.

The lists are read first: an attempt is in its run's record before anything is made for it, so that what is listed and
not in the record read afterwards is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import CloudError
from dropforge.base.log import log
from dropforge.base.settings import Settings
from dropforge.cloud.listing import Listed, Unlisted, is_of_run
from dropforge.platforms import get_server, get_target, servers, targets
from dropforge.run.record import Record, ResourceState, RunState
from dropforge.run.store import RunStore
from dropforge.stages.teardown import delete_resource

WORKERS = 16
LOOK_SECONDS = 1.0  # between two rounds of deleting what goes slowly
PATIENCE_SECONDS = 240.0  # for one sweep's deletions; a function has 540
EXPIRED = "past its ttl"
SURVIVES_AFTER = timedelta(hours=1)  # several sweeps: each of them has begun to delete it, or none has run
SURVIVES = "past its ttl for more than an hour"


class Doomed(NamedTuple):
    """What is to be deleted, and why."""

    found: Listed
    why: str


class Deletions(NamedTuple):
    """What became of the doomed: verified gone, on their way, and refused with a message each."""

    gone: list[Listed]
    going: list[Listed]
    problems: list[str]


def list_all(settings: Settings) -> tuple[list[Listed], list[str]]:
    """All that the cloud lists of this deployment's runs, and why some places could not be listed."""
    places = [*map(get_target, targets()), *map(get_server, servers())]
    with ThreadPoolExecutor(len(places)) as pool:
        answers = list(pool.map(lambda place: _listed(place, settings), places))
    # Some kinds are listed by several; the name is unique.
    found = {one.name: one for one in (one for answer, _ in answers for one in answer)}
    problems = dict.fromkeys(problem for _, told in answers for problem in told)
    for problem in problems:
        log(problem, stage="sweep", severity="ERROR")
    return list(found.values()), list(problems)


def judge(found: Listed, record: Record | None, settings: Settings, now: datetime) -> str:
    """Why a resource is to be deleted; "" for one that a run owns, or may own."""
    expires = found.labels.get(names.EXPIRES_LABEL, "")
    if expires.isdecimal() and int(expires) < now.timestamp():  # the latest time; people can edit labels
        return _expired(datetime.fromtimestamp(int(expires), UTC), now)
    if record is None:
        return "of a run that does not exist" if _is_settled(found, settings, now) else ""
    if serves(record, found.name):
        assert record.endpoint is not None
        return _expired(record.endpoint.expires, now) if record.endpoint.expires < now else ""
    if record.state.is_terminal:
        return "left by a run that is over"
    over = found.attempt is not None and found.attempt < record.attempt
    return "left by an attempt that is over" if over else ""


def _expired(expires: datetime, now: datetime) -> str:
    return EXPIRED if now - expires <= SURVIVES_AFTER else SURVIVES


def serves(record: Record, name: str) -> bool:
    """Whether a resource is a part of a run's endpoint that has not been ended. All its parts have one short name."""
    endpoint = record.endpoint
    if endpoint is None or endpoint.ended or (record.state.is_terminal and record.state is not RunState.SUCCEEDED):
        return False
    return name.rpartition("/")[2] == endpoint.service.rpartition("/")[2]


def delete(doomed: Iterable[Doomed], store: RunStore) -> Deletions:
    """Delete what nobody owns, in rounds: a disk goes only after its machine. One that is refused spares no other."""
    left = list(doomed)
    for one in left:
        severity = "INFO" if one.why == EXPIRED else "WARNING"
        log(one.why, stage="sweep", run=one.found.run, severity=severity, resource=one.found.name)
    gone: list[Listed] = []
    problems: list[str] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    with ThreadPoolExecutor(WORKERS) as pool:
        while left:
            answers = list(zip(left, pool.map(lambda one: _push(one, store), left), strict=True))
            gone += [one.found for one, answer in answers if answer is True]
            problems += [answer for _, answer in answers if isinstance(answer, str)]
            left = [one for one, answer in answers if answer is False]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
    return Deletions(gone, [one.found for one in left], problems)


def _listed(place: object, settings: Settings) -> tuple[list[Listed], list[str]]:
    found: list[Listed] = []
    try:
        for one in place.listed(settings):  # type: ignore[attr-defined]
            if is_of_run(one.labels, settings):
                found.append(one)
    except Unlisted as error:
        return found, [problem.message for problem in error.problems]
    except Exception as error:  # noqa: BLE001  # an answer that nobody has foreseen spares the other places
        return found, [f"{type(place).__name__} could not be listed: {error!r}"[:500]]
    return found, []


def _is_settled(found: Listed, settings: Settings, now: datetime) -> bool:
    """Whether it can be said to be nobody's: it names this deployment, and has been there for a while."""
    grace = timedelta(seconds=settings.check_interval_seconds)
    known = names.DEPLOYMENT_LABEL in found.labels and found.created is not None
    return known and found.created is not None and now - found.created > grace


def _push(one: Doomed, store: RunStore) -> bool | str:
    """Push it towards gone, and note it once it is: whether it is, or why that is refused."""
    try:
        if not delete_resource(one.found.kind, one.found.name):
            return False
        store.note(one.found.run, one.found.name, ResourceState.GONE)
        return True
    except Exception as error:  # noqa: BLE001  # likewise: of one resource
        message = error.message if isinstance(error, CloudError) else repr(error)[:500]
        log(message, stage="sweep", run=one.found.run, severity="ERROR", resource=one.found.name)
        return f"{one.found.name}: {message}"
