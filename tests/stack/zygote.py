"""Start stacks in a fraction of a second: fork them from a process that has imported the modules that they need.

Most of a stack's start is 2 s of imports in two processes. A harness that starts thousands of stacks would spend its
time there. Before it forks, the zygote opens no file, starts no thread and makes no client. So a forked stack is as
new as a stack that `python -P -m dropforge_local.stack.main` starts. It also dies, holds its lock and leaves its
children in the same way.

    harness ── zygote ── a stack (a child of init, as every stack)
                           └─ the nursery, forked while the stack has one thread ── each start of the functions
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil

MESSAGE_BYTES = 1 << 16
# The functions import these modules on first use.
CLIENTS = (
    "google.api_core.exceptions", "google.auth.transport.requests", "google.cloud.container_v1",
    "google.cloud.pubsub_v1", "google.cloud.run_v2", "google.cloud.secretmanager_v1", "google.cloud.storage",
    "google.cloud.tpu_v2", "google.cloud.workflows.executions_v1", "google.oauth2.id_token", "gunicorn.app.base",
    "gunicorn.workers.gthread", "kubernetes.client", "werkzeug.middleware.dispatcher",
)  # fmt: skip


class Zygote:
    """Starts stacks; `spawn` replaces `dropforge_local.stack.control._spawn`.

    Other processes of the test ask the zygote at its `address`, by `spawn_at`.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="df-")  # short: a socket's path has at most 107 bytes
        self.address = str(Path(self._directory.name) / "zygote")
        alive, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            descriptors = [listener.fileno(), alive]
            command = [sys.executable, "-P", __file__, *map(str, descriptors)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        os.close(alive)
        self._last: dict[str, psutil.Process] = {}  # by state directory

    def spawn(self, command: Sequence[str], log_path: object) -> int:
        """Start a stack as `python -P -m dropforge_local.stack.main ARGUMENTS` does; return its pid."""
        state = command[4]
        while state in self._last and _threads(self._last[state]) > 1:  # it may still end, and holds its ports
            time.sleep(0.01)
        pid = spawn_at(self.address, command, log_path)
        with suppress(psutil.NoSuchProcess):
            self._last[state] = psutil.Process(pid)
        return pid

    def close(self) -> None:
        """End the zygote and its last stacks: no command line identifies a stack that never became ready."""
        for stack in self._last.values():
            with suppress(psutil.NoSuchProcess):
                stack.kill()
        os.close(self._alive)
        self._process.wait(60)
        self._directory.cleanup()


def spawn_at(address: str, command: Sequence[str], log_path: object) -> int:
    """Start a stack as `python -P -m dropforge_local.stack.main ARGUMENTS` does; return its pid."""
    request = {"arguments": list(command[4:]), "log": str(log_path), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        connection.send(json.dumps({**request, "directory": os.getcwd()}).encode())
        return int(connection.recv(MESSAGE_BYTES))


class Functions:
    """The part of subprocess.Popen that the stack needs, for functions that the nursery forked.

    The functions are not a child of the stack, so their exit code is unknown.
    """

    def __init__(
        self,
        nursery: socket.socket,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: object,
        stdout: IO[bytes],
        pass_fds: Sequence[int],
        **_: Any,
    ) -> None:
        request = {"arguments": list(command[4:]), "environment": dict(env), "directory": str(cwd)}
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "wb")
        socket.send_fds(nursery, [json.dumps(request).encode()], [reading, stdout.fileno(), *pass_fds])
        os.close(reading)
        self.pid = int(nursery.recv(MESSAGE_BYTES))
        self.returncode: int | None = None
        try:
            self._handle: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._handle, self.returncode = None, -signal.SIGKILL

    def poll(self) -> int | None:
        return self.wait(0)

    def wait(self, timeout: float) -> int | None:
        """Return None while the process lives, then -9: only the parent knows the real exit code."""
        if self._handle is not None:
            poll = select.poll()  # select's descriptors end at 1024
            poll.register(self._handle, select.POLLIN)
            if poll.poll(timeout * 1000):
                os.close(self._handle)
                self._handle, self.returncode = None, -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)


def main(listener: int, alive: int) -> None:
    """Fork stacks until the other end of `alive` is closed."""
    from dropforge_local.stack import functions_host, functions_process
    from dropforge_local.stack import main as stack_main

    for name in ("dropforge_local.stack.process", *CLIENTS, *_modules_of(functions_host.SOURCE.read_text())):
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # the memory of the imported modules stays shared
    asked, poll = socket.socket(fileno=listener), select.poll()
    poll.register(asked, select.POLLIN)
    poll.register(alive, select.POLLHUP)
    while alive not in dict(poll.poll()):
        connection, _ = asked.accept()
        with connection:
            connection.send(_fork(stack_main, functions_process, connection.recv(MESSAGE_BYTES), asked))


def _fork(stack_main: Any, functions_process: Any, message: bytes, asked: socket.socket) -> bytes:
    """Fork a stack as a child of init; return its pid."""
    reading, writing = os.pipe()
    if not (intermediate := os.fork()):
        os.setsid()
        if not (pid := os.fork()):
            asked.close()
            os.close(reading)
            os.close(writing)
            _run(_stack, stack_main, functions_process, json.loads(message))
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(intermediate, 0)
    told = os.read(reading, MESSAGE_BYTES)
    os.close(reading)
    return told


def _threads(process: psutil.Process) -> int:
    try:
        return process.num_threads()
    except psutil.Error:
        return 0


def _modules_of(source: str) -> list[str]:
    """Return the modules that a source imports at top level."""
    lines = [line.split() for line in source.splitlines() if line.startswith(("import ", "from "))]
    return [words[1] for words in lines if words[1] != "__future__"]


def _stack(stack_main: Any, functions_process: Any, request: Mapping[str, Any]) -> None:
    os.umask(0o077)  # as control._spawn
    os.chdir(request["directory"])
    with open(os.devnull, "rb") as empty, open(request["log"], "ab") as log:
        _become(request, [empty.fileno(), log.fileno(), log.fileno()])
    nursery = _nursery()

    def popen(command: Sequence[str], **options: Any) -> Functions:
        return Functions(nursery, command, **options)

    functions_process.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)
    stack_main.main()


def _nursery() -> socket.socket:
    """Fork the process that forks the functions; return its socket.

    The nursery ends when its stack ends, because only the stack holds the returned socket.
    """
    stack_socket, nursery_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        nursery_socket.close()
        return stack_socket
    stack_socket.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended children
    while True:
        message, descriptors, _, _ = socket.recv_fds(nursery_socket, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        if not (pid := os.fork()):
            nursery_socket.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(_functions, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        nursery_socket.send(str(pid).encode())


def _functions(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    from dropforge_local.stack import functions_host

    reading, log, listener = descriptors
    _become(request, [reading, log, log])
    os.close(reading)
    os.close(log)
    os.chdir(request["directory"])
    os.set_inheritable(listener, True)
    _, *options = request["arguments"]
    sys.argv[1:] = [str(listener), *options]
    functions_host.main()


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Set the arguments, the environment and the three standard streams of this process."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.argv[1:] = request["arguments"]
    os.environ.clear()
    os.environ.update(request["environment"])


def _run(work: Callable[..., None], *arguments: Any) -> None:
    """Do the work of a forked process and exit, without a return to the code that forked it."""
    code: object = 1
    try:
        work(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except Exception:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
