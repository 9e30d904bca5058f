"""A switch that kills a part of the stack at a chosen moment: the Nth commit of the stack's database from now on.

    POST /_local/crash {"commit": 12, "moment": "after", "kill": "stack"}
    GET /_local/crash  → the number of commits since then, and the kill that is still armed

`kill` names who gets SIGKILL: the "stack" (its functions end with it), the "functions", or the "containers", i.e. every
training and serving process. `moment` is "before" or "after" the commit; `commit` 0 switches the kill off. The
environment variable DROPFORGE_KILL_AT_COMMIT=N kills the stack after the Nth commit of its own start.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.containers import shim
from dropforge_local.containers.processes import find_members, send_signal
from dropforge_local.emulators.kit.emulator import PassiveEmulator
from dropforge_local.emulators.kit.routing import Call, Route, mount

VARIABLE = "DROPFORGE_KILL_AT_COMMIT"
_DEFAULTS = {"commit": 0, "moment": "after", "kill": "stack"}
_MOMENTS, _VICTIMS = ("before", "after"), ("stack", "functions", "containers")
# Training and serving containers have one of these in their environment; nothing else on their machines has.
_CONTAINER_VARIABLES = frozenset({"DROPFORGE_RUN", "DROPFORGE_SERVED_MODEL_NAME"})


class CrashSwitch(PassiveEmulator):
    """Counts commits and kills at the armed commit. `directories` hold the containers."""

    def __init__(self, db: Database, directories: Sequence[Path], kill_functions: Callable[[], None]) -> None:
        self._directories = directories
        self._kill_functions = kill_functions
        self._commits = 0
        self._armed: dict[str, Any] = {**_DEFAULTS, "commit": int(os.environ.get(VARIABLE, "0"))}
        db.on_commit = self._on_commit

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount([Route("GET", "/_local/crash", self._show), Route("POST", "/_local/crash", self._arm)])

    def _show(self, call: Call) -> dict[str, Any]:
        return {"commits": self._commits, "armed": self._armed}

    def _arm(self, call: Call) -> dict[str, Any]:
        self._armed = parse(call.body)
        self._commits = 0
        return self._show(call)

    def _on_commit(self, moment: str) -> None:
        self._commits += moment == "before"
        if self._commits == self._armed["commit"] and moment == self._armed["moment"]:
            victim, self._armed = self._armed["kill"], {**_DEFAULTS}
            self._kill(victim)

    def _kill(self, victim: str) -> None:
        if victim == "stack":
            os.kill(os.getpid(), signal.SIGKILL)
        elif victim == "functions":
            self._kill_functions()
        else:
            members = [find_members(directory) for directory in self._directories]
            pids = [pid for groups in members for group in groups.values() for pid in group]
            send_signal(filter(_is_container, pids), signal.SIGKILL)


def parse(data: bytes) -> dict[str, Any]:
    """The kill that a request arms. Raises ApiError."""
    try:
        body = {**_DEFAULTS, **json.loads(data)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ApiError("INVALID_ARGUMENT", f"expected a JSON object like {json.dumps(_DEFAULTS)}: {error}") from error
    if set(body) != set(_DEFAULTS) or type(body["commit"]) is not int or body["commit"] < 0:
        raise ApiError("INVALID_ARGUMENT", f"the body is {body!r}; expected fields {sorted(_DEFAULTS)}, commit >= 0")
    if body["moment"] not in _MOMENTS or body["kill"] not in _VICTIMS:
        raise ApiError("INVALID_ARGUMENT", f"the body is {body!r}; expected moment {_MOMENTS} and kill {_VICTIMS}")
    return body


def _is_container(pid: int) -> bool:
    """Whether a training or serving container runs the process; its shim, which records the exit code, is excluded."""
    try:
        process = psutil.Process(pid)
        return shim.__file__ not in process.cmdline() and not _CONTAINER_VARIABLES.isdisjoint(process.environ())
    except psutil.Error:
        return False
