"""A middleware of vLLM that ends each connection with its answer.

A load balancer of GKE moves connections, not requests: a client that keeps one would keep asking the model before, and
a request on it could meet the end of the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


class Closing:
    """An ASGI application around another: `vllm serve --middleware containers.serve_vllm.closing.Closing`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_closing)
