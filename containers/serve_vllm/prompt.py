"""Counts the tokens of a request's prompt, without transformers: importing it takes half a gigabyte of memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class PromptCounter:
    """Counts prompt tokens with the model's own tokenizer and chat template, up to `most_tokens`."""

    def __init__(self, directory: Path, most_tokens: int | None = None) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        self._ids = _vocab_size(directory) or len(vocabulary)
        self._most_tokens, self._longest = most_tokens, max(map(len, vocabulary))
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self._tokens = {name: _text(token) for name, token in config.items() if name.endswith("_token")}
        # {% generation %} marks the text that training learns. A prompt does not need the mark.
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", (directory / "chat_template.jinja").read_text())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse  # no strftime_now: an exported template has one date for ever
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._template = environment.from_string(source)

    def count(self, body: dict[str, Any]) -> int:
        """The number of tokens of a chat request's messages or a completion request's prompt. Raises ValueError."""
        if "messages" not in body:
            prompt = body.get("prompt")
            if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
                if (largest := max(prompt)) >= self._ids:
                    raise ValueError(f"prompt has the token id {largest}; expected ids below {self._ids}")
                return len(prompt)
            if not isinstance(prompt, str):
                raise ValueError(f"prompt is {prompt!r:.80}; expected a string or token ids")
            return self._count(prompt, add_special_tokens=True)
        try:
            text = self._render(body["messages"], True)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return self._count(text, add_special_tokens=False)

    def _count(self, text: str, *, add_special_tokens: bool) -> int:
        # As vLLM (vllm/renderers/params.py): tokenising a text that cannot fit would take seconds.
        if self._most_tokens and len(text) > self._most_tokens * self._longest:
            raise ValueError(
                f"This model's maximum context length is {self._most_tokens} tokens. However, your prompt has "
                f"{len(text)} characters; expected at most {self._longest} for each token."
            )
        return len(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def answer_start(self) -> str:
        """The end of every prompt by the chat template, after which an answer starts."""
        messages = [{"role": "user", "content": "?"}]
        return self._render(messages, True).removeprefix(self._render(messages, False))

    def _render(self, messages: Any, for_answer: bool) -> str:
        text: str = self._template.render(messages=messages, add_generation_prompt=for_answer, **self._tokens)
        return text


def describe_answers(directory: Path) -> None:
    """Write into a Qwen model's tokenizer how answers start and end, if its template differs from Qwen's own.

    Without it `transformers serve` looks for Qwen's start, because of the model type, and answers with the prompt.
    """
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    if not model_type.startswith("qwen") or "response_template" in config:
        return
    start = PromptCounter(directory).answer_start()
    if start.startswith("<|im_start|>"):
        return
    content = {"content": "text", "close": _text(config["eos_token"])}
    template = {"start_anchor": start, "defaults": {"role": "assistant"}, "fields": {"content": content}}
    path.write_text(json.dumps({**config, "response_template": template}))


def _vocab_size(directory: Path) -> int | None:
    """How many ids the model's embedding has; a model that also sees has it in its part for texts."""
    config = json.loads((directory / "config.json").read_text())
    size: int | None = (config.get("text_config") or config).get("vocab_size")
    return size


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
