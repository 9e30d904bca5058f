"""`dropforge runs`, `status` and `cancel`: print records from the runs bucket, and publish a cancel request."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import click
from rich.console import Console

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import Malformed, NotFound
from dropforge.base.figures import age, duration
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.events import REQUESTED_WITH
from dropforge.run.index import READERS, read_index
from dropforge.run.record import Ledger, Record, RunState
from dropforge.run.store import RunStore
from dropforge.run.summary import Summary
from dropforge.spec import JobSpec

from .deployment import Deployment, connect
from .display import counted, fitting, joined, stderr, stdout, table, titled, working
from .dropped import is_dropped
from .endpoints import endpoint_json, named_json, named_of
from .follow import Follower, Snapshot, bar, describe_standstill, describe_wait, snapshots, watch
from .listing import FIELDS, Filter, columns, in_order
from .options import Label, json_option, latest_argument, run_argument, since_option, state_option
from .plain import echo, echo_json
from .problems import FAILED, CliError
from .result import show_result

PUBLISH_TIMEOUT_SECONDS = 20
LATEST = "latest"
LIMIT = 20  # runs that a terminal shows without --limit
MOST_MEANINGS = 10  # of an ambiguous RUN that an error lists
LIST_HINT = "`dropforge runs` lists them"
STATE = click.Choice([state.value for state in RunState], case_sensitive=False)


@click.command()
@click.option("--in", "states", multiple=True, type=STATE, metavar="STATE", help="Only runs in this state; repeatable.")
@click.option("--name", metavar="NAME", help="Only runs of this name; * stands for any text.")
@click.option("--target", metavar="TARGET", help="Only runs on this target, such as cloud_run.")
@click.option("--model", metavar="MODEL", help="Only runs that train this model; * stands for any text.")
@click.option("--label", "labels", multiple=True, type=Label(), metavar="KEY=VALUE", help="Only runs with this label.")
@since_option
@click.option("--sort", default="created", metavar="KEY", help="created (default), cost, name, or a metric.")
@click.option("--reverse", is_flag=True, help="The oldest, cheapest or lowest first.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help=f"At most N runs; default in a terminal: {LIMIT}.")
@json_option
@state_option
def runs(
    states: tuple[str, ...],
    name: str | None,
    target: str | None,
    model: str | None,
    labels: tuple[tuple[str, str], ...],
    since: datetime | None,
    sort: str,
    reverse: bool,
    limit: int | None,
    as_json: bool,
    state: str | None,
) -> None:
    """List runs, newest first; a terminal shows the columns that fit."""
    store, now, out = connect(state).store, utc_now(), stdout()
    wanted = Filter(states, name, since, target, labels, model)
    everything = all_runs(store)
    taken = in_order(filter(wanted.takes, everything), sort, now, backwards=reverse)
    limit = limit or (LIMIT if out.is_terminal and not as_json else len(taken))
    shown = taken[:limit]
    if as_json:
        echo_json(_as_json(store, shown, now))
    elif shown:
        out.print(fitting(shown, columns(shown, None if sort in FIELDS else sort, now), out.width)[0])
    elif everything:
        out.print(
            f"none of the {len(everything)} runs matches the options; without options, `dropforge runs` lists them all"
        )
    else:
        out.print("no runs yet; start a run with `dropforge submit SPEC`")
    if more := len(taken) - len(shown):
        stderr().print(f"{more} more: `--limit {len(taken)}` lists them all", style="dim")


@click.command()
@latest_argument
@click.option("--watch", "watched", is_flag=True, help="Follow the run to its end; exit 1 unless it succeeds.")
@json_option
@state_option
def status(run: str, watched: bool, as_json: bool, state: str | None) -> None:
    """Show a run: stages, attempts, cost, endpoint and resources.

    RUN is its id, the beginning of its id, a name (the newest run of that name), or `latest`, the default.
    """
    deployment = connect(state)
    store = deployment.store
    record = find_run(deployment, run)
    is_followed = watched and not record.state.is_terminal
    if is_followed:
        watch(deployment, record.run, stderr() if as_json else stdout())
        record = store.record(record.run)
    with working("reading the endpoints"):
        named = named_of(deployment.context.endpoints, record.run)
    if as_json:
        spec = _spec(store, record.run)
        more = {
            "named_endpoints": [named_json(endpoint, record.run) for endpoint in named],
            "console_url": deployment.settings.page_of(record.run),
        }
        echo_json({**record_json(record, utc_now(), spec, record.ledger), **more})
    elif not is_followed:
        with working("reading the run"):
            snapshot = Follower(store, record.run).snapshot()
        assert snapshot is not None, "a record is never deleted"
        show(snapshot, named, snapshot.record.ledger, stdout(), is_local=deployment.stack is not None)
        if page := deployment.settings.page_of(record.run):
            stdout().print(f"console {page}", soft_wrap=True)
    if watched and record.state is not RunState.SUCCEEDED:
        raise SystemExit(FAILED)


@click.command()
@run_argument
@state_option
def cancel(run: str, state: str | None) -> None:
    """Request the end of a run, or of the endpoint of a finished run.

    RUN is its id, the beginning of its id, the name of one run that works, or `latest`, if that run works. The id alone
    ends the endpoint of a finished run.
    """
    deployment = connect(state)
    record = find_one(deployment, run, lambda found: not found.state.is_terminal, "works")
    with working("publishing the request"):
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
    publisher = deployment.clients.publisher()
    publisher.publish(topic, data, timeout=TIMEOUT_SECONDS, **signature("cancel")).result(PUBLISH_TIMEOUT_SECONDS)


def signature(command: str) -> dict[str, str]:
    """The attribute of a message that tells operators which command and which user of which machine sent it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = f"number {os.getuid()}"
    return {REQUESTED_WITH: f"`dropforge {command}` of user {user}"}


def all_runs(store: RunStore) -> list[Summary]:
    """Return the summary of every run, newest first. A record that this version cannot read is reported on stderr."""
    with working("listing runs"):
        index = read_index(store)
    for problem in index.unreadable:
        stderr().print(f"left out: {problem}", style="yellow")
    return index.summaries


def find_run(deployment: Deployment, text: str) -> Record:
    """Return the record of the run that `text` names; raise CliError if it names none, or several.

    It names a run by its id, as `latest`, by the name of which the run is the newest, or by the beginning of its id.
    A spec becomes a run some seconds after it was dropped: this function waits for a run whose id it is given. This is
    for commands that read; `find_one` is for those that end or change something.
    """
    return _by_id(deployment, text) or _only(deployment, text, lambda named: named[:1])


def find_one(deployment: Deployment, text: str, is_meant: Callable[[Summary], bool], verb: str) -> Record:
    """Return the record of the run that `text` names; raise CliError if there is a choice.

    A name, and `latest`, name only a run that `is_meant`: where several runs have the name, exactly one of them must
    be. `verb` says for people which runs are meant. An id, and its beginning, name any run.
    """

    def meant(named: list[Summary]) -> list[Summary]:
        if named and not (found := [run for run in named if is_meant(run)]):
            raise CliError(f"no run {text!r} {verb}:\n{_listed(named)}", "give the id of the run")
        return found if named else []

    return _by_id(deployment, text) or _only(deployment, text, meant)


def _by_id(deployment: Deployment, text: str) -> Record | None:
    """The run with this id; None for a text that is no id. Raises CliError."""
    if not names.is_run_id(text):
        return None
    if (record := deployment.store.find(text) or _just_dropped(deployment, text)) is None:
        raise CliError(f"there is no run {text!r}", LIST_HINT)
    return record


def _only(deployment: Deployment, text: str, choose: Callable[[list[Summary]], list[Summary]]) -> Record:
    """The only run that `choose` takes of those that a name, or `latest`, names; else that of the beginning of an id.

    Raises CliError.
    """
    every = all_runs(deployment.store)
    if not every:
        raise CliError("there are no runs yet", "start a run with `dropforge submit SPEC`")
    named = every[:1] if text == LATEST else [run for run in every if run.name == text]
    matching = choose(named) or [run for run in every if run.run.startswith(text)]
    if not matching:
        raise CliError(f"no run has the name {text!r}, and no run id begins with {text!r}", LIST_HINT)
    if len(matching) > 1:
        problem = f"{text!r} could be any of {len(matching)} runs:\n{_listed(matching)}"
        raise CliError(problem, "give more of the id, or the name of a run, or `latest`")
    return deployment.store.record(matching[0].run)


def _just_dropped(deployment: Deployment, run: str) -> Record | None:
    """Wait for the record of a run whose spec is in the specs bucket; None without such a spec. Raises CliError."""
    with working(f"waiting for the run {run}"):
        return next(snapshots(deployment, run)).record if is_dropped(deployment, run) else None


def _listed(runs: list[Summary]) -> str:
    now = utc_now()
    lines = [
        f"  {run.run}  {run.name}, {run.state}, {age((now - run.created).total_seconds())} old"
        for run in runs[:MOST_MEANINGS]
    ]
    more = [f"  and {len(runs) - MOST_MEANINGS} more"] if len(runs) > MOST_MEANINGS else []
    return "\n".join([*lines, *more])


def _as_json(store: RunStore, shown: list[Summary], now: datetime) -> list[dict[str, Any]]:
    """The whole record of each run in a list, with the fields of its spec."""

    def read(run: str) -> dict[str, Any] | None:
        record = store.find(run)
        return None if record is None else record_json(record, now, _spec(store, run))

    with ThreadPoolExecutor(READERS) as pool:
        found = counted(pool.map(read, [run.run for run in shown]), len(shown), "reading records")
        return [record for record in found if record is not None]


def _spec(store: RunStore, run: str) -> JobSpec | None:
    """The spec of a run; None for a rejected run, and for a spec that this version cannot read."""
    try:
        return store.spec(run)
    except (NotFound, Malformed):
        return None


def record_json(record: Record, now: datetime, spec: JobSpec | None, ledger: Ledger | None = None) -> dict[str, Any]:
    """Return a record as JSON for programs, with computed fields and those of the spec that lists are made of."""
    computed: dict[str, Any] = {
        "attempt": record.attempt,
        "ended_by": record.ended_by,
        "stage_seconds": record.stage_seconds(now),
        "training_cost_usd": record.training_cost(now),
        "serving_cost_usd": record.serving_cost(now),
        "total_cost_usd": record.cost(now),
        "target": spec.target.type if spec else None,
        "model": spec.model.source if spec else None,
        "labels": spec.labels if spec else None,
        "endpoint": endpoint_json(record),
    }
    if ledger is not None:
        computed["ledger"] = [entry.model_dump(mode="json") for entry in ledger.entries]
    return {**record.model_dump(mode="json"), **computed}


def show(snapshot: Snapshot, named: list[EndpointRecord], ledger: Ledger, out: Console, *, is_local: bool) -> None:
    """Print a run for people."""
    record, now = snapshot.record, utc_now()
    out.print(titled(record.run, f"{record.name}  {record.state}"))
    by = f" by {record.submitter}" if record.submitter else ""
    out.print(f"created {record.created:%Y-%m-%d %H:%M:%S} UTC{by} from", soft_wrap=True)
    out.print(f"  {record.source}", soft_wrap=True)
    if record.cancel_requested:
        by = f" by {record.ended_by}" if record.ended_by else ""
        out.print(f"cancel requested at {record.cancel_requested:%H:%M:%S}{by}", soft_wrap=True)
    elif record.ended_by:
        out.print(f"ended by {record.ended_by}")
    if waits := describe_wait(record):
        out.print(waits)
    if spent := record.stage_seconds(now):
        out.print(
            joined("", [f"{state.lower()} {duration(length)}" for state, length in spent.items()], out), soft_wrap=True
        )
    if snapshot.progress is not None and record.state is RunState.TRAINING:
        out.print(bar(snapshot.progress, snapshot.standstill))
    if snapshot.standstill is not None:
        out.print(describe_standstill(record, snapshot.standstill), style="yellow", soft_wrap=True)
    _show_attempts(record, now, out)
    show_result(record, named, now, out, is_local=is_local)
    if ledger.entries:
        out.print(titled("resources"))
    for entry in ledger.entries:  # a line of its own width: a resource name can be copied
        out.print(f"{entry.state:8}  {entry.name}", soft_wrap=True)


def _show_attempts(record: Record, now: datetime, out: Console) -> None:
    if not record.attempts:
        return
    rows = table("attempt", "region", "started", "lasted", "ended with", right=("attempt", "lasted"))
    for attempt in record.attempts:
        lasted = duration(((attempt.ended or now) - attempt.started).total_seconds())
        started = f"{attempt.started:%H:%M:%S}"
        rows.add_row(str(attempt.number), attempt.region, started, lasted, attempt.ending or "-")
    out.print(rows)
