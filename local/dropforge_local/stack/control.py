"""The local stack seen from outside: start it, end it with everything it started, and list what is left.

The stack's process runs main.py, which imports the emulators. This module does not import them at its top: their import
takes a second, and `dropforge status` must not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path

import psutil

from dropforge_local.base.db import Database
from dropforge_local.base.ports import is_anothers, is_listening
from dropforge_local.containers import processes

from .config import PRIVATE, START_SECONDS, StackError, StackInfo, container_directories
from .deployment import CLUSTER

PROCESS = "dropforge_local.stack.main"


@dataclass(frozen=True)
class Leftovers:
    """What still exists of a stack: names of cloud resources, process ids, listening ports."""

    resources: list[str]
    processes: list[int]
    ports: list[int]

    def __bool__(self) -> bool:
        return bool(self.resources or self.processes or self.ports)


def state_directory(option: str | None = None) -> Path:
    """Where the stack keeps its state: `option`, $DROPFORGE_STATE, or build/local under the current directory."""
    return Path(option or os.environ.get("DROPFORGE_STATE") or "build/local").resolve()


def running(state: Path) -> StackInfo | None:
    """The live stack of a state directory; None when no stack runs there, or only its leftovers exist."""
    info = _read_info(state)
    return info if info and _is_alive(info) else None


def up(
    state: Path,
    *,
    http_port: int = 0,
    grpc_port: int = 0,
    functions_port: int = 0,
    console_port: int = 0,
    foreground: bool = False,
) -> StackInfo:
    """Start the stack and wait until it is ready; a stack that already runs stays unchanged.

    In the foreground, serve until SIGTERM or SIGINT. Raises StackError.
    """
    if info := running(state):
        return info
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o777 & ~PRIVATE)  # also a directory that existed before
    ports = _ports(state, http_port, grpc_port, functions_port, console_port)
    if foreground:
        from .main import run

        run(state, ports)
        raise SystemExit(0)
    return _start_in_background(state, ports)


def down(state: Path, *, delete: bool = False) -> list[str]:
    """Stop the stack and end every container process it started; return the names of everything it ended.

    Also works after the stack was killed. `delete` removes the state afterwards.
    """
    ended = []
    for pid in _stack_processes(state):
        ended.append(f"stack (pid {pid})")
        _terminate(pid)
    for directory in container_directories(state):
        ended += processes.end_all(directory)
    (state / "stack.json").unlink(missing_ok=True)
    if delete:
        shutil.rmtree(state, ignore_errors=True)
    return ended


def leftovers(state: Path) -> Leftovers:
    """List the emulators' resources, the processes of containers and of the stack, and the ports in use.

    Another stack may have been given a port since this stack ended: that port is not left over.
    """
    containers = [processes.find_members(directory) for directory in container_directories(state)]
    pids = [pid for members in containers for group in members.values() for pid in group]
    pids += _stack_processes(state)
    ports = json.loads((state / "ports.json").read_text()) if (state / "ports.json").exists() else []
    resources, emulated_ports = _emulated(state)
    used = [port for port in [*ports, *emulated_ports] if is_listening(port) and not is_anothers(port)]
    return Leftovers(resources, pids, used)


def _start_in_background(state: Path, ports: list[int]) -> StackInfo:
    (state / "stack.json").unlink(missing_ok=True)
    log_path = state / "stack.log"
    offset = log_path.stat().st_size if log_path.exists() else 0
    pid = _spawn([sys.executable, "-P", "-m", PROCESS, str(state), *map(str, ports)], log_path)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (info := _read_info(state)) and info.pid == pid:
            return info
        if not psutil.pid_exists(pid):
            reason = log_path.read_bytes()[offset:].decode(errors="replace").strip().splitlines()
            raise StackError(reason[-1] if reason else f"the stack ended; see {log_path}")
        time.sleep(0.02)
    _terminate(pid)
    raise StackError(f"the stack was not ready after {START_SECONDS:.0f} s; see {log_path}")


def _spawn(command: list[str], log_path: Path) -> int:
    """Start a process that outlives this process and is not its child; return its pid."""
    script = 'umask 077; log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
    shell = subprocess.run(
        ["sh", "-c", script, "sh", str(log_path), *command],
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    return int(shell.stdout)


def _ports(state: Path, *requested: int) -> list[int]:
    """The requested ports; for a port 0, the port of the last start, so that earlier URLs still work."""
    path = state / "ports.json"
    last = json.loads(path.read_text()) if path.exists() else []
    return [port or before for port, before in zip_longest(requested, last, fillvalue=0)]


def _read_info(state: Path) -> StackInfo | None:
    try:
        values = json.loads((state / "stack.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return StackInfo(**{f.name: values[f.name] for f in fields(StackInfo)})


def _is_alive(info: StackInfo) -> bool:
    try:
        process = psutil.Process(info.pid)
        return abs(process.create_time() - info.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stack_processes(state: Path) -> list[int]:
    """The stack's process, also while it starts: stack.json exists only once the stack is ready."""
    info = running(state)
    pids = {info.pid} if info else set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if PROCESS in command and str(state) in command:
            pids.add(process.pid)
    return sorted(pids)


def _terminate(pid: int) -> None:
    """End the stack and its functions, which end by themselves a moment after the stack."""
    try:
        stack = psutil.Process(pid)
        family = [stack, *stack.children(recursive=True)]
        stack.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([p for p in family if not _is_container(p)], timeout=15)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _is_container(process: psutil.Process) -> bool:
    """Whether the process belongs to a container: `end_all` ends containers group by group."""
    try:
        return "DROPFORGE_CONTAINER_ID" in process.environ()
    except psutil.Error:
        return False


def _emulated(state: Path) -> tuple[list[str], list[int]]:
    """Resources and ports in the emulators' state file; no stack needs to run."""
    if not (state / "state.db").exists():
        return [], []
    from dropforge_local.emulators.cloudrun.store import Store as CloudRunStore
    from dropforge_local.emulators.compute import ComputeEmulator
    from dropforge_local.emulators.container import GkeEmulator
    from dropforge_local.emulators.kubernetes import KubernetesEmulator
    from dropforge_local.emulators.tpu import TpuEmulator

    db = Database(state / "state.db")
    try:
        cloud_run = CloudRunStore(db)
        clusters = [name for name in GkeEmulator.names_in(db) if name != CLUSTER]
        resources = [*cloud_run.names(), *clusters, *KubernetesEmulator.names_in(db)]
        resources += [*TpuEmulator.names_in(db), *ComputeEmulator.names_in(db)]
        return resources, [*cloud_run.ports(), *KubernetesEmulator.ports_in(db)]
    finally:
        db.close()
