"""The chat template of a training: that of the spec or the model's own, with one date where it shows today's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

from dropforge.spec.sections import Model

from . import template_date
from .chat import EXCHANGE, first_special, load_tokenizer, render
from .errors import JobError, config_error


def training_tokenizer(directory: str, model: Model, day: Callable[[], date]) -> tuple[Any, date | None]:
    """The tokenizer of training and export, and the date that its chat template always shows, if it shows any.

    The template is model.chat_template, or else the model's own. One that shows today's date gets `day`: a model that
    was trained with one date in its prompts would see another in each later prompt. Raises JobError for a template of
    the spec that cannot be used, and for a date that cannot be a constant.
    """
    tokenizer = load_tokenizer(directory, model.trust_remote_code, model.chat_template)
    if model.chat_template is not None:
        check(tokenizer)
    if not template_date.shows_today(tokenizer.chat_template):
        return tokenizer, None
    shown = day()
    tokenizer.chat_template = template_date.freeze(tokenizer.chat_template, shown)
    return tokenizer, shown


def check(tokenizer: Any) -> None:
    """Render a question and an answer with a template of the spec. Raises JobError if a model could not learn it."""
    question, answer = EXCHANGE
    try:
        before, asked = (render(tokenizer, [question], for_answer=begins) for begins in (False, True))
        whole = render(tokenizer, EXCHANGE)
    except Exception as error:  # noqa: BLE001  (whatever the template raises, it is no use for the training)
        raise _unfit(f"fails to render a question and an answer: {type(error).__name__}: {error}") from None
    if question["content"] not in asked:
        raise _unfit("leaves out the question of a user")
    if answer["content"] not in whole:
        raise _unfit("leaves out the answer of the assistant")
    if first_special(tokenizer, whole.rpartition(answer["content"])[2]) is None:
        raise _unfit(
            "does not end an answer with a special token of the model's tokenizer: a model that learns such answers "
            "never ends one",
            "write {{ eos_token }}, or the model's end of a turn, directly after the content of an assistant's message",
        )
    start = whole.removeprefix(asked).partition(answer["content"])[0].strip()
    if asked == before and whole.startswith(asked) and start:
        raise _unfit(
            f"ignores add_generation_prompt, and begins an answer with {start!r}: a model would learn to write that",
            f"write {{% if add_generation_prompt %}}{start}{{% endif %}} at the end",
        )


_TRY = "correct the template; `dropforge data check` tries it with the model"


def _unfit(problem: str, hint: str = _TRY) -> JobError:
    return config_error(f"model.chat_template {problem}", hint)
