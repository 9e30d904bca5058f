"""A row in its one form: a conversation that ends with an answer, or a plain text. Reads messages in OpenAI's schema.

https://platform.openai.com/docs/api-reference/chat/create: roles, parts of a content, tools, calls and their results.
ShareGPT's `from` and `value` are read as `role` and `content`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fields import LEARNT, is_learnt
from .values import UnsupportedRow, UnusableRow, is_empty, kind_of, list_of, object_of, text_of, word

Message = dict[str, Any]  # as a chat template takes it; `content` is always text
Tool = dict[str, Any]

# OpenAI's names and those of ShareGPT, Gemini and LLaMA-Factory, by the names that chat templates know.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
    "function_call": "assistant",
}  # fmt: skip
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # templates read one of these names
USED = frozenset(
    ("role", "from", "content", "value", "parts", "name", "refusal", "tool_calls", "function_call", "tool_call_id",
     *LEARNT, *THOUGHTS)
)  # fmt: skip
_TEXT_PARTS = {None: "text", "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True)
class Row:
    """A conversation that ends with the assistant's answer; or a plain text, without messages.

    `muted` are the indices of the assistant's earlier messages that are read and not learnt (OpenAI's "weight": 0).
    `tools` are the tools that the model may call, in OpenAI's form. `number` is the place in the data set, from 0;
    `within` tells its place in one of several files.
    """

    messages: tuple[Message, ...]
    text: str = ""
    muted: frozenset[int] = frozenset()
    tools: tuple[Tool, ...] = ()
    number: int = field(default=0, compare=False)
    within: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """The row in a message."""
        return f"row {self.number}{self.within}"

    @property
    def prompt(self) -> list[Message]:
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        """The last answer as people read it: its text, or its calls of tools."""
        return self.messages[-1]["content"] or _calls_of(self.messages[-1])

    @property
    def is_plain(self) -> bool:
        """Whether any server takes the messages as they are: text only, without tools and thoughts."""
        return not self.tools and all(message.keys() <= {"role", "content"} for message in self.messages)

    @property
    def question(self) -> str:
        """The text before the answer; two rows with one question must not be on both sides of the split."""
        return self.text or json.dumps([self.prompt, self.tools], ensure_ascii=False)

    @property
    def content(self) -> str:
        """The whole text of the row, to count and compare."""
        return self.text or "\n".join(_whole(message) for message in self.messages)

    @property
    def answers(self) -> list[int]:
        """The indices of the messages that are learnt."""
        return [at for at, each in enumerate(self.messages) if each["role"] == "assistant" and at not in self.muted]


class LeftOut(ValueError):
    """A row whose author wants it not to be learnt ("weight": 0)."""


def conversation(
    given: Any, tools: Any = None, seen: Callable[[Mapping[str, Any]], None] = lambda message: None
) -> Row:
    """The row of a list of messages. `seen` is told each message as it is given.

    Raises UnusableRow, UnsupportedRow and LeftOut.
    """
    read: list[Message] = []
    learnt: list[bool] = []
    for message in list_of(given, "`messages`"):
        if not isinstance(message, Mapping):
            raise UnusableRow(f"a message is {kind_of(message)}; expected an object with a role and a content")
        seen(message)
        read.append(_message(message))
        learnt.append(_is_learnt(message, read[-1]["role"]))
    answers = [at for at, message in enumerate(read) if message["role"] == "assistant"]
    if not answers:
        raise UnusableRow("no message is an answer of the assistant")
    if not any(learnt):
        raise LeftOut("no message is an answer of the assistant with a weight above 0")
    while not learnt[-1]:  # training learns nothing from messages after the last answer
        read.pop()
        learnt.pop()
    if not any(message["role"] in ("user", "tool") and message["content"].strip() for message in read[:-1]):
        raise UnusableRow("no question is before the last answer")
    if not read[-1]["content"].strip() and "tool_calls" not in read[-1]:
        raise UnusableRow("the last answer is empty")
    # An answer before any question (a greeting) has no prompt that a client could send, so it is read only.
    first = next(at for at, message in enumerate(read) if message["role"] in ("user", "tool"))
    muted = frozenset(at for at in answers if at < len(read) and (not learnt[at] or at < first))
    return Row(tuple(read), muted=muted, tools=tools_of(tools))


def exchange(question: str, answer: str, system: str = "", before: Sequence[Message] = ()) -> Row:
    """The row of one question and one answer. Raises UnusableRow."""
    if not question.strip():
        raise UnusableRow("the prompt is empty")
    # `text[0]` of a string instead of a list leaves one character of each row.
    if len(question) == 1 and question.isascii() and not system and not before:
        raise UnusableRow(f"the prompt is {kind_of(question)}; expected more than one character")
    if not answer.strip():
        raise UnusableRow("the completion is empty")
    start = [{"role": "system", "content": system}] if system else []
    asked, answered = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return Row((*start, *before, asked, answered))


def tools_of(given: Any) -> tuple[Tool, ...]:
    """The tools of a row in OpenAI's form. Raises UnusableRow."""
    return () if is_empty(given) else tuple(_tool(object_of(tool, "a tool")) for tool in list_of(given, "`tools`"))


def _tool(tool: dict[str, Any]) -> Tool:
    function = tool.get("function") if "function" in tool else tool  # OpenAI's `functions`: without the outer object
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnusableRow("a tool has no function with a name")
    return {"type": "function", "function": _without_nulls(function)}


def _message(given: Mapping[str, Any]) -> Message:
    role_given = given.get("role", given.get("from"))
    role = ROLES.get(role_given.lower()) if isinstance(role_given, str) else None
    if role is None:
        raise UnusableRow(f"the role of a message is {word(role_given)}; expected system, user, assistant or tool")
    if role_given == "function_call":
        return {"role": role, "content": "", "tool_calls": [_call(given.get("value", given.get("content")))]}
    message: Message = {"role": role, "content": content_of(given, role)}
    for name in ("name", "tool_call_id"):
        if not is_empty(given.get(name)):
            message[name] = text_of(given[name], name)
    if calls := _calls(given):
        if role != "assistant":
            raise UnusableRow(f"a message of the role {role!r} has `tool_calls`; expected them in the assistant's")
        message["tool_calls"] = calls
    thoughts = [given[name] for name in THOUGHTS if not is_empty(given.get(name))]
    if thoughts:
        if role != "assistant":
            raise UnusableRow(f"a message of the role {role!r} has thoughts; expected them in the assistant's")
        message.update(dict.fromkeys(THOUGHTS, text_of(thoughts[0], "the thoughts")))
    return message


def content_of(given: Mapping[str, Any], role: str) -> str:
    """The text of a message. Raises UnusableRow and UnsupportedRow."""
    content = next((given[name] for name in ("content", "value", "parts") if given.get(name) is not None), None)
    if role == "assistant" and is_empty(content):
        content = given.get("refusal") or ""  # the answer of a model that refuses
    if role == "tool" and isinstance(content, Mapping):
        return json.dumps(content, ensure_ascii=False)
    if isinstance(content, list):
        # As vLLM joins parts for a template that takes text: https://docs.vllm.ai, chat_utils.py
        return "\n".join(_part(part) for part in content)
    return text_of(content, "content")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return text_of(part, "content")
    if not isinstance(part, Mapping):
        raise UnusableRow(f"a part of a content is {kind_of(part)}; expected an object with a type and a text")
    kind = part.get("type")
    name = _TEXT_PARTS.get(kind) if kind is None or isinstance(kind, str) else None
    if name is None or (kind is None and is_empty(part.get("text"))):
        told = word(kind) if kind is not None else ", ".join(word(key) for key in part)
        raise UnsupportedRow(
            f"a part of a content of the type {told}; expected text", "take such rows out of the data set"
        )
    return text_of(part.get(name), name)


def _calls(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = given.get("tool_calls")
    if is_empty(calls):
        calls = [] if is_empty(given.get("function_call")) else [{"function": given["function_call"]}]
    return [_call(call) for call in list_of(calls, "`tool_calls`")]


def _call(given: Any) -> dict[str, Any]:
    """A call with its arguments as an object: chat templates write them as JSON."""
    call = object_of(given, "a call of a tool")
    function = object_of(call.get("function", call), "the function of a call")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise UnusableRow("a call of a tool has no name")
    arguments = function.get("arguments")
    read = {} if is_empty(arguments) else object_of(arguments, "the arguments of a call")
    made = {"type": "function", "function": {"name": function["name"], "arguments": read}}
    return made if is_empty(call.get("id")) else {"id": text_of(call["id"], "id"), **made}


def _is_learnt(given: Mapping[str, Any], role: str) -> bool:
    """Whether a message is an answer to learn. Raises UnsupportedRow for another message that is to be learnt."""
    if role == "assistant":
        return is_learnt(given, "a message")
    if asked := next((name for name in LEARNT[1:] if given.get(name)), ""):
        raise UnsupportedRow(
            f"a message of the role {role!r} with `{asked}`; dropforge learns the assistant's answers only",
            f"take `{asked}` out of such messages",
        )
    return False


def _without_nulls(value: Any) -> Any:
    """A table's columns give each tool the fields of all tools, as nulls."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _whole(message: Message) -> str:
    return "\n".join(filter(None, (message.get(THOUGHTS[0]), message["content"], _calls_of(message))))


def _calls_of(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(calls, ensure_ascii=False) if calls else ""
