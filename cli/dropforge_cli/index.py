"""`dropforge index`: rebuild the summaries from which lists of runs are made."""

from __future__ import annotations

from collections import Counter

import click

from dropforge.index import Checked, Finding
from dropforge.index import rebuild as rebuild_all

from .deployment import connect
from .display import stderr, stdout, working
from .options import json_option, state_option
from .plain import echo_json
from .problems import FAILED

ADVICE = {
    Finding.MISSING: "old records: lists read each of them",
    Finding.WRONG: "not written by the control plane: lists read the records instead",
}


@click.group()
def index() -> None:
    """Rebuild the summaries of the runs, from which `runs`, `cost` and the console make their lists."""


@index.command()
@click.option("--check", "is_check", is_flag=True, help="Write nothing; exit 1 unless every summary is right.")
@json_option
@state_option
def rebuild(is_check: bool, as_json: bool, state: str | None) -> None:
    """Read every record, and write each summary that is not right; exit 1 if a record cannot be read.

    Runs may run meanwhile, and the command may be stopped and repeated at any time.
    """
    store = connect(state).store
    with working("reading records"):
        checked = list(rebuild_all(store, write=not is_check))
    found = Counter(one.finding for one in checked)
    if as_json:
        named = [one._asdict() for one in checked if one.finding is not Finding.RIGHT]
        echo_json({"runs": len(checked), **{finding: found[finding] for finding in Finding}, "findings": named})
    else:
        _show(checked, found, is_check)
    bad = found.total() - found[Finding.RIGHT] if is_check else found[Finding.UNREADABLE]
    if bad:
        raise SystemExit(FAILED)


def _show(checked: list[Checked], found: Counter[Finding], is_check: bool) -> None:
    for one in checked:
        if one.finding is Finding.UNREADABLE:
            stderr().print(f"cannot be read: {one.problem}", style="yellow")
        elif one.finding is Finding.WRONG:
            stderr().print(f"wrong: the summary of {one.run}", style="yellow")
    done = "found" if is_check else "written"
    stdout().print(f"{len(checked)} runs: {found[Finding.RIGHT]} summaries were right")
    for finding, advice in ADVICE.items():
        if found[finding]:
            stdout().print(f"{finding}: {found[finding]} ({advice}), {done}")
