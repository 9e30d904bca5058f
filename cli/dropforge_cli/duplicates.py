"""A spec whose bytes another object of the specs bucket has: dropping it again would pay for the same run twice."""

from __future__ import annotations

import sys

import click

from dropforge.base.clock import utc_now
from dropforge.base.figures import usd
from dropforge.cloud.objects import md5_of
from dropforge.run.record import Record, RunState

from .deployment import Deployment
from .display import working
from .dropped import dropped_specs, run_of_spec
from .plain import echo, plain
from .problems import CliError

MOST_SPECS = 2000  # objects of the specs bucket that are looked at, in two requests


class Duplicate(CliError):
    """The spec had a run already; the exit code is that of wrong usage."""

    exit_code = 2


def refuse_duplicate(deployment: Deployment, data: bytes) -> bool:
    """Ask in a terminal whether a spec that had a run already shall have another; without one, raise CliError.

    Returns whether the user wants another run; False for a spec that had none.
    """
    with working("looking for an earlier run of the spec"):
        run = run_of(deployment, data)
    if run is None:
        return False
    record = deployment.store.find(run)
    if record is not None and record.state is RunState.REJECTED:
        return False  # it cost nothing, and what it lacked may exist now
    text = f"the same spec is run {run}: {_described(record)}"
    if not is_terminal():
        raise Duplicate(text, "`--again` starts another run of it")
    echo(text, err=True)
    click.confirm(plain("Start another run of it?"), abort=True, err=True)
    return True


def is_terminal() -> bool:
    """Whether a user can answer a question."""
    return sys.stdin.isatty()


def run_of(deployment: Deployment, data: bytes) -> str | None:
    """Return the run of the newest object of the specs bucket with these bytes; None without such an object.

    Objects that were replaced since are not found. Without the right to list the bucket, nothing is found.
    """
    digest = md5_of(data)
    same = [blob for blob in dropped_specs(deployment, MOST_SPECS) if blob.md5_hash == digest]
    return run_of_spec(deployment, max(same, key=lambda blob: blob.updated)) if same else None


def _described(record: Record | None) -> str:
    if record is None:
        return "dropped, and not accepted yet"
    endpoint = record.endpoint
    serving = f", its endpoint serves until {endpoint.expires:%Y-%m-%d %H:%M} UTC" if endpoint else ""
    if endpoint and endpoint.ended:
        serving = ", its endpoint has ended"
    return f"{record.state}, cost so far {usd(record.cost(utc_now()))}{serving}"
