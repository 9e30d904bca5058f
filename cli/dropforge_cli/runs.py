"""`dropforge runs`, `status` and `cancel`: print records from the runs bucket, and publish a cancel request."""

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
from .endpoints import call_lines, endpoint_json
from .follow import Follower, Snapshot, bar, describe_wait, watch
from .options import json_option, run_argument, state_option
from .plain import echo, echo_json
from .problems import FAILED, CliError

READERS = 16  # parallel requests; each record is one request
PUBLISH_TIMEOUT_SECONDS = 20


@click.command()
@json_option
@state_option
def runs(as_json: bool, state: str | None) -> None:
    """List every run, newest first."""
    records, now = all_runs(connect(state).store), utc_now()
    if as_json:
        echo_json([record_json(record, now) for record in records])
        return
    rows = table("run", "name", "state", "attempt", "created", "cost", right=("attempt", "cost"))
    for record in records:
        created = f"{record.created:%Y-%m-%d %H:%M:%S}"
        cost = usd(record.training_cost(now))
        state_shown = f"{record.state}, place {record.queued.place}" if record.queued else record.state
        rows.add_row(record.run, record.name, state_shown, str(record.attempt or "-"), created, cost)
    stdout().print(rows if records else "no runs yet; start a run with `dropforge submit SPEC`")


@click.command()
@run_argument
@click.option("--watch", "watched", is_flag=True, help="Follow the run to its end; exit 1 unless it succeeds.")
@json_option
@state_option
def status(run: str, watched: bool, as_json: bool, state: str | None) -> None:
    """Show a run: stages, attempts, cost, endpoint and resources. RUN may be a prefix of the run's id."""
    deployment = connect(state)
    store = deployment.store
    record = find_run(store, run)
    succeeded = True
    if watched and not record.state.is_terminal:
        succeeded = watch(deployment, record.run, stderr() if as_json else stdout())
    snapshot = Follower(store, record.run).snapshot()
    assert snapshot is not None, "a record is never deleted"
    if as_json:
        echo_json(record_json(snapshot.record, utc_now(), store.ledger(record.run)))
    else:
        show(snapshot, store.ledger(record.run), stdout())
    if watched and not (succeeded and snapshot.record.state is RunState.SUCCEEDED):
        raise SystemExit(FAILED)


@click.command()
@run_argument
@state_option
def cancel(run: str, state: str | None) -> None:
    """Request the end of a run, or of the endpoint of a finished run."""
    deployment = connect(state)
    record = find_run(deployment.store, run)
    request_cancel(deployment, record.run)
    if not record.state.is_terminal:
        echo(f"requested the end of {record.run}; follow it with `dropforge status {record.run} --watch`")
    elif record.endpoint and not record.endpoint.ended:
        echo(f"{record.run} is {record.state}; requested the end of its endpoint")
    else:
        echo(f"{record.run} is already {record.state} and has no endpoint")


def request_cancel(deployment: Deployment, run: str) -> None:
    """Publish {"cancel": run} to the operations topic. Raises CliError if the configuration does not name the topic."""
    if not deployment.settings.operations_topic:
        problem = f"the configuration of {deployment.where} does not name operations_topic"
        raise CliError(problem, "write it again: `terraform output -raw dropforge_toml > dropforge.toml`")
    topic = deployment.settings.topic(deployment.settings.operations_topic)
    data = json.dumps({"cancel": run}).encode()
    deployment.clients.publisher().publish(topic, data, timeout=TIMEOUT_SECONDS).result(PUBLISH_TIMEOUT_SECONDS)


def all_runs(store: RunStore) -> list[Record]:
    """Return every run's record, newest first."""
    with ThreadPoolExecutor(READERS) as pool:
        records = [record for record in pool.map(store.find, store.runs()) if record is not None]
    return sorted(records, key=lambda record: record.created, reverse=True)


def find_run(store: RunStore, text: str) -> Record:
    """Return the record of the run whose id is `text` or begins with it. Raises CliError."""
    if names.is_run_id(text):
        try:
            return store.record(text)
        except NotFound:
            raise CliError(f"there is no run {text!r}", "`dropforge runs` lists them") from None
    matching = [run for run in store.runs() if run.startswith(text)]
    if len(matching) == 1:
        return store.record(matching[0])
    if not matching:
        raise CliError(f"no run id begins with {text!r}", "`dropforge runs` lists them")
    raise CliError(f"{len(matching)} run ids begin with {text!r}: {', '.join(matching[:5])}", "give a longer prefix")


def record_json(record: Record, now: datetime, ledger: Ledger | None = None) -> dict[str, Any]:
    """Return a record as JSON for programs, with computed fields."""
    computed: dict[str, Any] = {
        "attempt": record.attempt,
        "stage_seconds": record.stage_seconds(now),
        "training_cost_usd": record.training_cost(now),
        "endpoint": endpoint_json(record),
    }
    if ledger is not None:
        computed["ledger"] = [entry.model_dump(mode="json") for entry in ledger.entries]
    return {**record.model_dump(mode="json"), **computed}


def show(snapshot: Snapshot, ledger: Ledger, out: Console) -> None:
    """Print a run for people."""
    record, now = snapshot.record, utc_now()
    out.print(titled(record.run, f"{record.name}  {record.state}"))
    out.print(f"from {record.source}, created {record.created:%Y-%m-%d %H:%M:%S} UTC")
    if record.cancel_requested and not record.state.is_terminal:
        out.print(f"cancel requested at {record.cancel_requested:%H:%M:%S}")
    if waits := describe_wait(record):
        out.print(waits)
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
        values = [f"{key} {problem[key]}" for key in ("found", "expected") if problem.get(key)]
        out.print(f"{problem['pointer'] or '/'}: {'; '.join([str(problem['message']), *values])}", style="red")
    if record.error is not None:
        out.print(f"{record.error.error_class}: {record.error.message}", style="red")
        if record.error.hint:
            out.print(f"hint: {record.error.hint}")
    shown = {name: value for name, value in record.metrics.items() if value is not None}
    if shown:
        out.print(", ".join(f"{name} {number(value)}" for name, value in shown.items()))
    for line in call_lines(record):
        out.print(line)
