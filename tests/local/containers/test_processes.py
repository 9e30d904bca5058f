"""Containers as processes: exit codes, kills, memory, and survival of the process that started them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge_local.containers import processes, shim
from dropforge_local.containers.processes import (
    Container,
    ContainerSpec,
    Exit,
    Runtime,
    end_all,
    find_members,
    temporary_directory,
)
from dropforge_local.containers.shims import ForkServer, Shims


@pytest.fixture(autouse=True, params=["forked", "new"])
def shims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with forked shims and with shims that are new processes."""
    if request.param == "new":
        monkeypatch.setattr(ForkServer, "is_ready", lambda _: False)
    else:
        monkeypatch.setattr(Shims, "__init__", _with_forks)
    return str(request.param)


def _with_forks(shims: Shims) -> None:
    if not shim.HAS_PROC:
        pytest.skip("shims are forked only where /proc is")
    shims._forks = ForkServer()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not shims._forks.is_ready():
        assert time.monotonic() < deadline, "the process that forks was not ready in time"
        time.sleep(0.005)


def spec(code: str, memory_bytes: int | None = None, log_bytes: int = 2**20, **env: str) -> ContainerSpec:
    argv = (sys.executable, "-P", "-c", textwrap.dedent(code))
    return ContainerSpec(argv, env, Path("/"), memory_bytes, log_bytes)


def run(directory: Path, work: Callable[[Runtime], Awaitable[Exit]]) -> Exit:
    """Run `work` with a runtime on a new event loop, as the stack does."""

    async def start_and_work() -> Exit:
        runtime = Runtime(directory)
        await runtime.start()
        try:
            return await asyncio.wait_for(work(runtime), PATIENCE_SECONDS)
        finally:
            await runtime.stop()

    return asyncio.run(start_and_work())


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


async def ready(runtime: Runtime, container: Container) -> None:
    await until(lambda: "ready" in runtime.output(container.id))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.abort()", 134),
    ],
)
def test_exit_code_is_reported(tmp_path: Path, code: str, expected: int) -> None:
    before = time.time()
    ended = run(tmp_path, lambda runtime: runtime.launch("c", lambda _: spec(code)).wait())
    assert (ended.code, ended.reason) == (expected, "")
    assert before <= ended.at <= time.time()


def test_unknown_command_exits_with_127_and_an_explanation(tmp_path: Path) -> None:
    missing = ContainerSpec(("no-such-command",), {}, Path("/"))
    assert run(tmp_path, lambda runtime: runtime.launch("c", lambda _: missing).wait()).code == 127
    assert "cannot start 'no-such-command'" in (tmp_path / "c/output.log").read_text()


def test_the_environment_comes_from_the_spec_and_not_from_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_TEST_LEAK", "leaked")
    code = "import os; print(sorted(k for k in os.environ if k != 'LC_CTYPE')); print(os.environ['HOME'])"
    run(tmp_path, lambda runtime: runtime.launch("c", lambda _: spec(code, A="1")).wait())
    names, home = (tmp_path / "c/output.log").read_text().splitlines()
    assert names == "['A', 'DROPFORGE_CONTAINER_ID', 'HOME', 'LANG', 'PATH', 'TMPDIR']"
    assert Path(home).is_relative_to(tmp_path / "c")


def test_output_is_capped_and_keeps_the_end(tmp_path: Path) -> None:
    code = "for i in range(20000): print('line', i)"
    run(tmp_path, lambda runtime: runtime.launch("c", lambda _: spec(code, log_bytes=100_000)).wait())
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("output.log*")) <= 100_000
    assert (tmp_path / "c/output.log").read_text().endswith("line 19999\n")


POLITE = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", flush=True)
    time.sleep(600)
"""


def test_terminate_sends_sigterm_first(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: spec(POLITE))
        await ready(runtime, container)
        return await container.terminate(10)

    assert run(tmp_path, work).code == 5


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(15, 1); print('ready', flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-P", "-c", child], start_new_session=True, env={})
    subprocess.Popen([sys.executable, "-P", "-c", child], start_new_session=True)
    time.sleep(600)
"""


def test_terminate_waits_for_the_command_to_start(tmp_path: Path) -> None:
    """Before its handler is there, SIGTERM ends the command or is lost, never the shim: each end has an exit code."""
    code = "trap 'exit 5' TERM; sleep 60 & wait"

    async def work(runtime: Runtime) -> Exit:
        for index in range(25):
            container = runtime.launch(f"c{index}", lambda _: ContainerSpec(("bash", "-c", code), {}, Path("/")))
            await asyncio.sleep(0.0016 * index)
            ended = await container.terminate(0.3)
            assert (ended.code in (5, 137, 143), ended.reason) == (True, "")
        return ended

    run(tmp_path, work)


def test_sigterm_is_for_the_first_process_alone(tmp_path: Path) -> None:
    """A launcher must forward the signal to its workers: a container runtime does not."""
    code = """
        import signal, subprocess, sys, time
        worker = "import signal, time; signal.signal(15, lambda *_: print('told', flush=True)); "
        worker += "print('ready', flush=True); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-P", "-c", worker])
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(5)))
        print("ready", flush=True)
        process.wait()
    """

    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: spec(code))
        await until(lambda: runtime.output("c").count("ready") == 2)
        ended = await container.terminate(60)
        assert "told" not in runtime.output("c")
        assert runtime.live() == []
        return ended

    assert run(tmp_path, work).code == 5


@pytest.mark.skipif(not shim.HAS_PROC, reason="only /proc tells whether a process handles a signal")
def test_a_first_process_without_a_handler_gets_no_sigterm(tmp_path: Path) -> None:
    """The kernel discards it for process 1 of a container; the platform kills the container after the grace time."""

    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: ContainerSpec(("sleep", "60"), {}, Path("/")))
        await until(lambda: [process.name() for process in psutil.Process(container.pid).children()] == ["sleep"])
        return await container.terminate(0.2)

    assert run(tmp_path, work).code == 137


def test_terminate_ends_children_in_other_sessions(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: spec(STUBBORN))
        await until(lambda: runtime.output("c").count("ready") == 2)
        below = psutil.Process(container.pid).children(recursive=True)
        ended = await container.terminate(0.2)
        assert not any(process.is_running() and process.status() != "zombie" for process in below)
        assert runtime.live() == []
        return ended

    assert run(tmp_path, work).code == 137


@pytest.mark.skipif(not shim.HAS_PROC, reason="only on Linux can a shim adopt orphans that do not name their container")
def test_children_end_with_the_first_process(tmp_path: Path) -> None:
    seconds = f"60.{time.time_ns()}"  # a command line that no other process has
    code = f"""
        import subprocess
        subprocess.Popen(["sleep", "{seconds}"], start_new_session=True, env={{}})
    """

    async def work(runtime: Runtime) -> Exit:
        return await runtime.launch("c", lambda _: spec(code)).wait()

    assert run(tmp_path, work).code == 0
    assert not [item for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"] == ["sleep", seconds]]


def test_killed_shim_counts_as_lost_and_ends_the_container(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: spec("import time; print('ready', flush=True); time.sleep(600)"))
        await ready(runtime, container)
        os.kill(container.pid, signal.SIGKILL)
        return await container.wait()

    ended = run(tmp_path, work)
    assert (ended.code, ended.reason) == (137, "LOST")
    assert find_members(tmp_path) == {}


def test_memory_limit_kills_with_a_reason(tmp_path: Path) -> None:
    code = "import time; hog = bytearray(120 * 2**20); time.sleep(600)"
    ended = run(tmp_path, lambda runtime: runtime.launch("c", lambda _: spec(code, memory_bytes=64 * 2**20)).wait())
    assert (ended.code, ended.reason) == (137, "OOM")
    assert "Memory limit of 64 MiB exceeded" in (tmp_path / "c/output.log").read_text()


HOGS = """
    import subprocess, sys, threading, time
    hog = [sys.executable, "-c", "import time; hog = bytearray(40 * 2**20); time.sleep(600)"]
    for _ in range(2):
        threading.Thread(target=subprocess.run, args=[hog]).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("listed", [True, False])
def test_the_memory_of_all_processes_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """Each thread of a process has its own children. Not every kernel lists them."""
    monkeypatch.setattr(processes, "HAS_CHILDREN", listed and processes.HAS_CHILDREN)
    ended = run(tmp_path, lambda runtime: runtime.launch("c", lambda _: spec(HOGS, memory_bytes=80 * 2**20)).wait())
    assert ended.reason == "OOM"


def test_a_running_container_is_adopted_and_never_started_twice(tmp_path: Path) -> None:
    code = "import time, pathlib; print('ready', flush=True); time.sleep({}); raise SystemExit(4)"

    async def first(runtime: Runtime) -> Exit:
        await ready(runtime, runtime.launch("c", lambda _: spec(code.format(1))))
        return Exit(0, 0)

    async def second(runtime: Runtime) -> Exit:
        assert runtime.live() == ["c"]
        return await runtime.launch("c", lambda _: spec("raise SystemExit(9)")).wait()

    run(tmp_path, first)
    assert run(tmp_path, second).code == 4
    assert run(tmp_path, second if find_members(tmp_path) else _adopted).code == 4
    assert (tmp_path / "c/output.log").read_text() == "ready\n"


async def _adopted(runtime: Runtime) -> Exit:
    container = runtime.adopt("c")
    assert container is not None
    return await container.wait()


def test_a_container_without_a_record_is_adopted_by_its_mark(tmp_path: Path) -> None:
    """The stack was killed after it started the shim and before it recorded the pid."""

    async def work(runtime: Runtime) -> Exit:
        await ready(runtime, runtime.launch("c", lambda _: spec(POLITE)))
        (tmp_path / "c/process.json").unlink()
        return Exit(0, 0)

    async def second(runtime: Runtime) -> Exit:
        container = runtime.adopt("c")
        assert container is not None
        return await container.terminate(60)

    run(tmp_path, work)
    assert run(tmp_path, second).code == 5
    assert run(tmp_path, lambda runtime: _never(runtime)).code == 0


async def _never(runtime: Runtime) -> Exit:
    assert runtime.adopt("never-started") is None
    return Exit(0, 0)


def test_end_all_works_without_a_stack_after_it_was_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from dropforge_local.containers.processes import ContainerSpec, Runtime
async def main():
    runtime = Runtime(Path({str(tmp_path)!r}))
    await runtime.start()
    for name in ("a", "b"):
        runtime.launch(name, lambda _: ContainerSpec(("sleep", "300"), {{}}, Path("/")))
    print("started", flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as stack:
        assert stack.stdout is not None
        assert stack.stdout.readline() == "started\n"
        stack.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((tmp_path / name / "claim").exists() for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert end_all(tmp_path) == ["a", "b"]
    assert find_members(tmp_path) == {}
    assert end_all(tmp_path) == []


def test_long_paths_get_a_short_tmpdir(tmp_path: Path) -> None:
    assert len(str(temporary_directory(tmp_path / ("x" * 100)))) <= 60
    assert temporary_directory(Path("/a")) == Path("/a/tmp")


def test_release_keeps_output_and_exit_only(tmp_path: Path) -> None:
    async def work(runtime: Runtime) -> Exit:
        container = runtime.launch("c", lambda _: spec("print('kept')"))
        ended = await container.wait()
        container.release()
        return ended

    assert run(tmp_path, work).code == 0
    assert not (tmp_path / "c/home").exists()
    assert (tmp_path / "c/output.log").read_text() == "kept\n"


def test_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(_: Path) -> ContainerSpec:
        raise ValueError("no command")

    async def work(runtime: Runtime) -> Exit:
        with pytest.raises(ValueError, match="no command"):
            runtime.launch("c", fail)
        assert runtime.adopt("c") is None
        return await runtime.launch("c", lambda _: spec("pass")).wait()

    assert run(tmp_path, work).code == 0
    assert not temporary_directory(tmp_path / "c").exists()


def test_exit_code_survives_a_full_disk(tmp_path: Path) -> None:
    """A file size limit stops the shim's writes: it loses the output, but not the exit code."""
    code = "print('x' * 4096, flush=True)"
    limit = (
        "import resource, os, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    directory = tmp_path / "c"
    directory.mkdir()
    shim_path = shim.__file__
    command = [sys.executable, "-I", "-S", shim_path, str(directory), "1000", "/", sys.executable, "-c", code]
    subprocess.run([sys.executable, "-P", "-c", limit, *command], check=True, timeout=20, env={})
    assert (directory / "exit").read_text().split()[0] == "0"
    assert (directory / "output.log").stat().st_size <= 100


def test_a_temporary_directory_leaves_room_for_socket_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS ends a socket's path at 104 bytes with its NUL, and its temporary directories have 49 bytes themselves."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
    inside, short = Path("/s/containers/c"), Path("/s") / ("c" * 60)
    assert temporary_directory(inside) == inside / "tmp"
    assert temporary_directory(short).parent == Path("/tmp")
    for directory in (inside, short):
        assert len(str(temporary_directory(directory) / ("x" * 45))) < 104
