"""A spec whose bytes another object of the specs bucket has: dropping it again would pay for the same run twice."""

from __future__ import annotations

import click

from dropforge.base.clock import utc_now
from dropforge.base.figures import usd
from dropforge.cloud.objects import md5_of
from dropforge.run.record import Record, RunState

from .deployment import Deployment
from .display import working
from .dropped import dropped_specs, run_of_spec
from .options import is_terminal
from .plain import echo, plain
from .problems import CliError

# What these runs lacked may exist now, and a person has ended them: another run of the spec is no slip.
NO_DUPLICATE = (RunState.REJECTED, RunState.CANCELLED)
MOST_SPECS = 2000  # objects of the specs bucket that are looked at, in two requests


class Duplicate(CliError):
    """The spec had a run already; the exit code is that of wrong usage."""

    exit_code = 2


def refuse_duplicate(deployment: Deployment, data: bytes) -> bool:
    """Ask in a terminal whether a spec that had a run already shall have another; without one, raise CliError.

    Returns whether the user wants another run; False for a spec that had none.
    """
    with working("looking for an earlier run of the spec"):
        found = run_of(deployment, data)
    if found is None:
        return False
    run, record = found
    text = f"the same spec is run {run}: {_described(record)}"
    if not is_terminal():
        raise Duplicate(text, "`--again` starts another run of it")
    echo(text, err=True)
    click.confirm(plain("Start another run of it?"), abort=True, err=True)
    return True


def run_of(deployment: Deployment, data: bytes) -> tuple[str, Record | None] | None:
    """Return the newest run of a spec with these bytes, and its record if it has one; None without such a run.

    A run in NO_DUPLICATE does not count. Objects that were replaced since are not found. Without the right to list the
    bucket, nothing is found.
    """
    digest = md5_of(data)
    same = [blob for blob in dropped_specs(deployment, MOST_SPECS) if blob.md5_hash == digest]
    for blob in sorted(same, key=lambda blob: blob.updated, reverse=True):
        run = run_of_spec(deployment, blob)
        record = deployment.store.find(run)
        if record is None or record.state not in NO_DUPLICATE:
            return run, record
    return None


def _described(record: Record | None) -> str:
    if record is None:
        return "dropped, and not accepted yet"
    endpoint = record.endpoint
    serving = f", its endpoint serves until {endpoint.expires:%Y-%m-%d %H:%M} UTC" if endpoint else ""
    if endpoint and endpoint.ended:
        serving = ", its endpoint has ended"
    return f"{record.state}, cost so far {usd(record.cost(utc_now()))}{serving}"
