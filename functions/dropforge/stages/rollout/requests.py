"""Requests to change a named endpoint: each is checked, and becomes a rollout that its own execution carries out.

A request of a topic changes only endpoints whose models come from that topic; a spec in the specs bucket only those of
the specs bucket. A message on the operations topic changes every endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from dropforge.base import names
from dropforge.base.errors import DropforgeError, ErrorClass, InvalidSpec, Malformed, SpecProblem
from dropforge.cloud.executions import start_rollout
from dropforge.context import Context
from dropforge.endpoints.record import Canary, EndpointRecord, EndpointState, Kind, Rollout
from dropforge.platforms.serving import Deployment
from dropforge.run.artifacts import read_manifest
from dropforge.run.record import Record, RunError
from dropforge.spec import JobSpec, seconds

START_WITHIN = timedelta(seconds=30)  # of a request; an execution that is lost before it is noted is started again
_UNFIT = (ErrorClass.GATE, ErrorClass.PARITY)


class Refused(DropforgeError):
    """A request that changes nothing. `message` says why, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def put_behind(
    context: Context,
    record: Record,
    spec: JobSpec,
    endpoint: str,
    rollout: str,
    who: str,
    topic: str,
    canary: Canary | None,
) -> EndpointRecord:
    """Request that the model of a run gets behind a name; a repeated request changes nothing. Raises Refused.

    `spec.serve` says how the model is served. `topic` is the source of the request, "" for the specs bucket. `canary`
    None: every request at once.
    """
    if problem := _unfit(context, record):
        raise Refused(f"the model of run {record.run} cannot be served: {problem}", f"`dropforge status {record.run}`")
    assert spec.serve is not None, "the callers pass only specs that serve"
    server = context.platforms.named(spec.serve.type)
    deployment = Deployment(record.run, spec, context.settings, context.now(), endpoint=endpoint)
    place = {
        "type": spec.serve.type,
        "region": server.region(deployment),
        "service": server.service_name(deployment),
    }
    wanted = _rollout(context, rollout, "deploy", who, record.run).model_copy(update={"canary": canary})
    new = EndpointRecord(name=endpoint, source=record.topic, created=context.now(), **place)
    context.endpoints.create(new)

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        _check_place(latest, new.type, new.region, new.service)
        return latest.model_copy(update=place).with_rollout(wanted)

    return _request(context, endpoint, rollout, change)


def check_name(context: Context, spec: JobSpec, topic: str) -> None:
    """Refuse a spec whose model could not get behind its name. Raises InvalidSpec."""
    serve = spec.serve
    if serve is None or serve.endpoint is None or (record := context.endpoints.find(serve.endpoint)) is None:
        return
    server = context.platforms.named(serve.type)
    deployment = Deployment("", spec, context.settings, context.now(), endpoint=serve.endpoint)
    try:
        _check(context, record, topic)
        _check_place(record, serve.type, server.region(deployment), server.service_name(deployment))
    except Refused as refused:
        problem = SpecProblem("/serve/endpoint", refused.message, serve.endpoint, refused.hint)
        raise InvalidSpec([problem]) from None


def go_back(context: Context, endpoint: str, rollout: str, who: str, topic: str) -> EndpointRecord:
    """Request that the previous revision of an endpoint serves again. Raises Refused."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        if latest.current is None and not latest.previous:
            raise Refused(nothing_before(latest), f"`dropforge serve RUN --as {endpoint}` serves the model of any run")
        ended, canary = _without_canary(context, latest, "a rollback was requested")
        asked = _rollout(context, rollout, "rollback", who).model_copy(update={"ends": canary})
        return ended.with_rollout(asked)

    return _request(context, endpoint, rollout, change)


def retire(context: Context, endpoint: str, rollout: str, who: str, topic: str) -> EndpointRecord:
    """Request the end of an endpoint. Its name stays taken. Raises Refused."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        ended, _ = _without_canary(context, latest, "the end of the endpoint was requested")
        return ended.with_rollout(_rollout(context, rollout, "retire", who))

    return _request(context, endpoint, rollout, change)


def extend(context: Context, endpoint: str, ttl: str | None, topic: str) -> EndpointRecord:
    """Let an endpoint live for `ttl` from now, or until it is retired (None). Raises Refused."""
    expires = None if ttl is None else context.now() + timedelta(seconds=seconds(ttl))

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        return latest.model_copy(update={"expires": expires})

    _existing(context, endpoint)
    return context.endpoints.update(endpoint, change)


def start_again(context: Context, record: EndpointRecord) -> None:
    """Start an execution for the rollout whose turn it is, if it has none and its request is not fresh."""
    current = record.current
    if current is not None and current.execution is None and context.now() - current.requested >= START_WITHIN:
        start_rollout(context.cloud, record.name, current.id)


def nothing_before(record: EndpointRecord) -> str:
    return f"endpoint {record.name} has no model before the present one, so nothing can be rolled back"


def _unfit(context: Context, record: Record) -> str:
    """Why the model of a run may not be served; "" if it may.

    The rollout checks the proof of the manifest: whoever receives a request may not read the keys of runs.
    """
    if record.error is not None and record.error.error_class in _UNFIT:
        return record.error.message
    try:
        manifest = read_manifest(context.cloud.clients.storage(), context.settings.runs_bucket, record.run)
    except Malformed as malformed:
        return str(malformed)
    return "" if manifest else "it has no committed model"


def _existing(context: Context, endpoint: str) -> None:
    if not names.is_endpoint_name(endpoint) or context.endpoints.find(endpoint) is None:
        raise Refused(f"there is no endpoint {endpoint!r}", "`dropforge endpoints` lists them")


def _request(
    context: Context, endpoint: str, rollout: str, change: Callable[[EndpointRecord], EndpointRecord]
) -> EndpointRecord:
    """Add a rollout to the record and start its execution; a rollout that the record has is not added again."""
    _existing(context, endpoint)
    is_new = False

    def add(latest: EndpointRecord) -> EndpointRecord:
        nonlocal is_new
        is_new = latest.find(rollout) is None
        return change(latest) if is_new else latest

    record = context.endpoints.update(endpoint, add)
    if is_new:
        start_rollout(context.cloud, endpoint, rollout)
    else:
        start_again(context, record)
    return record


def _check(context: Context, record: EndpointRecord, topic: str) -> None:
    """Raises Refused for a retired endpoint, and for the endpoint of another source."""
    if record.state is EndpointState.RETIRED:
        when = f"{record.retired:%Y-%m-%d %H:%M} UTC"
        raise Refused(f"endpoint {record.name} was retired at {when}", "choose another name")
    if topic not in (record.source, context.settings.operations_topic):
        raise Refused(
            f"endpoint {record.name} belongs to {_source(record.source)}; the request came from {_source(topic)}",
            "choose another name, or ask an operator: the operations topic changes every endpoint",
        )


def _check_place(record: EndpointRecord, kind: str, region: str, service: str) -> None:
    """Raises Refused if a model there would change the URL of the endpoint."""
    is_fixed = record.state is not EndpointState.NEW or record.current is not None
    if is_fixed and (record.type, record.region) != (kind, region):
        found = f"{record.type} in {record.region}"
        raise Refused(
            f"endpoint {record.name} is on {found}, and the model would be on {kind} in {region}: its URL would change",
            f"set serve.type and serve.region to {found}, or choose another name",
        )
    if is_fixed and record.service != service:
        raise Refused(
            f"endpoint {record.name} is {record.service}, and the model would be behind {service}: "
            "its URL would change",
            "set serve.cluster to the cluster of the endpoint, or choose another name",
        )


def _source(topic: str) -> str:
    return f"topic {topic}" if topic else "the specs bucket"


def _without_canary(context: Context, record: EndpointRecord, why: str) -> tuple[EndpointRecord, str]:
    """A record whose canary, if it has one, is rolled back: its turn may last for days. Also the canary's rollout."""
    # Not CANCELLED: that is the class of a run whose own end was requested.
    error = RunError(error_class=ErrorClass.CONFIG, message=f"{why} while the model was a canary")
    return record.without_canary(error, context.now())


def _rollout(context: Context, rollout: str, kind: Kind, who: str, run: str = "") -> Rollout:
    return Rollout(id=rollout, kind=kind, who=who, requested=context.now(), run=run)
