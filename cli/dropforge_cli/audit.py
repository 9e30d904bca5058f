"""`dropforge audit`: compare every ledger with the cloud's list."""

from __future__ import annotations

import click

from dropforge.stages.sweep.audit import MEANING, Audit
from dropforge.stages.sweep.audit import audit as compare_all

from .deployment import connect
from .display import stderr, stdout, table, working
from .options import json_option, state_option
from .plain import echo_json
from .problems import FAILED


@click.command()
@json_option
@state_option
def audit(as_json: bool, state: str | None) -> None:
    """Compare every ledger with the cloud's list; exit 1 if they differ, or if a place cannot be listed."""
    deployment = connect(state)
    with working("comparing the ledgers with the cloud"):
        found = compare_all(deployment.context)
    if as_json:
        rows = [{**difference._asdict(), "why": MEANING[difference.difference]} for difference in found.differences]
        echo_json({"differences": rows, "problems": found.problems})
    else:
        _show(found)
    if found.differences or found.problems:
        raise SystemExit(FAILED)


def _show(found: Audit) -> None:
    for problem in found.problems:
        stderr().print(f"cannot be listed: {problem}", style="red")
    if not found.differences:
        stdout().print(f"{found.resources} resources and {found.ledgers} ledgers agree")
        return
    rows = table("difference", "run", "resource")
    for difference in found.differences:
        rows.add_row(difference.difference, difference.run, difference.name)
    stdout().print(rows)
    for kind in sorted({difference.difference for difference in found.differences}):
        stdout().print(f"{kind}: {MEANING[kind]}")
