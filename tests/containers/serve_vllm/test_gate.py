"""The gate demands the API key as vLLM does: below /v1, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

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


def test_a_server_without_a_key_answers_everybody() -> None:
    assert statuses("", None) == [200, 503, 503]
