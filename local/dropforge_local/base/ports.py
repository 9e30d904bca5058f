"""Free ports of this machine, for the servers that the emulators start."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile
import threading
from collections.abc import Set

HOST = "127.0.0.1"  # no other machine reaches what the stack starts
# The stack's own ports: below those that systems give to outgoing connections, which would take a port while its stack
# is down. A stack keeps its ports at the next start. DROPFORGE_STACK_PORTS ("10100-14999") chooses others: stacks that
# share no port cannot take each other's while they are down.
_FIRST, _, _LAST = os.environ.get("DROPFORGE_STACK_PORTS", "10100-14999").partition("-")
STACK_PORTS = range(int(_FIRST), int(_LAST) + 1)
# The part of a range that a process keeps for itself before it gives its own ports a second time.
SHARE = 4

_lent: dict[int, None] = {}  # the ports that this process has given, oldest first
_guard = threading.Lock()


def free_port(among: range, taken: Set[int]) -> int:
    """A port of 127.0.0.1 that nothing listens on, and that no other stack of this user gives at the same time.

    Whoever asks starts a container, which listens only seconds later. Until this process ends, a lock keeps other
    stacks from the port. Raises OSError when all ports are taken.
    """
    with _guard:
        own = [port for port in _lent if port in among]
        fresh = [port for port in random.sample(among, len(among)) if port not in _lent]
        for port in fresh + own if len(own) * SHARE < len(among) else own + fresh:
            if port not in taken and _reserve(port) and is_free(port):
                _lent.pop(port, None)
                _lent[port] = None
                return port
    raise OSError(f"no free port in {among.start} to {among.stop} on {HOST}")


def stack_port(port: int, taken: Set[int] = frozenset()) -> int:
    """The given port; for port 0, a free port of STACK_PORTS that is not `taken`. Raises OSError if there is none."""
    return port or free_port(STACK_PORTS, taken)


def is_listening(port: int) -> bool:
    """Whether a process accepts connections at the port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def is_anothers(port: int) -> bool:
    """Whether another stack of this user has been given the port."""
    with _guard:
        if port in _lent:
            return False
        if not _reserve(port):
            return True
        fcntl.lockf(_locks(), fcntl.LOCK_UN, 1, port)
        return False


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> bool:
    """Lock the port's byte of the file that this user's stacks share; the lock ends with this process."""
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@functools.cache
def _locks() -> int:
    path = os.path.join(tempfile.gettempdir(), f"dropforge-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
