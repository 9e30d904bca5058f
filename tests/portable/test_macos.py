"""What a machine with macOS lacks is hidden from the local stack, and the demos' path still ends well.

The kernel hides the features (hide.py). A real macOS has not run these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.patience import PATIENCE_SECONDS

from .hide import (
    CGROUPS,
    DIRECTORY,
    ENVIRON,
    FEATURES,
    NAMESPACE,
    PROC,
    REFUSED,
    SYSCALLS,
    TOOLS,
    namespaces,
)

SMALL = (CGROUPS, SYSCALLS, TOOLS)  # what an old or small Linux lacks, beside /proc and a whole loopback network
KILLS = "lost or by_its_mark or end_all"  # the tests that find and end the processes of a killed shim or stack
# By feature that the runtime of containers can use, the tests with that feature alone hidden. No machine has /proc and
# lacks prctl: without it, the runtime loses a child that has left its session.
ALONE = dict.fromkeys((PROC, CGROUPS, TOOLS, ENVIRON), f"sessions or {KILLS}") | {SYSCALLS: KILLS}
HIDE = [sys.executable, "-P", str(Path(__file__).with_name("hide.py"))]
MISSING_TOOL = ["sh", "-c", "setsid true; stat -c %s /; stat / > /dev/null; echo $?"]


def hidden(features: str, directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine without the features."""
    directory.mkdir(exist_ok=True)
    environment = {**os.environ, DIRECTORY: str(directory), "PYTHONPATH": str(ROOT)}
    words = [*namespaces(), *HIDE, features, *command]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=5 * PATIENCE_SECONDS
    )


def processes_of(directory: Path) -> list[str]:
    """The command lines of the processes that the hidden command left: they share its network's namespace."""
    number, left = int((directory / NAMESPACE).read_text()), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns" / "net").stat().st_ino == number:
                left.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, PermissionError):
            continue
    return left


@pytest.fixture(scope="module", autouse=True)
def _can_hide(tmp_path_factory: pytest.TempPathFactory) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux can hide its features")
    done = hidden(",".join(FEATURES), tmp_path_factory.mktemp("probe"), "true")
    if done.returncode:
        pytest.skip(f"this machine lets nobody make namespaces: {done.stderr}")


def test_the_kernel_hides_what_macos_lacks(tmp_path: Path) -> None:
    script = """
import os, socket, subprocess, psutil
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.strerror
sleeper = subprocess.Popen(["sleep", "60"])
print(os.listdir("/proc"), os.listdir("/sys"), refused(os.pidfd_open, 1), refused(os.sched_getaffinity, 0))
print([refused(socket.socket().bind, (host, 0)) for host in ("127.0.0.1", "127.0.0.2", "127.77.0.1")])
print(psutil.Process(sleeper.pid).environ(), "PATH" in psutil.Process().environ())
sleeper.kill()
"""
    done = hidden(",".join(FEATURES), tmp_path, sys.executable, "-c", script)
    absent, taken = "Function not implemented", "Cannot assign requested address"
    assert done.stdout.splitlines() == [
        f"[] [] {absent} {absent}", f"[None, '{taken}', '{taken}']", "{} True",
    ]  # fmt: skip
    tools = hidden(TOOLS, tmp_path / "tools", *MISSING_TOOL)
    assert tools.stdout == "0\n"
    assert (tmp_path / "tools" / REFUSED).read_text() == "setsid true\nstat -c %s /\n"


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_SECONDS)
@pytest.mark.parametrize(
    "features",
    [",".join(FEATURES), ",".join(SMALL)],
    ids=["macos", "small Linux"],
)
def test_runs_on_cloud_run_and_gke_end_well_and_leave_nothing(features: str, tmp_path: Path) -> None:
    done = hidden(features, tmp_path, sys.executable, "-P", "-m", "tests.portable.drive", str(tmp_path / "stack"))
    assert done.returncode == 0, done.stderr
    ended = {"cloud_run": "SUCCEEDED", "gke": "SUCCEEDED", "cancelled": "CANCELLED"}
    assert json.loads(done.stdout) == {"ends": ended, "left": [[], [], []]}
    assert processes_of(tmp_path) == []
    refused = tmp_path / REFUSED
    assert not refused.exists(), refused.read_text()


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_SECONDS)
@pytest.mark.parametrize(("features", "chosen"), [(",".join(FEATURES), ""), *ALONE.items()])
def test_the_runtime_of_containers_keeps_its_promises(features: str, chosen: str, tmp_path: Path) -> None:
    """The tests of containers with all features hidden; those that find and end processes with each hidden alone."""
    tests = str(ROOT / "tests" / "local" / "containers" / "test_processes.py")
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "tests"), "-k", chosen]
    done = hidden(features, tmp_path, sys.executable, "-P", "-m", "pytest", *options, tests)
    assert done.returncode == 0, done.stdout
    assert processes_of(tmp_path) == []


def test_a_feature_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = hidden(f"{PROC},magic", tmp_path, "true")
    assert done.returncode == 1
    assert "unknown features ['magic']" in done.stderr
