"""The laptop's engine computes for one request at a time: its seed is its own, and its work ends with its client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from tests.patience import PATIENCE_SECONDS, until

from ..lazy import Lazy

standin = Lazy("containers.serve_vllm.standin")
pytestmark = pytest.mark.slow
PROMPT = [2, 5, 6, 7]


@pytest.fixture(scope="module")
def model(base_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_model, dtype="auto").eval()


def answer(model: Any, request: Any, length: int = 24, **options: Any) -> list[int]:
    """The sampled ids of the model's answer to a request."""
    import torch

    standin.asked.set(request)
    ids = torch.tensor([PROMPT])
    sampling = {"do_sample": True, "temperature": 2.0, "max_new_tokens": length, "min_new_tokens": length}
    output = standin.View(model, "").generate(input_ids=ids, **sampling, **options)
    return [int(token) for token in output[0, len(PROMPT) :]]


def test_a_seed_gives_one_answer_whatever_was_computed_before(model: Any) -> None:
    alone = answer(model, standin.Asked(seed=7))
    others = [answer(model, standin.Asked(seed=seed)) for seed in (None, 8, None)]
    assert answer(model, standin.Asked(seed=7)) == alone
    assert alone not in others


def test_a_request_without_a_seed_does_not_repeat_what_followed_a_seed_before(model: Any) -> None:
    answers = []
    for _ in range(2):
        answer(model, standin.Asked(seed=7))
        answers.append(answer(model, standin.Asked()))
    assert answers[0] != answers[1]


def test_an_answer_ends_when_its_client_leaves(model: Any) -> None:
    request = standin.Asked(seed=7)
    streamed: list[Any] = []

    def put(tokens: Any) -> None:
        streamed.append(tokens)
        if len(streamed) == 4:  # the prompt and three tokens
            request.left.set()

    streamer = SimpleNamespace(put=put, end=lambda: None)
    assert len(answer(model, request, 200, streamer=streamer)) < 10


def test_nothing_is_computed_for_a_client_that_has_left(model: Any) -> None:
    request = standin.Asked()
    request.left.set()
    with pytest.raises(standin.Departed):
        answer(model, request)
    with pytest.raises(standin.Departed):
        standin.View(model, "")(input_ids=None)


@pytest.fixture
def served() -> Iterator[tuple[int, list[Any]]]:
    """The port of an application that computes until its client leaves, and the requests that it has had."""
    requests: list[Any] = []

    async def compute(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"{}", "more_body": False}
        requests.append(standin.asked.get())
        await asyncio.to_thread(requests[-1].left.wait, PATIENCE_SECONDS)
        raise standin.Departed

    config = uvicorn.Config(standin.Watched(compute), host="127.0.0.1", port=0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1], requests
    for request in requests:
        request.left.set()
    server.should_exit = True
    thread.join()


def test_the_application_learns_which_client_has_left(
    served: tuple[int, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    port, requests = served
    with socket.create_connection(("127.0.0.1", port)) as stays:
        stays.sendall(b"POST / HTTP/1.1\r\nHost: engine\r\nContent-Length: 2\r\n\r\n{}")
        until(lambda: len(requests) == 1)
        with socket.create_connection(("127.0.0.1", port)) as leaves:
            leaves.sendall(b"POST / HTTP/1.1\r\nHost: engine\r\nContent-Length: 2\r\n\r\n{}")
            until(lambda: len(requests) == 2)
        until(requests[1].left.is_set)
        assert not requests[0].left.is_set()
    until(requests[0].left.is_set)
    assert "Traceback" not in capfd.readouterr().err
