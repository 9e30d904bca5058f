"""The chat template and the token ids that it makes: training, evaluation and serving see the same prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dropforge.rows import Message, Row, UnsupportedRow, UnusableRow
from dropforge.rows.conversation import THOUGHTS as THOUGHT_FIELDS
from dropforge.rows.conversation import Tool
from dropforge.rows.split import MAX_BAD_ROWS

from .errors import config_error, data_error, place_of
from .read_rows import FIRST_PROBLEMS
from .rows import check_problems
from .token_rows import Column, Ints, TokenRows

MIN_MEAN_TOKENS = 8
MEAN_ROWS = 2048  # the rows are shuffled: the mean of the first ones is the mean of all
MAX_TRUNCATED = 0.25  # share of the rows
FEW_ROWS = 20  # a share of fewer rows says nothing about the data set: they may be the few that are held out

# For base models without a template: each turn on its own lines; the end-of-sequence token ends an answer. The template
# is exported with the model, so that chat completions render prompts exactly as the training rows did.
MINIMAL_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{{ '\\n' }}{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
)
# To try a template with.
EXCHANGE: tuple[Message, Message] = (
    {"role": "user", "content": "QUESTION"},
    {"role": "assistant", "content": "ANSWER"},
)
IGNORED = -100
Learn = Literal["answers", "last_answer", "all"]
THOUGHTS = re.compile(r"\A\s*<think>.*?(</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels (-100: no loss) of the sequences that the rows make; `rows` are the places of their rows.

    A conversation makes a sequence for each answer if the chat template renders earlier turns in another way.
    `truncated` counts the sequences that did not fit, `dropped` the rows of which nothing is left to learn. `refused`
    are the places of the rows among them that have no token ids. `given` and `learnt` count the answers of the rows,
    and those that are learnt whole.
    """

    input_ids: TokenRows
    labels: TokenRows
    truncated: int = 0
    dropped: int = 0
    rows: Ints = field(default_factory=lambda: np.empty(0, np.int32), compare=False)
    refused: tuple[int, ...] = ()
    given: int = 0
    learnt: int = 0

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Encoded:
        return cls(TokenRows.of(ids), TokenRows.of(labels))

    def __getitem__(self, chosen: slice) -> Encoded:
        return Encoded(self.input_ids[chosen], self.labels[chosen], rows=self.rows[chosen])

    @property
    def lengths(self) -> list[int]:
        return self.input_ids.lengths


@dataclass(frozen=True)
class Chunk:
    """The sequences of some rows, one after another, each cut at the greatest length.

    Sequences of which nothing is left to learn have no `ids` and `labels`, and are not `kept`. `lengths` are those of
    all sequences before the cut, `rows` the places of their rows in the chunk. `problems` are the rows that cannot be
    trained on, by place. `count` is the number of rows; `given` and `learnt` count answers, as in Encoded.
    """

    ids: Ints
    labels: Ints
    kept: np.ndarray[Any, np.dtype[np.bool_]]
    lengths: Ints
    rows: Ints
    problems: dict[int, str]
    count: int
    given: int
    learnt: int


@dataclass(frozen=True)
class Example:
    """The token ids and labels of a sequence, and the ends of its answers, counted from its start."""

    ids: list[int]
    labels: list[int]
    ends: list[int]


def load_tokenizer(directory: str, trust_remote_code: bool, template: Any = None) -> Any:
    """The model's tokenizer, with a chat template and a padding token that does not end a turn.

    `template` takes the place of the model's chat template; it is what a tokenizer has as `chat_template`.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise config_error(f"model.source has no tokenizer that can be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise config_error("the tokenizer has no end-of-sequence token; expected one, so that answers can end")
    tokenizer.chat_template = template or tokenizer.chat_template or MINIMAL_TEMPLATE
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer)
    return tokenizer


def stop_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """The tokens that end an answer: the template's end of turn first, then the model's own."""
    known = generation_config.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    return list(dict.fromkeys([end_of_turn(tokenizer), tokenizer.eos_token_id, *known]))


def end_of_turn(tokenizer: Any) -> int:
    """The special token that the template puts after an answer, else the tokenizer's end of sequence."""
    after = render(tokenizer, EXCHANGE).rpartition(EXCHANGE[1]["content"])[2]
    token = first_special(tokenizer, after)
    return int(tokenizer.eos_token_id) if token is None else token


def first_special(tokenizer: Any, text: str) -> int | None:
    """The token with which a text begins, if it is one that no text of a message becomes."""
    for token in tokenizer(text, add_special_tokens=False)["input_ids"][:1]:
        if token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder:
            return int(token)
    return None


def render(tokenizer: Any, messages: Sequence[Message], *, for_answer: bool = False, tools: Sequence[Tool] = ()) -> str:
    """Messages as text; with `for_answer`, up to the start of the assistant's next answer."""
    return str(
        tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=for_answer
        )
    )


def visible_answer(text: str) -> str:
    """An answer without the model's thoughts (Qwen 3 and others write them first) and without surrounding space."""
    return THOUGHTS.sub("", text).strip()


def encode_prompt(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """The token ids that a serving engine makes of a chat request."""
    return _ids(tokenizer, render(tokenizer, messages, for_answer=True, tools=tools))


def answer_of(tokenizer: Any, row: Row) -> str:
    """The row's answer as the model writes it, with calls of tools in the template's form, and without thoughts."""
    last = row.messages[-1]
    if "tool_calls" not in last:
        return visible_answer(last["content"])
    asked = render(tokenizer, row.prompt, for_answer=True, tools=row.tools)
    prompt, stop = _ids(tokenizer, asked), end_of_turn(tokenizer)
    ids = _encode_answer(tokenizer, row, len(row.messages) - 1, asked, prompt, stop)
    return visible_answer(tokenizer.decode(ids, skip_special_tokens=True))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer: Any, rows: Sequence[Row], max_length: int, source: str, learn: Learn = "answers") -> Encoded:
    """Token ids and labels of every row, cut at `max_length`. Raises JobError if the rows are too short or too long."""
    return join(tokenizer, rows, [encode_chunk(tokenizer, rows, max_length, source, learn)], max_length, source)


def encode_chunk(tokenizer: Any, rows: Sequence[Row], max_length: int, source: str, learn: Learn = "answers") -> Chunk:
    """The rows as token ids with labels; `learn` is training.learn of the spec.

    Raises JobError for a row of which the chat template would lose a part that means something.
    """
    special, stop = _special_tokens(tokenizer), end_of_turn(tokenizer)
    if learn == "last_answer":
        rows = [_last_answer(row) for row in rows]
    sequences: list[tuple[int, Example]] = []
    problems = {}
    for place, row in enumerate(rows):
        try:
            _check_special_tokens(row, special)
            sequences += [(place, each) for each in _encode_row(tokenizer, row, stop, learn)]
        except UnsupportedRow as problem:
            raise data_error(f"{row.place} of {source} has {problem}", problem.hint) from None
        except Exception as error:  # noqa: BLE001  (one odd row of a million does not end a run)
            problems[place] = f"{row.place}: {_told(error, tokenizer)}"
    kept = [any(label != IGNORED for label in each.labels[:max_length]) for _, each in sequences]
    return Chunk(
        ids=_flat(each.ids[:max_length] for _, each in compress(sequences, kept)),
        labels=_flat(each.labels[:max_length] for _, each in compress(sequences, kept)),
        kept=np.array(kept, bool),
        lengths=np.array([len(each.ids) for _, each in sequences], np.int32),
        rows=np.array([place for place, _ in sequences], np.int32),
        problems=problems,
        count=len(rows),
        given=sum(len(row.answers) or 1 for row in rows),
        learnt=sum(end <= max_length for _, each in sequences for end in each.ends),
    )


def _told(error: Exception, tokenizer: Any) -> str:
    """An error about a row in words that quote no text of the row."""
    from jinja2 import TemplateError

    if isinstance(error, UnusableRow):
        return str(error)
    if isinstance(error, TemplateError):
        # A template's own words, such as "roles must alternate". Its other texts may quote the row.
        words = str(error) if str(error) in str(tokenizer.chat_template) else place_of(error)
        return f"the model's chat template refuses it: {words}"
    return place_of(error)


def join(
    tokenizer: Any,
    rows: Sequence[Row],
    chunks: Iterable[Chunk],
    max_length: int,
    source: str,
    directory: Path | None = None,
) -> Encoded:
    """All chunks of the rows, with the token ids in files in `directory`. Raises JobError as `encode`."""
    refused: list[int] = []
    told: list[str] = []
    parts: list[tuple[Ints, Ints, Any]] = []
    first = given = learnt = 0
    with Column(directory) as ids, Column(directory) as labels:
        for chunk in chunks:
            ids.add(chunk.ids)
            labels.add(chunk.labels)
            parts.append((chunk.lengths, chunk.rows + np.int32(first), chunk.kept))
            refused += [first + place for place in chunk.problems]
            told += [] if len(told) >= FIRST_PROBLEMS else chunk.problems.values()
            first, given, learnt = first + chunk.count, given + chunk.given, learnt + chunk.learnt
        all_ids, all_labels = ids.mapped(), labels.mapped()
    check_problems(len(refused), told, len(rows), source, MAX_BAD_ROWS if len(rows) >= FEW_ROWS else 1.0)
    lengths, places, kept = (np.concatenate(column) for column in zip(*parts, strict=True))
    _check_lengths(tokenizer, rows, lengths, max_length, source)
    starts = np.concatenate([[0], np.cumsum(np.minimum(lengths[kept], max_length), dtype=np.int64)])
    return Encoded(
        input_ids=TokenRows(all_ids, starts),
        labels=TokenRows(all_labels, starts),
        truncated=int((lengths > max_length).sum()),
        dropped=len(rows) - len(np.unique(places[kept])),
        rows=places[kept],
        refused=tuple(refused),
        given=given,
        learnt=learnt,
    )


def _flat(rows: Iterable[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(rows), np.int32)


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches the tokens that end turns and texts: inside a message, they would end its turn."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    names = {*tokenizer.all_special_tokens, *added} - {""}
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or r"(?!)")


def _check_special_tokens(row: Row, special: re.Pattern[str]) -> None:
    """Raise UnusableRow for a message with a special token, such as a prompt that was rendered already."""
    for message in row.messages:
        if found := special.search(message["content"]):
            raise UnusableRow(
                f"a message of the role {message['role']!r} has the model's special token {found[0]!r}; expected text "
                "before the chat template (rendered rows go into the form `text`)"
            )


def _encode_row(tokenizer: Any, row: Row, stop: int, learn: Learn) -> list[Example]:
    if row.messages:
        return _encode_conversation(tokenizer, row, stop, prompts=learn == "all")
    ids = list(tokenizer(row.text)["input_ids"])
    if ids[:1] == ids[1:2] == [tokenizer.bos_token_id]:
        ids = ids[1:]  # the text had its first token already
    ids = ids if ids[-1:] == [stop] else [*ids, stop]
    return [Example(ids, list(ids), [len(ids)])]


def _last_answer(row: Row) -> Row:
    """The row without a loss on its earlier answers."""
    return replace(row, muted=row.muted | set(row.answers[:-1]))


def _encode_conversation(tokenizer: Any, row: Row, stop: int, *, prompts: bool) -> list[Example]:
    """Labels the assistant's answers, each with the token that ends it; muted answers have no label.

    With `prompts`, every other token has a label, too, where it comes first.

    Each answer follows the prompt that serving makes. If the template renders earlier turns differently in that prompt
    (Qwen 3 leaves out their thoughts), the answer begins a sequence of its own.
    """
    sequences: list[Example] = []
    ids: list[int] = []
    labels: list[int] = []
    ends: list[int] = []
    for index in (at for at, message in enumerate(row.messages) if message["role"] == "assistant"):
        if not any(message["role"] in ("user", "tool") for message in row.messages[:index]):
            continue  # a greeting: a part of the next prompt
        asked = render(tokenizer, row.messages[:index], for_answer=True, tools=row.tools)
        prompt = _ids(tokenizer, asked)
        if prompt[: len(ids)] != ids:
            known = _same(ids, prompt) if ends else 0
            if ends:
                sequences.append(Example(ids, labels, ends))
            ids, labels, ends = prompt[:known], [IGNORED] * known, []
        labels += prompt[len(ids) :] if prompts else [IGNORED] * (len(prompt) - len(ids))
        answer = _encode_answer(tokenizer, row, index, asked, prompt, stop)
        ids = [*prompt, *answer]
        labels += [IGNORED] * len(answer) if index in row.muted else answer
        if index not in row.muted:
            ends.append(len(ids))
    return [*sequences, Example(ids, labels, ends)] if ends else sequences


def _same(one: Sequence[int], two: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _encode_answer(tokenizer: Any, row: Row, index: int, asked: str, prompt: list[int], stop: int) -> list[int]:
    """The token ids of the answer at `index` with the token that ends it; it follows the text `asked`, or `prompt`.

    Raises UnusableRow and UnsupportedRow.
    """
    whole = render(tokenizer, row.messages[: index + 1], tools=row.tools)
    text = whole.removeprefix(asked) if whole.startswith(asked) else row.messages[index]["content"]
    if index not in row.muted:
        _check_rendered(row, index, asked, text)
    ids = _ids(tokenizer, whole)
    # Tokens may merge across the border. Training needs the prompt that serving makes, so encode the answer alone.
    answer = ids[len(prompt) :] if ids[: len(prompt)] == prompt else _ids(tokenizer, text)
    last = len(answer) - answer[::-1].index(stop) if stop in answer else len(answer)
    # The model never generates the text after the end of a turn (a line feed in Gemma's template): do not learn it.
    return answer[:last] if stop in answer else [*answer, stop]


def _check_rendered(row: Row, index: int, asked: str, answer: str) -> None:
    """Check that the chat template has written each part of the prompt and of the answer that it must not lose.

    A part of an earlier turn may be lost: the same template loses it when the model is served.
    """
    before, message = row.messages[:index], row.messages[index]
    if not _has(answer, message["content"]):
        raise UnusableRow("the model's chat template leaves out a part of the answer")
    if not _has(answer, message.get(THOUGHT_FIELDS[0], "")):
        names = ", ".join(f"`{name}`" for name in THOUGHT_FIELDS)
        raise _lost(f"thoughts of the assistant ({names})", "thoughts", "take the thoughts out of the rows")
    for call in message.get("tool_calls", ()):
        if not _has(answer, call["function"]["name"]):
            raise _lost("`tool_calls`", "calls of tools", "write the calls as text")
    for tool in row.tools:
        if not _has(asked, tool["function"]["name"]):
            raise _lost("`tools`", "tools", "write the tools into the system's message")
    since = max((at for at, each in enumerate(before) if each["role"] == "assistant"), default=-1)
    for at, each in enumerate(before):
        if (at > since or each["role"] == "system") and not _has(asked, each["content"]):
            raise _lost(f"a message of the role {each['role']!r}", "such messages", "use rows without them")


def _lost(part: str, lacks: str, hint: str) -> UnsupportedRow:
    message = f"{part}, and the model's chat template has no place for {lacks}"
    return UnsupportedRow(message, f"{hint}, or give a template with the place in model.chat_template")


def _has(text: str, part: str) -> bool:
    """Whether a text has a part; templates may change the space in it."""
    part = part.strip()
    return part in text or "".join(part.split()) in "".join(text.split())


def _check_lengths(tokenizer: Any, rows: Sequence[Row], lengths: Ints, max_length: int, source: str) -> None:
    sample = rows[:MEAN_ROWS]
    contents = tokenizer([row.content for row in sample], add_special_tokens=False)["input_ids"]
    mean = sum(map(len, contents)) / len(sample)
    if mean < MIN_MEAN_TOKENS:
        raise data_error(
            f"the rows of {source} have {mean:.1f} tokens on average; expected at least {MIN_MEAN_TOKENS}",
            "check the format and the columns: such short rows are usually fragments",
        )
    long, count = int((lengths > max_length).sum()), len(lengths)
    if long > MAX_TRUNCATED * count and (count >= FEW_ROWS or long == count):
        raise data_error(
            f"{long} of {count} rows of {source} ({long / count:.0%}) are longer than training.max_length "
            f"{max_length}, the longest has {lengths.max()} tokens; expected at most {MAX_TRUNCATED:.0%}",
            f"raise training.max_length (the median row has {np.sort(lengths)[len(lengths) // 2]} tokens)",
        )


def _spare_token(tokenizer: Any) -> str:
    """A padding token without another meaning: a model padded with the end of a turn may not learn to end a turn."""
    vocabulary = tokenizer.get_vocab()
    names = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<unk>", "<|endoftext|>", "<|end_of_text|>")
    for name in names:
        if name in vocabulary and vocabulary[name] != tokenizer.eos_token_id:
            return name
    return str(tokenizer.unk_token or tokenizer.eos_token)
