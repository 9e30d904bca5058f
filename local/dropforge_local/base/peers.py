"""Keeps other users of this machine away from the local stack: everybody on a machine reaches 127.0.0.1.

Google's clients send no token to emulators of Cloud Storage and Pub/Sub. So the kernel says who has connected: Linux
lists the owner of each TCP socket in /proc/net/tcp (https://docs.kernel.org/networking/proc_net_tcp.html). On other
systems, and for a connection that the list does not have, everybody is let in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import inet_aton
from time import monotonic
from weakref import WeakKeyDictionary

from aiohttp import web

from .errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # tcp6: IPv4 addresses of clients that open IPv6 sockets
KNOWN_SECONDS = 1.0  # how long an answer about a gRPC client counts; a port is not given to another socket so soon
MOST_KNOWN = 1000


def stranger(client: tuple[str, int], server: tuple[str, int], owner: int) -> str | None:
    """Why the process at the other end of a connection may not call; None if it may, or if its user is unknown.

    `client` and `server` are the IPv4 address and the port of each end, `owner` is the id of the stack's user. The
    owner and root may call. The kernel gives a socket without a process to root: nobody reads its answers, and its
    request has no effect.
    """
    ends = f"{_hex(client)} {_hex(server)}"
    for table in TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                local, remote, user, inode = fields[1], fields[2], int(fields[7]), int(fields[9])
                if f"{local[-13:]} {remote[-13:]}" != ends:
                    continue
                if inode == 0:
                    return "the client has closed its connection"
                if user not in (0, owner):
                    return f"the local stack of user {owner} takes no request of user {user}"
                return None
    return None


class Strangers:
    """Looks up each HTTP connection once, and each gRPC client once in KNOWN_SECONDS."""

    def __init__(self) -> None:
        self._owner = os.geteuid()
        self._connections: WeakKeyDictionary[object, str | None] = WeakKeyDictionary()
        self._clients: dict[tuple[str, int], tuple[float, str | None]] = {}

    @property
    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """Answers 403 to a request of another user of this machine."""
        return web.middleware(partial(self._refuse))

    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if problem := self._of_connection(request):
            refusal = ApiError("PERMISSION_DENIED", problem)
            return web.json_response(refusal.to_json(), status=refusal.http_status)
        return await handler(request)

    def _of_connection(self, request: web.Request) -> str | None:
        transport = request.transport
        if transport is None:
            return None
        if transport not in self._connections:
            client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            self._connections[transport] = stranger(client[:2], server[:2], self._owner) if client and server else None
        return self._connections[transport]

    def of_grpc(self, peer: str, port: int, host: str) -> str | None:
        """As `stranger`, for a gRPC peer such as `ipv4:127.0.0.1:40000` at this port of the server."""
        kind, _, address = peer.partition(":")
        ip, _, client_port = address.rpartition(":")
        if kind != "ipv4" or not client_port.isdecimal():
            return None
        known = self._clients.get((peer, port))
        if known is None or monotonic() - known[0] > KNOWN_SECONDS:
            if len(self._clients) >= MOST_KNOWN:
                self._clients.clear()
            known = monotonic(), stranger((ip, int(client_port)), (host, port), self._owner)
            self._clients[peer, port] = known
        return known[1]


def _hex(end: tuple[str, int]) -> str:
    """An end of a connection as the kernel lists it: the address in the byte order of the machine, and the port."""
    address = int.from_bytes(inet_aton(end[0]), sys.byteorder)
    return f"{address:08X}:{end[1]:04X}"
