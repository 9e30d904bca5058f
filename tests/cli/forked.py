"""Start commands without their imports: fork them from a process that has imported the modules.

The imports of a command take a half to one second of processor time, and its work often less. A forked command is a
process of its own, with its own arguments, environment, directory, streams, signals and exit code. The stack that it
starts is not forked.

    tests ── nursery ── a process that waits for the end of a command, and tells the exit code
                          └─ the command
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
from pathlib import Path
from typing import Any, NoReturn

MESSAGE_BYTES = 1 << 17
CODE = ["-P", "-c"]  # the options of Python in a command that is code and not `dropforge`


class Nursery:
    """Forks commands. `modules` are the names of what it imports first."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            command = [sys.executable, "-P", __file__, str(its_end.fileno()), *modules]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its_end.fileno()])

    def start(
        self, command: Sequence[str], streams: Sequence[int], environment: Mapping[str, str], directory: Path
    ) -> Forked:
        """Start a command: `dropforge ARGUMENTS` or `python -P -c CODE ARGUMENTS`. `streams` are 0, 1 and 2."""
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


def main(descriptor: int, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # the memory of the imported modules stays shared
    requests = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps those that have waited
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _wait(requests, json.loads(message), descriptors)
        for each in descriptors:
            os.close(each)


def _wait(requests: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Fork the command, tell its pid, and its exit code when it has ended."""
    *streams, end = descriptors
    if not (pid := os.fork()):
        requests.close()
        os.close(end)
        _become(request, streams)
    for each in streams:
        os.close(each)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests.send(str(pid).encode())
    requests.close()
    _, status = os.waitpid(pid, 0)
    os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run the command and end, as an interpreter does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    program, *words = request["command"]
    code: object = 0
    try:
        if words[:2] == CODE:
            sys.argv = ["-c", *words[3:]]
            exec(words[2], {"__name__": "__main__"})
        else:
            sys.argv = [program, *words]
            importlib.import_module("dropforge_cli.main").cli()
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:  # noqa: BLE001  (an interpreter prints every exception, too)
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
