"""Requests to change a named endpoint: each is checked, and becomes a rollout that its own execution carries out.

A request of a topic changes only endpoints whose models come from that topic; a spec in the specs bucket only those of
the specs bucket. A message on the operations topic, or of the console, changes every endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import count

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import DropforgeError, ErrorClass, InvalidSpec, Malformed, SpecProblem
from dropforge.cloud.executions import find_rollout, start_rollout
from dropforge.context import Context
from dropforge.endpoints import shared
from dropforge.endpoints.record import Canary, EndpointRecord, EndpointState, Kind, Revision, Rollout, RolloutState
from dropforge.endpoints.shared import Adapter, Base
from dropforge.platforms.named import NamedServer
from dropforge.platforms.serving import Deployment
from dropforge.run.artifacts import read_manifest
from dropforge.run.record import Record, RunError
from dropforge.spec import JobSpec, parts, seconds
from dropforge.spec.job_spec import ServeSpec

START_WITHIN = timedelta(seconds=30)  # of a request; an execution that is lost before it is noted is started again
UNFIT = (ErrorClass.GATE, ErrorClass.PARITY)
SHARING = "docs/endpoints.md#many-adapters"


class Refused(DropforgeError):
    """A request that changes nothing. `message` says why, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Unchanged(Refused):
    """A request for what is so already."""


def check_new(context: Context, endpoint: str, rollout: str, is_asked: Callable[[Revision], bool]) -> None:
    """Raises Unchanged if an endpoint serves the model of a request already, and no rollout is about to change that."""
    record = context.endpoints.find(endpoint)
    if record is None or record.state is not EndpointState.SERVING or record.current or record.find(rollout):
        return
    if record.serving is not None and is_asked(record.serving):
        message = f"endpoint {endpoint} serves this model already, as revision {record.stable}: nothing was changed"
        raise Unchanged(message, f"`dropforge serve RUN --as {endpoint} --again` starts its server anew")


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

    `endpoint` "" is for a spec that shares an endpoint and names none: the endpoint is that of its base.
    `spec.serve` says how the model is served. `topic` is the source of the request, "" for the specs bucket. `canary`
    None: every request at once.
    """
    if problem := "" if names.is_copy(record.run) else _unfit(context, record):
        raise Refused(f"the model of run {record.run} cannot be served: {problem}", f"`dropforge status {record.run}`")
    assert spec.serve is not None, "the callers pass only specs that serve"
    base = _base(context, record, spec.serve) if spec.serve.share else None
    server = context.platforms.named(spec.serve.type)
    region = server.region(Deployment(record.run, spec, context.settings, context.now()))
    if base is not None:
        endpoint = endpoint or _shared_name(context, base, record.topic, region, rollout)
        _check_room([], spec.name, record.topic, endpoint)  # before there is a record
    deployment = Deployment(record.run, spec, context.settings, context.now(), endpoint=endpoint)
    place = {"type": spec.serve.type, "region": region, "service": server.service_name(deployment), "base": base}
    wanted = evolve(_rollout(context, rollout, "deploy", who, record.run), canary=canary)
    new = EndpointRecord(name=endpoint, source=record.topic, created=context.now(), **place)
    context.endpoints.create(new)

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        _check_money(context, latest)
        service = _service(server, deployment, latest)
        _check_place(latest, new.type, new.region, service)
        _check_canary(server, service, canary is not None)
        if _is_fixed(latest):
            _check_base(latest, base)
        if base is not None:
            _check_room(latest.adapters, spec.name, record.topic, endpoint)
        return evolve(latest, **{**place, "service": service}).with_rollout(wanted)

    return _request(context, endpoint, rollout, change)


def check_name(context: Context, spec: JobSpec, topic: str) -> None:
    """Refuse a spec whose model could not get behind its name. Raises InvalidSpec."""
    try:
        check_fit(context, spec, topic, spec.serve is not None and spec.serve.canary is not None)
    except Refused as refused:
        name = spec.serve.endpoint if spec.serve else None
        raise InvalidSpec([SpecProblem("/serve/endpoint", refused.message, name, refused.hint)]) from None


def check_request(context: Context, spec: JobSpec, topic: str, is_canary: bool) -> None:
    """Raises Refused for a spec whose model cannot get behind its name now; `is_canary`: as a canary."""
    if (record := check_fit(context, spec, topic, is_canary)) is not None:
        _check_money(context, record)


def check_fit(context: Context, spec: JobSpec, topic: str, is_canary: bool) -> EndpointRecord | None:
    """The present record of the endpoint that a spec names. Raises Refused if its model could not get behind it."""
    serve = spec.serve
    if serve is None or serve.endpoint is None or (record := context.endpoints.find(serve.endpoint)) is None:
        return None
    server = context.platforms.named(serve.type)
    deployment = Deployment("", spec, context.settings, context.now(), endpoint=serve.endpoint)
    _check(context, record, topic)
    service = _service(server, deployment, record)
    _check_place(record, serve.type, server.region(deployment), service)
    _check_canary(server, service, is_canary)
    if _is_fixed(record):
        _check_early(record, spec, topic)
    return record


def go_back(context: Context, endpoint: str, rollout: str, who: str, topic: str) -> EndpointRecord:
    """Request that the previous revision of an endpoint serves again. Raises Refused."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        if not context.platforms.named(latest.type).keeps_revisions:
            message = f"endpoint {endpoint} is on serve.type {latest.type}, which keeps no machine for a rollback"
            raise Refused(message, f"`dropforge serve RUN --as {endpoint}` starts a machine for the model of any run")
        _check_money(context, latest)
        if latest.current is None and not latest.previous:
            raise Refused(nothing_before(latest), f"`dropforge serve RUN --as {endpoint}` serves the model of any run")
        ended, canary = _without_canary(context, latest, "a rollback was requested")
        asked = evolve(_rollout(context, rollout, "rollback", who), ends=canary)
        return ended.with_rollout(asked)

    return _request(context, endpoint, rollout, change)


def remove(context: Context, endpoint: str, model: str, rollout: str, who: str, topic: str) -> EndpointRecord:
    """Request that a shared endpoint does not serve a model any more; the last one retires it. Raises Refused."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        found = next((adapter for adapter in latest.adapters if adapter.name == model), None)
        if found is None:
            known = ", ".join(adapter.name for adapter in latest.adapters) or "none"
            raise Refused(f"endpoint {endpoint} serves no model {model!r} of a run; it serves: {known}")
        if len(latest.adapters) > 1:  # the others get a new revision; the end of the last one ends the endpoint
            _check_money(context, latest)
        asked = evolve(_rollout(context, rollout, "remove", who, found.run), model=model)
        return latest.with_rollout(asked)

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
        return latest.with_expiry(expires)

    _existing(context, endpoint)
    return context.endpoints.update(endpoint, change)


def set_budget(
    context: Context, endpoint: str, budget: parts.Budget | None, resume: str, who: str, topic: str
) -> EndpointRecord:
    """Give an endpoint a budget, or none. A suspended endpoint whose budget is not spent any more resumes.

    `resume` is the id of the rollout that resumes. Raises Refused.
    """
    now = context.now()

    def change(latest: EndpointRecord) -> EndpointRecord:
        _check(context, latest, topic)
        if budget is not None and latest.cost(now) is None:
            message = f"the budget of endpoint {endpoint} cannot be enforced: a price is unknown"
            raise Refused(message, "put a model with serve.price_usd_per_hour behind it, or retire it")
        changed = latest.with_budget(budget, who, now)
        return changed if not latest.is_stopping or changed.is_spent(now) else _resumed(context, changed, resume, who)

    return _request(context, endpoint, resume, change)


def suspend(context: Context, record: EndpointRecord, rollout: str, who: str) -> EndpointRecord:
    """Request that the instances of an endpoint end, whose budget is spent. A rollout under way fails first."""
    error = RunError(error_class=ErrorClass.BUDGET, message=money_problem(record, context.now()))

    def change(latest: EndpointRecord) -> EndpointRecord:
        now = context.now()
        if latest.is_stopping or latest.state is EndpointState.RETIRED or not latest.is_spent(now):
            return latest
        ended = latest.without_rollout(error, now)
        is_moving = ended.current is not None and ended.current.state is RolloutState.SHIFTING
        if not latest.stable and not is_moving:  # nothing serves; the failed rollout deletes the service
            return evolve(ended.in_period(now), suspended=now)
        return ended.with_rollout(_rollout(context, rollout, "suspend", who))

    return _request(context, record.name, rollout, change)


def resume(context: Context, record: EndpointRecord, rollout: str, who: str) -> EndpointRecord:
    """Request that a suspended endpoint answers again."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        return _resumed(context, latest.in_period(context.now()), rollout, who) if latest.suspended else latest

    return _request(context, record.name, rollout, change)


def restore(context: Context, record: EndpointRecord, rollout: str, who: str) -> EndpointRecord:
    """Request another machine for an endpoint whose own has ended, unless it has changed since it was read."""

    def change(latest: EndpointRecord) -> EndpointRecord:
        is_same = latest.current is None and (latest.stable, latest.suspended) == (record.stable, None)
        return latest.with_rollout(_rollout(context, rollout, "resume", who)) if is_same else latest

    return _request(context, record.name, rollout, change)


def money_problem(record: EndpointRecord, now: datetime) -> str:
    """Why the budget of an endpoint allows no instance; "" if it does."""
    budget = record.in_period(now).budget
    if budget is not None and record.is_spent(now):
        until = f"it answers again from {budget.ends:%Y-%m-%d %H:%M} UTC, or once its budget is higher"
        return f"endpoint {record.name} has spent its budget of {budget}; {until}"
    if record.suspended:
        return f"endpoint {record.name} is suspended; its budget is not spent any more, so the next sweep resumes it"
    return ""


def start_again(context: Context, record: EndpointRecord) -> None:
    """Start an execution for the rollout whose turn it is, if it has none and its request is not fresh.

    A started execution is noted in the record only when it begins: messages that are delivered again meanwhile, and
    the sweep, would each start another.
    """
    current = record.current
    if current is None or current.execution is not None or context.now() - current.requested < START_WITHIN:
        return
    if find_rollout(context.cloud, record.name, current.id, current.requested) is None:
        start_rollout(context.cloud, record.name, current.id)


def nothing_before(record: EndpointRecord) -> str:
    return f"endpoint {record.name} has no model before the present one, so nothing can be rolled back"


def _unfit(context: Context, record: Record) -> str:
    """Why the model of a run may not be served; "" if it may.

    The rollout checks the proof of the manifest: whoever receives a request may not read the keys of runs.
    """
    if record.error is not None and record.error.error_class in UNFIT:
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
    """Make a change that may add a rollout, and start its execution. A repeated request changes nothing."""
    _existing(context, endpoint)
    is_new = False

    def add(latest: EndpointRecord) -> EndpointRecord:
        nonlocal is_new
        is_new = latest.find(rollout) is None
        return change(latest) if is_new else latest

    record = context.endpoints.update(endpoint, add)
    if not is_new:
        start_again(context, record)
    elif record.find(rollout) is not None:
        start_rollout(context.cloud, endpoint, rollout)
    return record


def _check(context: Context, record: EndpointRecord, topic: str) -> None:
    """Raises Refused for a retired endpoint, and for the endpoint of another source."""
    if record.state is EndpointState.RETIRED:
        when = f"{record.retired:%Y-%m-%d %H:%M} UTC"
        raise Refused(f"endpoint {record.name} was retired at {when}", "choose another name")
    if topic != record.source and not context.settings.reaches_all(topic):
        raise Refused(
            f"endpoint {record.name} belongs to {_source(record.source)}; the request came from {_source(topic)}",
            "choose another name, or ask an operator: the operations topic changes every endpoint",
        )


def _check_money(context: Context, record: EndpointRecord) -> None:
    """Raises Refused for an endpoint whose budget allows no instance."""
    if problem := money_problem(record, context.now()):
        raise Refused(problem, f"`dropforge budget {record.name} 50/month` sets another budget")


def _check_place(record: EndpointRecord, kind: str, region: str, service: str) -> None:
    """Raises Refused if a model there would change the URL of the endpoint."""
    is_fixed = _is_fixed(record)
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


def _service(server: NamedServer, deployment: Deployment, record: EndpointRecord) -> str:
    """The service of an endpoint that gets another model; a platform keeps the kind of service that it has."""
    return server.service_name(deployment, record.service if _is_fixed(record) else "")


def _check_canary(server: NamedServer, service: str, is_wanted: bool) -> None:
    """Raises Refused for a canary of an endpoint whose service gives one revision every request."""
    if is_wanted and (problem := server.why_whole(service)):
        raise Refused(problem, "no canary: the model gets every request at once. docs/endpoints.md#gke")


def _is_fixed(record: EndpointRecord) -> bool:
    """Whether an endpoint has, or may soon have, a model: then its place and its base stay."""
    return record.state is not EndpointState.NEW or record.current is not None


def _base(context: Context, record: Record, serve: ServeSpec) -> Base:
    """The base of a run's adapter. Raises Refused for a model that a shared endpoint cannot serve."""
    manifest = read_manifest(context.cloud.clients.storage(), context.settings.runs_bucket, record.run)
    assert manifest is not None, "the caller has looked"
    if problem := shared.why_unfit(manifest):
        raise Refused(f"the model of run {record.run} cannot share an endpoint: {problem}", SHARING)
    return shared.base_of(manifest, serve)


def _shared_name(context: Context, base: Base, source: str, region: str, rollout: str) -> str:
    """The first name for the endpoint of a base that is free, or whose endpoint serves or has the rollout."""
    for number in count():
        name = shared.name_of(base, source, region, number)
        found = context.endpoints.find(name)
        if found is None or found.retired is None or found.find(rollout):
            return name
    raise AssertionError("`count` does not end")


def _check_base(record: EndpointRecord, base: Base | None) -> None:
    """Raises Refused unless an endpoint and a model both have the same base, or both have none."""
    _check_kind(record, is_shared=base is not None)
    if record.base is not None and base is not None:
        _refuse_model(record, shared.why_differs(record.base, base))


def _check_kind(record: EndpointRecord, *, is_shared: bool) -> None:
    if (record.base is not None) != is_shared:
        found = "serves one model" if record.base is None else "serves the adapters of many runs"
        expected = "serve.share false" if record.base is None else "serve.share true"
        raise Refused(f"endpoint {record.name} {found}", f"choose another name, or set {expected}: {SHARING}")


def _refuse_model(record: EndpointRecord, problem: str) -> None:
    if problem:
        raise Refused(f"the model does not fit endpoint {record.name}: {problem}", f"choose another name: {SHARING}")


def _check_room(adapters: Sequence[Adapter], name: str, source: str, endpoint: str) -> None:
    """Raises Refused if a shared endpoint has no room for a model of that name."""
    if problem := shared.why_no_room(adapters, name, source, endpoint):
        raise Refused(f"endpoint {endpoint} cannot serve the model: {problem}", SHARING)


def _check_early(record: EndpointRecord, spec: JobSpec, topic: str) -> None:
    """Raises Refused for what is known before the training. The files of the base are compared after it."""
    assert spec.serve is not None, "the caller has looked"
    _check_kind(record, is_shared=spec.serve.share)
    if record.base is None:
        return
    if record.base.uri != spec.model.source:
        _refuse_model(record, f"its base is {spec.model.source}, and the endpoint's is {record.base.uri}")
    _refuse_model(record, shared.why_served_otherwise(record.base, shared.serving_of(spec.serve)))
    _check_room(record.adapters, spec.name, topic, record.name)


def _source(topic: str) -> str:
    return f"topic {topic}" if topic else "the specs bucket"


def _without_canary(context: Context, record: EndpointRecord, why: str) -> tuple[EndpointRecord, str]:
    """A record whose canary, if it has one, is rolled back: its turn may last for days. Also the canary's rollout."""
    # Not CANCELLED: that is the class of a run whose own end was requested.
    error = RunError(error_class=ErrorClass.CONFIG, message=f"{why} while the model was a canary")
    return record.without_canary(error, context.now())


def _resumed(context: Context, record: EndpointRecord, rollout: str, who: str) -> EndpointRecord:
    """A record whose endpoint is to answer again. One that has no model yet only waits for its first."""
    if not record.stable:
        return evolve(record, suspended=None)
    return record.with_rollout(_rollout(context, rollout, "resume", who))


def _rollout(context: Context, rollout: str, kind: Kind, who: str, run: str = "") -> Rollout:
    return Rollout(id=rollout, kind=kind, who=who, requested=context.now(), run=run)
