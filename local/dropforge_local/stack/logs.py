"""The output of emulated containers, as the command line and the console read it from a stack."""

from __future__ import annotations

import requests

from dropforge.base.log_lines import readable

TIMEOUT_SECONDS = 60
LINES = 40  # of a log in the console


def read_log(http: str, resource: str, tail: int | None = None) -> str | None:
    """Return the output of an emulated resource's containers; None if no container ran, or the kind has no logs."""
    parameters = {} if tail is None else {"tail": str(tail)}
    response = requests.get(f"{http}/_local/logs/{resource}", params=parameters, timeout=TIMEOUT_SECONDS)
    if response.status_code in (404, 501):
        return None
    response.raise_for_status()
    return response.text


def last_lines(http: str, resource: str) -> list[str]:
    """Return the last lines of an emulated resource's log for people, without credentials."""
    return [readable(line) for line in (read_log(http, resource, LINES) or "").splitlines()]
