"""The endpoint that `chat`, `token` and `snippet` call: a run's own endpoint, or a named endpoint."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from dropforge.base import names
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.record import Endpoint, Record, RunState
from dropforge.spec import JobSpec

from .deployment import Deployment
from .endpoints import endpoint_of
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
    """Return what `text` names: a named endpoint, else a run. Raises CliError if it cannot be called."""
    named = deployment.context.endpoints.find(text) if names.is_endpoint_name(text) else None
    if named is not None and named.retired is None:
        return _named(deployment, named)
    record = find_run(deployment.store, text)
    if record.endpoint is None and record.state is RunState.SUCCEEDED:
        serve = deployment.store.spec(record.run).serve
        if serve is not None and serve.endpoint and (named := deployment.context.endpoints.find(serve.endpoint)):
            return _named(deployment, named)
    return Callee(record.run, endpoint_of(record), record, deployment.store.spec(record.run))


def _named(deployment: Deployment, named: EndpointRecord) -> Callee:
    serving = named.serving
    if serving is None:
        raise CliError(f"endpoint {named.name} is {named.state} and does not answer", "`dropforge endpoints` lists all")
    record = deployment.store.record(serving.run)
    endpoint = Endpoint(
        url=named.url,
        model=named.name,
        service=named.service,
        region=named.region,
        ready=serving.promoted or named.created,
        expires=named.expires or datetime.max.replace(tzinfo=UTC),
    )
    return Callee(named.name, endpoint, record, deployment.store.spec(serving.run))
