"""The local stack's own route that answers the output of an emulated machine or container as text."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from dropforge_local.base.errors import ApiError

from ...containers.logs import last_lines
from .routing import Call, Route


def log_route(name: str, output: Callable[[str], str]) -> Route:
    """GET /_local/logs/{name=…}[?tail=LINES] of the resources whose names match the template `name`."""

    def read(call: Call) -> web.Response:
        tail = call.query.get("tail")
        if tail is not None and not tail.isdigit():
            raise ApiError("INVALID_ARGUMENT", f"tail is {tail!r}; expected a number of lines")
        return web.Response(text=last_lines(output(call.names["name"]), int(tail) if tail else None))

    return Route("GET", f"/_local/logs/{{name={name}}}", read)
