"""Keeps other users of this machine away from the local stack: everybody on a machine reaches 127.0.0.1.

Google's clients send no token to emulators of Cloud Storage and Pub/Sub. So the kernel says who has connected. Linux
answers a question about one TCP socket (https://man7.org/linux/man-pages/man7/sock_diag.7.html) in 0.02 ms. A kernel
without these answers lists the owner of each socket in /proc/net/tcp
(https://docs.kernel.org/networking/proc_net_tcp.html), which takes 10 ms for 2,000 sockets. On other systems, and for a
connection that the kernel does not know, everybody is let in.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import inet_aton
from time import monotonic
from typing import NamedTuple
from weakref import WeakKeyDictionary

from aiohttp import web

from .errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
End = tuple[str, int]  # the IPv4 address and the port of one end of a connection
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # tcp6: IPv4 addresses of clients that open IPv6 sockets
KNOWN_SECONDS = 1.0  # how long an answer about a gRPC client counts; a port is not given to another socket so soon
MOST_KNOWN = 1000


# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, ANY_STATE = 4, 20, 1, 0xFFFFFFFF
HEADER, REQUEST, ENDS, ANY_INTERFACE = "=IHHII", "=BBxxI", ">HH16s16s", b"\0\0\0\0" + b"\xff" * 8
OWNER_OFFSET = struct.calcsize(HEADER) + 4 + 48 + 12  # of the user and the inode in the answer
ANSWER_BYTES = 4096


class Owner(NamedTuple):
    """The user of a socket, and its inode: 0 if no process has the socket."""

    user: int
    inode: int


def stranger(client: End, server: End, owner: int) -> str | None:
    """Why the process at the other end of a connection may not call; None if it may, or if its user is unknown.

    `client` and `server` are the ends, `owner` is the id of the stack's user. The owner and root may call. The kernel
    gives a socket without a process to root: nobody reads its answers, and its request has no effect.
    """
    found = next((found for look in LOOKS if (found := look(client, server)) is not None), None)
    if found is None:
        return None
    if found.inode == 0:
        return "the client has closed its connection"
    if found.user not in (0, owner):
        return f"the local stack of user {owner} takes no request of user {found.user}"
    return None


def asked(client: End, server: End) -> Owner | None:
    """The owner of the client's socket, as the kernel answers; None if it does not know the socket or the question."""
    if sys.platform != "linux":
        return None
    ends = struct.pack(ENDS, client[1], server[1], inet_aton(client[0]), inet_aton(server[0]))
    request = struct.pack(REQUEST, socket.AF_INET, socket.IPPROTO_TCP, ANY_STATE) + ends + ANY_INTERFACE
    header = struct.pack(HEADER, struct.calcsize(HEADER) + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(header + request)
            answer = kernel.recv(ANSWER_BYTES)
    except OSError:
        return None
    if struct.unpack_from(HEADER, answer)[1] != SOCK_DIAG_BY_FAMILY:  # an error
        return None
    return Owner(*struct.unpack_from("=II", answer, OWNER_OFFSET))


def listed(client: End, server: End) -> Owner | None:
    """The owner of the client's socket in the tables of the kernel; None without its line."""
    ends = f"{_hex(client)} {_hex(server)}"
    for table in TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if f"{fields[1][-13:]} {fields[2][-13:]}" == ends:
                    return Owner(int(fields[7]), int(fields[9]))
    return None


LOOKS = (asked, listed)


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


def _hex(end: End) -> str:
    """An end of a connection as the kernel lists it: the address in the byte order of the machine, and the port."""
    address = int.from_bytes(inet_aton(end[0]), sys.byteorder)
    return f"{address:08X}:{end[1]:04X}"
