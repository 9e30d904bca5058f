"""The forms of rows that people have, and the reader that turns any of them into a Row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dropforge.spec import Columns, Dataset
from dropforge.spec.templates import columns_in, fill_template, shown_columns

from .conversation import USED as USED_IN_MESSAGES
from .conversation import LeftOut, Message, Row, content_of, conversation, exchange
from .fields import LEARNT, MEANING, Verdict, is_learnt, unused_fields, verdict
from .values import UnsupportedRow, UnusableRow, is_empty, kind_of, list_of, text_of

SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "functions")
INSTRUCTIONS = ("systemInstruction", "system_instruction")
PREFERENCES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"), ("preferred", "non_preferred"))
JUDGED = ("prompt", "completion", "label")  # rows for KTO


@dataclass(frozen=True)
class Form:
    """A form of rows: the columns that it needs, and those that it reads if they are there."""

    columns: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Reader], Row]

    @property
    def is_conversation(self) -> bool:
        """Whether a row has messages, which no template can name."""
        return len(self.columns) == 1 and self.columns[0] in ("messages", "conversations", "contents")

    def fits(self, columns: Collection[str]) -> bool:
        return all(name in columns for name in self.columns)


def _messages(name: str) -> Form:
    def read(values: Mapping[str, Any], reader: Reader) -> Row:
        return _conversation(_column(values, name), values, reader)

    return Form((name,), (*SYSTEM, *TOOLS), read)


def _contents(values: Mapping[str, Any], reader: Reader) -> Row:
    """https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare"""
    given = next((values[name] for name in INSTRUCTIONS if not is_empty(values.get(name))), None)
    parts = given.get("parts") if isinstance(given, Mapping) else given
    system = "" if is_empty(parts) else content_of({"parts": parts}, "system")
    return _conversation(_column(values, "contents"), {"system": system}, reader)


def _conversation(messages: Any, values: Mapping[str, Any], reader: Reader) -> Row:
    """The row of messages, with the tools and the instruction that have columns of their own."""
    messages = list_of(messages, "`messages`")
    if system := _system(values):
        if any(isinstance(each, Mapping) and each.get("role", each.get("from")) == "system" for each in messages):
            raise UnsupportedRow("a column `system` beside a message of the role 'system'", "keep one of the two")
        messages = [{"role": "system", "content": system}, *messages]
    return conversation(messages, _tools(values), reader.see)


def _tools(values: Mapping[str, Any]) -> Any:
    return next((values[name] for name in TOOLS if not is_empty(values.get(name))), None)


def _prompt_completion(values: Mapping[str, Any], reader: Reader) -> Row:
    prompt, completion = _column(values, "prompt"), _column(values, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        row = _conversation([*prompt, *completion], values, reader)
        asked = len(prompt) + bool(_system(values))  # messages before the completion; their answers are read only
        if not any(at >= asked for at in row.answers):
            raise UnusableRow("the completion has no answer of the assistant")
        return replace(row, muted=row.muted | {at for at in row.answers if at < asked})
    if (tools := _tools(values)) is not None:
        raise UnsupportedRow(
            f"the field 'tools' ({kind_of(tools)}) beside a prompt of text, which training would lose",
            "write the row as `messages`",
        )
    return _pair("prompt", "completion")(values, reader)


def _pair(asked: str, answered: str, *more: str, after: str = "") -> Callable[[Mapping[str, Any], Reader], Row]:
    """A question and an answer, after the turns of the column `after`.

    A value of `more` follows the question on a line of its own.
    """

    def read(values: Mapping[str, Any], reader: Reader) -> Row:
        question = text_of(_column(values, asked), asked)
        parts = [question, *(text_of(values[name], name) for name in more if not is_empty(values.get(name)))]
        answer = text_of(_column(values, answered), answered)
        return exchange("\n".join(filter(None, parts)), answer, _system(values), _history(values.get(after)))

    return read


def _text(name: str) -> Callable[[Mapping[str, Any], Reader], Row]:
    def read(values: Mapping[str, Any], reader: Reader) -> Row:
        text = text_of(_column(values, name), name)
        if len(text.strip()) <= 1:
            raise UnusableRow(f"the text is {kind_of(text)}; expected more than one character")
        return Row((), text)

    return read


# By dataset.format, in the order in which `auto` tries them.
FORMS = {
    "messages": _messages("messages"),
    "conversations": _messages("conversations"),
    "contents": Form(("contents",), INSTRUCTIONS, _contents),
    "prompt_completion": Form(("prompt", "completion"), (*SYSTEM, *TOOLS), _prompt_completion),
    "prompt_response": Form(("prompt", "response"), SYSTEM, _pair("prompt", "response")),
    "query_response": Form(("query", "response"), (*SYSTEM, "history"), _pair("query", "response", after="history")),
    "instruction_output": Form(
        ("instruction", "output"),
        (*SYSTEM, "input", "history"),
        _pair("instruction", "output", "input", after="history"),
    ),
    "instruction_response": Form(
        ("instruction", "response"), (*SYSTEM, "input", "context"), _pair("instruction", "response", "context", "input")
    ),
    "input_output": Form(("input", "output"), SYSTEM, _pair("input", "output")),
    "question_answer": Form(("question", "answer"), SYSTEM, _pair("question", "answer")),
    "text": Form(("text",), (), _text("text")),
    "completion": Form(("completion",), (), _text("completion")),
}


class Reader:
    """Turns the rows of one data set into Rows, and collects the fields that nothing reads."""

    def __init__(self, form: Form, ignored: Collection[str] = ()) -> None:
        self._form = form
        self._ignored = frozenset(ignored)
        self._used = {*form.columns, *form.optional, *(() if self._is_by_templates else LEARNT)}
        self.unused: dict[str, None] = {}  # by first sight

    def verdict(self, column: str) -> Verdict:
        """What becomes of a column that has values. Templates name what is read, so they refuse no column."""
        found = verdict(column, self._used, self._ignored)
        return "harmless" if self._is_by_templates and found != "used" else found

    def __call__(self, values: Mapping[str, Any]) -> Row:
        """Raises UnusableRow, UnsupportedRow and LeftOut."""
        row = self._form.read(values, self)
        self._note(values, self._used, "")
        if not self._is_by_templates and not is_learnt(self._without_ignored(values), "a row"):
            raise LeftOut("its weight is 0")
        return row

    def see(self, message: Mapping[str, Any]) -> None:
        self._note(message, USED_IN_MESSAGES, "a message with ")

    @property
    def _is_by_templates(self) -> bool:
        return not self._form.columns

    def _note(self, values: Mapping[str, Any], used: Collection[str], what: str) -> None:
        if self._is_by_templates:  # the templates name what is read: the author has chosen
            return
        for name in unused_fields(values, used, self._ignored, what):
            self.unused[name] = None

    def _without_ignored(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in values.items() if name not in self._ignored}


def form_of(columns: Collection[str], dataset: Dataset) -> Form:
    """The form of rows with these columns, by the spec's templates or format. Raises UnsupportedRow."""
    if dataset.columns is not None:
        return _by_templates(dataset.columns, columns)
    _refuse_untrainable(columns, dataset)
    wanted = [dataset.format] if dataset.format in FORMS else list(FORMS)
    for name in wanted:
        if FORMS[name].fits(columns):
            return FORMS[name]
    expected = " or ".join("+".join(FORMS[name].columns) for name in wanted)
    raise UnsupportedRow(
        f"the columns {shown_columns(columns)}; expected {expected} (format {dataset.format!r})",
        "name the columns in dataset.columns, as in {'prompt': 'Question: {question}', 'completion': '{answer}'}",
    )


def judging_columns(columns: Collection[str]) -> tuple[str, ...]:
    """The columns that make rows of preferences, or of answers that are judged (KTO); () if there are none."""
    if all(name in columns for name in JUDGED):
        return JUDGED[-1:]
    return next((pair for pair in PREFERENCES if all(name in columns for name in pair)), ())


def _refuse_untrainable(columns: Collection[str], dataset: Dataset) -> None:
    """Refuse rows of preferences, whatever other form they seem to have. Raises UnsupportedRow."""
    found = judging_columns(columns)
    if not found or set(found) & set(dataset.ignore):
        return
    good = f"; to learn the good answers only, write dataset.columns with {{{found[0]}}}" if len(found) == 2 else ""
    raise UnsupportedRow(
        f"the columns {' and '.join(found)}, which say which answers are good and which are bad: {MEANING[found[0]]}",
        f"use rows whose every answer is right{good}",
    )


def _by_templates(columns: Columns, given: Collection[str]) -> Form:
    """Fills the templates. A column without a value is empty text, unless no column of the template has one."""
    templates = {name: template for name, template in columns if template is not None}
    named = {name: _named(template, name) for name, template in templates.items()}
    for name, wanted in named.items():
        for column in wanted:
            if not has_column(given, column):
                raise UnsupportedRow(
                    f"the columns {shown_columns(given)}; dataset.columns.{name} names the column {column!r}",
                    "name a column that the data set has",
                )

    def fill(name: str, values: Mapping[str, Any]) -> str:
        if name not in templates:
            return ""
        found = {column: _value(values, column) for column in named[name]}
        empty = [column for column, value in found.items() if is_empty(value)]
        if found and len(empty) == len(found):
            raise UnusableRow(f"{empty[0]!r} is {kind_of(found[empty[0]])}; expected text")
        texts = {column: "" if column in empty else text_of(value, column) for column, value in found.items()}
        return fill_template(templates[name], texts)

    def read(values: Mapping[str, Any], reader: Reader) -> Row:
        return exchange(fill("prompt", values), fill("completion", values), fill("system", values))

    read_columns = [
        column if column in given else column.partition(".")[0] for wanted in named.values() for column in wanted
    ]
    return Form((), tuple(read_columns), read)


def _named(template: str, where: str) -> list[str]:
    try:
        return columns_in(template)
    except ValueError as error:
        message = f"dataset.columns.{where}, which is not a template: {error}"
        raise UnsupportedRow(message, "write {{ for a brace") from None


def _system(values: Mapping[str, Any]) -> str:
    return next((text_of(values[name], name) for name in SYSTEM if not is_empty(values.get(name))), "")


def _history(pairs: Any) -> list[Message]:
    """The earlier turns of LLaMA-Factory's and ms-swift's `history`: pairs of a question and an answer."""
    if is_empty(pairs):
        return []
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise UnusableRow(f"`history` is {kind_of(pairs)}; expected pairs of a question and an answer")
    texts = [(text_of(asked, "history"), text_of(answered, "history")) for asked, answered in pairs]
    return [
        {"role": role, "content": text}
        for pair in texts
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _column(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise UnusableRow(f"the column {name!r} is missing")
    return values[name]


def has_column(columns: Collection[str], name: str) -> bool:
    """Whether rows with these columns can have a value by this name: a column, or a field in it (`answers.text`)."""
    return name in columns or name.partition(".")[0] in columns


def _value(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside it: `answers.text`, `choices.0.text`. None if there is none.

    A list of one value is that value.
    """
    if name in values:
        found = values[name]
    else:
        found = values
        for part in name.split("."):
            if isinstance(found, Mapping):
                found = found.get(part)
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of some rows, in the order of their first sight."""
    return list(dict.fromkeys(name for row in rows for name in row))
