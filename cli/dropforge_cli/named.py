"""`dropforge endpoints`, `serve`, `rollback`, `extend` and `retire`: named endpoints, which outlive runs.

Each change is a message on the operations topic. The command checks what it can before it publishes, and then follows
the endpoint's record.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from contextlib import suppress
from typing import Any

import click
from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.endpoints.record import EndpointRecord, EndpointState, Rollout, RolloutState
from dropforge.spec.parts import DURATION, Canary

from .deployment import Deployment, connect
from .display import stdout, table, working
from .options import json_option, run_argument, state_option
from .plain import echo, echo_json
from .problems import CliError
from .runs import PUBLISH_TIMEOUT_SECONDS, find_run

PAGE = "docs/endpoints.md"
PATIENCE_SECONDS = 120.0  # for a message to become a rollout
name_argument = click.argument("name", metavar="NAME")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also retired endpoints.")
@json_option
@state_option
def endpoints(everything: bool, as_json: bool, state: str | None) -> None:
    """List named endpoints: URL, model, cost and expiry."""
    store, now = connect(state).context.endpoints, utc_now()
    records = [store.record(name) for name in store.names()]
    shown = [record for record in records if everything or record.state is not EndpointState.RETIRED]
    if as_json:
        echo_json([as_data(record) for record in shown])
        return
    if not shown:
        stdout().print(f"no endpoints yet; set serve.endpoint in a spec, or `dropforge serve RUN --as NAME` ({PAGE})")
        return
    rows = table("endpoint", "state", "run", "revision", "at most", "expires", "base URL", right=("at most",))
    for record in shown:
        serving, cost = record.serving, record.cost(now)
        rows.add_row(
            record.name,
            _state(record),
            serving.run if serving else "-",
            str(record.stable or "-"),
            "unknown" if cost is None else f"${cost:,.2f}",
            f"{record.expires:%Y-%m-%d %H:%M}" if record.expires else "never",
            record.base_url or "-",
        )
    stdout().print(rows)


@click.command()
@run_argument
@click.option("--as", "name", required=True, metavar="NAME", help="The endpoint that gets the model.")
@click.option(
    "--canary",
    metavar="FIELDS",
    help="A share of the requests first, such as `percent=10,for=30m,max_error_rate=0.01,max_latency_ratio=2`; `none`: "
    "every request at once. Default: serve.canary of the run's spec.",
)
@state_option
def serve(run: str, name: str, canary: str | None, state: str | None) -> None:
    """Put the model of a finished run behind a named endpoint, without training.

    RUN is its id, the beginning of its id, a name (the newest run of that name), or `latest`.
    """
    deployment = connect(state)
    record = find_run(deployment.store, run)
    if not names.is_endpoint_name(name):
        raise CliError(f"{name!r} is not the name of an endpoint", f"{PAGE}#names says which names are allowed")
    wanted = {} if canary is None else {"canary": canary_fields(canary)}
    _change(deployment, name, serve={"run": record.run, "endpoint": name, **wanted})


@click.command()
@name_argument
@state_option
def rollback(name: str, state: str | None) -> None:
    """Let the model that served before serve again; what serves now is kept for another rollback."""
    deployment = connect(state)
    record = find_endpoint(deployment, name)
    if not record.previous and record.current is None:
        hint = f"`dropforge serve RUN --as {name}` serves the model of any run"
        raise CliError(f"endpoint {name} has no model before the present one", hint)
    _change(deployment, name, rollback=name)


@click.command()
@name_argument
@click.argument("ttl", metavar="TTL")
@state_option
def extend(name: str, ttl: str, state: str | None) -> None:
    """Let a named endpoint live for TTL from now, such as 36h or 7d; `never` removes its expiry."""
    deployment = connect(state)
    find_endpoint(deployment, name)
    if ttl != "never" and not re.fullmatch(DURATION, ttl):
        raise CliError(f"TTL is {ttl!r}; expected how long, such as 36h or 7d, or never")
    before = utc_now()
    publish(deployment, extend={"endpoint": name, "ttl": None if ttl == "never" else ttl})

    def is_extended() -> EndpointRecord | None:
        record = deployment.context.endpoints.record(name)
        is_done = record.expires is None if ttl == "never" else record.expires is not None and record.expires > before
        return record if is_done else None

    with working("waiting for the change"):
        record = _until(deployment, is_extended, f"endpoint {name} was not extended")
    echo(f"endpoint {name} expires {record.expires:%Y-%m-%d %H:%M} UTC" if record.expires else f"{name} never expires")


@click.command()
@name_argument
@state_option
def retire(name: str, state: str | None) -> None:
    """End a named endpoint and delete it; its name cannot be used again."""
    deployment = connect(state)
    find_endpoint(deployment, name)
    _change(deployment, name, retire=name)


def canary_fields(text: str) -> dict[str, Any] | None:
    """Return the fields of `serve.canary` in a text like `percent=10,for=30m`; None for "none". Raises CliError."""
    if text == "none":
        return None
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        fields[name.strip()] = _number(value.strip())
    try:
        Canary.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        expected = "percent=10,for=30m,max_error_rate=0.01,max_latency_ratio=2, or some of these fields"
        raise CliError(f"--canary {text!r}: {where}: {problem['msg']}; expected {expected}", f"{PAGE}#canary") from None
    return fields


def _number(value: str) -> int | float | str:
    """The number in a text; the text if it is none."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def find_endpoint(deployment: Deployment, name: str) -> EndpointRecord:
    """Return the record of a named endpoint that is not retired. Raises CliError."""
    store = deployment.context.endpoints
    record = store.find(name) if names.is_endpoint_name(name) else None
    if record is None:
        known = ", ".join(sorted(store.names())) or "none"
        raise CliError(f"there is no endpoint {name!r}; there are: {known}", "`dropforge endpoints` lists them")
    if record.retired:
        raise CliError(f"endpoint {name} was retired at {record.retired:%Y-%m-%d %H:%M} UTC", "choose another name")
    return record


def as_data(record: EndpointRecord) -> dict[str, Any]:
    """Return a record as JSON for programs, with computed fields."""
    computed = {"state": record.state, "base_url": record.base_url, "at_most_usd": record.cost(utc_now())}
    return {**record.model_dump(mode="json"), **computed, "token_command": f"dropforge token {record.name}"}


def publish(deployment: Deployment, **change: Any) -> str:
    """Publish a change to the operations topic; return the id of its rollout. Raises CliError."""
    settings = deployment.settings
    if not settings.operations_topic or not settings.rollout_workflow:
        problem = f"the configuration of {deployment.where} names no operations_topic, or no rollout_workflow"
        raise CliError(problem, "deploy this version, then `terraform output -raw dropforge_toml > dropforge.toml`")
    key, topic = uuid.uuid4().hex, settings.operations_topic
    publisher, data = deployment.clients.publisher(), json.dumps(change).encode()
    sent = publisher.publish(settings.topic(topic), data, idempotency_key=key, timeout=TIMEOUT_SECONDS)
    sent.result(PUBLISH_TIMEOUT_SECONDS)
    return names.rollout_id(topic, key)


def _change(deployment: Deployment, name: str, **change: Any) -> None:
    """Publish a change and follow its rollout to the end. Raises CliError if it was refused or rolled back."""
    rollout = publish(deployment, **change)

    def found() -> Rollout | None:
        record = deployment.context.endpoints.find(name)
        return record.find(rollout) if record else None

    def ended() -> Rollout | None:
        each = found()
        return each if each and each.state.is_terminal else None

    with working("waiting for the rollout"):
        _until(deployment, found, f"the change of endpoint {name} was refused")
        done = _until(deployment, ended, "", patience=float("inf"))
    record = deployment.context.endpoints.record(name)
    if done.state is RolloutState.ROLLED_BACK:
        why = done.error.message if done.error else "it was rolled back"
        stays = f"revision {record.stable} serves as before" if record.stable else "nothing serves behind the name"
        raise CliError(f"endpoint {name} was not changed: {why}; {stays}", done.error.hint if done.error else "")
    if done.state is RolloutState.RETIRED:
        echo(f"endpoint {name} is retired; nothing of it is left")
        return
    echo(f"{record.base_url} answers with revision {record.stable}, as model {name}")
    echo(f"call it with `dropforge chat {name}` or `dropforge snippet {name}`; its token: `dropforge token {name}`")


def _until(deployment: Deployment, look: Any, failure: str, patience: float = PATIENCE_SECONDS) -> Any:
    """Look until there is something; return it. Raises CliError after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise CliError(failure, f"the function's log says why: {PAGE}#requests")
        time.sleep(deployment.poll_seconds)
    return seen


def _state(record: EndpointRecord) -> str:
    """The state of an endpoint, and the rollout that is under way."""
    current = record.current
    return str(record.state) if current is None else f"{record.state}, {current.kind} {current.state}"
