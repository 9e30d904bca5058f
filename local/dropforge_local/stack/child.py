"""The environment and the sockets of the processes that a stack starts, and their end with the stack."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from dropforge_local.base.ports import HOST, stack_port

from .config import StackError

# A child gets what a deployment sets, and nothing else of the shell's: the last two are for platforms that live outside
# of the repository (dropforge/spec/registry.py).
INHERITED = ("PATH", "LANG", "TMPDIR", "PYTHONPATH", "DROPFORGE_PLATFORMS")
BIND_SECONDS = 3.0


def inherited() -> dict[str, str]:
    """The part of this process's environment that a child gets."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


def listen(port: int, option: str) -> socket.socket:
    """A listening socket. Wait up to BIND_SECONDS: a child of a killed stack may hold the port for a moment.

    `option` of `dropforge up` chooses the port. Raises StackError when the port is taken.
    """
    port = stack_port(port)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            listener.bind((HOST, port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                listener.close()
                reason = f"cannot listen on {HOST}:{port}: {error.strerror}"
                raise StackError(f"{reason}; choose another with {option}") from error
        time.sleep(0.05)
    listener.listen(1024)
    return listener


def end_with_parent() -> None:
    """End this process when the stack ends, even if the stack was killed: its end of the pipe closes then."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
