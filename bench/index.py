"""The index of runs: how long the lists of the command line and of the console take.

    python -m bench.index --runs 10000 --beside 2

The storage emulator runs in another process and has N runs, each with objects beside its record. Every figure is the
median of several looks. A cold look has a reader that knows nothing; a warm look has the reader of the look before.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from rich.console import Console

from dropforge.base.changes import evolve
from dropforge.base.clock import Clock
from dropforge.endpoints.store import EndpointStore
from dropforge.run.index import read_index
from dropforge.run.record import About, Attempt, Record, RunState, Transition
from dropforge.run.store import RunStore
from dropforge_cli.display import fitting
from dropforge_cli.listing import Filter, columns, in_order
from dropforge_console import views
from dropforge_console.reader import Reader

from .storage import SERVER, client

RUNS, BESIDE, LOOKS, WRITERS = 10_000, 2, 5, 8
SHOWN = 20
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
BUCKET = "runs"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.index")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N")
    parser.add_argument("--beside", type=int, default=BESIDE, metavar="N", help="objects beside each record")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-P", "-c", SERVER, root]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            os.environ["STORAGE_EMULATOR_HOST"] = server.stdout.readline().strip()
            client().create_bucket(BUCKET)
            fill(options.runs, options.beside)
            measure(options.runs)
        finally:
            server.communicate("")


def fill(runs: int, beside: int) -> None:
    store = RunStore(client(), BUCKET)

    def write(number: int) -> None:
        run = run_of(number)
        for other in range(beside):
            store.put_new(f"runs/{run}/events/0001-{other:015d}-checkpoint.json", b"{}")
        assert store.create(record(run, number))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(runs)))


def run_of(number: int) -> str:
    return f"text-to-sql-{number:012x}"


def record(run: str, number: int) -> Record:
    """A finished run with labels, metrics, and one attempt."""
    created = BEGAN + timedelta(minutes=number)
    ended = created + timedelta(minutes=40)
    states = (RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING, RunState.TEARING_DOWN, RunState.SUCCEEDED)
    attempt = Attempt(
        number=1,
        placement=0,
        region="us-central1",
        started=created,
        deadline=ended,
        usd_per_hour=1.5,
        running=created,
        ended=ended,
    )
    return Record(
        run=run,
        name="text-to-sql",
        source="gs://specs/specs/a.json#1",
        state=RunState.SUCCEEDED,
        created=created,
        history=[Transition(state=state, time=created, attempt=1) for state in states],
        attempts=[attempt],
        metrics={"exact_match": number / RUNS, "exact_match_before": 0.1, "loss": 0.5, "loss_before": 2.5},
        about=About(target="cloud_run", model="google/gemma-2b", labels={"team": "search"}, most_usd=12.5),
    )


def measure(runs: int) -> None:
    report(f"command line: list {runs:,} runs, show {SHOWN}", lambda: listed(runs))
    report(f"console: first look at {runs:,} runs", lambda: new_reader().refresh())
    reader = new_reader()
    reader.refresh()
    report("console: next look, nothing has changed", reader.refresh)
    report("console: next look, one record has changed", reader.refresh, before=change)
    report("console: rows of the page, filtered by a word", lambda: rows(reader))


def listed(runs: int) -> None:
    """The work of `dropforge runs --label team=search --sort exact_match --limit 20` after its start."""
    now = datetime.now(UTC)
    index = read_index(RunStore(client(), BUCKET))
    assert len(index.summaries) == runs
    wanted = Filter(labels=(("team", "search"),))
    shown = in_order(filter(wanted.takes, index.summaries), "exact_match", now)[:SHOWN]
    out = Console(file=io.StringIO(), width=120)
    out.print(fitting(shown, columns(shown, "exact_match", now), out.width)[0])


def new_reader() -> Reader:
    store = RunStore(client(), BUCKET)
    return Reader(store, EndpointStore(store, Clock()))


def rows(reader: Reader) -> None:
    now = datetime.now(UTC)
    taken = views.selected(reader.runs(), views.Wanted("gemma search"), now)
    assert [views.row(run, now) for run in taken[:100]]


def change() -> None:
    store = RunStore(client(), BUCKET)
    store.update(run_of(0), lambda found: evolve(found, name=found.name))


def report(what: str, look: Callable[[], object], before: Callable[[], None] = lambda: None) -> None:
    took = []
    for _ in range(LOOKS):
        before()
        began = time.perf_counter()
        look()
        took.append(time.perf_counter() - began)
    print(f"{what:52} {1000 * statistics.median(took):8.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
