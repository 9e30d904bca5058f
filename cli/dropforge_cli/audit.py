"""`dropforge audit`: every ledger against what the cloud lists."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import click

from dropforge.cloud.listing import Listed
from dropforge.run.record import Ledger, Record, ResourceState
from dropforge.run.store import RunStore
from dropforge.stages.sweep.orphans import list_all, serves

from .deployment import connect
from .display import stderr, stdout, table
from .options import json_option, state_option
from .problems import FAILED
from .runs import READERS

UNOWNED, MISSING, REMAINING = "unowned", "missing", "remaining"
MEANING = {
    UNOWNED: "the cloud lists it, and no ledger says that it exists",
    MISSING: "its ledger says that it exists, and the cloud does not list it",
    REMAINING: "its run is over and does not serve it, and its ledger does not say that it is gone",
}


class Difference(NamedTuple):
    """One thing that a ledger and the cloud do not agree on: `difference` is a key of MEANING."""

    difference: str
    run: str
    kind: str
    name: str


@click.command()
@json_option
@state_option
def audit(as_json: bool, state: str | None) -> None:
    """Compare every ledger with what the cloud lists; exit 1 if they differ, or if a part cannot be listed."""
    context = connect(state).context
    store = context.store
    before = _ledgers(store, store.runs())
    found, problems = list_all(context.cloud)
    differences = compare(store, before, found)
    if as_json:
        told = [{**one._asdict(), "why": MEANING[one.difference]} for one in differences]
        click.echo(json.dumps({"differences": told, "problems": problems}, indent=2))
    else:
        _show(differences, problems, len(found), len(before))
    if differences or problems:
        raise SystemExit(FAILED)


def compare(store: RunStore, before: dict[str, Ledger], found: Iterable[Listed]) -> list[Difference]:
    """What ledgers, as they were `before` the cloud was asked, and the cloud's list do not agree on.

    Where they differ, the ledger is read again: what has come or gone in the meantime is no difference.
    """
    listed: dict[str, list[Listed]] = defaultdict(list)
    for one in found:
        listed[one.run].append(one)
    runs = {run for run, ledger in before.items() if ledger.remaining()} | set(listed)
    with ThreadPoolExecutor(READERS) as pool:
        records = dict(zip(runs, pool.map(store.find, runs), strict=True))
    first = _differences(before, listed, records)
    now = _ledgers(store, {one.run for one in first})
    again = _differences(now, {run: listed[run] for run in now}, records)
    return sorted(one for one in again if one in first)


def _ledgers(store: RunStore, runs: Iterable[str]) -> dict[str, Ledger]:
    with ThreadPoolExecutor(READERS) as pool:
        return {ledger.run: ledger for ledger in pool.map(store.ledger, runs)}


def _differences(
    ledgers: dict[str, Ledger], listed: dict[str, list[Listed]], records: dict[str, Record | None]
) -> set[Difference]:
    differences = set()
    for run in {*ledgers, *listed}:
        entries = {entry.name: entry for entry in ledgers.get(run, Ledger(run=run)).remaining()}
        there = {one.name: one for one in listed.get(run, ())}
        differences |= {Difference(UNOWNED, run, one.kind, name) for name, one in there.items() if name not in entries}
        record = records.get(run)
        is_over = record is None or record.state.is_terminal
        for name, entry in entries.items():
            # What is in a cluster of its attempt is not listed apart from it.
            is_there = name in there or name.partition("/k8s/")[0] in there
            # What was intended may never come to be while its run goes on.
            if not is_there and (is_over or entry.state is ResourceState.CREATED):
                differences.add(Difference(MISSING, run, entry.kind, name))
            if is_over and not (record and serves(record, name)):
                differences.add(Difference(REMAINING, run, entry.kind, name))
    return differences


def _show(differences: list[Difference], problems: list[str], listed: int, ledgers: int) -> None:
    for problem in problems:
        stderr().print(f"could not be listed: {problem}", style="red")
    if not differences:
        stdout().print(f"{listed} resources and {ledgers} ledgers agree")
        return
    rows = table("difference", "run", "resource")
    for one in differences:
        rows.add_row(one.difference, one.run, one.name)
    stdout().print(rows)
    for difference in sorted({one.difference for one in differences}):
        stdout().print(f"{difference}: {MEANING[difference]}")
