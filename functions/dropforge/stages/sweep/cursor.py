"""Where the next sweep continues, if the last sweep had not enough time for all open marks or all specs."""

from __future__ import annotations

import json
from typing import NamedTuple

from dropforge.base.errors import NotFound
from dropforge.context import Context

OBJECT = "runs/sweep.json"


class Cursor(NamedTuple):
    """The last run and the last spec that a sweep looked at; "" if it came to the end."""

    run: str = ""
    spec: str = ""


def read(context: Context) -> Cursor:
    """Where the last sweep stopped; the beginning if nothing readable says so."""
    try:
        stored = json.loads(context.store.read(OBJECT).data)
        return Cursor(str(stored["run"]), str(stored["spec"]))
    except (NotFound, ValueError, KeyError, TypeError):
        return Cursor()


def write(context: Context, before: Cursor, now: Cursor) -> None:
    """Note where this sweep stopped, if that differs. Another sweep may win at the same time: both places are good."""
    if now != before:
        context.store.replace(OBJECT, json.dumps(now._asdict()).encode())
