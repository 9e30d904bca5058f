"""Part of stage `sweep`: resources that the cloud lists and no run owns.

The sweep lists the cloud first and reads the records afterwards. An attempt is in its run's record before any resource
is created for the attempt, so a listed resource whose attempt is not in the record is an orphan.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import CloudError, NotFound
from dropforge.base.redact import cut
from dropforge.base.settings import Settings
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, Unlisted, is_named_endpoint, is_of_deployment
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.serving import Server
from dropforge.platforms.training import Target
from dropforge.run.record import Record, ResourceState, RunState
from dropforge.stages.deletion import delete_resource

WORKERS = 16
LOOK_SECONDS = 1.0  # between two rounds of deleting
PATIENCE_SECONDS = 240.0  # for the deletions of one sweep; a function has 540 seconds
EXPIRED = "past its ttl"
SURVIVES_AFTER = timedelta(hours=1)  # by then several sweeps have started to delete the resource, or no sweep has run
SURVIVES = "past its ttl for more than an hour"


class Orphan(NamedTuple):
    """A resource to delete, and the reason."""

    resource: Listed
    reason: str


class Deletions(NamedTuple):
    """The results of deleting: verified deletions, deletions in progress, and messages of refused deletions."""

    gone: list[Listed]
    pending: list[Listed]
    problems: list[str]


def list_all(cloud: Cloud, platforms: Platforms | None = None) -> tuple[list[Listed], list[str]]:
    """All resources of this deployment that the cloud lists, and the problems of incomplete lists.

    They belong to runs; those with an `endpoint` belong to named endpoints.
    """
    adapters = list((platforms or Platforms()).all())
    lists = cloud.threads.map(lambda adapter: _listed(cloud, adapter), adapters, len(adapters))
    # Several platforms list some kinds; the name is unique.
    resources = {resource.name: resource for listed, _ in lists for resource in listed}
    problems = dict.fromkeys(problem for _, problems in lists for problem in problems)
    for problem in problems:
        cloud.log(problem, stage="sweep", severity="ERROR")
    return list(resources.values()), list(problems)


def judge(resource: Listed, record: Record | None, settings: Settings, now: datetime) -> str:
    """The reason to delete a resource; "" for a resource that a run owns, or may own."""
    expires = resource.labels.get(names.EXPIRES_LABEL, "")
    if expires.isdecimal() and int(expires) < now.timestamp():  # the label is the latest time; users can edit labels
        return _expired(datetime.fromtimestamp(int(expires), UTC), now)
    if record is None:
        return "of a run that does not exist" if _is_settled(resource, settings, now) else ""
    if serves(record, resource.name):
        assert record.endpoint is not None, "a record that serves has an endpoint"
        return _expired(record.endpoint.expires, now) if record.endpoint.expires < now else ""
    if record.state.is_terminal:
        return "left by a run that is over"
    is_over = resource.attempt is not None and resource.attempt < record.attempt
    return "left by an attempt that is over" if is_over else ""


def serves(record: Record, name: str) -> bool:
    """Whether a resource is part of a run's live endpoint. All parts of an endpoint have the same short name."""
    endpoint = record.endpoint
    if endpoint is None or endpoint.ended or (record.state.is_terminal and record.state is not RunState.SUCCEEDED):
        return False
    return name.rpartition("/")[2] == endpoint.service.rpartition("/")[2]


def delete_orphans(context: Context, orphans: Iterable[Orphan]) -> Deletions:
    """Delete orphans in rounds: a disk can be deleted only after its machine. A refusal does not stop the others."""
    remaining = list(orphans)
    for orphan in remaining:
        _log_orphan(context, orphan)
    gone: list[Listed] = []
    problems: list[str] = []
    clock = context.cloud.clock
    deadline = clock.monotonic() + PATIENCE_SECONDS
    while remaining:
        results = context.cloud.threads.map(lambda orphan: _delete(context, orphan.resource), remaining, WORKERS)
        answers = list(zip(remaining, results, strict=True))
        gone += [orphan.resource for orphan, answer in answers if answer is True]
        problems += [answer for _, answer in answers if isinstance(answer, str)]
        remaining = [orphan for orphan, answer in answers if answer is False]
        if not remaining or clock.monotonic() > deadline:
            break
        clock.sleep(LOOK_SECONDS)
    return Deletions(gone, [orphan.resource for orphan in remaining], problems)


def _listed(cloud: Cloud, adapter: Target | Server) -> tuple[list[Listed], list[str]]:
    """The resources of this deployment that an adapter lists, and its problems."""
    resources: list[Listed] = []
    try:
        for resource in adapter.listed(cloud):
            labels, settings = resource.labels, cloud.settings
            if is_of_deployment(labels, settings) or is_named_endpoint(labels, settings):
                resources.append(resource)
    except Unlisted as error:
        return resources, [problem.message for problem in error.problems]
    except Exception as error:  # noqa: BLE001  # an unforeseen answer must not stop the other adapters
        return resources, [f"{type(adapter).__name__} could not be listed: {cut(repr(error), 400)}"]
    return resources, []


def _expired(expires: datetime, now: datetime) -> str:
    return EXPIRED if now - expires <= SURVIVES_AFTER else SURVIVES


def _is_settled(resource: Listed, settings: Settings, now: datetime) -> bool:
    """Whether a resource without a record is an orphan: it is not new."""
    grace = timedelta(seconds=settings.check_interval_seconds)
    return resource.created is not None and now - resource.created > grace


def _log_orphan(context: Context, orphan: Orphan) -> None:
    severity = "INFO" if orphan.reason == EXPIRED else "WARNING"
    resource = orphan.resource
    context.log(orphan.reason, stage="sweep", run=resource.run, severity=severity, resource=resource.name)


def _delete(context: Context, resource: Listed) -> bool | str:
    """Continue the deletion of a resource, and note its end: True once it is verified, or the message of a refusal."""
    try:
        if not delete_resource(context, resource.run, resource.kind, resource.name):
            return False
        with suppress(NotFound):  # a resource of no run is in no ledger
            context.store.note(resource.run, [resource.name], ResourceState.GONE)
        return True
    except Exception as error:  # noqa: BLE001  # an unforeseen answer must not stop the other deletions
        message = error.message if isinstance(error, CloudError) else cut(repr(error), 500)
        context.log(message, stage="sweep", run=resource.run, severity="ERROR", resource=resource.name)
        return f"{resource.name}: {message}"
