"""The endpoint that `chat`, `token` and `snippet` call: a run's own endpoint, or a named endpoint."""

from __future__ import annotations

from typing import NamedTuple

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.endpoints.record import EndpointRecord, Revision
from dropforge.run.record import Endpoint, Record, RunState
from dropforge.spec import JobSpec
from dropforge.stages.rollout.requests import money_problem
from dropforge_console.asking import named_endpoint

from .deployment import Deployment
from .endpoints import endpoint_of, named_of
from .problems import CliError
from .runs import find_run


class Callee(NamedTuple):
    """What a command calls: a run's own endpoint or a named one, with the run whose model answers and its spec.

    `name` names it on the command line.
    """

    name: str
    endpoint: Endpoint
    record: Record
    spec: JobSpec


def callee_of(deployment: Deployment, text: str) -> Callee:
    """Return what `text` names: a named endpoint, NAME/MODEL of a shared one, or a run.

    Raises CliError if it cannot be called.
    """
    name, _, model = text.partition("/")
    named = deployment.context.endpoints.find(name) if names.is_endpoint_name(name) else None
    if named is not None and named.retired is None:
        return _named(deployment, named, model)
    record = find_run(deployment, text)
    if record.endpoint is None and record.state is RunState.SUCCEEDED:
        serve = deployment.store.spec(record.run).serve
        if serve is not None and serve.share:
            return _shared(deployment, record, serve.endpoint)
        if serve is not None and serve.endpoint and (named := deployment.context.endpoints.find(serve.endpoint)):
            return _named(deployment, named)
    return Callee(record.run, endpoint_of(record), record, deployment.store.spec(record.run))


def _shared(deployment: Deployment, record: Record, name: str | None) -> Callee:
    """The shared endpoint that serves the adapter of a run. Raises CliError if none does."""
    for named in named_of(deployment.context.endpoints, record.run):
        for adapter in named.adapters:
            if adapter.run == record.run and name in (None, named.name):
                return _named(deployment, named, adapter.name)
    raise CliError(f"no shared endpoint serves the model of {record.run} any more", "`dropforge endpoints` lists all")


def _named(deployment: Deployment, named: EndpointRecord, model: str = "") -> Callee:
    serving = named.serving
    if named.suspended:
        raise CliError(money_problem(named, utc_now()), f"`dropforge budget {named.name} 50/month` sets another budget")
    if serving is None:
        raise CliError(f"endpoint {named.name} is {named.state} and does not answer", "`dropforge endpoints` lists all")
    run = _run_of(named, serving, model)
    record = deployment.store.record(run)
    endpoint = named_endpoint(named, serving, model)
    return Callee(f"{named.name}/{model}" if model else named.name, endpoint, record, deployment.store.spec(run))


def _run_of(named: EndpointRecord, serving: Revision, model: str) -> str:
    """The run whose model answers as `model`. Raises CliError for a model that the endpoint does not serve."""
    if not model:
        return serving.run
    adapter = serving.adapter(model)
    if adapter is None:
        known = ", ".join(f"{named.name}/{each.name}" for each in serving.adapters) or named.name
        raise CliError(f"endpoint {named.name} serves no model {model!r}; there are: {known}")
    return adapter.run
