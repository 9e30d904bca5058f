"""`dropforge cost`: what runs and their endpoints have cost, by group, beside what they could have cost at most."""

from __future__ import annotations

import csv
import io
from datetime import datetime

import click

from dropforge.base.clock import utc_now
from dropforge.money.bill import BY, LABEL, Group, grouped, named_costs
from dropforge.run.record import RunState

from .deployment import connect
from .display import stderr, stdout, table, working
from .options import json_option, since_option, state_option
from .plain import echo, echo_json
from .runs import all_runs


class By(click.ParamType[str]):
    """What runs are grouped by: a key of BY, or `label:KEY`."""

    name = "group"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in BY and (not value.startswith(LABEL) or value == LABEL):
            self.fail(f"{value!r}; expected {', '.join(BY)} or {LABEL}KEY, such as {LABEL}team", param, ctx)
        return value


@click.command()
@click.option("--by", type=By(), default="month", metavar="GROUP", help="month (default), target, model, or label:KEY.")
@since_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@state_option
def cost(by: str, since: datetime | None, as_json: bool, as_csv: bool, state: str | None) -> None:
    """Add up the cost of runs and endpoints so far, and show their maximum cost."""
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    deployment, now = connect(state), utc_now()
    store = deployment.store
    accepted = [run for run in all_runs(store) if run.state is not RunState.REJECTED]
    runs = [run for run in accepted if since is None or run.created >= since]
    endpoints = deployment.context.endpoints
    with working("reading the endpoints"):
        named = named_costs(map(endpoints.record, endpoints.names()), now)
    groups, total = grouped(runs, by, now, named), Group.of("in all", runs, now, named)
    if as_json:
        echo_json({"by": by, "groups": [group.to_json() for group in groups], "total": total.to_json()})
    elif as_csv:
        echo(as_table_of_values(groups), nl=False)
    elif not runs:
        stdout().print("no runs, so no cost")
    else:
        show(groups, total, by, sum(run.is_open(now) for run in runs))
        if deployment.stack is not None:
            stderr().print("a local stack costs nothing: on the cloud it would have been this much", style="dim")


def show(groups: list[Group], total: Group, by: str, still_open: int) -> None:
    """Print the groups for people."""
    columns = (by.removeprefix(LABEL), "runs", "training", "endpoints", "total", "maximum", "share")
    rows = table(*columns, right=columns[1:])
    for group in [*groups, total]:
        rows.add_row(*group.row())
    stdout().print(rows)
    if still_open:
        stderr().print(f"so far: runs that have not ended, or still serve: {still_open}", style="dim")


def as_table_of_values(groups: list[Group]) -> str:
    """Return the groups as comma-separated values with a header. An unknown amount is empty."""
    text = io.StringIO()
    rows = [group.to_json() for group in groups]
    writer = csv.DictWriter(text, fieldnames=list(Group.of("", [], utc_now()).to_json()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
