"""The gates: what a client gets from the engine behind them, and what it gets from themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web
from tests.patience import PATIENCE_SECONDS
from yarl import URL

from containers.serve_vllm.gate import LARGEST_REQUEST, PRIVATE, Gate
from containers.serve_vllm.standin_gate import StandinGate

T = TypeVar("T")
KEY = "Canary7f3a-é"
NOBODY = "http://127.0.0.1:9"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
JSON = {"Content-Type": "application/json"}
ANSWER = {
    "id": "1", "model": "inner", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


def of_vllm(upstream: str, **options: Any) -> Gate:
    return Gate(upstream, "served", **options)


def of_standin(upstream: str, **options: Any) -> StandinGate:
    given = {"max_model_len": 64, "max_num_seqs": 1, "count_tokens": lambda body: 1, **options}
    return StandinGate(upstream, "served", "inner", **given)


GATES = pytest.mark.parametrize("make", [of_vllm, of_standin])
Make = Callable[..., Gate]


@asynccontextmanager
async def running(gate: Gate, *, ready: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a gate that listens."""
    runner = gate.runner(shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        if ready:
            gate.ready.set()
        async with aiohttp.ClientSession(address(runner)) as client:
            yield client
    finally:
        await runner.cleanup()


def address(runner: web.BaseRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


@asynccontextmanager
async def engine(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """The address of an engine that answers by `handle`, which is cancelled if the gate closes its connection."""
    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield address(runner)
    finally:
        await runner.cleanup()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE_SECONDS))


async def error_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape."""
    error: dict[str, Any] = (await answer.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    assert error["message"]
    return error


def statuses(make: Make, key: str, authorization: str | None) -> list[int]:
    """The answers to a list of models, to a completion, to a text to tokenise, and to a look at the health."""

    async def ask() -> list[int]:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with running(make(NOBODY, key=key), ready=False) as client:
            answers = [
                await client.get("/v1/models", headers=headers),
                await client.post(CHAT, headers=headers, json={"model": "served"}),
                await client.post("/tokenize", headers=headers, json={"prompt": "x"}),
                await client.get("/health", headers=headers),
            ]
            assert KEY not in str([await answer.text() for answer in answers])
            for answer in answers[:-1]:
                await error_of(answer)
            return [answer.status for answer in answers]

    return run(ask())


@GATES
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", f"bearer {KEY}", KEY, f"Bearer {KEY}x", "Basic eA=="])
def test_requests_without_the_key_are_refused(make: Make, given: str | None) -> None:
    assert statuses(make, KEY, given) == [401, 401, 401, 503]


@GATES
@pytest.mark.parametrize("key", [KEY, ""])
def test_requests_with_the_key_wait_for_the_model(make: Make, key: str) -> None:
    assert statuses(make, key, f"Bearer {key}") == [503, 503, 503, 503]


@GATES
def test_an_answer_ends_its_connection_if_the_server_drains(make: Make) -> None:
    async def ask(*, ends: bool) -> str:
        async with running(make(NOBODY, ends_connections=ends)) as client:
            return str((await client.get("/v1/models")).headers.get("Connection", ""))

    assert [run(ask(ends=ends)) for ends in (True, False)] == ["close", ""]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers"),
    [
        ("GET", "/v1/models", b"", {}),
        ("GET", "/version?x=%2F", b"", {}),
        ("POST", "/v1/responses", b'{"input": "?"}', JSON),
        ("POST", "/v1/embeddings", b'{"input": "?"}', JSON),
        ("POST", "/tokenize", b'{"prompt": "?"}', JSON),
        ("POST", CHAT, b'{"messages": []}', JSON),  # without a model
        ("POST", CHAT, b"[" * 100_000, JSON),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain", "X-Request-Id": "7"}),
        ("DELETE", "/v1/responses/a%2Fb", b"", {}),
    ],
)
def test_vllm_gets_every_request_as_it_was_sent(method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
    seen = []

    async def handle(request: web.BaseRequest) -> web.Response:
        seen.append((request.method, request.raw_path, await request.read()))
        assert {name: request.headers.get(name) for name in headers} == headers
        assert "Authorization" not in request.headers
        return web.Response(status=201, body=b"\x00its own", headers={"X-Own": "1"})

    async def ask() -> None:
        url = URL(path, encoded=True)
        async with engine(handle) as upstream, running(of_vllm(upstream, key=KEY)) as client:
            key = {"Authorization": f"Bearer {KEY}"}
            answer = await client.request(method, url, data=body or None, headers={**headers, **key})
            assert (answer.status, await answer.read(), answer.headers["X-Own"]) == (201, b"\x00its own", "1")

    run(ask())
    assert seen == [(method, path, body)]


@pytest.mark.parametrize("path", [*sorted(PRIVATE), "/adapters/sql", "/%73leep", "/v1/load%5Flora_adapter"])
def test_administrative_routes_of_vllm_are_not_for_clients(path: str) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        raise AssertionError(request.path)

    async def ask() -> dict[str, Any]:
        async with engine(handle) as upstream, running(of_vllm(upstream)) as client:
            answer = await client.post(URL(path, encoded=True), json={})
            assert answer.status == 404
            return await error_of(answer)

    assert "administrative" in run(ask())["message"]


@pytest.mark.parametrize(
    ("status", "text", "expected", "kind"),
    [
        (404, '{"detail": "Not Found"}', 404, "NotFoundError"),
        (405, '{"detail": "Method Not Allowed"}', 405, "Method Not Allowed"),
        (422, '{"detail": [{"loc": ["body"]}]}', 400, "BadRequestError"),
        (400, '{"error": {"message": "m", "type": "t", "param": null, "code": 400}}', 400, "t"),
        (401, '{"error": "Unauthorized"}', 401, "AuthenticationError"),
        (500, "Internal Server Error", 500, "InternalServerError"),
        (503, "[]", 503, "ServiceUnavailableError"),
    ],
)
@pytest.mark.parametrize("make", [of_vllm, of_standin])
def test_every_error_of_an_engine_gets_openai_s_shape(
    make: Make, status: int, text: str, expected: int, kind: str
) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text=text)

    async def ask() -> tuple[int, str]:
        async with engine(handle) as upstream, running(make(upstream)) as client:
            answer = await client.post(CHAT, json=HELLO)
            return answer.status, (await error_of(answer))["type"]

    assert run(ask()) == (expected, kind)


def fail(body: dict[str, Any]) -> int:
    raise KeyError("Canary")


def sent(data: Any, content_type: str = "application/json") -> dict[str, Any]:
    return {"data": data, "headers": {"Content-Type": content_type}}


TOO_LARGE = b"x" * (LARGEST_REQUEST + 1)
HALF = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
ERRORS: dict[str, tuple[Make, str, str, dict[str, Any], int]] = {
    "no engine": (of_vllm, "POST", "/v1/anything", {"json": {}}, 502),
    "no engine of the stand-in": (of_standin, "POST", CHAT, {"json": HELLO}, 502),
    "too large for vLLM": (of_vllm, "POST", CHAT, sent(BytesIO(TOO_LARGE)), 413),
    "too large": (of_standin, "POST", CHAT, sent(BytesIO(TOO_LARGE)), 413),
    "no such route": (of_standin, "POST", "/v1/responses", {"json": {}}, 404),
    "another method": (of_standin, "GET", CHAT, {}, 405),
    "another type": (of_standin, "POST", CHAT, sent(json.dumps(HELLO), "text/plain"), 400),
    "no type": (of_standin, "POST", CHAT, {"data": json.dumps(HELLO).encode()}, 400),
    "no JSON": (of_standin, "POST", CHAT, sent(b"{"), 400),
    "no object": (of_standin, "POST", CHAT, sent(b"[1]"), 400),
    "no UTF-8": (of_standin, "POST", CHAT, sent(b'{"a": "\xff"}'), 400),
    "deep": (of_standin, "POST", CHAT, sent(b"[" * 100_000), 400),
    "half of a pair": (of_standin, "POST", CHAT, sent(HALF), 400),
    "half of a pair in a name": (of_standin, "POST", CHAT, sent(rb'{"\udc00": 1}'), 400),
    "another model": (of_standin, "POST", CHAT, {"json": {**HELLO, "model": "other"}}, 404),
    "a fault": (lambda upstream: of_standin(upstream, count_tokens=fail), "POST", CHAT, {"json": HELLO}, 500),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_of_a_gate_has_openai_s_shape(name: str) -> None:
    make, method, path, options, status = ERRORS[name]

    async def ask() -> None:
        async with running(make(NOBODY)) as client:
            answer = await client.request(method, path, **options)
            assert answer.status == status, await answer.text()
            assert "Canary" not in (await error_of(answer))["message"]

    run(ask())


@pytest.mark.parametrize(
    ("path", "wrong", "field"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 0}, "logprobs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"stop": ["x"], "stream": True}, "stop"),
        (CHAT, {"stop": ""}, "stop"),
        (TEXT, {"stop": ["x", ""]}, "stop"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"max_completion_tokens": 65}, "max_tokens"),
        (CHAT, {"model": 5}, "model"),
        (TEXT, {"prompt": ""}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ],
)
def test_the_stand_in_refuses_what_its_engine_cannot_do(path: str, wrong: dict[str, Any], field: str) -> None:
    async def ask() -> tuple[int, dict[str, Any]]:
        async with running(of_standin(NOBODY)) as client:
            answer = await client.post(path, json={**(HELLO if path == CHAT else {"prompt": "?"}), **wrong})
            return answer.status, await error_of(answer)

    status, error = run(ask())
    assert (status, error["type"], error["param"]) == (400, "BadRequestError", field)


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}, {"model": "served"}])
def test_a_request_without_a_model_is_for_the_served_one(model: dict[str, Any]) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        assert (await request.json())["model"] == "inner"
        return web.json_response({**ANSWER, "id": request.headers["X-Request-Id"]})

    async def ask() -> Any:
        async with engine(handle) as upstream, running(of_standin(upstream)) as client:
            answer = await client.post(TEXT, json={"prompt": "?", **model}, headers={"X-Request-Id": "7"})
            return await answer.json()

    answer = run(ask())
    assert (answer["model"], answer["id"], answer["choices"][0]["logprobs"]) == ("served", "cmpl-7", None)


@GATES
def test_the_engine_learns_that_a_client_has_left(make: Make) -> None:
    async def ask() -> bool:
        arrived, left = asyncio.Event(), asyncio.Event()

        async def handle(request: web.BaseRequest) -> web.Response:
            arrived.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
            return web.Response()

        async with engine(handle) as upstream, running(make(upstream)) as client:
            asked = asyncio.create_task(client.post(CHAT, json=HELLO))
            await arrived.wait()
            asked.cancel()
            return await left.wait()

    assert run(ask())


def test_a_waiting_request_leaves_with_its_client() -> None:
    """The engine has one place. The second client leaves before its turn, and the engine never sees its request."""
    seen: list[str] = []

    async def ask() -> None:
        first, end = asyncio.Event(), asyncio.Event()

        async def handle(request: web.BaseRequest) -> web.Response:
            seen.append((await request.json())["prompt"])
            first.set()
            await end.wait()
            return web.json_response(ANSWER)

        async with engine(handle) as upstream, running(of_standin(upstream)) as client:

            async def waiting(count: int) -> None:
                """Wait until so many requests wait in the gate."""
                line = f'vllm:num_requests_waiting{{engine="0",model_name="served"}} {count}\n'
                while line not in await (await client.get("/metrics")).text():
                    await asyncio.sleep(0.01)

            asked = [asyncio.create_task(client.post(TEXT, json={"prompt": "first"}))]
            await first.wait()
            leaving = asyncio.create_task(client.post(TEXT, json={"prompt": "leaves"}))
            await waiting(1)
            leaving.cancel()
            await waiting(0)
            asked.append(asyncio.create_task(client.post(TEXT, json={"prompt": "stays"})))
            await waiting(1)
            end.set()
            assert [(await each).status for each in asked] == [200, 200]

    run(ask())
    assert seen == ["first", "stays"]


def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    """uvicorn closes a connection after an error in an application, and says so to nobody."""
    answer = b'{"choices": [{"finish_reason": "stop"}]}'

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"served"}')
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer))
        writer.write(answer)
        with suppress(asyncio.IncompleteReadError):
            await reader.readexactly(1)  # a second request on this connection is cut
        writer.close()

    async def ask() -> list[int]:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with running(of_vllm(f"http://127.0.0.1:{port}")) as client:
                body = {"messages": [{"role": "user"}], "model": "served"}
                return [(await client.post(CHAT, json=body)).status for _ in range(2)]

    assert run(ask()) == [200, 200]


@GATES
@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_that_the_engine_cuts_short_ends_without_an_end(make: Make, cut: bool) -> None:
    """A second response within the first would look like a part of the answer, and its end like the answer's."""
    chunk = b'data: {"model": "inner", "choices": [{"text": "one"}]}\n\n'

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"prompt"')
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) + (b"" if cut else b"0\r\n\r\n"))
        await writer.drain()
        writer.close()

    async def ask() -> bytes:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with running(make(f"http://127.0.0.1:{port}")) as client:
                url = client._base_url
                assert url is not None
                reader, writer = await asyncio.open_connection(url.host, url.port)
                body = b'{"prompt": "?", "stream": true, "model": "served"}'
                # The connection would stay open for a further request.
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                answer = await (reader.read() if cut else reader.readuntil(b"0\r\n\r\n"))
                writer.close()
                return answer

    answer = run(ask())
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"text": "one"' in answer
    assert answer.endswith(b"0\r\n\r\n") == (not cut)
    assert (b"[DONE]" in answer) == (not cut and make is of_standin), "vLLM sends it itself"


def test_a_redirection_is_the_client_s_to_follow() -> None:
    """The engine could name any address."""

    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(status=307, headers={"Location": f"http://{request.headers['Host']}/sleep"})

    async def ask() -> tuple[int, str]:
        async with engine(handle) as upstream, running(of_vllm(upstream)) as client:
            answer = await client.post("/sleep_", json={}, headers={"Host": "gate:1"}, allow_redirects=False)
            return answer.status, answer.headers["Location"]

    assert run(ask()) == (307, "http://gate:1/sleep")
