"""Start commands without their imports: fork them from a process that has imported the modules.

The imports of `dropforge` and of `gcloud` take a half to one second of processor time, and their work often less. A
forked command is a process of its own, with its own arguments, environment, directory, streams, signals and exit code.
What it starts is not forked. A nursery imports what earlier commands have imported.

    tests ── nursery ── a process that waits for the end of a command, and tells the exit code
                          └─ the command

The Python of gcloud runs this file, too: it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

MESSAGE_BYTES = 1 << 17
CODE = ["-P", "-c"]  # the options of Python in a command that is code and not `dropforge`


class Nursery:
    """Forks commands that call `entry`, such as "package.module:function", from a process of `python`.

    `paths` come first on its import path.
    """

    def __init__(self, entry: str, python: Sequence[str] = (sys.executable, "-P"), paths: Sequence[str] = ()) -> None:
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            command = [*python, __file__, str(its_end.fileno()), entry, *paths]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()])

    def start(
        self, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str], directory: Path
    ) -> Forked:
        """Start a command: a program that calls the entry, or `python -P -c CODE`. `streams` are 0, 1 and 2."""
        request = {"command": list(command), "environment": dict(environment), "directory": str(directory)}
        reading, writing = os.pipe()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, writing])
        os.close(writing)
        return Forked(command, int(self._socket.recv(MESSAGE_BYTES)), reading)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


class Forked:
    """A forked command, with the part of subprocess.Popen that the tests use."""

    def __init__(self, command: Sequence[str], pid: int, end: int) -> None:
        self.args, self.pid = list(command), pid
        self.returncode: int | None = None
        self._end = end  # the exit code comes from here

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()  # select's descriptors end at 1024
            poll.register(self._end, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                self.returncode = int(os.read(self._end, 20) or -signal.SIGKILL)  # nothing: who waited was killed, too
                os.close(self._end)
        return self.returncode


def main(descriptor: int, entry: str, paths: Sequence[str]) -> None:
    sys.path[:0] = paths
    importlib.import_module(entry.partition(":")[0])
    requests = socket.socket(fileno=descriptor)
    learned, teaches = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    learned.setblocking(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps those that have waited
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        if not message:
            return
        _learn(learned)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _wait(requests, teaches, {**json.loads(message), "entry": entry}, descriptors)
        for each in descriptors:
            os.close(each)


def _learn(learned: socket.socket) -> None:
    """Import what the commands so far have imported."""
    with suppress(BlockingIOError):
        while True:
            for name in learned.recv(MESSAGE_BYTES).decode().split():
                with suppress(ImportError):  # a command may add a directory to its import path
                    importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # the memory of the imported modules stays shared


def _wait(
    requests: socket.socket, teaches: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    """Fork the command, tell its pid, and its exit code when it has ended."""
    *streams, end = descriptors
    if not (pid := os.fork()):
        requests.close()
        os.close(end)
        _become(request, teaches, streams)
    for each in streams:
        os.close(each)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests.send(str(pid).encode())
    requests.close()
    _, status = os.waitpid(pid, 0)
    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: Mapping[str, Any], teaches: socket.socket, streams: Sequence[int]) -> NoReturn:
    """Run the command and end, as an interpreter does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    program, *words = request["command"]
    known, code = set(sys.modules), cast(object, 0)
    try:
        if words[:2] == CODE:
            sys.argv = ["-c", *words[3:]]
            exec(words[2], {"__name__": "__main__"})
        else:
            sys.argv = [program, *words]
            module, _, function = request["entry"].partition(":")
            code = getattr(importlib.import_module(module), function)() or 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:  # noqa: BLE001  (an interpreter prints every exception, too)
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    news = " ".join(name for name in sys.modules if name not in known and not name.startswith("__"))
    teaches.send(news.encode()[: MESSAGE_BYTES // 2])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
