"""`dropforge endpoints`, `serve`, `rollback`, `extend`, `budget` and `retire`: named endpoints, which outlive runs.

Each change is a message on the operations topic. The command makes the function's own checks before it publishes
(stages/rollout/trial.py), and then follows the endpoint's record.
"""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from google.api_core.exceptions import GoogleAPIError

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import CloudError, DropforgeError, InvalidSpec
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.endpoints.record import EndpointRecord, EndpointState, Rollout, RolloutState
from dropforge.spec import parts
from dropforge.spec.parse import read_part
from dropforge.spec.parts import DURATION, Canary
from dropforge.stages.rollout.elsewhere import PAGE as ELSEWHERE
from dropforge.stages.rollout.elsewhere import Unreadable, find_model, is_copy_of, is_elsewhere
from dropforge.stages.rollout.requests import Refused, Unchanged, check_new, money_problem
from dropforge.stages.rollout.traffic import Traffic, traffic
from dropforge.stages.rollout.trial import check_change

from .deployment import Deployment, connect
from .display import Column, fitting, stderr, stdout, working
from .endpoints import token_command
from .options import json_option, run_argument, state_option, state_words
from .plain import echo, echo_json
from .problems import CliError
from .runs import PUBLISH_TIMEOUT_SECONDS, find_one, signature

PAGE = "docs/endpoints.md"
URL = "base URL"
PATIENCE_SECONDS = 120.0  # for a message to become a rollout
name_argument = click.argument("name", metavar="NAME")


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also retired endpoints.")
@json_option
@state_option
def endpoints(everything: bool, as_json: bool, state: str | None) -> None:
    """List named endpoints: URL, model, requests and latency of an hour, cost and expiry."""
    context = connect(state).context
    with working("reading the endpoints, and the requests of the last hour"):
        records = [context.endpoints.record(name) for name in context.endpoints.names()]
        shown = [record for record in records if everything or record.state is not EndpointState.RETIRED]
        asked = traffic(context, shown)
    if as_json:
        echo_json([{**as_data(record), **_traffic_data(record, asked)} for record in shown])
        return
    out = stdout()
    if not shown:
        out.print(f"no endpoints yet; set serve.endpoint in a spec, or `dropforge serve RUN --as NAME` ({PAGE})")
        return
    rows, columns = fitting(shown, _columns(shown, asked), out.width)
    out.print(rows)
    if all(column.title != URL for column in columns):
        out.print()
        for record in shown:
            out.print(f"{record.name}  {record.base_url or '-'}", soft_wrap=True)
    for name, problem in asked.problems.items():
        stderr().print(f"the requests of {name} are not counted: {problem}")


def _columns(records: Sequence[EndpointRecord], asked: Traffic) -> list[Column]:
    """Return every column, in the order of the list."""
    now = utc_now()
    budget = Column(4, "budget", _budget, is_number=True)
    return [
        Column(0, "endpoint", lambda record: record.name),
        Column(1, "state", _state),
        Column(6, "run or models", _models),
        Column(8, "revision", lambda record: str(record.stable or "-"), is_number=True),
        Column(3, "requests/h", lambda record: _requests(record, asked), is_number=True),
        Column(3, "p95", lambda record: _latency(record, asked), is_number=True),
        Column(2, "at most", lambda record: _usd(record.cost(now)), is_number=True),
        *([budget] if any(record.budget for record in records) else []),
        Column(5, "expires", lambda record: f"{record.expires:%Y-%m-%d %H:%M}" if record.expires else "never"),
        Column(7, URL, lambda record: record.base_url or "-"),
    ]


@click.command()
@run_argument
@click.option("--as", "name", required=True, metavar="NAME", help="The endpoint that gets the model.")
@click.option(
    "--canary",
    metavar="FIELDS",
    help="A share of the requests first, such as `percent=10,for=30m,max_error_rate=0.01,max_latency_ratio=2`; `none`: "
    "every request at once. Default: serve.canary of the run's spec.",
)
@click.option(
    "--with",
    "changes",
    metavar="FIELDS",
    help="Fields of `serve` that differ from the spec of a run of another deployment, such as "
    "`region=europe-west4,max_instances=2`.",
)
@click.option("--again", is_flag=True, help="Start its server anew if NAME serves this model already.")
@state_option
def serve(run: str, name: str, canary: str | None, changes: str | None, again: bool, state: str | None) -> None:
    """Put the model of a finished run behind a named endpoint, without training.

    RUN is its id, the beginning of its id, the name of one run with a model, or `latest`. The model of another
    deployment is `gs://OTHER-RUNS-BUCKET/models/RUN`; an operator lists the bucket in Terraform's model_buckets.
    """
    deployment = connect(state)
    if not names.is_endpoint_name(name):
        raise CliError(parts.not_an_endpoint(name), f"{PAGE}#names")
    wanted: dict[str, Any] = {"endpoint": name, **({} if canary is None else {"canary": canary_fields(canary)})}
    wanted |= {"again": True} if again else {}
    if is_elsewhere(deployment.settings, run):
        wanted |= {"run": run, "with": {} if changes is None else _fields(changes)}
    elif changes is not None:
        raise CliError("--with is for the model of another deployment", f"{ELSEWHERE} describes it")
    else:
        found = find_one(deployment, run.rstrip("/").rpartition("/")[2], lambda each: each.has_trained, "has a model")
        wanted["run"] = found.run
    try:
        if "with" in wanted:
            _check_elsewhere(deployment, wanted)
        change(deployment, name, serve=wanted)
    except Unchanged as same:
        echo(f"{same.message}; {same.hint}")


def _check_elsewhere(deployment: Deployment, wanted: dict[str, Any]) -> None:
    """Check what the function will check, as far as the user may read the other bucket. Raises CliError, Unchanged."""
    name, context = wanted["endpoint"], deployment.context
    try:
        model = find_model(context, wanted["run"], name, wanted["with"])
        if not wanted.get("again"):
            check_new(context, name, "", lambda revision: is_copy_of(context, model, revision))
    except Unreadable:
        return  # the function's accounts may be allowed to
    except Unchanged:
        raise
    except Refused as refused:
        raise CliError(refused.message, refused.hint) from None
    except CloudError as error:
        raise CliError(error.message, error.hint) from None


@click.command()
@name_argument
@state_option
def rollback(name: str, state: str | None) -> None:
    """Let the previous model serve again; the present model is kept for another rollback."""
    deployment = connect(state)
    find_endpoint(deployment, name)
    change(deployment, name, rollback=name)


@click.command()
@name_argument
@click.argument("ttl", metavar="TTL")
@state_option
def extend(name: str, ttl: str, state: str | None) -> None:
    """Let a named endpoint live for TTL from now, such as 36h or 7d; `never` removes its expiry."""
    deployment = connect(state)
    record = find_endpoint(deployment, name)
    if ttl != "never" and not re.fullmatch(DURATION, ttl):
        meant = parts.corrected(DURATION, ttl)
        expected = "a length of time such as 36h or 7d, or never" + (f"; did you mean {meant}?" if meant else "")
        raise CliError(f"TTL is {ttl!r}; expected {expected}")
    if ttl != "never":
        echo(_cost_until(record, ttl), err=True)
    before = utc_now()

    def is_extended() -> EndpointRecord | None:
        record = deployment.context.endpoints.record(name)
        is_done = record.expires is None if ttl == "never" else record.expires is not None and record.expires > before
        return record if is_done else None

    with working("waiting for the change"):
        publish(deployment, extend={"endpoint": name, "ttl": None if ttl == "never" else ttl})
        record = _until(deployment, is_extended, f"endpoint {name} was not extended")
    echo(f"endpoint {name} expires {record.expires:%Y-%m-%d %H:%M} UTC" if record.expires else f"{name} never expires")


def _cost_until(record: EndpointRecord, ttl: str) -> str:
    """The most that an endpoint costs in a time from now, as a sentence."""
    now = utc_now()
    try:
        until = now + timedelta(seconds=parts.seconds(ttl))
    except OverflowError:
        until = datetime.max.replace(tzinfo=UTC)
    so_far, then = record.cost(now), record.cost(until)
    if so_far is None or then is None:
        return f"warning: what endpoint {record.name} costs until {until:%Y-%m-%d} is unknown: it has no known price"
    most = f"at most {_usd(then - so_far)} until {until:%Y-%m-%d %H:%M} UTC, with all instances all the time"
    limit = f"; it has spent {_budget(record)}" if record.budget else "; `dropforge budget` limits it"
    return f"endpoint {record.name} costs {most}{limit}"


@click.command()
@name_argument
@click.argument("amount", metavar="BUDGET")
@state_option
def budget(name: str, amount: str, state: str | None) -> None:
    """Set what a named endpoint may cost, such as 50/month or 5/day; `none` removes the budget.

    It counts US dollars, as if all instances ran all the time. People are warned at 80 %. At 100 %, the next sweep
    suspends the endpoint until the next day or month (UTC), or until its budget is higher.
    """
    deployment = connect(state)
    find_endpoint(deployment, name)
    wanted = budget_of(amount)
    before = utc_now()

    def is_set() -> EndpointRecord | None:
        record = deployment.context.endpoints.record(name)
        found = record.budget
        return record if (found is None if wanted is None else found is not None and found.asked > before) else None

    with working("waiting for the change"):
        rollout = publish(deployment, budget={"endpoint": name, **(wanted.model_dump() if wanted else {"usd": None})})
        record = _until(deployment, is_set, f"the budget of endpoint {name} was not changed")
    echo(f"endpoint {name} has no budget" if wanted is None else f"endpoint {name} has spent {_budget(record)}")
    if record.find(rollout) is not None:
        _follow(deployment, name, rollout)  # it resumes
    elif record.suspended:
        echo(money_problem(record, utc_now()))


def budget_of(text: str) -> parts.Budget | None:
    """Return the budget in a text like `50/month`; None for "none". Raises CliError."""
    if text == "none":
        return None
    amount, _, per = text.partition("/")
    try:
        return read_part(parts.Budget, {"usd": _number(amount.lstrip("$")), "per": per}, "serve", "budget")
    except InvalidSpec as error:
        expected = "US dollars and a period, such as 50/month or 5/day, or none"
        raise CliError(f"BUDGET is {text!r}; expected {expected}\n{error}", f"{PAGE}#budget") from None


@click.command()
@name_argument
@click.option("--model", metavar="MODEL", help="Only this model of a shared endpoint; the last one ends the endpoint.")
@state_option
def retire(name: str, model: str | None, state: str | None) -> None:
    """End a named endpoint and delete it; its name cannot be used again."""
    deployment = connect(state)
    find_endpoint(deployment, name)
    change(deployment, name, retire=name if model is None else {"endpoint": name, "model": model})


def canary_fields(text: str) -> dict[str, Any] | None:
    """Return the fields of `serve.canary` in a text like `percent=10,for=30m`; None for "none". Raises CliError."""
    if text == "none":
        return None
    fields = _fields(text)
    if "=" not in text and isinstance(_number(text), int | float):
        raise CliError(f"--canary is {text!r}; did you mean percent={text}?", f"{PAGE}#canary")
    try:
        read_part(Canary, fields, "serve", "canary")
    except InvalidSpec as error:
        expected = "percent=10,for=30m,max_error_rate=0.01,max_latency_ratio=2, or some of these fields"
        raise CliError(f"--canary is {text!r}; expected {expected}\n{error}", f"{PAGE}#canary") from None
    return fields


def _fields(text: str) -> dict[str, Any]:
    """Return the fields in a text like `region=europe-west4,max_instances=2`."""
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip(): _number(value.strip()) for name, _, value in parts}


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
    now = utc_now()
    money = {"at_most_usd": record.cost(now), "budget_spent_usd": record.spent(now)}
    computed: dict[str, Any] = {"state": record.state, "base_url": record.base_url, **money}
    if record.base is not None:
        computed["at_most_usd_by_model"] = record.cost_by_model(now)
    return {**record.model_dump(mode="json"), **computed, "token_command": token_command(record.name)}


def _traffic_data(record: EndpointRecord, asked: Traffic) -> dict[str, Any]:
    """The requests of the last hour by revision of the cloud; null where nobody counts them."""
    counted = asked.counted.get(record.name)
    data = None if counted is None else {name: each.model_dump(mode="json") for name, each in counted.items()}
    return {"last_hour": data, "last_hour_problem": asked.problems.get(record.name, "")}


def publish(deployment: Deployment, **change: Any) -> str:
    """Publish a change to the operations topic; return the id of its rollout.

    Raises CliError if this deployment takes no changes, or if the function would refuse this change now; Unchanged if
    it would change nothing.
    """
    settings = deployment.settings
    if not settings.operations_topic or not settings.rollout_workflow:
        problem = f"the configuration of {deployment.where} names no operations_topic, or no rollout_workflow"
        raise CliError(problem, "deploy this version, then `terraform output -raw dropforge_toml > dropforge.toml`")
    key, topic = uuid.uuid4().hex, settings.operations_topic
    _check(deployment, change, topic)
    publisher, data = deployment.clients.publisher(), json.dumps(change).encode()
    signed = {"idempotency_key": key, **signature(next(iter(change)))}
    sent = publisher.publish(settings.topic(topic), data, timeout=TIMEOUT_SECONDS, **signed)
    sent.result(PUBLISH_TIMEOUT_SECONDS)
    return names.rollout_id(topic, key)


def _check(deployment: Deployment, change: dict[str, Any], topic: str) -> None:
    """Check what the function will check, as far as the user may read what it reads. Raises CliError, Unchanged."""
    try:
        check_change(deployment.context, change, topic)
    except Unchanged:
        raise
    except Refused as refused:
        raise CliError(refused.message, refused.hint) from None
    except (GoogleAPIError, DropforgeError):
        return  # the function's accounts may be allowed to


def change(deployment: Deployment, name: str, **wanted: Any) -> None:
    """Publish a change and follow its rollout to the end. Raises CliError if it was refused or rolled back."""

    def is_known() -> bool:
        record = deployment.context.endpoints.find(name)
        return record is not None and record.find(rollout) is not None

    with working("waiting for the rollout"):
        rollout = publish(deployment, **wanted)
        _until(deployment, is_known, f"the change of endpoint {name} was refused, or is late")
    _follow(deployment, name, rollout)


def _follow(deployment: Deployment, name: str, rollout: str) -> None:
    """Wait until a rollout has ended, and print how. Raises CliError if it was rolled back."""

    told = ""

    def ended() -> Rollout | None:
        nonlocal told
        record = deployment.context.endpoints.record(name)
        each = record.find(rollout)
        if each is None or each.state.is_terminal:
            return each
        if told != _state(record) and not sys.stderr.isatty():
            told = _state(record)
            echo(f"endpoint {name}: {told}", err=True)
        return None

    with working("waiting for the rollout"):
        done = _until(deployment, ended, "", patience=float("inf"))
    record = deployment.context.endpoints.record(name)
    if done.state is RolloutState.ROLLED_BACK:
        why = done.error.message if done.error else "it was rolled back"
        stays = f"revision {record.stable} serves as before" if record.stable else "nothing serves behind the name"
        raise CliError(f"endpoint {name} was not changed: {why}; {stays}", done.error.hint if done.error else "")
    if done.state is RolloutState.RETIRED:
        echo(f"endpoint {name} is retired; nothing of it is left")
        return
    if record.base is not None:
        models = ", ".join(adapter.name for adapter in record.adapters)
        echo(f"{record.base_url} answers with revision {record.stable}, as models {models}")
        echo(f"call one with `dropforge chat {name}/MODEL{state_words()}`; its token: `{token_command(name)}`")
        return
    echo(f"{record.base_url} answers with revision {record.stable}, as model {name}")
    called = f"{name}{state_words()}"
    echo(f"ask it: `dropforge chat {called}`; in a program: `dropforge snippet {called}`")
    echo(f"its token: `{token_command(name)}`")


def _until(deployment: Deployment, look: Any, failure: str, patience: float = PATIENCE_SECONDS) -> Any:
    """Look until there is something; return it. Raises CliError after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise CliError(failure, f"the function's log says why: {PAGE}#requests")
        time.sleep(deployment.poll_seconds)
    return seen


def _budget(record: EndpointRecord) -> str:
    """What is spent of the budget of an endpoint."""
    spent = record.spent(utc_now())
    if record.budget is None:
        return "none"
    return f"${spent or 0.0:,.2f} of ${record.budget.usd:g}/{record.budget.per}"


def _usd(cost: float | None) -> str:
    return "unknown" if cost is None else f"${cost:,.2f}"


def _models(record: EndpointRecord) -> str:
    names = ", ".join(adapter.name for adapter in record.adapters)
    return names or (record.serving.run if record.serving else "-")


def _requests(record: EndpointRecord, asked: Traffic) -> str:
    """The requests to all revisions in the last hour."""
    counted = asked.counted.get(record.name)
    return "-" if counted is None else f"{sum(each.requests for each in counted.values()):,}"


def _latency(record: EndpointRecord, asked: Traffic) -> str:
    """The 95th percentile of the latencies of the revision that serves, in the last hour."""
    counted = asked.of(record, record.serving.revision) if record.serving and record.serving.revision else None
    return "-" if counted is None or counted.latency_ms is None else f"{counted.latency_ms:,.0f} ms"


def _state(record: EndpointRecord) -> str:
    """The state of an endpoint, and the rollout that is under way."""
    current = record.current
    if current is None:
        return str(record.state)
    if current.state is RolloutState.WATCHING and current.canary is not None:
        return f"{record.state}, canary {current.canary.percent} %"
    return f"{record.state}, {current.kind} {current.state}"
