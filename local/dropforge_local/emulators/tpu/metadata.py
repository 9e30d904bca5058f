"""A machine's metadata server, as https://cloud.google.com/compute/docs/metadata/querying-metadata describes it.

The tree of values is asked for at each request; a leaf is text, or a function of the query for what must not be listed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from dropforge_local.base.ports import HOST

ROOT = "/computeMetadata/v1"
HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
LONGEST_WAIT_SECONDS = 300.0

Tree = dict[str, Any]


class MetadataServer:
    """One machine's server on one loopback port."""

    def __init__(self, port: int, tree: Callable[[], Tree]) -> None:
        self._port = port
        self._tree = tree
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _get(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/":
            return web.Response(text="computeMetadata/\n", headers=HEADERS)
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403, text="Missing required header: Metadata-Flavor: Google\n", headers=HEADERS)
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            return web.Response(status=404, text=f"{path} was not found\n", headers=HEADERS)
        found = find(self._tree(), path[len(ROOT) :])
        if found is not None and request.query.get("wait_for_change") == "true":
            found = await self._wait(path, request.query)
        if found is None:
            return web.Response(status=404, text=f"{path} was not found\n", headers=HEADERS)
        if isinstance(found, dict) and not path.endswith("/"):
            raise web.HTTPMovedPermanently(f"{path}/")
        text, kind = render(found, request.query, own_names=path.endswith("/attributes/"))
        return web.Response(text=text, content_type=kind, headers={**HEADERS, "ETag": etag(found)})

    async def _wait(self, path: str, query: Mapping[str, str]) -> Any:
        """What is at a path once it differs from what the caller has, or as it is when the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(float(query.get("timeout_sec", LONGEST_WAIT_SECONDS)), LONGEST_WAIT_SECONDS)
        found = find(self._tree(), path[len(ROOT) :])
        known = query.get("last_etag") or etag(found)
        while etag(found) == known and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
            found = find(self._tree(), path[len(ROOT) :])
        return found


def find(tree: Tree, path: str) -> Any:
    """The value at a path; None when there is none."""
    here: Any = tree
    for part in filter(None, path.split("/")):
        if not isinstance(here, dict) or part not in here:
            return None
        here = here[part]
    return here


def render(value: Any, query: Mapping[str, str], *, own_names: bool) -> tuple[str, str]:
    """Text and content type of a value: a leaf as it is, a directory as a list of names or, recursively, as JSON.

    `own_names` says that the names in it are users' and stay as they are.
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
    """A value as JSON: directories in camel case, except for what users named; functions are left out."""
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
