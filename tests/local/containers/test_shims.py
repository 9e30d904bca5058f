"""A container with a forked shim cannot be told from a container whose shim is a new process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge_local.containers import shim, shims
from dropforge_local.containers.processes import ContainerSpec, Runtime, find_members
from dropforge_local.containers.shims import ForkServer, Shims

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shims are forked on Linux only")

# Prints all that a process inherits from its parent, the shim. Process ids are printed as relations ("my parent's
# group"), since the numbers differ.
INHERITED = """
import json, os, resource
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
ignored = int(status["SigIgn"], 16) & ~(3 << 31)  # glibc's posix_spawn ignores its own two signals, 32 and 33
names = ("Umask", "SigBlk", "SigCgt", "NoNewPrivs", "CapInh", "CapPrm", "Groups", "Seccomp", "Cpus_allowed")
descriptors = {number: os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in (0, 1, 2)}
print(json.dumps({
    "environment": dict(os.environ),
    "original environment": sorted(open("/proc/self/environ", "rb").read().decode("latin-1").split("\\0")),
    "directory": os.getcwd(),
    "descriptors": descriptors,
    "descriptors above": len(os.listdir("/proc/self/fd")) - 4,  # the listing takes one
    "leads its session and group": os.getpid() == os.getsid(0) == os.getpgid(0),
    "parent leads its own": os.getppid() == os.getsid(os.getppid()),
    "limits": limits,
    "niceness": os.nice(0),
    "ignored signals": ignored,
    "status": {name: status.get(name) for name in names},
}))
"""


class Started:
    """A runtime whose containers have forked shims if its process that forks is ready."""

    def __init__(self, directory: Path) -> None:
        self.runtime = Runtime(directory)

    async def run(self, name: str, environment: Mapping[str, str] = {}, code: str = INHERITED) -> str:
        """The output of a container."""
        argv = (sys.executable, "-I", "-S", "-c", code)
        container = self.runtime.launch(name, lambda _: ContainerSpec(argv, environment, Path("/usr")))
        ended = await asyncio.wait_for(container.wait(), PATIENCE_SECONDS)
        assert ended.code == 0, self.runtime.output(name)
        return self.runtime.output(name)


def in_both_ways(directory: Path, **options: Any) -> tuple[str, str]:
    """The output of the same container with a new shim and with a forked shim."""

    async def work() -> tuple[str, str]:
        started = Started(directory)
        new = await started.run("c", **options)
        (directory / "c").rename(directory / "with-new-shim")
        await _ready(started.runtime._shims)
        forked = await started.run("c", **options)
        await started.runtime.stop()
        return new, forked

    return asyncio.run(work())


async def _ready(started: Shims) -> ForkServer:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while started._forks is None or not started._forks.is_ready():
        assert time.monotonic() < deadline, "the process that forks was not ready in time"
        await asyncio.sleep(0.005)
    return started._forks


def test_a_container_inherits_the_same(tmp_path: Path) -> None:
    environment = {"A": "1=2", "EMPTY": "", "PATH": "/own", "LC_ALL": "C", "PYTHONPATH": "/x", "ODD": "\u00e9\udcff\n"}
    new, forked = in_both_ways(tmp_path, environment=environment)
    fresh, inherited = json.loads(new), json.loads(forked)
    assert inherited.pop("descriptors above") == 0
    del fresh["descriptors above"]  # a new process also inherits what the tests' own process lets it inherit
    assert inherited == fresh
    assert inherited["environment"]["A"] == "1=2"


def test_a_container_does_not_see_the_environment_of_the_container_before(tmp_path: Path) -> None:
    async def work() -> str:
        started = Started(tmp_path)
        await started.run("first")
        await _ready(started.runtime._shims)
        await started.run("second", {"SECRET": "one"})
        output = await started.run("third", {"OWN": "two"})
        await started.runtime.stop()
        return output

    output = asyncio.run(work())
    assert "SECRET" not in output
    assert "OWN" in output


def test_a_forked_shim_is_found_by_its_mark(tmp_path: Path) -> None:
    async def work() -> None:
        runtime = Runtime(tmp_path)
        runtime.launch("first", lambda _: ContainerSpec(("true",), {}, Path("/")))
        forks = await _ready(runtime._shims)
        container = runtime.launch("c", lambda _: ContainerSpec(("sleep", "600"), {}, Path("/")))
        assert psutil.Process(container.pid).ppid() == forks._process.pid
        assert container.pid in find_members(tmp_path / "c")[tmp_path / "c"]
        assert psutil.Process(container.pid).environ()[shim.MARKER] == str(tmp_path / "c")
        await container.terminate(0)
        await runtime.stop()

    asyncio.run(work())


def test_ended_shims_are_collected(tmp_path: Path) -> None:
    async def work() -> None:
        runtime = Runtime(tmp_path)
        runtime.launch("first", lambda _: ContainerSpec(("true",), {}, Path("/")))
        forks = await _ready(runtime._shims)
        for number in range(3):
            await runtime.launch(f"c{number}", lambda _: ContainerSpec(("true",), {}, Path("/"))).wait()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while psutil.Process(forks._process.pid).children():
            assert time.monotonic() < deadline, "an ended shim is still there"
            await asyncio.sleep(0.005)
        await runtime.stop()

    asyncio.run(work())


def test_the_process_that_forks_ends_with_its_stack(tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from dropforge_local.containers.processes import ContainerSpec, Runtime
async def main():
    runtime = Runtime(Path({str(tmp_path)!r}))
    runtime.launch("c", lambda _: ContainerSpec(("true",), {{}}, Path("/")))
    print(runtime._shims._forks._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as stack:
        assert stack.stdout is not None
        forks = psutil.Process(int(stack.stdout.readline()))
        stack.kill()
    psutil.wait_procs([forks], PATIENCE_SECONDS)
    assert not forks.is_running() or forks.status() == psutil.STATUS_ZOMBIE


def test_a_container_does_not_begin_for_a_stack_that_was_killed(tmp_path: Path) -> None:
    """The stack sent the request and ended; its successor has already looked for the container."""
    (tmp_path / "c").mkdir()
    code = f"""
import os, socket, sys
sys.path.insert(0, {str(Path(shim.__file__).parent)!r})
import shim
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
theirs.close()
shim.become_shim(ours, ["4", {str(tmp_path / "c")!r}, "1000000", "/", "true"])
"""
    environment = {shim.MARKER: "-" * shim.PATH_BYTES}
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], env=environment, capture_output=True, check=False)
    assert ended.returncode == 1
    assert b"BrokenPipeError" in ended.stderr
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime whose process that forks was ready, and does not answer."""
    monkeypatch.setattr(shims, "PATIENCE_SECONDS", 0.2)
    runtime = Runtime(tmp_path)
    runtime._shims._forks = ForkServer()
    asyncio.run(_ready(runtime._shims))
    runtime._shims._forks._process.send_signal(signal.SIGSTOP)
    yield runtime
    runtime._shims.close()


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_without_an_answer_the_shim_is_a_new_process(stopped: Runtime, tmp_path: Path, end: signal.Signals) -> None:
    forks = stopped._shims._forks
    assert forks is not None
    forks._process.send_signal(end)

    async def work() -> None:
        for name in ("a", "b"):
            container = stopped.launch(name, lambda _: ContainerSpec(("echo", "ran"), {}, Path("/")))
            assert psutil.Process(container.pid).ppid() == os.getpid()
            assert (await asyncio.wait_for(container.wait(), PATIENCE_SECONDS)).code == 0
            assert stopped.output(name) == "ran\n"
        await stopped.stop()

    # launch needs a loop of its own: a container's future belongs to it
    asyncio.run(work())
    assert find_members(tmp_path) == {}


@pytest.mark.parametrize("environment", [{"BIG": "x" * shim.REQUEST_BYTES}, {"A=B": "C"}, {"": "x"}])
def test_a_request_that_could_be_misread_is_not_made(environment: dict[str, str]) -> None:
    assert shims._request(["directory"], environment) is None
    assert shims._request(["directory", "a\0b"], {}) is None


def test_a_request_lists_arguments_and_variables() -> None:
    assert shims._request(["d", "1"], {"A": "b=c"}) == b"2\0d\x001\0A=b=c"
