"""The date in a chat template: Llama 3.2, gpt-oss, Mistral and others show today's date in each prompt.

The prompts of a training have one date, and the exported template shows that date for ever, as Llama 3.1's own template
does. Otherwise the served model would get other prompts each day than those that it was trained, evaluated and sealed
with.
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any

from .errors import config_error

# transformers' function, which returns the present time in a form of `strftime` (utils/chat_template_utils.py).
_CALL = re.compile(r"""\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(?P<quote>["'])(?P<form>[^"'\\]*)(?P=quote)\s*\)""")
_IS_DEFINED = re.compile(r"\bstrftime_now\s+is\s+(not\s+)?defined\b")
_NAME = re.compile(r"\bstrftime_now\b")
_COMMENT = re.compile(r"{#.*?#}", re.DOTALL)


def shows_today(template: Any) -> bool:
    """Whether a prompt of the template depends on the day. A tokenizer has a template, or several by their names."""
    texts = template.values() if isinstance(template, dict) else [template]
    return any(_NAME.search(_COMMENT.sub("", text)) for text in texts)


def freeze(template: Any, day: date) -> Any:
    """The template with `day` in the place of today's date. Raises JobError if it computes the form of the date."""
    is_several = isinstance(template, dict)
    frozen = {name: _frozen(text, day) for name, text in template.items()} if is_several else _frozen(template, day)
    if shows_today(frozen):
        raise config_error(
            "the chat template shows today's date by strftime_now in a form that it computes; expected the form as a "
            "text, as in strftime_now('%d %b %Y')",
            "give the template with a date of its own, or without a date, in model.chat_template",
        )
    return frozen


def _frozen(text: str, day: date) -> str:
    text = _CALL.sub(lambda call: json.dumps(day.strftime(call["form"]), ensure_ascii=False), text)
    return _IS_DEFINED.sub(lambda test: "false" if test[1] else "true", text)
