"""The chat template of a training: that of the spec or the model's own, with one date where it shows today's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any, NamedTuple

from dropforge.spec.sections import Model

from . import template_date
from .chat import EXCHANGE, first_special, load_tokenizer, render
from .errors import JobError, config_error


def training_tokenizer(directory: str, model: Model, day: Callable[[], date]) -> tuple[Any, date | None]:
    """The tokenizer of training and export, and the date that its chat template always shows, if it shows any.

    The template is model.chat_template, or else the model's own. One that shows today's date gets `day`: a model that
    was trained with one date in its prompts would see another in each later prompt. Raises JobError for a template that
    cannot be used, and for a date that cannot be a constant.
    """
    tokenizer = load_tokenizer(directory, model.trust_remote_code, model.chat_template)
    if model.chat_template is None:
        check_own(tokenizer)
    else:
        check(tokenizer)
    if not template_date.shows_today(tokenizer.chat_template):
        return tokenizer, None
    shown = day()
    tokenizer.chat_template = template_date.freeze(tokenizer.chat_template, shown)
    return tokenizer, shown


def check_own(tokenizer: Any) -> None:
    """Render a question and an answer with the model's own template. Raises JobError if it renders no text.

    Templates of models for images may read lists of parts only.
    """
    if problem := _rendered(tokenizer).problem:
        hint = "give a template for text in model.chat_template, or use a model for text"
        raise config_error(f"the model's own chat template {problem}", hint)


def check(tokenizer: Any) -> None:
    """Render a question and an answer with a template of the spec. Raises JobError if a model could not learn it."""
    before, asked, whole, problem = _rendered(tokenizer)
    if problem:
        raise _unfit(problem)
    answer = EXCHANGE[1]
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


class _Rendered(NamedTuple):
    """A question without and with the beginning of an answer, both with the answer, and what is wrong with these."""

    before: str = ""
    asked: str = ""
    whole: str = ""
    problem: str = ""


def _rendered(tokenizer: Any) -> _Rendered:
    question, answer = EXCHANGE
    try:
        before, asked = (render(tokenizer, [question], for_answer=begins) for begins in (False, True))
        whole = render(tokenizer, EXCHANGE)
    except Exception as error:  # noqa: BLE001  (whatever the template raises, it is no use for the training)
        return _Rendered(problem=f"fails to render a question and an answer: {type(error).__name__}: {error}")
    if question["content"] not in asked:
        return _Rendered(problem="leaves out the question of a user")
    if answer["content"] not in whole:
        return _Rendered(problem="leaves out the answer of the assistant")
    return _Rendered(before, asked, whole)


_TRY = "correct the template; `dropforge data check` tries it with the model"


def _unfit(problem: str, hint: str = _TRY) -> JobError:
    return config_error(f"model.chat_template {problem}", hint)
