"""The demos' path through a local stack: `python -P -m tests.portable.drive STATE`, below hide.py.

Two runs that train nothing go through Cloud Run and GKE to an endpoint, which then ends. The containers of the first
leave a process behind, and a third run is cancelled. Prints what `dropforge demo` prints at its end, as JSON.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import psutil
from tests.patience import PATIENCE_SECONDS

from dropforge_local.containers.shim import HAS_PROC
from dropforge_local.stack import control

from ..stack.conftest import NOOP_CONFIG, User, user_of
from ..stack.targets import PARTS, SERVES


def main(state: Path) -> None:
    NOOP_CONFIG.save(state)
    info = control.up(state)
    try:
        if not HAS_PROC:
            restart_as_after_a_reboot(state, info.pid)
        ends = drive(user_of(state))
    finally:
        control.down(state)
        left = control.leftovers(state)
    print(json.dumps({"ends": ends, "left": [left.resources, left.processes, left.ports]}))


def restart_as_after_a_reboot(state: Path, pid: int) -> None:
    """Kill the stack and give its process id to another process, this one. Start the stack again."""
    stack = psutil.Process(pid)
    stack.kill()
    stack.wait(PATIENCE_SECONDS)
    with closing(sqlite3.connect(state / "state.db", isolation_level=None)) as db:
        assert db.execute("UPDATE wf_lease SET process = ?", (f"{os.getpid()}:",)).rowcount == 1
    control.up(state)


def drive(user: User) -> dict[str, str]:
    """The state in which each run ended, once its endpoint has ended, too."""
    runs = {
        "cloud_run": user.drop(user.spec("orphan", serve={"type": "cloud_run", **SERVES["cloud_run"]})),
        "gke": user.drop(user.spec(target={"type": "gke", **PARTS["gke"]}, serve={"type": "gke", **SERVES["gke"]})),
        "cancelled": user.drop(user.spec("hang")),
    }
    user.wait(runs["cancelled"], "TRAINING")
    cancel(user, runs["cancelled"])
    ends = {name: str(user.wait(run).state) for name, run in runs.items()}
    for name in SERVES.keys() & runs.keys():
        cancel(user, runs[name])
        user.wait_for(runs[name], lambda record: record.endpoint is None or record.endpoint.ended is not None)
    return ends


def cancel(user: User, run: str) -> None:
    user.publish(user.settings.operations_topic, json.dumps({"cancel": run}).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
