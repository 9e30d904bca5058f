"""A proxy for engines that break the serving contract. It adds names, limits, readiness, OpenAI's errors, [DONE]."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from hmac import compare_digest
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

POLL_SECONDS = 0.05
PROBE_SECONDS = 60.0

# Fields of OpenAI's requests that `transformers serve` takes and ignores, with the values that change nothing.
IGNORED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "web_search_options": (),
}

CountTokens = Callable[[dict[str, Any]], int]


class Gate:
    """An OpenAI-compatible proxy of the engine at `upstream`, which names the model `inner_name`.

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
    ) -> None:
        self.ready = asyncio.Event()
        self._upstream = upstream
        self._inner_name = inner_name
        self._served_name = served_name
        self._max_model_len = max_model_len
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._count_tokens = count_tokens
        self._is_standin = is_standin
        self._authorization = f"Bearer {key}".encode() if key else b""
        self._created = int(time.time())
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        application = web.Application(client_max_size=16 * 2**20, middlewares=[self._with_key])
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_post("/v1/completions", self._complete)
        application.cleanup_ctx.append(self._connected)
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
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
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
        model = {
            "id": self._served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "dropforge",
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if not self.ready.is_set():
            return _error(503, "the model is still loading", "ServiceUnavailableError")
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the request is not JSON", "BadRequestError")
        if not isinstance(body, dict):
            return _error(400, "the request is not a JSON object", "BadRequestError")
        if body.get("model") != self._served_name:
            message = f"The model `{body.get('model')}` does not exist; this endpoint serves `{self._served_name}`."
            return _error(404, message, "NotFoundError", "model")
        if self._is_standin and (name := refused_field(body)):
            value = "more than text" if name == "messages" else repr(body[name])[:80]
            message = f"{name} is {value}: the engine `transformers` does not do that; vLLM does"
            return _error(400, message, "BadRequestError", name)
        if problem := self._limit(body):
            return _error(400, problem, "BadRequestError", "messages" if "messages" in body else "prompt")
        async with self._slots:
            return await self._forward(request, {**body, "model": self._inner_name})

    def _limit(self, body: dict[str, Any]) -> str:
        """Why the prompt does not fit into the context, or "". Limits max_tokens to the rest, as vLLM does."""
        try:
            prompt = self._count_tokens(body)
        except ValueError as error:
            return str(error)
        limit = body.pop("max_completion_tokens", None) or body.get("max_tokens") or self._max_model_len
        if not isinstance(limit, int) or limit < 1:
            return f"max_tokens is {limit!r}; expected a positive number"
        room = self._max_model_len - prompt
        if room < 1:
            return (
                f"This model's maximum context length is {self._max_model_len} tokens. "
                f"However, your prompt has {prompt} tokens."
            )
        body["max_tokens"] = min(limit, room)
        return ""

    async def _forward(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert self._session is not None
        try:
            async with self._session.post(f"{self._upstream}{request.path}", json=body) as response:
                if response.status != 200:
                    return _translated(response.status, await response.text())
                if body.get("stream"):
                    return await self._relay(request, response)
                answer = await response.json()
        except aiohttp.ClientError as error:
            return _error(502, f"the engine did not answer: {error!r}", "InternalServerError")
        return web.json_response({**answer, "model": self._served_name})

    async def _relay(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Relay server-sent events under the served name; ends with the [DONE] that clients wait for."""
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async for line in upstream.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                await response.write(f"data: {json.dumps(self._renamed(json.loads(data)))}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _renamed(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "model": self._served_name} if "model" in chunk else chunk


def refused_field(body: dict[str, Any]) -> str:
    """The first field that `transformers serve` would ignore, in part or as a whole; "" if there is none."""
    wanted = {name: value for name, value in body.items() if value is not None and name in IGNORED}
    ignored = next((name for name, value in wanted.items() if value not in IGNORED[name]), "")
    messages = body.get("messages")
    return ignored or ("" if not isinstance(messages, list) or all(map(_is_text, messages)) else "messages")


def _is_text(message: Any) -> bool:
    """Whether a message is text alone. `transformers serve` leaves out images, and the text beside a call of a tool.

    The chat template refuses what is no message.
    """
    if not isinstance(message, dict):
        return True
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return not message.get("tool_calls") and all(
        isinstance(part, dict) and part.get("type") == "text" for part in parts
    )


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


def _error(status: int, message: str, kind: str, parameter: str | None = None) -> web.Response:
    """https://platform.openai.com/docs/guides/error-codes, with vLLM's names."""
    error = {"message": message, "type": kind, "param": parameter, "code": status}
    return web.json_response({"error": error}, status=status)
