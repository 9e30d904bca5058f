"""Commands of dropforge as processes of their own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from tests.patience import PATIENCE_SECONDS

from ..forked import Forked, Nursery

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [str(Path(sys.executable).with_name("dropforge"))]
# The real demo on a stack whose containers train and serve nothing, so that it takes seconds.
NOOP = """
import os, sys
from dataclasses import replace
from dropforge_local.stack import control as stack
from dropforge_local.stack.config import StackConfig
from dropforge_local.stack.deployment import IMAGES
images, start = sys.argv.pop(1), stack.up
def up(state, **options):
    settings = {
        "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-noop:test",
        "DROPFORGE_SERVE_VLLM_IMAGE": f"{IMAGES}/serve-noop:test",
        "DROPFORGE_CHECK_INTERVAL_SECONDS": "2",
    }
    replace(StackConfig.of(state), images=images, settings=settings).save(state)
    return start(state, **options)
stack.up = up
if address := os.environ.pop("STACK_ZYGOTE", ""):  # only a forked command has tests on its import path
    from functools import partial
    from tests.stack.zygote import spawn_at
    stack._spawn = partial(spawn_at, address)
from dropforge_cli.main import cli
cli(prog_name="dropforge")
"""
NOOP_COMMAND = [sys.executable, "-P", "-c", NOOP, str(ROOT / "tests" / "images")]


class Process:
    """A running command. A test can wait for its output. A nursery forks it (forked.py) if there is one.

    The stacks of a forked command are forked, too, by the zygote at `zygote` (tests/stack/zygote.py).
    """

    def __init__(self, command: list[str], directory: Path, nursery: Nursery | None = None, zygote: str = "") -> None:
        # A stack keeps to the ports of this worker of pytest: the stack of another worker would look like a leftover.
        kept = ("DROPFORGE_STACK_PORTS", "DROPFORGE_CACHE")
        clean = {
            name: value
            for name, value in os.environ.items()
            if name in kept or not (name.startswith("DROPFORGE_") or "EMULATOR" in name)
        }
        self.output = directory / f"output-{time.monotonic_ns()}"
        self.popen: subprocess.Popen[bytes] | Forked
        with self.output.open("wb") as file:
            if nursery is None:
                self.popen = subprocess.Popen(command, stdout=file, stderr=file, cwd=directory, env=clean)
            else:
                streams = (0, file.fileno(), file.fileno())
                self.popen = nursery.start(command, streams, {**clean, "STACK_ZYGOTE": zygote}, directory)

    def wait_for(self, text: str, timeout: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.text():
            assert self.popen.poll() is None, f"ended before {text!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.text()}"
            time.sleep(0.01)

    def code(self, timeout: float = PATIENCE_SECONDS) -> int:
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.popen.args!r} did not end in {timeout:.0f} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()


def processes_of(directory: Path) -> list[int]:
    """Return every process whose command line, working directory or environment names a directory."""
    pids = []
    for process in psutil.process_iter():
        try:
            marks = [*process.cmdline(), process.cwd(), process.environ().get("DROPFORGE_CONTAINER_ID", "")]
        except psutil.Error:
            continue
        if any(str(directory) in mark for mark in marks):
            pids.append(process.pid)
    return pids
