"""`transformers serve` with what vLLM has beyond it: `python -m … MODEL PORT [NAME=DIRECTORY …]`.

transformers 5.23 ignores requests for log-probabilities, and takes no token ids as a prompt. This process answers both
in vLLM's format (`return_token_ids`, `prompt_logprobs`, a list of ids as `prompt`), with the model that it serves. A
request for a NAME is answered with the adapter in its DIRECTORY, every other request with the model alone. A seed holds
for its own request, and the work for a client ends when the client leaves. The gate in front of it refuses what it does
not do.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event
from typing import Any, ClassVar

import torch
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving import chat_completion, completion, model_manager, server, utils

Message = MutableMapping[str, Any]
Application = Callable[..., Awaitable[None]]


@dataclass
class Asked:
    """A request: its seed, whether its client has left, and the token ids of its prompt and of its answer."""

    seed: int | None = None
    left: Event = field(default_factory=Event)
    ids: tuple[list[int], list[int]] = ([], [])


asked: ContextVar[Asked] = ContextVar("asked")


class Departed(Exception):
    """The client has left before the computation for it began."""


class Watched:
    """The application of `transformers serve`, which learns that a client has left.

    transformers itself looks for that only while it sends a stream.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] != "http":
            return await self._application(scope, receive, send)
        request = Asked()
        asked.set(request)
        watches: list[asyncio.Task[Message]] = []

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                request.left.set()
            elif not message.get("more_body"):  # the next message is the end of the connection
                watches.append(asyncio.create_task(received()))
            return message

        try:
            with suppress(Departed):
                await self._application(scope, received, send)
        finally:
            for watch in watches:
                watch.cancel()


class Left(StoppingCriteria):  # type: ignore[misc]
    """Ends the answer to a client that has left."""

    def __init__(self, left: Event) -> None:
        self._left = left

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._left.is_set(), device=input_ids.device, dtype=torch.bool)


class Manager(utils.GenerateManager):  # type: ignore[misc]
    """Notes the token ids of a request: of its prompt and of its answer."""

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        text, length, ids = await super().generate_non_streaming(model, processor, inputs, *args, **options)
        asked.get().ids = (_ids(inputs["input_ids"][0]), _ids(ids))
        return text, length, ids


class View:
    """The model for one request, with one of its adapters (""; with none). All requests share the model's weights.

    transformers computes on one thread per model, one request after the other. So the choice of an adapter and the
    state of PyTorch's one generator of random numbers hold until the end of a computation.
    """

    def __init__(self, model: Any, adapter: str) -> None:
        self._model = model
        self._adapter = adapter
        self._asked = asked.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._chosen():
            return self._model(*args, **options)

    def generate(self, *args: Any, **options: Any) -> Any:
        with self._chosen():
            if self._asked.seed is None:
                torch.seed()  # otherwise the answer would depend on the seed of a request before
            else:
                torch.manual_seed(self._asked.seed)
            until = StoppingCriteriaList([Left(self._asked.left)])
            return self._model.generate(*args, stopping_criteria=until, **options)

    @contextmanager
    def _chosen(self) -> Iterator[None]:
        """Compute with the adapter, if the client is still there. Raises Departed."""
        if self._asked.left.is_set():
            raise Departed
        if self._adapter:
            self._model.set_adapter(self._adapter)
        if self._adapter or not Models.adapters:
            yield
        else:
            with self._model.disable_adapter():
                yield


class Models(model_manager.ModelManager):  # type: ignore[misc]
    """Loads the tokenizer alone of a model that also sees (Gemma 3): its image processor needs Pillow or torchvision.

    The gate refuses requests with images. Loads the adapters with the model.
    """

    adapters: ClassVar[dict[str, str]] = {}  # directories by name

    def _load_model(self, *args: Any, **options: Any) -> Any:
        model = super()._load_model(*args, **options)
        if not self.adapters:
            return model
        from peft import PeftModel

        (first, directory), *others = self.adapters.items()
        model = PeftModel.from_pretrained(model, directory, adapter_name=first)
        for name, directory in others:
            model.load_adapter(directory, adapter_name=name)
        return model.eval()

    def _load_processor(self, model_id_and_revision: str, gguf_file: str | None = None) -> Any:
        directory = model_id_and_revision.rpartition("@")[0]
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=self.trust_remote_code)


class Sampling:
    """Samples where a request gives a temperature: transformers ignores it if the model's default is greedy.

    transformers would set the seed when a request arrives, while it computes the answer to another one. Answers with
    the adapter that a request names.
    """

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        adapters = Models.adapters
        adapter = body["model"] if body.get("model") in adapters else ""
        if adapter:
            body["model"] = self.model_manager.force_model  # type: ignore[attr-defined]
        name, model, processor = super()._resolve_model(body)  # type: ignore[misc]
        return name, View(model, adapter), processor

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **options: Any) -> Any:
        asked.get().seed = body.get("seed")
        config = super()._build_generation_config({**body, "seed": None}, *args, **options)  # type: ignore[misc]
        config.do_sample = config.do_sample if body.get("temperature") is None else body["temperature"] > 0
        return config


class Chats(Sampling, chat_completion.ChatCompletionHandler):  # type: ignore[misc]
    """The route of chat completions."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        wants_ids = body.pop("return_token_ids", False) and not body.get("stream")
        response = await super().handle_request(body, request_id)
        if not wants_ids:
            return response
        prompt, answer = asked.get().ids
        content = json.loads(response.body)
        content["choices"][0]["token_ids"] = answer
        return JSONResponse({**content, "prompt_token_ids": prompt})


class Completions(Sampling, completion.CompletionHandler):  # type: ignore[misc]
    """The route of completions, for a text or a list of token ids."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        wants_ids, count = body.pop("return_token_ids", False), body.pop("prompt_logprobs", None)
        asked_name = body.get("model")  # transformers writes the name of the model that answers in its place
        if isinstance(body.get("prompt"), list):
            response = await self._answer_ids(body, request_id)
        else:
            response = await super().handle_request(body, request_id)
        if body.get("stream") or not (wants_ids or count):
            return response
        prompt, answer = asked.get().ids
        content = json.loads(response.body)
        choice = content["choices"][0]
        if wants_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": answer}
        if count:
            name, model, _ = self._resolve_model({**body, "model": asked_name})
            manager = self.generation_state.get_manager(name)
            choice["prompt_logprobs"] = await manager.async_submit(prompt_logprobs, model, prompt, count)
        return JSONResponse(content)

    async def _answer_ids(self, body: dict[str, Any], request_id: str) -> Any:
        if body.get("stream"):
            raise HTTPException(status_code=400, detail="a prompt of token ids cannot be streamed")
        model_id, model, processor = self._resolve_model(body)
        ids = torch.tensor([body["prompt"]], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        config = self._build_generation_config(body, model.generation_config)
        manager = self.generation_state.get_manager(model_id)
        return await self._non_streaming(request_id, model, processor, model_id, inputs, config, manager)


def prompt_logprobs(model: Any, ids: list[int], count: int) -> list[dict[str, dict[str, float]] | None]:
    """For each token of the prompt but the first: the `count` most likely tokens, and the token itself.

    The keys are token ids, as in vLLM (vllm/entrypoints/openai/completion/protocol.py).
    """
    with torch.inference_mode():
        values = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float().log_softmax(-1)
    best = values.topk(min(count, values.shape[-1]))
    own = values.gather(-1, torch.tensor(ids[1:], device=values.device)[:, None])[:, 0].tolist()
    result: list[dict[str, dict[str, float]] | None] = [None]
    for token, value, tokens, found in zip(ids[1:], own, best.indices.tolist(), best.values.tolist(), strict=True):
        entries = {token: value, **dict(zip(tokens, found, strict=True))}
        result.append({str(key): {"logprob": entry} for key, entry in entries.items()})
    return result


def _ids(tensor: Any) -> list[int]:
    return [int(token) for token in tensor]


def main(model: str, port: str, *adapters: str) -> None:
    """Serve until SIGTERM."""
    Models.adapters = dict(each.split("=", 1) for each in adapters)
    # `Serve` has no parameters for them; it looks the classes up when it is called.
    model_manager.ModelManager = Models
    utils.GenerateManager = Manager
    chat_completion.ChatCompletionHandler = Chats
    completion.CompletionHandler = Completions
    build = server.build_server
    server.build_server = lambda *parts, **options: Watched(build(*parts, **options))
    # The log of an endpoint has its start and its errors, as that of vLLM; a line for each request would bury them.
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    Serve(model, device="cpu", dtype="auto", host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
