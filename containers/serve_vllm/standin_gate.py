"""The gate in front of `transformers serve`: vLLM's names, limits, checks and metrics, as far as it can."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from .checks import Chat, Completion, checked, cut
from .gate import Gate, stream
from .metrics import Metrics
from .openai_errors import Refused, translated

CountTokens = Callable[[dict[str, Any]], int]
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class StandinGate(Gate):
    """A proxy of `transformers serve` at `upstream`, which names the model by its directory `model`.

    Requests select an adapter by its name, which is also the engine's. At most `max_num_seqs` requests are in the
    engine; the others wait here. `count_tokens` counts the tokens of a request's prompt.
    """

    def __init__(
        self,
        upstream: str,
        served_name: str,
        model: str,
        max_model_len: int,
        max_num_seqs: int,
        count_tokens: CountTokens,
        key: str = "",
        ends_connections: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(upstream, served_name, key, ends_connections)
        self._engine_names = {served_name: model, **{name: name for name in adapters}}
        self._max_model_len = max_model_len
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._count_tokens = count_tokens
        self._created = int(time.time())
        self._metrics = Metrics(served_name)

    @property
    def engine_model(self) -> str:
        return self._engine_names[self.served_name]

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/metrics", self._tell_metrics)
        router.add_get("/v1/models", self._models)
        router.add_route("*", "/v1/chat/completions", self._complete)
        router.add_route("*", "/v1/completions", self._complete)
        router.add_route("*", "/{path:.*}", self._lacks)

    async def _tell_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics.text())

    async def _models(self, request: web.Request) -> web.Response:
        shared = {"object": "model", "created": self._created, "owned_by": "dropforge"}
        base = {**shared, "id": self.served_name, "max_model_len": self._max_model_len}
        others = [name for name in self._engine_names if name != self.served_name]
        adapters = [{**shared, "id": name, "parent": self.served_name} for name in others]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _lacks(self, request: web.Request) -> web.Response:
        has = "/v1/models, /v1/chat/completions and /v1/completions"
        raise Refused(f"the engine `transformers` does not have {request.path}, but {has}; vLLM has more", status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        body = await read_body(request)
        route = Chat if request.path.endswith("/chat/completions") else Completion
        bodies = checked(route, body, self._max_model_len, self._count_tokens)
        model = body.get("model") or self.served_name  # as vLLM, which has one base model, too
        if model not in self._engine_names:
            known = ", ".join(f"`{name}`" for name in self._engine_names)
            raise Refused(f"The model `{model}` does not exist; this endpoint serves {known}.", "model", 404)
        with self._metrics.waiting():
            await self._slots.acquire()
        try:
            with self._metrics.running():
                return await self._forward(request, bodies, model)
        finally:
            self._slots.release()

    async def _forward(self, request: web.Request, bodies: list[dict[str, Any]], model: str) -> web.StreamResponse:
        """Ask the engine for an answer of a model to each body, one after the other."""
        kind = "chatcmpl" if request.path.endswith("/chat/completions") else "cmpl"
        # transformers takes the id of an answer from this header.
        headers = {"X-Request-Id": f"{kind}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"}
        answers = []
        for body in bodies:
            inner = {**body, "model": self._engine_names[model]}
            async with self.session.post(f"{self.upstream}{request.path}", json=inner, headers=headers) as response:
                if response.status != 200:
                    return translated(response.status, await response.text())
                if body.get("stream"):
                    return await stream(request, self._events(response, body, model), STREAM_HEADERS)
                answers.append(_cut(await response.json(), body.get("stop")))
        answer = _joined(answers)
        self._metrics.count(answer)
        return web.json_response({**_whole(answer), "model": model})

    async def _events(self, upstream: aiohttp.ClientResponse, body: dict[str, Any], model: str) -> AsyncIterator[bytes]:
        """The engine's server-sent events under the name of the request, and the [DONE] that clients wait for."""
        async for line in upstream.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                for chunk in self._chunks(json.loads(data), body, model):
                    yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _chunks(self, chunk: dict[str, Any], body: dict[str, Any], model: str) -> list[dict[str, Any]]:
        """The client's chunks for one chunk of the engine. The usage is the last one, if the client asked for it."""
        if "choices" not in chunk:  # an error
            return [chunk]
        self._metrics.count(chunk)
        usage = chunk.pop("usage", None)
        told = {**_whole(chunk), "model": model}
        if not (body.get("stream_options") or {}).get("include_usage"):
            return [told]
        return [{**told, "usage": None}, *([{**told, "choices": [], "usage": usage}] if usage else [])]


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request. Raises Refused, as vLLM does, for another type, and for what is no text."""
    if request.content_type != "application/json":
        raise Refused(f"Content-Type is {request.content_type}; expected application/json")
    try:
        body = json.loads(await request.read())
        # Half of a surrogate pair, which JSON can write, is no text that an engine could read.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("the request has half of a surrogate pair; expected text that UTF-8 can write") from None
    except ValueError as error:
        raise Refused(f"the request is not JSON: {error}") from None
    except RecursionError:
        raise Refused("the request is nested too deeply") from None
    if not isinstance(body, dict):
        raise Refused(f"the request is JSON, but a {type(body).__name__}; expected an object")
    return body


def _whole(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the chunk of one, with the keys of OpenAI's that transformers leaves out where they are null."""
    choices = []
    for choice in answer["choices"]:
        message = {"message": {"content": None, "refusal": None, **choice["message"]}} if "message" in choice else {}
        choices.append({"logprobs": None, "finish_reason": None, **choice, **message})
    return {**answer, "choices": choices}


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
