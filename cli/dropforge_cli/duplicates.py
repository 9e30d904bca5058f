"""A spec whose bytes another object of the specs bucket has: dropping it again would pay for the same run twice."""

from __future__ import annotations

import base64
import hashlib
import sys

import click

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.figures import usd
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.run.record import Record, RunState

from .deployment import Deployment
from .display import working
from .plain import echo, plain
from .problems import CliError

MOST_SPECS = 2000  # objects of the specs bucket that are looked at, in two requests


class Duplicate(CliError):
    """The spec had a run already; the exit code is that of wrong usage."""

    exit_code = 2


def refuse_duplicate(deployment: Deployment, data: bytes) -> None:
    """Ask in a terminal whether a spec that had a run already shall have another; without one, raise CliError."""
    with working("looking for an earlier run of the spec"):
        run = run_of(deployment, data)
    if run is None:
        return
    record = deployment.store.find(run)
    if record is not None and record.state is RunState.REJECTED:
        return  # it cost nothing, and what it lacked may exist now
    text = f"the same spec is run {run}: {_described(record)}"
    if not is_terminal():
        raise Duplicate(text, "`--again` starts another run of it")
    echo(text, err=True)
    click.confirm(plain("Start another run of it?"), abort=True, err=True)


def is_terminal() -> bool:
    """Whether a user can answer a question."""
    return sys.stdin.isatty()


def run_of(deployment: Deployment, data: bytes) -> str | None:
    """Return the run of the newest object of the specs bucket with these bytes; None without such an object.

    Objects that were replaced since are not found. Without the right to list the bucket, nothing is found.
    """
    from google.api_core.exceptions import Forbidden

    settings, digest = deployment.settings, base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    blobs = deployment.clients.storage().list_blobs(
        settings.specs_bucket, prefix=names.SPECS_PREFIX, max_results=MOST_SPECS, timeout=TIMEOUT_SECONDS
    )
    try:
        same = [blob for blob in blobs if blob.md5_hash == digest and names.is_spec_object(blob.name)]
    except Forbidden:
        return None
    if not same:
        return None
    newest = max(same, key=lambda blob: blob.updated)
    return names.run_id_of_object(settings.specs_bucket, newest.name, newest.generation)


def _described(record: Record | None) -> str:
    if record is None:
        return "dropped, and not accepted yet"
    endpoint = record.endpoint
    serving = f", its endpoint serves until {endpoint.expires:%Y-%m-%d %H:%M} UTC" if endpoint else ""
    if endpoint and endpoint.ended:
        serving = ", its endpoint has ended"
    return f"{record.state}, cost so far {usd(record.cost(utc_now()))}{serving}"
