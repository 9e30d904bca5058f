"""Serve the console: on 127.0.0.1 for the people at this machine, or in a container on Cloud Run."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress

import uvicorn

from dropforge.context import Context

from .access import Gate
from .app import create_app
from .pages import LogReader
from .playground import TokenOf
from .preflight import Ask

STOP_SECONDS = 2  # for open streams: uvicorn waits for them
HOST = "127.0.0.1"


def listen(port: int, address: str = HOST) -> socket.socket:
    """Return a socket that listens at a port of this machine; 0 is any free port. Raises OSError for a port in use."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()  # a browser that is quicker than the server waits
    except OSError:
        listener.close()
        raise
    return listener


def host_of(listener: socket.socket) -> str:
    """Return the host and the port of a listening socket, as browsers name them."""
    return f"{HOST}:{listener.getsockname()[1]}"


def serve(
    context: Context,
    listener: socket.socket,
    gate: Gate,
    read_log: LogReader | None = None,
    token_of: TokenOf | None = None,
    preflight: Ask | None = None,
) -> None:
    """Serve at a listening socket until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        create_app(context, gate, read_log, token_of, preflight),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the caller cleans up after SIGTERM too
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again that ended it
        uvicorn.Server(config).run(sockets=[listener])
