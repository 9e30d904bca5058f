"""Starts shims (shim.py): forked from a process that waits for requests, or each as a new process.

A forked shim takes 5 ms of CPU, a new process 20 ms. The first container starts the process that forks, and gets a new
process itself. So does every container where the fork is not possible or not certain: without /proc
(on macOS), with an environment that is too large, or after the forking process has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import shim

COMMAND = [sys.executable, "-I", "-S", shim.__file__]
ANSWER_BYTES = 64
PATIENCE_SECONDS = 5.0  # a fork takes a millisecond


class Shims:
    """Starts the shims of one runtime."""

    def __init__(self) -> None:
        self._forks: ForkServer | None = None

    def start(self, directory: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the shim of a container and return its pid; `arguments` follow the directory. Raises OSError."""
        words = [str(directory), *arguments]
        if self._forks is None:
            self._forks = ForkServer()
        elif pid := self._forks.fork(words, environment):
            return pid
        return _spawn(directory, words, environment)

    def close(self) -> None:
        """End the process that forks. The shims continue."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None


class ForkServer:
    """A process that forks shims; it ends with this process."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._said_ready = False
        if not shim.HAS_PROC:
            return
        self._connection, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_end:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=its_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={shim.MARKER: "-" * shim.PATH_BYTES},
            )
        self._connection.setblocking(False)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
        """Fork a shim and return its pid; None when there is no such shim, and will be none."""
        request = _request(arguments, environment)
        if request is None or not self.is_ready():
            return None
        assert self._connection is not None
        try:
            self._connection.send(request)
            answer = self._connection.recv(ANSWER_BYTES)
        except OSError:
            # It has ended, or it is late. From here on no shim can answer, and a shim without an answer does not begin.
            self._connection.shutdown(socket.SHUT_RD)
            answer = self._connection.recv(ANSWER_BYTES)
        if not answer:
            self.close()
        return int(answer) if answer else None

    def close(self) -> None:
        """End the process. Its shims continue."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._process.kill()
            self._process.wait()

    def is_ready(self) -> bool:
        """Whether the process has said that it can fork; it never waits for that."""
        if self._connection is not None and not self._said_ready:
            with contextlib.suppress(BlockingIOError):
                self._said_ready = self._connection.recv(ANSWER_BYTES) == shim.READY
                self._connection.settimeout(PATIENCE_SECONDS)
                if not self._said_ready:
                    self.close()
        return self._said_ready and self._connection is not None


def _request(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes | None:
    """The message that `shim.serve` expects; None where the message could be misread."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    fields = [str(len(arguments)), *arguments, *variables]
    request = os.fsencode("\0".join(fields))
    is_clear = request.count(b"\0") == len(fields) - 1 and not any(not name or "=" in name for name in environment)
    return request if is_clear and len(request) < shim.REQUEST_BYTES else None


def _spawn(directory: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a shim as a new process; return its pid."""
    log = str(directory / shim.SHIM_LOG)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        [*COMMAND, *arguments],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, log, flags, 0o600),
        ],
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM),
    )
