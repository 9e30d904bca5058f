"""Many runs at once: the cost of waiting runs, of a SIGKILL of the stack, and of many cancellations.

    python -m bench.load --waiting 10000 --cancel 2000

The benchmark drops N specs at once while no region has a GPU. Every run creates its Cloud Run job, whose execution
waits for capacity, and its workflow waits for a callback. Only the shortage is simulated; no container runs. Steps:
1. Measure memory and CPU time while the runs wait.
2. SIGKILL the stack; measure how long a new stack needs to recover all executions.
3. Cancel some runs at once: they must end and leave nothing, and the other runs must continue to wait.
4. Cancel the other runs.
A lost or doubled run, or a resource that is left, ends the benchmark with a message and a non-zero status.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackInfo

from .stack import Cpu, User, check_nothing_left, describe_memory, processes, running_stack

WAITING, CANCELLED = 200, 50
IDLE_SECONDS = 10.0


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--waiting", type=int, default=WAITING, metavar="N", help="runs that wait for a GPU")
    parser.add_argument(
        "--cancel", type=int, default=CANCELLED, metavar="N", help="number of runs that are cancelled first"
    )
    options = parser.parse_args(arguments)
    with running_stack() as (state, info):
        post(info, "_local/cloudrun/faults", {"stockout": ["us-central1"]})
        user = User(info)
        runs = measure_waiting(user, options.waiting)
        info = measure_recovery(state, user, runs)
        measure_cancel(user, runs[: options.cancel], runs[options.cancel :])
        measure_cancel(user, runs[options.cancel :], [])
        user.check_ended(runs, "CANCELLED")
        check_nothing_left(state)


def measure_waiting(user: User, count: int) -> list[str]:
    before, began = Cpu.now(user.info), time.monotonic()
    runs = user.drop_all([f"wait-{number}" for number in range(count)])
    dropped = time.monotonic() - began
    user.wait(runs, "PROVISIONING")
    wait_for_callbacks(user, runs)
    seconds = time.monotonic() - began
    print(
        f"{count} specs dropped in {dropped:.1f} s; "
        f"all runs wait after {seconds:.1f} s, {count / seconds:.1f} per second"
    )
    print(f"CPU time per run until it waits: {Cpu.now(user.info).since(before).each(count)}")
    before = Cpu.now(user.info)
    time.sleep(IDLE_SECONDS)
    used = sum(Cpu.now(user.info)) - sum(before)
    print(f"while the runs wait: {describe_memory(user.info)}, {used / IDLE_SECONDS * 100:.1f} % of a core")
    return runs


def wait_for_callbacks(user: User, runs: Sequence[str]) -> None:
    """Wait until every record contains the callback URL of its workflow."""
    deadline = time.monotonic() + 60 + len(runs)
    for run in runs:
        while user.store.record(run).callback_url is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"LOST: run {run} has no callback; it is {user.store.record(run)}")
            time.sleep(0.2)


def measure_recovery(state: Path, user: User, runs: Sequence[str]) -> StackInfo:
    """SIGKILL the stack while every run waits; the new stack must list every execution as active."""
    family = [psutil.Process(user.info.pid), *processes(user.info)[1]]
    os.kill(user.info.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=30)
    began = time.monotonic()
    info = user.info = local.up(state)
    ready = time.monotonic() - began
    active = user.executions("ACTIVE")
    seconds = time.monotonic() - began
    if lost := [run for run in runs if active[run] != 1]:
        raise SystemExit(f"LOST: {len(lost)} of {len(runs)} executions are not active after SIGKILL: {lost[:5]}")
    print(
        f"SIGKILL: a new stack serves after {ready:.2f} s, has listed all {len(runs)} executions after {seconds:.2f} s"
    )
    return info


def measure_cancel(user: User, runs: Sequence[str], others: Sequence[str]) -> None:
    """Cancel `runs` at once; they must end and leave nothing, and `others` must stay active."""
    if not runs:
        return
    before, began = Cpu.now(user.info), time.monotonic()
    user.cancel_all(runs)
    user.wait(runs)
    seconds = time.monotonic() - began
    user.check_ended(runs, "CANCELLED")
    if lost := set(others) - set(user.executions("ACTIVE")):
        raise SystemExit(f"LOST: {len(lost)} runs ended without a cancel: {sorted(lost)[:5]}")
    print(f"{len(runs)} cancelled at once: all ended in {seconds:.1f} s, {len(runs) / seconds:.1f} per second")
    print(f"CPU per cancelled run: {Cpu.now(user.info).since(before).each(len(runs))}")


def post(info: StackInfo, path: str, body: object) -> None:
    request = urllib.request.Request(f"{info.http}/{path}", json.dumps(body).encode(), method="POST")
    urllib.request.urlopen(request, timeout=30).close()


if __name__ == "__main__":
    main(sys.argv[1:])
