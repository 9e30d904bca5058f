"""How many tokens a request's prompt has, without the half gigabyte that importing transformers takes."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class PromptCounter:
    """Counts prompt tokens with the model's own tokenizer and chat template."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self._tokens = {name: _text(token) for name, token in config.items() if name.endswith("_token")}
        # {% generation %} marks what training learns; for a prompt it means nothing.
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", (directory / "chat_template.jinja").read_text())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self._template = environment.from_string(source)

    def count(self, body: dict[str, Any]) -> int:
        """Tokens of a chat request's messages, or of a completion request's prompt. Raises ValueError."""
        if "messages" not in body:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise ValueError(f"prompt is {prompt!r:.80}; expected a string")
            return len(self._tokenizer.encode(prompt).ids)
        try:
            text = self._template.render(messages=body["messages"], add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
