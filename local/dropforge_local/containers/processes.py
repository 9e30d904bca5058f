"""Process groups that stand for containers and outlive the stack that started them.

A container's directory holds all facts about it, which a later stack (or `end_all`, without a stack) reads back:
`process.json` (shim pid, start time), `claim`, `exit` ("CODE TIME", written by the shim), `reason` and the output.
Every process of a container has the container's directory in its environment, so every process can be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import shim
from .logs import append_platform_line, read_output
from .shim import HAS_PROC, MARKER, UNADOPTED
from .shims import Shims

KILLED = 137  # 128 + SIGKILL, as Docker and Cloud Run report it
OUT_OF_MEMORY = "OOM"
LOST = "LOST"
START_POLL_SECONDS = 0.02
EXIT_POLL_SECONDS = 0.1  # only where the kernel has no pidfd
MEMORY_CHECK_SECONDS = 1.0
SHIM_PATIENCE_SECONDS = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HAS_CHILDREN = HAS_PROC and os.path.exists("/proc/thread-self/children")  # most kernels of Linux (CONFIG_PROC_CHILDREN)
Children = Callable[[int], Iterable[int]]  # the pids of a process's children
# Unix socket paths end at 108 bytes, on macOS at 104; torch and multiprocessing put sockets of up to 45 into TMPDIR.
LONGEST_TMPDIR = 57
SHORT_TMPDIR = Path("/tmp")  # macOS's own temporary directories are 49 bytes long


@dataclass(frozen=True)
class ContainerSpec:
    """A command to run; it sees `env`, PATH, LANG, HOME and TMPDIR, and `env` may override LANG, HOME and TMPDIR."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: Path
    memory_bytes: int | None = None
    log_bytes: int = 16 * 2**20
    search_path: tuple[Path, ...] = ()  # comes before the runtime's own search path


@dataclass(frozen=True)
class Exit:
    """How a container ended: exit code, time (Unix seconds), and reason: "", OOM or LOST (no exit was recorded)."""

    code: int
    at: float
    reason: str = ""


class Container:
    """A started container; only `Runtime` creates one."""

    def __init__(self, directory: Path, pid: int, created: float, memory_bytes: int | None) -> None:
        self.id = directory.name
        self.directory = directory
        self.pid = pid
        self.created = created
        self.memory_bytes = memory_bytes
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    def exit(self) -> Exit | None:
        """The container's exit, or None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> Exit:
        """Return once all processes of the container have ended."""
        return await asyncio.shield(self._exit)

    async def terminate(self, grace_seconds: float, reason: str = "") -> Exit:
        """Send SIGTERM to the first process, and SIGKILL to all after the grace time; return once all have ended."""
        if reason and not (self.directory / "exit").exists():
            (self.directory / "reason").write_text(reason)
        if not self._exit.done() and grace_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end_politely(), grace_seconds)
        patience = time.monotonic() + SHIM_PATIENCE_SECONDS
        while not self._exit.done():
            # Spare the shim at first: it records the exit code.
            spared = self.pid if time.monotonic() < patience else None
            send_signal((pid for pid in self.members() if pid != spared), signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), 0.2)
        return self._exit.result()

    async def _end_politely(self) -> None:
        """Send SIGTERM as container runtimes do: once, to the first process alone. Wait until that process exists."""
        while not self._exit.done():
            if (first := self._first_process()) is not None:
                if shim.takes_signal(first, signal.SIGTERM):
                    send_signal([first], signal.SIGTERM)
                await self.wait()
            await asyncio.sleep(START_POLL_SECONDS)

    def _first_process(self) -> int | None:
        """The pid of the command's process: the shim's oldest child. The shim's other children are orphans."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return min(children, key=lambda child: (child.create_time(), child.pid)).pid if children else None
        return None

    def members(self) -> list[int]:
        """Pids of all live processes of the container, including its shim."""
        return find_members(self.directory).get(self.directory, [])

    def resident_bytes(self, children: Children) -> int:
        """Memory of all processes except the shim; shared pages count once where the kernel reports them (Linux).

        `children` is `children_now()`; a caller that checks many containers makes it once.
        """
        processes = _descendants(self.pid, children)
        total = sum(_memory(pid, exact=False) for pid in processes)
        if self.memory_bytes is None or total <= self.memory_bytes:
            return total
        # Forked workers share pages, which RSS counts for each worker; only then read the exact figure, which is slow.
        return sum(_memory(pid, exact=True) for pid in processes)

    def release(self) -> None:
        """Free the disk that a finished container no longer needs; output and exit code stay."""
        for name in ("home", "programs", "rootfs"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


class Runtime:
    """Starts containers under a directory and finds them again after a restart. Belongs to one event loop."""

    def __init__(self, directory: Path, search_path: Iterable[Path] = ()) -> None:
        self.directory = directory.resolve()
        self.search_path = os.pathsep.join([*map(str, search_path), "/usr/local/bin", "/usr/bin", "/bin"])
        self.containers: dict[str, Container] = {}
        self._shims = Shims()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._spawn(self._watch_memory())

    async def stop(self) -> None:
        """Stop watching; the containers continue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._shims.close()
        self.containers.clear()

    def launch(self, container_id: str, prepare: Callable[[Path], ContainerSpec]) -> Container:
        """Start a container, or return it if its id was ever started. `prepare` fills its directory first."""
        if container := self.adopt(container_id):
            return container
        directory = self.directory / container_id
        shutil.rmtree(directory, ignore_errors=True)
        for path in (directory, directory / "home", temporary_directory(directory)):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            spec = prepare(directory)
        except BaseException:
            self.forget(container_id)
            raise
        return self._begin(directory, spec)

    def adopt(self, container_id: str) -> Container | None:
        """The running or ended container with this id; None if it was never started."""
        if container := self.containers.get(container_id):
            return container
        directory = self.directory / container_id
        if not directory.exists():
            return None
        record = _read_record(directory)
        if record is None and not (directory / "claim").exists() and not find_members(directory):
            return None
        pid, created, memory_bytes = record or (_find_shim(directory), 0.0, None)
        return self._track(Container(directory, pid, created, memory_bytes))

    def output(self, container_id: str, tail: int | None = None) -> str:
        return read_output(self.directory / container_id, tail)

    def forget(self, container_id: str) -> None:
        """Delete all files of an ended container, including its output."""
        directory = self.directory / container_id
        shutil.rmtree(temporary_directory(directory), ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)

    def live(self) -> list[str]:
        """Ids of the containers that have a process, read from the machine: an empty list proves that none runs."""
        return sorted(directory.name for directory in find_members(self.directory))

    def _begin(self, directory: Path, spec: ContainerSpec) -> Container:
        env = {
            **own_environment(directory),
            **spec.env,
            # An image's own PATH comes last: the local environment stands for the packages that the image installed.
            "PATH": os.pathsep.join(
                filter(None, [*map(str, spec.search_path), self.search_path, spec.env.get("PATH")])
            ),
        }
        pid = self._shims.start(directory, [str(spec.log_bytes), str(spec.workdir), *spec.argv], env)
        created = _created(pid) or time.time()
        record = {"pid": pid, "created": created, "memory_bytes": spec.memory_bytes, "argv": list(spec.argv)}
        # Without a record (full disk), a later stack still finds the container by the mark in its environment.
        with contextlib.suppress(OSError):
            _write(directory / "process.json", json.dumps(record))
        return self._track(Container(directory, pid, created, spec.memory_bytes))

    def _track(self, container: Container) -> Container:
        self.containers[container.id] = container
        self._spawn(self._watch_exit(container))
        return container

    async def _watch_exit(self, container: Container) -> None:
        await wait_for_process(container.pid, container.created, container.directory)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(container.pid, os.WNOHANG)  # this process collects it, unless an earlier stack started it
        # Otherwise the shim has killed them.
        if (container.directory / UNADOPTED).exists() or not (container.directory / "exit").exists():
            while strays := [pid for pid in container.members() if pid != container.pid or _alive(pid)]:
                send_signal(strays, signal.SIGKILL)
                await asyncio.sleep(0.01)
        shutil.rmtree(temporary_directory(container.directory), ignore_errors=True)
        container._exit.set_result(_read_exit(container.directory))
        self.containers.pop(container.id, None)

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_CHECK_SECONDS)
            if not self.containers:
                continue
            children = children_now()
            for container in list(self.containers.values()):
                limit = container.memory_bytes
                if limit and container.exit is None and (used := container.resident_bytes(children)) > limit:
                    append_platform_line(container.directory, _memory_message(limit, used))
                    self._spawn(self._end_for_memory(container))
                    container.memory_bytes = None

    async def _end_for_memory(self, container: Container) -> None:
        await container.terminate(0, OUT_OF_MEMORY)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def own_environment(directory: Path) -> dict[str, str]:
    """The variables of every process of a container: its marker, its language and its directories."""
    return {
        "LANG": "C.UTF-8",
        "HOME": str(directory / "home"),
        "TMPDIR": str(temporary_directory(directory)),
        MARKER: str(directory),
    }


def children_now() -> Children:
    """A function that returns the pids of a process's children.

    Linux lists the children of a thread. While a child ends, its list may miss others: the next look finds them. To
    read every process of the machine instead takes 40 µs for each, so that is done once for all containers.
    """
    if HAS_CHILDREN:
        return _listed_children
    children = children_by_parent()
    return lambda pid: children.get(pid, ())


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return children
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended; its children are now another thread's
            children += map(int, _read_once(f"/proc/{pid}/task/{thread}/children").split())
    return children


def children_by_parent() -> dict[int, list[int]]:
    """The pids of all processes of this machine by their parent's pid."""
    if HAS_PROC:  # less than half of psutil's time
        return shim.children_by_parent()
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    return children


def end_all(directory: Path, grace_seconds: float = 5.0) -> list[str]:
    """End every container below `directory`, with or without a stack; return the ids of the containers that ran.

    For `dropforge down` after the stack was killed. Raises TimeoutError if a process survives SIGKILL for ten seconds.
    """
    root = directory.resolve()
    ended = sorted(container.name for container in find_members(root))
    deadline = time.monotonic() + grace_seconds
    send_signal(_all_members(root), signal.SIGTERM)
    while (left := _all_members(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while left := _all_members(root):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left!r} of containers under {root} survived SIGKILL; end them by hand")
        send_signal(left, signal.SIGKILL)
        time.sleep(0.02)
    for container in root.glob("*/"):
        shutil.rmtree(temporary_directory(container), ignore_errors=True)
    return ended


def find_members(directory: Path) -> dict[Path, list[int]]:
    """Pids of live processes marked with a container directory at or below `directory`, by container directory."""
    members: dict[Path, list[int]] = {}
    for pid, mark in _marks(str(directory)):
        members.setdefault(Path(mark), []).append(pid)
    if members and not HAS_PROC:
        _add_unmarked(members)
    return members


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


async def wait_for_process(pid: int, created: float, directory: Path) -> None:
    """Return when the process has ended: the kernel reports it (pidfd), or this function polls ten times a second."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        while _is_same(pid, created, directory):
            await asyncio.sleep(EXIT_POLL_SECONDS)
        return
    try:
        if _is_same(pid, created, directory):  # checked after the open: from here on the pid cannot be reused
            await _readable(descriptor)
    finally:
        os.close(descriptor)


def temporary_directory(directory: Path) -> Path:
    """A container's TMPDIR: inside its directory, or a short path if that path is too long for sockets."""
    inside = directory / "tmp"
    if len(str(inside)) <= LONGEST_TMPDIR:
        return inside
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return min(Path(tempfile.gettempdir()), SHORT_TMPDIR, key=lambda path: len(str(path))) / f"dropforge-{name}"


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def _marks(prefix: str) -> Iterable[tuple[int, str]]:
    """(pid, container directory) of every live process whose container directory is `prefix` or below it."""
    # psutil also reads when each process began, which takes as long as to read its environment.
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit()) if HAS_PROC else psutil.pids()
    for pid in pids:
        mark = _mark(pid)
        if mark and (mark == prefix or mark.startswith(f"{prefix}/")):
            yield pid, mark


def _add_unmarked(members: dict[Path, list[int]]) -> None:
    """Add processes that descend from a container's marked processes.

    macOS tells nobody the environments of its own programs, such as /bin/sh (`sysctl_procargsx` in
    https://github.com/apple-oss-distributions/xnu/blob/main/bsd/kern/kern_sysctl.c).
    """
    children = children_now()
    marked = {pid for pids in members.values() for pid in pids}
    for pids in members.values():
        below = {child for pid in pids for child in _descendants(pid, children)}
        pids += sorted(below - marked)


def _mark(pid: int) -> str:
    if HAS_PROC:
        try:
            data = _read_once(f"/proc/{pid}/environ")  # a zombie's environment reads as empty
        except OSError:
            return ""
        _, marked, rest = (b"\0" + data).partition(f"\0{MARKER}=".encode())
        return os.fsdecode(rest.partition(b"\0")[0]) if marked else ""
    try:
        process = psutil.Process(pid)
        return process.environ().get(MARKER, "") if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""


def _read_once(path: str) -> bytes:
    """A file of /proc, without the buffer that Python makes for a file."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _all_members(root: Path) -> list[int]:
    return [pid for members in find_members(root).values() for pid in members]


def _find_shim(directory: Path) -> int:
    """The pid of the shim of a container without a record; 0 when the shim has ended."""
    members = find_members(directory).get(directory, [])
    return min(members, key=lambda pid: _created(pid) or 0.0, default=0)


def _is_same(pid: int, created: float, directory: Path) -> bool:
    """Whether the pid still belongs to the recorded, live shim and was not reused."""
    now = _created(pid)
    # psutil derives start times from the boot time, which moves with the clock: hence the tolerance and the mark.
    same_start = now is not None and (not created or abs(now - created) < 2)
    return same_start and _alive(pid) and _mark(pid) in ("", str(directory))


def _descendants(pid: int, children: Children) -> list[int]:
    pids, todo = list[int](), [pid]
    while todo:
        below = children(todo.pop())
        pids += below
        todo += below
    return pids


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _created(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time() if pid else None
    except psutil.Error:
        return None


def _memory(pid: int, exact: bool) -> int:
    try:
        if HAS_PROC and not exact:
            return int(_read_once(f"/proc/{pid}/statm").split()[1]) * PAGE_BYTES
        process = psutil.Process(pid)
        return int(process.memory_full_info().pss if HAS_PROC else process.memory_info().rss)
    except (psutil.Error, OSError):
        return 0


def _memory_message(limit: int, used: int) -> str:
    mib = 2**20
    return f"Memory limit of {limit // mib} MiB exceeded with {used // mib} MiB used. Consider increasing the limit."


def _read_record(directory: Path) -> tuple[int, float, int | None] | None:
    try:
        record = json.loads((directory / "process.json").read_text())
    except FileNotFoundError:
        return None
    return record["pid"], record["created"], record["memory_bytes"]


def _read_exit(directory: Path) -> Exit:
    reason = ""
    with contextlib.suppress(FileNotFoundError):
        reason = (directory / "reason").read_text()
    try:
        code, at = (directory / "exit").read_text().split()
    except FileNotFoundError:
        return Exit(KILLED, time.time(), reason or LOST)
    return Exit(int(code), float(at), reason)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)
