"""A machine's metadata server, as https://cloud.google.com/compute/docs/metadata/querying-metadata describes it.

Every request reads the tree of values anew. A leaf is a text, or a function of the query: listings leave functions out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from dropforge_local.base.browsers import refuse_pages
from dropforge_local.base.peers import Strangers
from dropforge_local.base.ports import HOST

from ..kit.background import Changes

ROOT = "/computeMetadata/v1"
HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
LONGEST_WAIT_SECONDS = 300.0

Tree = dict[str, Any]


class MetadataServer:
    """The metadata server of a machine, on a loopback port."""

    def __init__(self, port: int, tree: Callable[[], Tree]) -> None:
        self._port = port
        self._tree = tree
        self._changes = Changes()

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application(middlewares=[Strangers().middleware, refuse_pages])
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    def notify(self) -> None:
        """Wake the requests that wait for a change."""
        self._changes.notify()

    async def _get(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/":
            return web.Response(text="computeMetadata/\n", headers=HEADERS)
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403, text="Missing required header: Metadata-Flavor: Google\n", headers=HEADERS)
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            return web.Response(status=404, text=f"{path} was not found\n", headers=HEADERS)
        value = self._value(path)
        if value is not None and request.query.get("wait_for_change") == "true":
            value = await self._wait(path, value, request.query)
        if value is None:
            return web.Response(status=404, text=f"{path} was not found\n", headers=HEADERS)
        if isinstance(value, dict) and not path.endswith("/"):
            raise web.HTTPMovedPermanently(f"{path}/")
        text, kind = render(value, request.query, own_names=path.endswith("/attributes/"))
        return web.Response(text=text, content_type=kind, headers={**HEADERS, "ETag": etag(value)})

    async def _wait(self, path: str, value: Any, query: Mapping[str, str]) -> Any:
        """The value at a path once its ETag differs from the caller's last ETag, or as it is after the timeout."""
        known = query.get("last_etag") or etag(value)
        seconds = min(float(query.get("timeout_sec", LONGEST_WAIT_SECONDS)), LONGEST_WAIT_SECONDS)
        await self._changes.until(lambda: etag(self._value(path)) != known, seconds)
        return self._value(path)

    def _value(self, path: str) -> Any:
        return find(self._tree(), path[len(ROOT) :])


def find(tree: Tree, path: str) -> Any:
    """The value at a path; None for an unknown path."""
    value: Any = tree
    for part in filter(None, path.split("/")):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def render(value: Any, query: Mapping[str, str], *, own_names: bool) -> tuple[str, str]:
    """Text and content type of a value: a leaf as it is, a directory as a list of names or, recursively, as JSON.

    `own_names`: users chose the names in the directory, so the JSON keeps their spelling.
    """
    if callable(value):
        return value(query), "application/json"
    if query.get("alt") == "json" or (isinstance(value, dict) and query.get("recursive") == "true"):
        return json.dumps(_plain(value, own_names=own_names)), "application/json"
    if isinstance(value, dict):
        names = (f"{name}/" if isinstance(child, dict) else name for name, child in value.items())
        return "".join(f"{name}\n" for name in names), "application/text"
    return str(value), "application/text"


def etag(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any, *, own_names: bool = False) -> Any:
    """A value as JSON, without functions; names in camel case, except for names that users chose."""
    if not isinstance(value, dict):
        return "" if callable(value) else value
    if value and all(name.isdigit() for name in value):
        return [_plain(child) for child in value.values()]
    return {
        name if own_names else _camel_case(name): _plain(child, own_names=name == "attributes")
        for name, child in value.items()
        if not callable(child)
    }


def _camel_case(name: str) -> str:
    return re.sub(r"-([a-z])", lambda match: match[1].upper(), name)
