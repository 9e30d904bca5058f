"""The playground: asks served models for a viewer, whose browser never sees an endpoint's token. It stores nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dropforge.base.errors import CloudError, DropforgeError
from dropforge.base.redact import cut
from dropforge.cloud.classify import classify, client_errors
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord
from dropforge.platforms.serving import endpoint_key
from dropforge.run.record import Endpoint
from dropforge.spec import JobSpec

from .asking import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    PLAIN,
    Answer,
    Prompt,
    Unanswered,
    named_endpoint,
    prompt_of,
    refused,
    unreachable,
)
from .reader import Reader

MOST_SIDES = 2
MOST_OFFERED = 50
LONGEST_REFUSAL = 4096  # bytes
LONGEST_LINE = 1 << 20  # bytes of an event
LONGEST_MESSAGE = 2000


class Turn(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "user", "assistant"]
    content: str


class Question(BaseModel):
    """A question of a viewer to an endpoint: the fields of its prompt, or the held-out row with the number `sample`.

    `is_raw`: without the template of the training. `history` has the messages before, of a model without a template.
    """

    model_config = ConfigDict(extra="forbid")
    of: str
    values: dict[str, str] = {}
    sample: Annotated[int, Field(ge=0)] | None = None
    is_raw: bool = False
    system: str | None = None
    history: list[Turn] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None


class Callee(NamedTuple):
    """An endpoint that can be asked. `name` is that of the run or of the named endpoint."""

    name: str
    run: str
    spec: JobSpec
    endpoint: Endpoint

    @property
    def prompt(self) -> Prompt:
        return prompt_of(self.spec) or PLAIN

    @property
    def is_trained_prompt(self) -> bool:
        return prompt_of(self.spec) is not None

    @property
    def is_scaled_to_zero(self) -> bool:
        """Whether the first question may find no instance."""
        return self.spec.serve is not None and self.spec.serve.min_instances == 0


TokenOf = Callable[[Callee], str]  # the token for an endpoint; "" if it demands none


class Side(NamedTuple):
    """A column of the page: an endpoint, or why `name` cannot be asked."""

    name: str
    callee: Callee | None
    problem: str = ""


class Playground:
    """Asks the endpoints of a deployment."""

    def __init__(self, context: Context, reader: Reader, token_of: TokenOf | None = None) -> None:
        self._context = context
        self._reader = reader
        self._token_of = token_of or self._own_token

    def side(self, name: str) -> Side:
        """The column of a run or of a named endpoint."""
        try:
            return Side(name, self.callee(name))
        except Unanswered as error:
            return Side(name, None, str(error))

    def callee(self, name: str) -> Callee:
        """What `name` names: a named endpoint, else a run. Raises Unanswered if nothing answers there."""
        named = {record.name: record for record in self._reader.endpoints() if record.retired is None}
        if name in named:
            return self._named(named[name])
        run = self._reader.find(name)
        if run is None or run.spec is None:
            raise Unanswered(f"there is no run and no endpoint {name[:80]!r} that this console can read")
        record, serve = run.record, run.spec.serve
        for each in named.values():
            for adapter in each.adapters:
                if adapter.run == record.run and each.serving is not None:
                    return Callee(each.name, record.run, run.spec, named_endpoint(each, each.serving, adapter.name))
        if record.endpoint is None and serve is not None and serve.endpoint in named:
            return self._named(named[serve.endpoint])
        if record.endpoint is None:
            why = "has no endpoint" if record.state.is_terminal else "has no endpoint yet"
            raise Unanswered(f"the run is {record.state} and {why}")
        if record.endpoint.ended:
            raise Unanswered(f"the endpoint ended at {record.endpoint.ended:%Y-%m-%d %H:%M} UTC")
        return Callee(record.run, record.run, run.spec, record.endpoint)

    def _named(self, record: EndpointRecord) -> Callee:
        serving = record.serving
        run = self._reader.find(serving.run) if serving else None
        if serving is None or run is None or run.spec is None:
            raise Unanswered(f"the endpoint {record.name} is {record.state}: no model answers there now")
        return Callee(record.name, serving.run, run.spec, named_endpoint(record, serving))

    def offered(self, now: datetime) -> list[str]:
        """The named endpoints that serve, and the newest runs with an endpoint."""
        named = [record.name for record in self._reader.endpoints() if record.serving and not record.retired]
        ended = (run for run in self._reader.runs() if (served := run.endpoint) and not served.ended)
        runs = [run.run for run in ended if run.endpoint and now < run.endpoint.expires]
        return [*named, *runs[:MOST_OFFERED]]

    async def answer(self, question: Question) -> AsyncIterator[str]:
        """Yield server-sent events with the parts of the answer, and at last its end or its error."""
        try:
            callee = await asyncio.to_thread(self.callee, question.of)
            messages = await asyncio.to_thread(self._messages, callee, question)
            token = await asyncio.to_thread(self._token_of, callee)
            async for part in self._parts(callee, messages, question, token):
                yield _event(part)
        except Unanswered as error:
            yield _event({"error": cut(str(error), LONGEST_MESSAGE), "hint": error.hint})
        except CloudError as error:
            yield _event({"error": cut(error.message, LONGEST_MESSAGE), "hint": error.hint})
        except DropforgeError as error:
            yield _event({"error": cut(str(error), LONGEST_MESSAGE), "hint": ""})

    async def _parts(
        self, callee: Callee, messages: Sequence[dict[str, str]], question: Question, token: str
    ) -> AsyncIterator[dict[str, str]]:
        from aiohttp import ClientError, ClientSession, ClientTimeout  # 0.2 s, which no other page needs

        sampling = {"max_tokens": question.max_tokens, "temperature": question.temperature}
        body = {"model": callee.endpoint.model, "messages": messages, "stream": True}
        body |= {name: value for name, value in sampling.items() if value is not None}
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)
        answer = Answer(callee.name)
        try:
            async with ClientSession(timeout=limits, read_bufsize=LONGEST_LINE) as session:
                url = f"{callee.endpoint.base_url}/chat/completions"
                async with session.post(url, json=body, headers=headers, allow_redirects=False) as reply:
                    if reply.status != 200:
                        text = (await reply.content.read(LONGEST_REFUSAL)).decode("utf-8", "replace")
                        raise refused(callee.name, callee.spec, reply.status, text or str(reply.reason))
                    async for line in reply.content:
                        if text := answer.part(line):
                            yield {"text": text}
        except TimeoutError:
            raise unreachable(callee.name, callee.spec, callee.endpoint, "did not answer in time") from None
        except (ClientError, OSError) as error:
            raise self._broken(callee, answer, error) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Unanswered(f"the endpoint of {callee.name} sent what is no chat completion: {error!r}") from None
        answer.check_end()
        yield {"end": answer.ended}

    def _broken(self, callee: Callee, answer: Answer, error: Exception) -> Unanswered:
        if answer.has_begun:
            return Unanswered(f"the endpoint of {callee.name} broke off: {error}")
        return unreachable(callee.name, callee.spec, callee.endpoint, f"cannot be reached: {error}")

    def _messages(self, callee: Callee, question: Question) -> list[dict[str, str]]:
        if question.sample is not None:
            return held_out(self._reader.samples(callee.run), question.sample)
        is_trained = callee.is_trained_prompt and not question.is_raw
        prompt = callee.prompt if is_trained else PLAIN
        if question.system is not None:
            prompt = prompt.with_system(question.system)
        missing = [name for name in prompt.fields if name not in question.values]
        if missing:
            raise Unanswered(f"the prompt of {callee.name} needs a text for {' and '.join(missing)}")
        messages = prompt.messages(question.values)
        if is_trained or not question.history:
            return messages
        return [*(turn.model_dump() for turn in question.history), messages[-1]]

    def _own_token(self, callee: Callee) -> str:
        """The token of this process's account, or the API key of the deployment's endpoints."""
        spec = callee.spec
        assert spec.serve is not None, "only a spec with an endpoint has a token"
        if spec.serve.credential == "none":
            return ""
        if spec.serve.credential == "api_key":
            return endpoint_key(self._context.cloud, spec)
        try:
            return self._context.cloud.clients.endpoint_token(callee.endpoint.url)
        except client_errors() as error:
            raise classify(error) from error


def held_out(rows: Sequence[dict[str, Any]], number: int) -> list[dict[str, str]]:
    """The messages of a held-out row. A container has written them. Raises Unanswered."""
    prompt = rows[number].get("prompt") if number < len(rows) else None
    try:
        return [turn.model_dump() for turn in _TURNS.validate_python(prompt)]
    except ValidationError:
        raise Unanswered(f"the run has no held-out question {number + 1}") from None


_TURNS = TypeAdapter(Annotated[list[Turn], Field(min_length=1)])


def _event(content: dict[str, str]) -> str:
    return f"data: {json.dumps(content)}\n\n"
