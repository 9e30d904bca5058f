"""The Workflows engine beside two durable engines of others, on one machine, one after another: DBOS and Restate.

All three run workflows of 20 durable steps. A step is one HTTP GET to a server in another process, over a connection
that stays open. Each engine is a program of its own (ours.py, with_dbos.py, with_restate.py) with the same four
commands. A program that has started its workflows makes the file STATE/started. What DBOS and Restate need is installed
in build/peers/, at the first run: 82 MB and 257 MB.

The engines differ in what a step is. Our engine sends the request itself, and syncs the results of reads together. The
steps of the others are Python functions, which send it with httpx (about 1 ms), and each result is synced.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bench.engine import RUNNING, STEPS, Peer

from .environments import Missing, python_with, restate_server

HERE = Path(__file__).resolve().parent
ROUNDS = 3
RECOVERY_SECONDS = 120.0


class Contender(NamedTuple):
    """An engine: its name and version, and the command of its program without the arguments."""

    name: str
    command: list[str]


class Recovery(NamedTuple):
    """The effects of a SIGKILL of an engine with RUNNING workflows."""

    first_seconds: float
    all_seconds: float
    lost: int
    repeated: int


def main() -> None:
    """Print the medians of three rounds, and the ratios to the first engine, which is ours."""
    print(f"durable workflows of {STEPS} HTTP steps   cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    contenders = available()
    with tempfile.TemporaryDirectory() as folder, Peer(Path(folder)) as service:
        print_speed(contenders, Path(folder), service)
        print_recovery(contenders, Path(folder), service)


def available() -> list[Contender]:
    """Return our engine, and those of the others that this machine can install."""
    found = [Contender("workflows_engine", [sys.executable, "-m", "bench.peers.ours"])]
    try:
        python = python_with("dbos", "dbos==3.4.0", "httpx==0.28.1")
        found.append(Contender("DBOS 3.4.0, SQLite", [python, str(HERE / "with_dbos.py")]))
    except Missing as error:
        print(f"  without DBOS: {error}")
    try:
        python = python_with("restate", "restate-sdk==1.2.0", "hypercorn==0.18.0", "httpx==0.28.1")
        found.append(Contender("Restate 1.7.12", [python, str(HERE / "with_restate.py"), restate_server("1.7.12")]))
    except Missing as error:
        print(f"  without Restate: {error}")
    return found


def print_speed(contenders: list[Contender], home: Path, service: Peer) -> None:
    """Each round measures every engine, so that a change of the machine's load meets all of them."""
    measured: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    for number in range(ROUNDS):
        for place, contender in enumerate(contenders):
            state = home / f"speed-{number}-{place}"
            measured[contender.name].append(_run(contender, "speed", service.url, state))
    ours: dict[str, float] = {}
    for what, unit, text in (
        ("latency_ms", "ms", f"one workflow of {STEPS} steps, p50 of 50"),
        ("rate", "/s", "200 workflows, 16 at a time"),
    ):
        print(f"  {text}")
        for name, rounds in measured.items():
            value = statistics.median(figures[what] for figures in rounds)
            ours.setdefault(what, value)
            print(f"    {name:<22} {value:10.1f} {unit:<3} {value / ours[what]:8.2f} times ours")


def print_recovery(contenders: list[Contender], home: Path, service: Peer) -> None:
    print(f"  SIGKILL with {RUNNING} running workflows, whose steps take 0.25 s")
    for place, contender in enumerate(contenders):
        found = recover(contender, home / f"recovery-{place}", service)
        print(
            f"    {contender.name:<22} first step after {found.first_seconds:.2f} s, all done after "
            f"{found.all_seconds:.2f} s; {found.lost} steps lost, {found.repeated} repeated"
        )


def recover(contender: Contender, state: Path, service: Peer) -> Recovery:
    """Kill an engine in the middle of RUNNING workflows, start it again, and count the effects of the steps."""
    service.pause = 0.25
    with _running(contender, "start", service.url, state):
        _until(lambda: (state / "started").exists() and service.count() >= RUNNING * 5)
    time.sleep(2 * service.pause)  # the steps that were under way have an effect still
    before, begin = service.count(), time.monotonic()
    with _running(contender, "continue", service.url, state):
        _until(lambda: service.count() > before)
        first_seconds = time.monotonic() - begin
        with suppress(TimeoutError):
            _until(lambda: len(service.effects()) == RUNNING * STEPS)
        all_seconds = time.monotonic() - begin
    effects = service.effects()
    service.pause = 0.0
    lost = RUNNING * STEPS - len(effects)
    return Recovery(first_seconds, all_seconds, lost, sum(effects.values()) - len(effects))


@contextmanager
def _running(contender: Contender, mode: str, url: str, state: Path) -> Iterator[None]:
    """Run an engine's program, and kill all of its processes at the end."""
    process = subprocess.Popen([*contender.command, mode, url, str(state)], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + RECOVERY_SECONDS
    while not is_true():
        if time.monotonic() > give_up:
            raise TimeoutError(f"nothing happened in {RECOVERY_SECONDS:.0f} s")
        time.sleep(0.01)


def _run(contender: Contender, mode: str, url: str, state: Path) -> dict[str, float]:
    done = subprocess.run([*contender.command, mode, url, str(state)], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
