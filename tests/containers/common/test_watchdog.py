"""The end of a training that makes no step any more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from containers.common.errors import INTERNAL
from containers.common.watchdog import FIRST_STEP_SECONDS, STALL_SECONDS, STEPS, TICK_SECONDS, VARIABLE, Pause

from ..conftest import ROOT

STALLED = """
import sys, threading
from pathlib import Path
from containers.common import watchdog
watchdog.TICK_SECONDS = 0.05

def wait_for_a_peer():
    threading.Event().wait()

with watchdog.Watchdog("rank 1", lambda error: Path(sys.argv[1]).write_text(str(error.to_json()))) as dog:
    dog.step()
    threading.Thread(target=wait_for_a_peer).start()
    wait_for_a_peer()
"""
BROKEN = """
import threading
from containers.common import watchdog
watchdog.TICK_SECONDS = 0.05
with watchdog.Watchdog("rank 1", lambda error: 1 / 0) as dog:
    dog.step()
    threading.Event().wait()
"""
ENDS = """
import threading
from containers.common import watchdog
watchdog.TICK_SECONDS = 0.05
with watchdog.Watchdog("rank 1") as dog:
    dog.step()
print([thread.name for thread in threading.enumerate()])
"""


def ended(program: str, *words: str, stall: str = "1") -> subprocess.CompletedProcess[str]:
    """A program with a watchdog that waits so many seconds."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}", VARIABLE: stall}
    command = [sys.executable, "-P", "-c", program, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_training_that_makes_no_step_ends_with_the_stacks_of_its_threads(tmp_path: Path) -> None:
    done = ended(STALLED, str(tmp_path / "error"))
    assert done.returncode == INTERNAL
    error = (tmp_path / "error").read_text()
    assert "'error_class': 'infrastructure'" in error
    assert "rank 1 stalled: no step for 1 s after 1 steps" in error
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert [json.loads(line)["severity"] for line in lines] == ["WARNING", "ERROR"]
    assert done.stderr.count(" in wait_for_a_peer") == 2 * len(lines)


def test_a_training_ends_also_if_nobody_hears_of_it() -> None:
    done = ended(BROKEN)
    assert done.returncode == INTERNAL
    assert "the stall was not reported: ZeroDivisionError" in done.stderr


def test_what_follows_the_training_takes_its_time() -> None:
    """The export may take longer than any pause of a training."""
    done = ended(ENDS, stall="60")
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def passed(pause: Pause, seconds: float) -> None:
    """Pass a time as the watchdog counts it, tick by tick."""
    while seconds > 0:
        pause.passed(min(seconds, TICK_SECONDS))
        seconds -= TICK_SECONDS


@pytest.mark.parametrize(("seconds", "limit"), [(1, STALL_SECONDS), (600, STEPS * 600)])
def test_a_pause_may_be_as_long_as_many_steps(seconds: float, limit: float) -> None:
    pause = Pause()
    assert pause.limit == FIRST_STEP_SECONDS
    passed(pause, 3000)  # compiles
    pause.stepped()
    assert pause.limit == STALL_SECONDS
    passed(pause, seconds)
    pause.stepped()
    passed(pause, 1)
    pause.stepped()
    assert (pause.seconds, pause.limit) == (0, limit)


def test_the_time_of_a_suspended_machine_does_not_count() -> None:
    pause = Pause()
    pause.stepped()
    pause.passed(10 * STALL_SECONDS)  # between two ticks
    assert pause.seconds < STALL_SECONDS
