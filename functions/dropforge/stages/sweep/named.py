"""Part of stage `sweep`: named endpoints.

A rollout without a live execution; an endpoint past its expiry; a budget that is spent, or not any more; a service that
no record says exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.executions import find_rollout, live_executions, start_rollout
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord, EndpointState, RolloutState
from dropforge.stages.rollout.advance import is_lost, prune
from dropforge.stages.rollout.requests import START_WITHIN, remove, restore, resume, retire, suspend
from dropforge.stages.rollout.telling import warn_of_budget

from .audit import is_left_over

SWEEP = "the sweep"
RESTORES_AFTER = timedelta(hours=1)  # after a try that has failed: a region may have no capacity for days


def tend(context: Context, endpoint: str, listed: Iterable[Listed], now: datetime) -> str:
    """Continue what an endpoint needs; the rollout that was begun or continued, or "".

    `listed` are its services in the cloud's lists. Raises CloudError if a service cannot be deleted.
    """
    record = context.endpoints.find(endpoint)
    if record is not None:
        record = _keep_budget(context, record)
    if record is not None and record.current is not None:
        return _restart(context, record, now)
    if record is not None and _is_over(record, now):
        return _expire(context, record)
    if record is None or not record.stable:
        return _delete(context, endpoint, record, listed, now)
    if not record.suspended and (rollout := _expire_model(context, record, now)):
        return rollout
    if record.suspended and not context.platforms.named(record.type).keeps_revisions:
        _end_left(context, record, listed)
    elif any(is_left_over(record, resource) for resource in listed):
        prune(context, record)
    return "" if record.suspended else _restore(context, record, now)


def _keep_budget(context: Context, record: EndpointRecord) -> EndpointRecord:
    """Suspend an endpoint whose budget is spent, resume one whose budget is not, and warn before."""
    now = context.now()  # not the sweep's beginning: the deletions before may have taken minutes
    budget = record.in_period(now).budget
    if record.state is EndpointState.RETIRED or (budget is None and not record.suspended):
        return record
    is_spent = record.is_spent(now)
    if is_spent and not record.is_stopping and budget is not None:
        rollout = names.rollout_id(SWEEP, f"{record.name} suspends {budget.asked} {budget.began}")
        record = suspend(context, record, rollout, f"{SWEEP}: its budget of {budget} is spent")
    elif record.suspended and not is_spent and not _is_over(record, now):
        rollout = names.rollout_id(SWEEP, f"{record.name} resumes {record.suspended}")
        record = resume(context, record, rollout, f"{SWEEP}: its budget is not spent")
    elif not record.suspended and record.is_to_warn(now):
        warn_of_budget(context, record)
    return record


def _is_over(record: EndpointRecord, now: datetime) -> bool:
    return record.expires is not None and record.expires <= now


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
    if find_rollout(context.cloud, record.name, current.id, current.requested) is not None:
        return ""  # it has not begun yet
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


def _expire_model(context: Context, record: EndpointRecord, now: datetime) -> str:
    """Take a model past its expiry from a shared endpoint; the id of the rollout, or "". Each sweep takes one.

    A rollout that fails has made a revision, so the next sweep begins another.
    """
    expired = (each for each in record.adapters if each.expires is not None and each.expires <= now)
    if (adapter := next(expired, None)) is None:
        return ""
    rollout = names.rollout_id(
        SWEEP, f"{record.name} {adapter.name} {adapter.run} {record.last}"
    )  # a failed try has made a revision
    who, topic = f"{SWEEP}: model {adapter.name} is past its ttl", context.settings.operations_topic
    remove(context, record.name, adapter.name, rollout, who, topic)
    return rollout


def _end_left(context: Context, record: EndpointRecord, listed: Iterable[Listed]) -> None:
    """Delete what a late call has made of a suspended endpoint, where nothing of it may remain."""
    own = [each for each in listed if each.name == record.service or names.is_of_endpoint(each.name, record.name)]
    for resource in sorted(own, key=lambda each: each.name != record.service):  # no machine ends before its name
        if context.endpoints.record(record.name) != record:
            return  # it is being resumed
        message = "of an endpoint that is suspended"
        context.log(message, stage="sweep", severity="WARNING", endpoint=record.name, resource=resource.name)
        is_gone = context.platforms.owner(resource.kind).teardown(context.cloud, resource.kind, resource.name)
        if resource.name == record.service and not is_gone:
            return  # the next sweep looks again


def _restore(context: Context, record: EndpointRecord, now: datetime) -> str:
    """Begin a rollout that starts the revision that serves anew, if its machine has ended; its id, or ""."""
    last = next(reversed(record.rollouts), None)
    has_failed = last is not None and last.kind == "resume" and last.state is RolloutState.ROLLED_BACK
    if has_failed and last is not None and last.ended is not None and now - last.ended < RESTORES_AFTER:
        return ""
    if not is_lost(context, record):
        return ""
    rollout = names.rollout_id(SWEEP, f"{record.name} {record.stable} restores after {last.id if last else ''}")
    restore(context, record, rollout, f"{SWEEP}: its machine has ended")
    return rollout


def _delete(
    context: Context, endpoint: str, record: EndpointRecord | None, listed: Iterable[Listed], now: datetime
) -> str:
    """Delete the services of an endpoint that serves nothing, unless they are as new as a record may be."""
    own = record.service if record is not None else ""  # a record of Cloud DNS tells no time
    old = [each for each in listed if (now - each.created > START_WITHIN if each.created else each.name == own)]
    for resource in old:
        if resource.name != own and not names.is_of_endpoint(resource.name, endpoint):
            message = f"{resource.name} is not deleted: its label says endpoint {endpoint}, its name does not"
            raise CloudError(ErrorClass.CONFIG, message, "find out who set its labels")
        message = "of an endpoint that serves nothing"
        context.log(message, stage="sweep", severity="WARNING", endpoint=endpoint, resource=resource.name)
        context.platforms.owner(resource.kind).teardown(context.cloud, resource.kind, resource.name)
    return ""
