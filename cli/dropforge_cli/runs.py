"""`dropforge runs`, `status` and `cancel`: what the runs bucket says, and the one request that changes it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import click
from rich.console import Console

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import NotFound
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.run.record import Ledger, Record, RunState
from dropforge.run.store import RunStore

from .deployment import Deployment, connect
from .display import duration, number, stderr, stdout, table, titled, usd
from .follow import Follower, Snapshot, bar, watch
from .options import json_option, state_option
from .problems import FAILED, CliError

READERS = 16  # a record is one request; many runs are read at once
PUBLISH_TIMEOUT_SECONDS = 20


@click.command()
@json_option
@state_option
def runs(as_json: bool, state: str | None) -> None:
    """List every run, the newest first."""
    found, now = all_runs(connect(state).store), utc_now()
    if as_json:
        click.echo(json.dumps([record_json(record, now) for record in found], indent=2))
        return
    rows = table("run", "name", "state", "attempt", "created", "cost", right=("attempt", "cost"))
    for record in found:
        created = f"{record.created:%Y-%m-%d %H:%M:%S}"
        cost = usd(record.training_cost(now))
        rows.add_row(record.run, record.name, record.state, str(record.attempt or "-"), created, cost)
    stdout().print(rows if found else "no runs yet; `dropforge submit SPEC` makes one")


@click.command()
@click.argument("run")
@click.option("--watch", "watched", is_flag=True, help="Follow it to its end; exit 1 unless it succeeds.")
@json_option
@state_option
def status(run: str, watched: bool, as_json: bool, state: str | None) -> None:
    """Show all that is known about a run; RUN may be the beginning of its id."""
    deployment = connect(state)
    store = deployment.store
    record = find_run(store, run)
    succeeded = True
    if watched and not record.state.is_terminal:
        succeeded = watch(deployment, record.run, stderr() if as_json else stdout())
    snapshot = Follower(store, record.run).look()
    assert snapshot is not None, "a record is never deleted"
    if as_json:
        click.echo(json.dumps(record_json(snapshot.record, utc_now(), store.ledger(record.run)), indent=2))
    else:
        show(snapshot, store.ledger(record.run), stdout())
    if watched and not (succeeded and snapshot.record.state is RunState.SUCCEEDED):
        raise SystemExit(FAILED)


@click.command()
@click.argument("run")
@state_option
def cancel(run: str, state: str | None) -> None:
    """Ask for the end of a run, or of a finished run's endpoint."""
    deployment = connect(state)
    record = find_run(deployment.store, run)
    request_cancel(deployment, record.run)
    if not record.state.is_terminal:
        click.echo(f"asked for the end of {record.run}; `dropforge status {record.run} --watch` follows it")
    elif record.endpoint and not record.endpoint.ended:
        click.echo(f"{record.run} is {record.state}; asked for the end of its endpoint")
    else:
        click.echo(f"{record.run} is {record.state} already and has no endpoint")


def request_cancel(deployment: Deployment, run: str) -> None:
    """Publish {"cancel": run} to the requests topic."""
    topic = deployment.settings.topic(deployment.settings.requests_topic)
    data = json.dumps({"cancel": run}).encode()
    deployment.clients.publisher().publish(topic, data, timeout=TIMEOUT_SECONDS).result(PUBLISH_TIMEOUT_SECONDS)


def all_runs(store: RunStore) -> list[Record]:
    """Every run's record, the newest first."""
    with ThreadPoolExecutor(READERS) as pool:
        found = [record for record in pool.map(store.find, store.runs()) if record is not None]
    return sorted(found, key=lambda record: record.created, reverse=True)


def find_run(store: RunStore, text: str) -> Record:
    """The run with that id, or the one whose id begins with it. Raises CliError."""
    if names.is_run_id(text):
        try:
            return store.record(text)
        except NotFound:
            raise CliError(f"there is no run {text!r}", "`dropforge runs` lists them") from None
    matching = [run for run in store.runs() if run.startswith(text)]
    if len(matching) == 1:
        return store.record(matching[0])
    if not matching:
        raise CliError(f"there is no run that begins with {text!r}", "`dropforge runs` lists them")
    raise CliError(f"{text!r} is the beginning of {len(matching)} runs: {', '.join(matching[:5])}", "write more of it")


def record_json(record: Record, now: datetime, ledger: Ledger | None = None) -> dict[str, Any]:
    """A record for programs, with what is computed from it."""
    computed: dict[str, Any] = {
        "attempt": record.attempt,
        "stage_seconds": record.stage_seconds(now),
        "training_cost_usd": record.training_cost(now),
    }
    if ledger is not None:
        computed["ledger"] = [entry.model_dump(mode="json") for entry in ledger.entries]
    return {**record.model_dump(mode="json"), **computed}


def show(snapshot: Snapshot, ledger: Ledger, out: Console) -> None:
    """All that is known about a run, for people."""
    record, now = snapshot.record, utc_now()
    out.print(titled(record.run, f"{record.name}  {record.state}"))
    out.print(f"from {record.source}, created {record.created:%Y-%m-%d %H:%M:%S} UTC")
    if record.cancel_requested and not record.state.is_terminal:
        out.print(f"cancel requested at {record.cancel_requested:%H:%M:%S}")
    _show_stages(record, now, out)
    if snapshot.progress is not None and record.state is RunState.TRAINING:
        out.print(bar(snapshot.progress))
    _show_attempts(record, now, out)
    _show_result(record, out)
    if ledger.entries:
        rows = table("resource", "state")
        for entry in ledger.entries:
            rows.add_row(entry.name, entry.state)
        out.print(rows)


def _show_stages(record: Record, now: datetime, out: Console) -> None:
    spent = record.stage_seconds(now)
    if spent:
        out.print(", ".join(f"{state.lower()} {duration(length)}" for state, length in spent.items()))


def _show_attempts(record: Record, now: datetime, out: Console) -> None:
    if not record.attempts:
        return
    rows = table("attempt", "region", "started", "lasted", "ended with", right=("attempt", "lasted"))
    for attempt in record.attempts:
        lasted = duration(((attempt.ended or now) - attempt.started).total_seconds())
        ending = str(attempt.error.error_class) if attempt.error else ("success" if attempt.ended else "-")
        rows.add_row(str(attempt.number), attempt.region, f"{attempt.started:%H:%M:%S}", lasted, ending)
    out.print(rows)
    out.print(f"training cost so far: {usd(record.training_cost(now))}")


def _show_result(record: Record, out: Console) -> None:
    for problem in record.problems:
        parts = [str(problem["message"])] + [f"{w} {problem[w]}" for w in ("found", "expected") if problem.get(w)]
        out.print(f"{problem['pointer'] or '/'}: {'; '.join(parts)}", style="red")
    if record.error is not None:
        out.print(f"{record.error.error_class}: {record.error.message}", style="red")
        if record.error.hint:
            out.print(f"hint: {record.error.hint}")
    shown = {name: value for name, value in record.metrics.items() if value is not None}
    if shown:
        out.print(", ".join(f"{name} {number(value)}" for name, value in shown.items()))
    if record.endpoint is not None:
        over = record.endpoint.ended
        until = f"ended {over:%H:%M:%S}" if over else f"until {record.endpoint.expires:%Y-%m-%d %H:%M} UTC"
        if record.endpoint.limit == "max_cost_usd" and not over:
            until += ", when the budget is used up"
        out.print(f"endpoint {record.endpoint.url}, model {record.endpoint.model}, {until}")
