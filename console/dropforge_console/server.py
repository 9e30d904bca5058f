"""Serve the console on 127.0.0.1, for the people at this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from dropforge.context import Context

from .access import Access
from .app import create_app
from .pages import LogReader

STOP_SECONDS = 2  # for open streams: uvicorn waits for them
HOST = "127.0.0.1"


def serve(context: Context, port: int, ready: Callable[[Access], None], read_log: LogReader | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM. `ready` is called when the port is bound. Raises OSError for a port in use.

    Port 0 is any free port.
    """
    config = uvicorn.Config(
        lambda: None,
        host=HOST,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    listener = config.bind_socket()
    listener.listen()  # a browser that is quicker than the server waits
    access = Access(f"{HOST}:{listener.getsockname()[1]}", time.monotonic)
    config.app = create_app(context, access, read_log)
    ready(access)
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again that ended it
        uvicorn.Server(config).run(sockets=[listener])
