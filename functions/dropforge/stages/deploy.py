"""Stage `deploy`: advance a trained run towards an endpoint that has answered a real completion."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.log import log
from dropforge.base.settings import settings
from dropforge.cloud import clients
from dropforge.cloud.classify import client_errors
from dropforge.money import endpoint_expiry, kept_until, serving_price
from dropforge.platforms import get_server
from dropforge.platforms.serving import START_HINT, Deployment
from dropforge.run.record import Endpoint, Record, ResourceState, RunState, utc_now
from dropforge.run.store import RunStore, open_store
from dropforge.spec import JobSpec, seconds

from .admission import MIN_ATTEMPT_SECONDS
from .answers import failed, superseded, waiting
from .notify import announce
from .provision import launch_of

COMPLETION_TIMEOUT_SECONDS = 120
RETRY_SECONDS = 5


def deploy(run: str, execution: str) -> dict[str, Any]:
    """Make the endpoint of a run exist and answer, or report why it does not. Raises NotFound for an unknown run.

    Answers {"status": "READY" | "PENDING" | "FAILED" | "CANCELLED" | "SUPERSEDED", ...}.
    """
    store = open_store()
    spec = store.spec(run)
    record = store.update(run, lambda found: _enter(found, execution, spec))
    if record.execution != execution or record.state.is_terminal:
        return superseded(record)
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, "cancelled while deploying")
    if record.endpoint:
        return {"status": "READY", "url": record.endpoint.url}
    announce(record, RunState.DEPLOYING)
    try:
        return _deploy(store, record, spec)
    except CloudError as error:
        if error.error_class is ErrorClass.TRANSIENT and utc_now() < _ends(record, spec):
            raise
        log(error.message, stage="deploy", run=run, severity="WARNING", error_class=error.error_class)
        return failed(error.error_class, error.message, error.hint)


def _deploy(store: RunStore, record: Record, spec: JobSpec) -> dict[str, Any]:
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    server = get_server(spec.serve.type)
    began = next(t.time for t in record.history if t.state is RunState.DEPLOYING)
    # The label is set when the service is made, so that it expires even if nobody ever looks at it again.
    paid_until = endpoint_expiry(record, spec, began)
    expires = min(paid_until, kept_until(record, spec))
    if (expires - began).total_seconds() < MIN_ATTEMPT_SECONDS:
        message = f"{record.training_cost(began):.2f} of {spec.limits.max_cost_usd:g} USD are spent"
        hint = "the model is kept; raise limits.max_cost_usd"
        return failed(ErrorClass.BUDGET, f"nothing is left for the endpoint: {message}", hint)
    if utc_now() >= expires:  # what is made now would be swept at once
        return _too_late(spec, expires)
    deployment = Deployment(record.run, spec, settings(), expires, launch_of(record, spec))
    resources = server.resources(deployment)
    entries = [(resource.kind, resource.name) for resource in resources]
    if not store.intend_all(record.run, entries, record.attempt, lambda found: found.state is RunState.DEPLOYING):
        return superseded(store.record(record.run))
    url = server.deploy(deployment)
    if url is None:
        return _not_yet(deployment, began, lambda: server.why_not_ready(deployment))
    if problem := completion_problem(url, spec.name):
        return _not_yet(deployment, began, lambda: CloudError(ErrorClass.CODE, problem, START_HINT))
    for resource in resources:
        store.note(record.run, resource.name, ResourceState.CREATED)
    ready, ttl = utc_now(), timedelta(seconds=seconds(spec.serve.ttl))
    if ready >= expires:
        return _too_late(spec, expires)
    allowed = min(ready, began + timedelta(seconds=seconds(spec.serve.startup_timeout))) + ttl
    endpoint = Endpoint(
        url=url,
        model=spec.name,
        service=resources[0].name,
        region=server.region(deployment),
        ready=ready,
        expires=min(expires, ready + ttl),
        limit="max_cost_usd" if paid_until < allowed else "ttl",
    )
    record = store.update(record.run, lambda found: _with_endpoint(found, endpoint))
    if record.endpoint is None:
        return superseded(record)
    log("ready", stage="deploy", run=record.run, url=url)
    return {"status": "READY", "url": url}


def _ends(record: Record, spec: JobSpec) -> datetime:
    """When the endpoint must be ready."""
    assert spec.serve is not None, "the workflow deploys only runs that serve"
    began = next(t.time for t in record.history if t.state is RunState.DEPLOYING)
    return began + timedelta(seconds=seconds(spec.serve.startup_timeout))


def _too_late(spec: JobSpec, expires: datetime) -> dict[str, Any]:
    """An endpoint that is ready only when it must be gone is none."""
    found = ErrorClass.DEADLINE if spec.limits.max_cost_usd is None else ErrorClass.BUDGET
    return failed(found, f"the endpoint's time was over at {expires:%H:%M:%S}, before it was ready", START_HINT)


def completion_problem(url: str, model: str) -> str:
    """Why the endpoint does not answer a one-token completion; "" when it does.

    A health check is not enough: an engine can be healthy and fail every request.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    failures: tuple[type[Exception], ...] = (*client_errors(), ValueError, LookupError, TypeError)
    try:
        session = clients.endpoint(url)
        response = session.post(f"{url}/v1/chat/completions", json=body, timeout=COMPLETION_TIMEOUT_SECONDS)
        if response.status_code != 200:
            return f"a completion was answered with {response.status_code}: {response.text[:300]}"
        response.json()["choices"][0]["message"]
    except failures as error:
        return f"a completion failed: {error!r}"[:400]
    return ""


def _enter(record: Record, execution: str, spec: JobSpec) -> Record:
    """What the endpoint costs is pinned here, as an attempt's price is when it is opened."""
    if record.execution != execution or record.state.is_terminal or record.cancel_requested or record.endpoint:
        return record
    if record.state is RunState.DEPLOYING:
        return record
    entered = record.entered(RunState.DEPLOYING, utc_now())
    return entered.model_copy(update={"serving_usd_per_hour": serving_price(spec).usd_per_hour})


def _with_endpoint(record: Record, endpoint: Endpoint) -> Record:
    """A call that comes late, after teardown, must not note an endpoint that is gone."""
    return record.model_copy(update={"endpoint": endpoint}) if record.state is RunState.DEPLOYING else record


def _not_yet(deployment: Deployment, began: datetime, problem: Callable[[], CloudError]) -> dict[str, Any]:
    """Wait as long as the spec allows; then `problem` says why it was for nothing."""
    assert deployment.spec.serve is not None
    patience = timedelta(seconds=seconds(deployment.spec.serve.startup_timeout))
    ends = min(began + patience, deployment.expires)
    if utc_now() < ends:
        return {**waiting("PENDING", RETRY_SECONDS), "deadline": ends.timestamp()}
    error, waited = problem(), (ends - began).total_seconds()
    if ends < began + patience:
        message = f"the budget paid for {waited:.0f} s of an endpoint that was not ready: {error.message}"
        return failed(ErrorClass.BUDGET, message, "the model is kept; raise limits.max_cost_usd")
    return failed(error.error_class, f"the endpoint was not ready after {waited:.0f} s: {error.message}", error.hint)
