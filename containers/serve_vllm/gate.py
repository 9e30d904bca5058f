"""A proxy for engines that break the serving contract. It adds names, limits, readiness, OpenAI's errors, [DONE]."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from dropforge.base.log import log

from .checks import BadRequest, Chat, Completion, checked, cut
from .metrics import Metrics

POLL_SECONDS = 0.05
PROBE_SECONDS = 60.0

CountTokens = Callable[[dict[str, Any]], int]


class Gate:
    """An OpenAI-compatible proxy of the engine at `upstream`, which names the model `inner_name`.

    Requests select an adapter by its name, which is also the engine's.

    /health answers 200 only after a real completion: an engine can report health and fail every request.
    """

    def __init__(
        self,
        upstream: str,
        inner_name: str,
        served_name: str,
        max_model_len: int,
        max_num_seqs: int,
        count_tokens: CountTokens,
        is_standin: bool = False,
        key: str = "",
        ends_connections: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        self.ready = asyncio.Event()
        self._upstream = upstream
        self._inner_name = inner_name
        self._served_name = served_name
        self._inner_names = {served_name: inner_name, **{name: name for name in adapters}}
        self._max_model_len = max_model_len
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._count_tokens = count_tokens
        self._is_standin = is_standin
        self._ends_connections = ends_connections
        self._authorization = f"Bearer {key}".encode() if key else b""
        self._created = int(time.time())
        self._metrics = Metrics(served_name)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        application = web.Application(client_max_size=16 * 2**20, middlewares=[self._with_key])
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._tell_metrics)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_post("/v1/completions", self._complete)
        application.cleanup_ctx.append(self._connected)
        if self._ends_connections:
            application.on_response_prepare.append(_end_connection)
        return application

    async def probe(self) -> None:
        """Wait for the engine and its first completion, then set `ready`. Raises RuntimeError on failure."""
        assert self._session is not None
        while not await self._is_up():
            await asyncio.sleep(POLL_SECONDS)
        body = {"model": self._inner_name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        async with self._session.post(f"{self._upstream}/v1/chat/completions", json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200 or "choices" not in text:
                raise RuntimeError(f"the engine is up but its first completion failed: {response.status} {text[:500]}")
        self.ready.set()

    @web.middleware
    async def _with_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """As vLLM's --api-key: every path below /v1 needs the key, /health does not."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path.startswith("/v1") and self._authorization and not compare_digest(given, self._authorization):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _connected(self, application: web.Application) -> Any:
        # The engine closes a connection after an error, without saying so: the next request would find it closed.
        connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            yield

    async def _is_up(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._upstream}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _health(self, request: web.Request) -> web.Response:
        if not self.ready.is_set():
            return web.json_response({"status": "starting"}, status=503)
        if not await self._is_up():
            return web.json_response({"status": "the engine is down"}, status=503)
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        shared = {"object": "model", "created": self._created, "owned_by": "dropforge"}
        base = {**shared, "id": self._served_name, "max_model_len": self._max_model_len}
        others = [name for name in self._inner_names if name != self._served_name]
        adapters = [{**shared, "id": name, "parent": self._served_name} for name in others]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if not self.ready.is_set():
            return _error(503, "the model is still loading", "ServiceUnavailableError")
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the request is not JSON", "BadRequestError")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object", "BadRequestError")
        if not isinstance(body.get("model"), str) or body["model"] not in self._inner_names:
            known = ", ".join(f"`{name}`" for name in self._inner_names)
            message = f"The model `{body.get('model')}` does not exist; this endpoint serves {known}."
            return _error(404, message, "NotFoundError", "model")
        bodies = [body]
        if self._is_standin:
            route = Chat if request.path.endswith("/chat/completions") else Completion
            try:
                bodies = checked(route, body, self._max_model_len, self._count_tokens)
            except BadRequest as error:
                return _error(400, str(error), "BadRequestError", error.field)
        with self._metrics.waiting():
            await self._slots.acquire()
        try:
            with self._metrics.running():
                return await self._forward(request, bodies, body["model"])
        finally:
            self._slots.release()

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        """vLLM's own metrics, or those of requests for the stand-in."""
        if self._is_standin:
            return web.Response(text=self._metrics.text())
        assert self._session is not None
        async with self._session.get(f"{self._upstream}/metrics") as response:
            return web.Response(status=response.status, text=await response.text())

    async def _forward(self, request: web.Request, bodies: list[dict[str, Any]], model: str) -> web.StreamResponse:
        """Ask the engine for an answer of a model to each body, one after the other."""
        assert self._session is not None
        answers = []
        try:
            for body in bodies:
                inner = {**body, "model": self._inner_names[model]}
                async with self._session.post(f"{self._upstream}{request.path}", json=inner) as response:
                    if response.status != 200:
                        return _translated(response.status, await response.text())
                    if body.get("stream"):
                        return await self._relay(request, response, {**body, "model": model})
                    answers.append(_cut(await response.json(), body.get("stop") if self._is_standin else None))
        except aiohttp.ClientError as error:
            return _error(502, f"the engine did not answer: {error!r}", "InternalServerError")
        answer = _joined(answers)
        self._metrics.count(answer)
        return web.json_response({**answer, "model": model})

    async def _relay(
        self, request: web.Request, upstream: aiohttp.ClientResponse, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Relay server-sent events under the name of the request; ends with the [DONE] that clients wait for.

        If the engine ends an answer early, the connection ends without the answer's end: the status 200 has been sent,
        and a second response would look like a part of the answer.
        """
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            async for line in upstream.content:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    for chunk in self._chunks(json.loads(data), body):
                        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        except (aiohttp.ClientError, ValueError) as error:  # a ClientError, too, if the client is gone
            log(f"an answer ended early: {type(error).__name__}", stage="serve", severity="WARNING")
            if request.transport is not None:
                request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunks(self, chunk: dict[str, Any], body: dict[str, Any]) -> list[dict[str, Any]]:
        """What the client gets for a chunk of the engine. vLLM tells the usage last, by itself, and only if asked."""
        if "model" not in chunk:  # an error
            return [chunk]
        renamed = {**chunk, "model": body["model"]}
        if not self._is_standin:
            return [renamed]
        self._metrics.count(chunk)
        usage = renamed.pop("usage", None)
        wants_usage = (body.get("stream_options") or {}).get("include_usage")
        return [renamed, {**renamed, "choices": [], "usage": usage}] if usage and wants_usage else [renamed]


def _cut(answer: dict[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    """The answer without its stop text, as vLLM's answers are."""
    for choice in answer["choices"] if stop else ():
        place, field = (choice["message"], "content") if "message" in choice else (choice, "text")
        place[field] = cut(place.get(field) or "", stop or "")
    return answer


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer with the choices of all, in their order."""
    if len(answers) == 1:
        return answers[0]
    choices = [choice for answer in answers for choice in answer["choices"]]
    usage = {
        name: sum(answer["usage"][name] for answer in answers)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return {**answers[0], "choices": [{**choice, "index": at} for at, choice in enumerate(choices)], "usage": usage}


def _translated(status: int, text: str) -> web.Response:
    """The engine's error in OpenAI's format."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {}
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return web.json_response(answer, status=status)
    detail = answer.get("detail", text) if isinstance(answer, dict) else text
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    told = str(detail)  # to the client alone, of its own request
    return _error(400 if status == 422 else status, told[:2000], kind)


async def _end_connection(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"  # aiohttp has made its own headers before it calls this


def _error(status: int, message: str, kind: str, parameter: str | None = None) -> web.Response:
    """https://platform.openai.com/docs/guides/error-codes, with vLLM's names."""
    error = {"message": message, "type": kind, "param": parameter, "code": status}
    return web.json_response({"error": error}, status=status)
