"""Part of stage `sweep`: named endpoints.

A rollout without a live execution; an endpoint past its expiry; a service that no record says exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.executions import live_executions, start_rollout
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord, EndpointState
from dropforge.stages.rollout.advance import prune
from dropforge.stages.rollout.requests import START_WITHIN, retire

from .audit import is_left_over

SWEEP = "the sweep"


def tend(context: Context, endpoint: str, listed: Iterable[Listed], now: datetime) -> str:
    """Continue what an endpoint needs; the rollout that was begun or continued, or "".

    `listed` are its services in the cloud's lists. Raises CloudError if a service cannot be deleted.
    """
    record = context.endpoints.find(endpoint)
    if record is not None and record.current is not None:
        return _restart(context, record, now)
    if record is not None and record.expires is not None and record.expires <= now:
        return _expire(context, record)
    if record is None or record.state is not EndpointState.SERVING:
        return _delete(context, endpoint, listed, now)
    if any(is_left_over(record, resource) for resource in listed):
        prune(context, record)
    return ""


def _restart(context: Context, record: EndpointRecord, now: datetime) -> str:
    """Give the rollout whose turn it is another execution, if its own has ended."""
    current = record.current
    assert current is not None, "the caller has looked"
    owner = current.execution
    if owner is None and now - current.requested < START_WITHIN:
        return ""
    if owner is not None:
        if owner in live_executions(context.cloud, context.settings.rollout_workflow_name):
            return ""
        context.endpoints.update(record.name, lambda latest: latest.released(current.id, owner))
    message = "a rollout without a live execution"
    context.log(message, stage="sweep", severity="WARNING", endpoint=record.name, rollout=current.id)
    start_rollout(context.cloud, record.name, current.id)
    return current.id


def _expire(context: Context, record: EndpointRecord) -> str:
    """Retire an endpoint past its expiry. The rollout has the same id whenever the sweep asks."""
    rollout = names.rollout_id(SWEEP, f"{record.name} {record.expires}")
    topic = context.settings.operations_topic
    retire(context, record.name, rollout, f"{SWEEP}: past its ttl", topic)
    return rollout


def _delete(context: Context, endpoint: str, listed: Iterable[Listed], now: datetime) -> str:
    """Delete the services of an endpoint that serves nothing, unless they are as new as a record may be."""
    old = [each for each in listed if each.created is not None and now - each.created > START_WITHIN]
    for resource in old:
        if not names.is_of_endpoint(resource.name, endpoint):
            message = f"{resource.name} is not deleted: its label says endpoint {endpoint}, its name does not"
            raise CloudError(ErrorClass.CONFIG, message, "find out who set its labels")
        message = "of an endpoint that serves nothing"
        context.log(message, stage="sweep", severity="WARNING", endpoint=endpoint, resource=resource.name)
        context.platforms.owner(resource.kind).teardown(context.cloud, resource.kind, resource.name)
    return ""
