"""What `transformers serve` is asked, checked as vLLM checks it: the engine itself fails at a wrong value with 500.

Fields, types and defaults: vllm/entrypoints/openai/{chat_completion,completion}/protocol.py. The engine takes and
ignores some fields that vLLM honours, so a request that has one of them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .openai_errors import Refused

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
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Limit = Annotated[int, Field(ge=1)]


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class Part(BaseModel):
    """A part of a message; a model of texts takes no other type."""

    type: str
    text: str | None = None


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part | str] | None = None


class Request(BaseModel):
    """The fields of both routes."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None


class Chat(Request):
    """https://platform.openai.com/docs/api-reference/chat/create"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Limit | None = None


class Completion(Request):
    """https://platform.openai.com/docs/api-reference/completions/create. vLLM gives 16 tokens unless told otherwise."""

    prompt: Tokens | Annotated[list[Tokens], Field(min_length=1)] | str | Annotated[list[str], Field(min_length=1)]
    max_tokens: Limit | None = 16


def checked(route: type[Request], body: dict[str, Any], max_model_len: int, count: Callable[[Any], int]) -> Any:
    """The bodies for the engine: one for each prompt of the request. Raises Refused.

    `count` counts the tokens of a body's prompt; it raises ValueError where the chat template refuses the messages.
    """
    if refused := refused_field(body):
        message = f"{refused} is {body[refused]!r:.80}: the engine `transformers` does not do that; vLLM does"
        raise Refused(message, refused)
    try:
        values = route.model_validate(_given(body)).model_dump(exclude_none=True)
    except ValidationError as error:
        raise _named(error) from None
    if "" in _list(values.get("stop")):
        raise Refused("stop has an empty text, with which every answer would end at once", "stop")
    if body.get("stream_options") and not body.get("stream"):
        raise Refused('stream_options is given without stream; expected it with "stream": true', "stream_options")
    limit = values.pop("max_completion_tokens", None) or values.get("max_tokens")
    if "messages" in values:
        values["messages"] = [_with_text(message, at) for at, message in enumerate(values["messages"])]
    bodies = [{**values, "prompt": prompt} for prompt in _prompts(values["prompt"])] if "prompt" in values else [values]
    if values.get("stop") and values.get("stream"):
        raise Refused("stop is given for a stream: the engine `transformers` does not do that; vLLM does", "stop")
    if len(bodies) > 1 and values.get("stream"):
        raise Refused("prompt has several prompts: the engine `transformers` streams one", "prompt")
    return [each | {"max_tokens": _limit(each, limit, max_model_len, count)} for each in bodies]


def refused_field(body: dict[str, Any]) -> str:
    """The first field that `transformers serve` would ignore; "" if there is none."""
    wanted = {name: value for name, value in _given(body).items() if name in IGNORED}
    return next((name for name, value in wanted.items() if not any(_equal(value, each) for each in IGNORED[name])), "")


def _equal(value: object, other: object) -> bool:
    """Whether two values are the same in JSON; in Python, 0 is equal to False."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def cut(text: str, stop: str | list[str]) -> str:
    """The text before the first of the stop texts; the engine's answer ends with one."""
    found = [at for each in _list(stop) if (at := text.find(each)) >= 0]
    return text[: min(found, default=len(text))]


def _list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _limit(body: dict[str, Any], limit: int | None, max_model_len: int, count: Callable[[Any], int]) -> int:
    """How many tokens an answer may have: the limit, or what the context has left if that is less.

    As vLLM (renderers/params.py, get_max_tokens): only a limit above the whole context is refused.
    """
    field = "messages" if "messages" in body else "prompt"
    try:
        prompt = count(body)
    except ValueError as error:
        raise Refused(str(error), field) from None
    if limit and limit > max_model_len:
        raise Refused(
            f"max_tokens is {limit}; expected at most {max_model_len}, the length of the context", "max_tokens"
        )
    if not prompt or body.get("prompt") == "":
        raise Refused("the prompt is empty; expected a text or token ids", field)
    if prompt >= max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {prompt} tokens."
        )
        raise Refused(message, field)
    return min(limit or max_model_len, max_model_len - prompt)


def _prompts(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _with_text(message: dict[str, Any], at: int) -> dict[str, Any]:
    """The message with its parts as one text, joined as vLLM joins them for templates that take texts."""
    if message.get("tool_calls"):
        problem = f"messages[{at}] has calls of tools: the engine `transformers` leaves their text out; vLLM does not"
        raise Refused(problem, "messages")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if wrong := next((part["type"] for part in parts if part["type"] != "text" or "text" not in part), ""):
        problem = f"messages[{at}] has a part of type {wrong!r}; expected parts of type 'text' with a text"
        raise Refused(problem, "messages")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _named(error: ValidationError) -> Refused:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    return Refused(f"{place}: {first['msg']}; it was {first['input']!r:.80}", str(first["loc"][0]))
