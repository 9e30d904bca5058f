"""The gate demands the API key as vLLM does, and survives an engine that closes its connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.patience import PATIENCE_SECONDS

from containers.serve_vllm.gate import Gate

KEY = "Canary7f3a-é"


def statuses(key: str, authorization: str | None) -> list[int]:
    """The answers to a list of models, to a completion, and to a look at the health."""

    async def ask() -> list[int]:
        gate = Gate("http://127.0.0.1:9", "inner", "served", 8, 1, lambda body: 1, key=key)
        headers = {} if authorization is None else {"Authorization": authorization}
        async with TestClient(TestServer(gate.application())) as client:
            answers = [
                await client.get("/v1/models", headers=headers),
                await client.post("/v1/chat/completions", headers=headers, json={"model": "served"}),
                await client.get("/health", headers=headers),
            ]
            assert KEY not in str([await answer.text() for answer in answers])
            return [answer.status for answer in answers]

    return asyncio.run(ask())


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", f"bearer {KEY}", KEY, f"Bearer {KEY}x", "Basic eA=="])
def test_requests_without_the_key_are_refused(given: str | None) -> None:
    assert statuses(KEY, given) == [401, 401, 503]


def test_requests_with_the_key_reach_the_engine() -> None:
    assert statuses(KEY, f"Bearer {KEY}") == [200, 503, 503]  # 503: the engine has not started


def test_an_answer_ends_its_connection_if_the_server_drains() -> None:
    async def ask(*, ends: bool) -> str:
        gate = Gate("http://127.0.0.1:9", "inner", "served", 8, 1, lambda body: 1, ends_connections=ends)
        async with TestClient(TestServer(gate.application())) as client:
            return str((await client.get("/v1/models")).headers.get("Connection", ""))

    assert [asyncio.run(ask(ends=ends)) for ends in (True, False)] == ["close", ""]


def test_a_server_without_a_key_answers_everybody() -> None:
    assert statuses("", None) == [200, 503, 503]


def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    """uvicorn closes a connection after an error in an application, and says so to nobody."""
    answer = b'{"choices": [{"finish_reason": "stop"}]}'

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"inner"}')
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer))
        writer.write(answer)
        with suppress(asyncio.IncompleteReadError):
            await reader.readexactly(1)  # a second request on this connection is cut
        writer.close()

    async def ask() -> list[int]:
        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            gate = Gate(f"http://127.0.0.1:{port}", "inner", "served", 8, 1, lambda body: 1)
            gate.ready.set()
            async with TestClient(TestServer(gate.application())) as client:
                body = {"messages": [{"role": "user"}], "model": "served"}
                route = "/v1/chat/completions"
                return [(await client.post(route, json=body)).status for _ in range(2)]

    assert asyncio.run(ask()) == [200, 200]


@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_that_the_engine_cuts_short_ends_without_an_end(cut: bool) -> None:
    """A second response within the first would look like a part of the answer, and its end like the answer's."""
    chunk = b'data: {"model": "inner", "choices": [{"text": "one"}]}\n\n'

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"inner"}')
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) + (b"" if cut else b"0\r\n\r\n"))
        await writer.drain()
        writer.close()

    async def ask() -> bytes:
        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            gate = Gate(f"http://127.0.0.1:{port}", "inner", "served", 8, 1, lambda body: 1)
            gate.ready.set()
            async with TestServer(gate.application()) as served:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                body = b'{"prompt": "?", "stream": true, "model": "served"}'
                # The connection would stay open for a further request.
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: gate\r\nContent-Length: %d\r\n\r\n" % len(body))
                writer.write(body)
                whole = reader.read() if cut else reader.readuntil(b"0\r\n\r\n")
                answer = await asyncio.wait_for(whole, PATIENCE_SECONDS)
                writer.close()
                return answer

    answer = asyncio.run(ask())
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"text": "one"' in answer
    assert (b"[DONE]" in answer, answer.endswith(b"0\r\n\r\n")) == (not cut, not cut)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stop": ["x"], "stream": True}, "stop"),
        ({"max_completion_tokens": 9}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ],
)
def test_the_stand_in_refuses_what_its_engine_cannot_do(wrong: dict[str, Any], field: str) -> None:
    async def ask() -> tuple[int, dict[str, Any]]:
        gate = Gate("http://127.0.0.1:9", "inner", "served", 8, 1, lambda body: 1, is_standin=True)
        gate.ready.set()
        async with TestClient(TestServer(gate.application())) as client:
            body = {"model": "served", "messages": [{"role": "user", "content": "?"}], **wrong}
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.status, (await answer.json())["error"]

    status, error = asyncio.run(ask())
    assert (status, error["type"], error["param"]) == (400, "BadRequestError", field)
