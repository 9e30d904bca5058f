"""Free ports of this machine, for the servers that the emulators start."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"  # no other machine reaches what the stack starts


def free_port(among: range, taken: set[int]) -> int:
    """A port of 127.0.0.1 that nothing listens on. Raises OSError when all are taken."""
    for port in random.sample(among, len(among)):
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port in {among.start} to {among.stop} on {HOST}")


def is_listening(port: int) -> bool:
    """Whether a process accepts connections at the port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
