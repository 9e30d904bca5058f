"""Stage `deploy`: advance a trained run towards an endpoint that answers as the exported model does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState
from dropforge.money.limits import MIN_ATTEMPT_SECONDS, endpoint_expiry, kept_until, serving_price
from dropforge.platforms.serving import START_HINT, Deployment, endpoint_key
from dropforge.platforms.training import Waits, launch_of
from dropforge.run.record import Endpoint, Record, ResourceState, RunError, RunState
from dropforge.run.starts import read_start
from dropforge.spec import JobSpec, seconds
from dropforge.tell.run_events import announce

from .answers import Failed, Pending, Ready, Superseded, failed, superseded
from .completion import completion_problem
from .looks import next_look_since
from .parity import compare
from .rollout.canary import canary_of
from .rollout.requests import Refused, put_behind
from .waits import cancelled_while, note_endpoint_refusal, note_endpoint_wait

DeployAnswer = Ready | Pending | Failed | Superseded


def deploy(context: Context, run: str, execution: str) -> DeployAnswer:
    """Create the endpoint of a run and wait until it answers, or say why it does not.

    Raises NotFound for an unknown run, CloudError if another try may succeed.
    """
    spec, asked = context.store.spec(run), context.now()
    record = context.store.update(run, lambda latest: _enter(latest, execution, spec, asked))
    if record.execution != execution or record.state.is_terminal:
        return superseded(record)
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, cancelled_while(record.endpoint_wait_reason, "deploying"))
    if record.endpoint:
        return Ready(url=record.endpoint.url)
    announce(context, record, RunState.DEPLOYING)
    try:
        return (
            _put_behind(context, record, spec) if spec.serve and spec.serve.is_named else _deploy(context, record, spec)
        )
    except CloudError as error:
        is_nothing = error.did_nothing and asked in (_began(record), record.endpoint_asked)
        if is_nothing or error.error_class is ErrorClass.TRANSIENT:
            note_endpoint_refusal(context, record, error.message, _began(record), nothing_exists=is_nothing)
        if error.error_class is ErrorClass.TRANSIENT and context.now() < _start_ends(record, spec):
            raise
        context.log(error.message, stage="deploy", run=run, severity="WARNING", error_class=error.error_class)
        return failed(error.error_class, error.message, error.hint)


def _enter(record: Record, execution: str, spec: JobSpec, now: datetime) -> Record:
    """The record in DEPLOYING, with a note of the endpoint's price: a later catalog does not change it."""
    if record.execution != execution or record.state.is_terminal or record.cancel_requested or record.endpoint:
        return record
    if record.state is RunState.DEPLOYING:
        return record.with_endpoint_request(now)
    entered = record.entered(RunState.DEPLOYING, now)
    # A named endpoint counts its own costs: it outlives the run.
    is_own = spec.serve is None or not spec.serve.is_named
    price = serving_price(spec, record.attempts[-1].placement).usd_per_hour if is_own else 0.0
    return evolve(entered, serving_usd_per_hour=price)


def _put_behind(context: Context, record: Record, spec: JobSpec) -> DeployAnswer:
    """Advance towards a named endpoint that serves the run's model. The rollout has its own execution."""
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    who, name = f"run {record.run}", spec.serve.endpoint or ""
    try:
        canary = canary_of(spec.serve.canary)
        endpoint = put_behind(context, record, spec, name, record.run, who, record.topic, canary)
    except Refused as refused:
        return failed(ErrorClass.CONFIG, refused.message, refused.hint)
    rollout, now = endpoint.rollout(record.run), context.now()
    if rollout.state is RolloutState.PROMOTED:
        _note_rollout(context, record, endpoint, rollout)
        return Ready(url=endpoint.url)
    if rollout.state.is_terminal:
        error = rollout.error or RunError(error_class=ErrorClass.CODE, message=f"its rollout is {rollout.state}")
        return failed(error.error_class, error.message, error.hint)
    note_endpoint_wait(context, record, rollout.wait_reason or f"its rollout is {rollout.state}", _began(record))
    usual = context.platforms.start_seconds(spec.serve.type)
    deadline = now + timedelta(hours=1)  # the rollout has its own deadline, and other rollouts may come before it
    return Pending(wait_seconds=next_look_since(_began(record), now, usual), deadline=deadline.timestamp())


def _note_rollout(context: Context, record: Record, endpoint: EndpointRecord, rollout: Rollout) -> None:
    """Note what the rollout has found out about the run's model."""
    revision = endpoint.revision(rollout.revision)
    own = next((adapter for adapter in revision.adapters if adapter.run == record.run), None)
    parity = own.parity if own else revision.parity
    context.store.update(
        record.run,
        lambda latest: (
            evolve(latest, parity=parity, endpoint_wait_reason="") if latest.state is RunState.DEPLOYING else latest
        ),
    )


def _deploy(context: Context, record: Record, spec: JobSpec) -> DeployAnswer:
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    store, server = context.store, context.platforms.server(spec.serve.type)
    began = _began(record)
    # The expiry label is set when the endpoint is created, so that it expires even if no stage looks at it again.
    paid_until = endpoint_expiry(record, spec, record.serving_began or began)
    expires = min(paid_until, kept_until(record, spec))
    if (expires - began).total_seconds() < MIN_ATTEMPT_SECONDS:
        return _nothing_left(record, spec, began)
    if context.now() >= expires:  # the sweep would delete the endpoint at once
        return _too_late(spec, expires)
    launch = launch_of(record, spec, context.settings, key=store.key(record.run))
    deployment = Deployment(record.run, spec, context.settings, expires, launch)
    resources = server.resources(deployment)
    entries = [(resource.kind, resource.name) for resource in resources]
    if not store.intend_all(record, entries, record.attempt, lambda latest: latest.state is RunState.DEPLOYING):
        return superseded(store.record(record.run))
    url = server.deploy(context.cloud, deployment)
    if isinstance(url, Waits):
        note_endpoint_wait(context, record, url.reason, began)
        return _not_ready(context, deployment, began, lambda: server.why_not_ready(context.cloud, deployment))
    key = endpoint_key(context.cloud, spec)
    if problem := completion_problem(context.cloud, url, spec.name, key):
        # Not the problem itself: its text differs at each look, and the record would be written again and again.
        note_endpoint_wait(context, record, "the server does not answer a completion yet", began)
        return _not_ready(context, deployment, began, lambda: CloudError(ErrorClass.CODE, problem, START_HINT))
    if unfinished := _compare(context, record, spec, url, key):
        note_endpoint_wait(context, record, "its answers are being compared with the model's", began)
        return _not_ready(context, deployment, began, lambda: unfinished)
    ready = context.now()
    if ready >= expires:
        return _too_late(spec, expires)
    service, region = resources[0].name, server.region(deployment)
    endpoint = _endpoint(spec, url, service, region, began, ready, expires, paid_until)
    start = read_start(context.cloud.clients.storage(), context.settings.runs_bucket, record.run)
    endpoint = evolve(endpoint, start=start)
    return _ready(context, record, endpoint, [resource.name for resource in resources])


def _compare(context: Context, record: Record, spec: JobSpec, url: str, key: str) -> CloudError | None:
    """Compare the endpoint with the model's seal and note the result; why the comparison is not over, or None.

    Raises CloudError of the class PARITY if the endpoint differs from its model.
    """
    parity, error = compare(context, record.run, record.parity, url, spec.name, key)

    def change(latest: Record) -> Record:
        return evolve(latest, parity=parity) if latest.state is RunState.DEPLOYING else latest

    if parity != record.parity:
        context.store.update(record.run, change)
        context.log(f"parity: {parity.state}", stage="deploy", run=record.run, **parity.model_dump(exclude={"state"}))
    if error is not None and error.error_class is ErrorClass.PARITY:
        raise error
    unfinished = CloudError(ErrorClass.CODE, f"{parity.rows} rows have been compared with the model", START_HINT)
    return error or (None if parity.is_over else unfinished)


def _ready(context: Context, record: Record, endpoint: Endpoint, resources: list[str]) -> Ready | Superseded:
    """Note the endpoint. A late call, after teardown, must not note an endpoint that was deleted."""

    def change(latest: Record) -> Record:
        if latest.state is not RunState.DEPLOYING:
            return latest
        created = latest.with_ledger(lambda ledger: ledger.with_state(resources, ResourceState.CREATED, endpoint.ready))
        return evolve(created, endpoint=endpoint, endpoint_wait_reason="")

    record = context.store.update(record.run, change)
    if record.endpoint is None:
        return superseded(record)
    context.log("ready", stage="deploy", run=record.run, url=endpoint.url)
    return Ready(url=endpoint.url)


def _endpoint(
    spec: JobSpec,
    url: str,
    service: str,
    region: str,
    began: datetime,
    ready: datetime,
    expires: datetime,
    paid_until: datetime,
) -> Endpoint:
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    ttl = timedelta(seconds=seconds(spec.serve.ttl))
    allowed = min(ready, began + timedelta(seconds=seconds(spec.serve.startup_timeout))) + ttl
    return Endpoint(
        url=url,
        model=spec.name,
        service=service,
        region=region,
        ready=ready,
        expires=min(expires, ready + ttl),
        limit="max_cost_usd" if paid_until < allowed else "ttl",
    )


def _began(record: Record) -> datetime:
    """When the run entered DEPLOYING."""
    return next(t.time for t in record.history if t.state is RunState.DEPLOYING)


def _start_ends(record: Record, spec: JobSpec) -> datetime:
    """When the endpoint must be ready."""
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    return _began(record) + timedelta(seconds=seconds(spec.serve.startup_timeout))


def _nothing_left(record: Record, spec: JobSpec, began: datetime) -> Failed:
    message = f"{record.training_cost(began):.2f} of {spec.limits.max_cost_usd:g} USD are spent"
    hint = "the model is kept; raise limits.max_cost_usd"
    return failed(ErrorClass.BUDGET, f"nothing is left for the endpoint: {message}", hint)


def _too_late(spec: JobSpec, expires: datetime) -> Failed:
    """The endpoint would be ready only after its expiry."""
    error_class = ErrorClass.DEADLINE if spec.limits.max_cost_usd is None else ErrorClass.BUDGET
    return failed(error_class, f"the endpoint's time was over at {expires:%H:%M:%S}, before it was ready", START_HINT)


def _not_ready(
    context: Context, deployment: Deployment, began: datetime, problem: Callable[[], CloudError]
) -> Pending | Failed:
    """Pending until the spec's startup_timeout is over; then a failure, for which `problem` gives the reason."""
    assert deployment.spec.serve is not None, "the workflow deploys only runs that serve"
    patience = timedelta(seconds=seconds(deployment.spec.serve.startup_timeout))
    ends = min(began + patience, deployment.expires)
    if (now := context.now()) < ends:
        usual = context.platforms.start_seconds(deployment.spec.serve.type)
        look = next_look_since(began, now, usual, ends)
        return Pending(wait_seconds=look, deadline=ends.timestamp())
    error, waited = problem(), (ends - began).total_seconds()
    if ends < began + patience:
        message = f"the budget paid for {waited:.0f} s of an endpoint that was not ready: {error.message}"
        return failed(ErrorClass.BUDGET, message, "the model is kept; raise limits.max_cost_usd")
    return failed(error.error_class, f"the endpoint was not ready after {waited:.0f} s: {error.message}", error.hint)
