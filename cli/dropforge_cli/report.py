"""The parts of a `dropforge demo` report: metrics, an answer, seconds, cost, Slack messages, and the failure."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import requests
from rich.console import Console

from dropforge.base.clock import utc_now
from dropforge.base.errors import NotFound
from dropforge.base.figures import number, usd
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.money.plan import price_warnings
from dropforge.platforms import get_server, get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice
from dropforge.run.artifacts import read_artifact, read_manifest
from dropforge.run.record import Endpoint, Record, RunState
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge_local.stack.logs import read_log

from .deployment import Deployment
from .display import table, titled
from .endpoints import token_of
from .result import show_reason

LOG_LINES = 30
ANSWER_SECONDS = 120.0
ANSWER_TOKENS = 128


def show_metrics(record: Record, out: Console) -> None:
    """Print the metrics that were measured before and after the training, side by side."""
    out.print()
    out.print(titled("evaluation", f"{number(record.metrics.get('rows_eval'))} held-out rows"))
    rows = table("", "before", "after", right=("before", "after"))
    for name, value in record.metrics.items():
        before = f"{name}_before"
        if before in record.metrics:
            rows.add_row(name.replace("_", " "), number(record.metrics[before]), number(value))
    out.print(rows)


def show_answer(deployment: Deployment, record: Record, endpoint: Endpoint, out: Console) -> None:
    """Print one held-out question with the expected answer, the base model's and the endpoint's."""
    sample = held_out_sample(deployment, record)
    if sample is None:
        return
    token = token_of(deployment, deployment.store.spec(record.run))
    answer = ask(endpoint, sample["prompt"], token)
    out.print()
    out.print(titled("a held-out question", f"answered by {endpoint.model} at {endpoint.base_url}"))
    for message in sample["prompt"]:
        out.print(message["content"])
    out.print(f"expected  {sample['expected']}")
    out.print(f"base      {sample['before']}")
    out.print(f"served    {answer}", style="green" if answer.strip() == sample["expected"].strip() else "yellow")


def held_out_sample(deployment: Deployment, record: Record) -> dict[str, Any] | None:
    """Return the first held-out row among the training's artifacts; None without such rows."""
    bucket = deployment.settings.runs_bucket
    manifest = read_manifest(deployment.clients.storage(), bucket, record.run)
    if manifest is None:
        return None
    try:
        samples = json.loads(read_artifact(deployment.clients.storage(), bucket, manifest, "samples.json"))
    except NotFound:
        return None
    return dict(samples[0]) if samples else None


def ask(endpoint: Endpoint, messages: list[Any], token: str) -> str:
    """Return the endpoint's answer, requested with the ordinary openai package."""
    from openai import OpenAI

    # The package refuses an empty key; an endpoint without a token ignores any.
    with OpenAI(base_url=endpoint.base_url, api_key=token or "none", timeout=ANSWER_SECONDS) as client:
        reply = client.chat.completions.create(
            model=endpoint.model, messages=messages, temperature=0, max_tokens=ANSWER_TOKENS
        )
    return reply.choices[0].message.content or ""


def show_parity(record: Record, out: Console) -> None:
    """Print how far each link from the trained model to the endpoint differs."""
    parity, title = record.parity, "not served"
    rows = table("", "nats", right=("nats",))
    if (merged := record.metrics.get("adapter_to_merged")) is not None:
        rows.add_row("adapter to merged", f"{merged:.2g}")
    if (saved := record.metrics.get("adapter_to_saved")) is not None:
        rows.add_row("adapter to saved, beside its base", f"{saved:.2g}")
    if (exported := record.metrics.get("trained_to_exported")) is not None:
        rows.add_row("trained to exported, mean loss", f"{exported:.2g}")
    if "saved_to_reloaded" in record.metrics:
        rows.add_row("saved to reloaded", "equal in every bit")
    if parity is not None:
        title = f"{parity.state}: {parity.reason or f'{parity.rows} held-out rows, {parity.tokens} tokens'}"
    if parity is not None and parity.limit is not None:
        rows.add_row("merged to served", f"{parity.divergence:.2g}")
        rows.add_row("another attention kernel", f"{parity.floor:.2g}")
        rows.add_row("limit", f"{parity.limit:.2g}")
    if parity is None and not rows.row_count:
        return
    out.print()
    out.print(titled("parity", title))
    if rows.row_count:
        out.print(rows)


def show_stages(record: Record, out: Console) -> None:
    """Print the seconds in each stage."""
    spent = record.stage_seconds(utc_now())
    out.print()
    out.print(titled("seconds per stage", f"{sum(spent.values()):.1f} in all"))
    rows = table("", "", right=("",))
    rows.show_header = False
    for state, seconds in spent.items():
        rows.add_row(state.lower().replace("_", " "), f"{seconds:.1f}")
    out.print(rows)


def show_cost(record: Record, spec: JobSpec, out: Console) -> None:
    """Print the cost of the same seconds on the cloud, by the catalog's prices."""
    out.print()
    out.print(titled("on the cloud the same seconds would have cost"))
    target = get_target(spec.target.type)
    used = [
        (f"attempt {a.number} in {a.region}", _seconds(a.started, a.ended), target.price(spec, a.placement))
        for a in record.attempts
    ]
    if spec.serve is not None and record.endpoint is not None:
        began = next(t.time for t in record.history if t.state is RunState.DEPLOYING)
        price = get_server(spec.serve.type).price(spec, record.attempts[-1].placement)
        instances = max(1, spec.serve.min_instances)
        part = f"endpoint in {record.endpoint.region}" + (f", {instances} instances" if instances > 1 else "")
        used.append((part, _seconds(began, record.endpoint.ended), price.times(instances)))
    rows = table("", "seconds", "$ per hour", "cost", right=("seconds", "$ per hour", "cost"))
    for part, seconds, price in used:
        rows.add_row(part, f"{seconds:.1f}", usd(price.usd_per_hour), usd(_cost(price, seconds)))
    costs = [_cost(price, seconds) for _, seconds, price in used]
    rows.add_row("in all", "", "", usd(None if None in costs else sum(cost for cost in costs if cost is not None)))
    out.print(rows)
    prices = [price for _, _, price in used]
    for line in [*dict.fromkeys(map(_source, prices)), *price_warnings(prices, utc_now().date())]:
        out.print(line, style="dim")


def show_slack(deployment: Deployment, out: Console) -> None:
    """Print the Slack messages that the local stack received."""
    assert deployment.stack is not None, "only the local stack keeps Slack messages"
    response = requests.get(f"{deployment.stack.http}/slack/messages", timeout=TIMEOUT_SECONDS)
    messages = response.json()["messages"]
    out.print()
    out.print(titled("Slack", f"{len(messages)} messages as sent"))
    for message in messages:
        for index, text in enumerate(slack_texts(message["payload"])):
            for line in text.splitlines():
                out.print(f"  {line}", style="bold" if index == 0 else "")
        out.print()


def slack_texts(payload: dict[str, Any]) -> list[str]:
    """Return every text of a Block Kit message, in order."""
    texts = []
    for block in payload.get("blocks") or [{"text": {"text": payload.get("text", "")}}]:
        parts = [block["text"]] if "text" in block else block.get("elements", [])
        texts += [str(part["text"]) for part in parts if "text" in part]
    return texts


def show_failure(deployment: Deployment, store: RunStore, record: Record, out: Console) -> None:
    """Print why a run did not succeed: its error or its spec's problems, and the last lines of its containers."""
    out.print()
    out.print(titled(f"the run is {record.state}"))
    show_reason(record, out)
    for entry in store.ledger(record.run).entries:
        if deployment.stack and (text := read_log(deployment.stack.http, entry.name, LOG_LINES)):
            out.print()
            out.print(titled("the end of the log of", entry.name))
            out.print(text.rstrip("\n"))


def _seconds(began: datetime, ended: datetime | None) -> float:
    return ((ended or utc_now()) - began).total_seconds()


def _cost(price: HourlyPrice, seconds: float) -> float | None:
    return None if price.usd_per_hour is None else price.usd_per_hour * seconds / SECONDS_PER_HOUR


def _source(price: HourlyPrice) -> str:
    dated = f", as of {price.as_of}" if price.as_of else ""
    return f"price: {price.source}{dated}"
