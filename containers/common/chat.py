"""The chat template and the token ids that it makes: training, evaluation and serving see the same prompts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from .errors import config_error, data_error, place_of
from .rows import Message, Row
from .token_rows import Ints, TokenRows

MIN_MEAN_TOKENS = 8
MEAN_ROWS = 2048  # the rows are shuffled: the mean of the first ones is the mean of all
MAX_TRUNCATED = 0.25  # share of the rows

# For base models without a template: each turn on its own lines; the end-of-sequence token ends an answer. The template
# is exported with the model, so that chat completions render prompts exactly as the training rows did.
MINIMAL_TEMPLATE = (
    "{% if bos_token %}{{ bos_token }}{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{{ '\\n' }}{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
)
IGNORED = -100
THOUGHTS = re.compile(r"\A\s*<think>.*?(</think>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels (-100: no loss) of the rows; `truncated` and `dropped` count the rows that did not fit."""

    input_ids: TokenRows
    labels: TokenRows
    truncated: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Encoded:
        return cls(TokenRows.of(ids), TokenRows.of(labels))

    def __getitem__(self, chosen: slice) -> Encoded:
        return Encoded(self.input_ids[chosen], self.labels[chosen])

    @property
    def lengths(self) -> list[int]:
        return self.input_ids.lengths


@dataclass(frozen=True)
class Chunk:
    """Some rows, one after another, each cut at the greatest length. `lengths` are the rows' before the cut."""

    ids: Ints
    labels: Ints
    lengths: Ints


def load_tokenizer(directory: str, trust_remote_code: bool) -> Any:
    """The model's tokenizer, with a chat template and a padding token that does not end a turn."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise config_error(f"model.source has no tokenizer that can be loaded: {error}") from None
    if tokenizer.eos_token_id is None:
        raise config_error("the tokenizer has no end-of-sequence token; expected one, so that answers can end")
    if not tokenizer.chat_template:
        tokenizer.chat_template = MINIMAL_TEMPLATE
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
    marker = "ANSWER"
    rendered = render(tokenizer, [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": marker}])
    after = rendered.rpartition(marker)[2]
    for token in tokenizer(after, add_special_tokens=False)["input_ids"][:1]:
        if token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder:
            return int(token)
    return int(tokenizer.eos_token_id)


def render(tokenizer: Any, messages: Sequence[Message], *, for_answer: bool = False) -> str:
    """Messages as text; with `for_answer`, up to the start of the assistant's next answer."""
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=for_answer))


def visible_answer(text: str) -> str:
    """An answer without the model's thoughts (Qwen 3 and others write them first) and without surrounding space."""
    return THOUGHTS.sub("", text).strip()


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The token ids that a serving engine makes of a chat request."""
    return list(tokenizer(render(tokenizer, messages, for_answer=True), add_special_tokens=False)["input_ids"])


def encode(tokenizer: Any, rows: Sequence[Row], max_length: int, source: str) -> Encoded:
    """Token ids and labels of every row, cut at `max_length`. Raises JobError if the rows are too short or too long."""
    return join(tokenizer, rows, [encode_chunk(tokenizer, rows, max_length, source)], max_length, source)


def encode_chunk(tokenizer: Any, rows: Sequence[Row], max_length: int, source: str) -> Chunk:
    """The rows as token ids with labels. Raises JobError for a row that the chat template refuses."""
    from jinja2 import TemplateError

    stop = end_of_turn(tokenizer)
    encoded = []
    for row in rows:
        try:
            ids, labels = _encode_row(tokenizer, row, stop)
        except TemplateError as error:
            # A template's own words, such as "roles must alternate". Its other texts may quote the row.
            words = str(error) if str(error) in str(tokenizer.chat_template) else place_of(error)
            raise data_error(f"the model's chat template refuses row {row.number} of {source}: {words}") from None
        encoded.append((ids[:max_length], labels[:max_length], len(ids)))
    return Chunk(
        ids=_flat(ids for ids, _, _ in encoded),
        labels=_flat(labels for _, labels, _ in encoded),
        lengths=np.array([length for _, _, length in encoded], np.int32),
    )


def join(tokenizer: Any, rows: Sequence[Row], chunks: Sequence[Chunk], max_length: int, source: str) -> Encoded:
    """All chunks of the rows, without the rows of which no answer is left. Raises JobError as `encode`."""
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    _check_lengths(tokenizer, rows, lengths, max_length, source)
    ids = np.concatenate([chunk.ids for chunk in chunks])
    labels = np.concatenate([chunk.labels for chunk in chunks])
    starts = np.cumsum([0, *np.minimum(lengths, max_length)], dtype=np.int64)
    kept = np.logical_or.reduceat(labels != IGNORED, starts[:-1])
    if not kept.all():
        tokens = np.repeat(kept, np.diff(starts))
        ids, labels = ids[tokens], labels[tokens]
        starts = np.cumsum([0, *np.diff(starts)[kept]], dtype=np.int64)
    return Encoded(
        input_ids=TokenRows(ids, starts),
        labels=TokenRows(labels, starts),
        truncated=int((lengths > max_length).sum()),
        dropped=int((~kept).sum()),
    )


def _flat(rows: Iterable[Sequence[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(rows), np.int32)


def _encode_row(tokenizer: Any, row: Row, stop: int) -> tuple[list[int], list[int]]:
    if not row.messages:
        ids = [*tokenizer(row.text)["input_ids"], stop]
        ids = ids[:-1] if len(ids) > 1 and ids[-2] == stop else ids
        return ids, list(ids)
    return _encode_conversation(tokenizer, row, stop)


def _encode_conversation(tokenizer: Any, row: Row, stop: int) -> tuple[list[int], list[int]]:
    """Labels exactly the assistant's answers, each with the token that ends it; muted answers have no label."""
    messages = row.messages
    ids: list[int] = []
    labels: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encode_prompt(tokenizer, messages[:index])
        if prompt[: len(ids)] != ids:
            # The template renders earlier turns differently, e.g. without their thoughts: learn the last answer only.
            ids, labels = [], []
        labels += [IGNORED] * (len(prompt) - len(ids))
        answer = _encode_answer(tokenizer, messages[: index + 1], prompt, stop)
        ids = [*prompt, *answer]
        labels += [IGNORED] * len(answer) if index in row.muted else answer
    return ids, labels


def _encode_answer(tokenizer: Any, messages: Sequence[Message], prompt: list[int], stop: int) -> list[int]:
    whole = tokenizer(render(tokenizer, messages), add_special_tokens=False)["input_ids"]
    if whole[: len(prompt)] == prompt:
        answer = list(whole[len(prompt) :])
    else:
        # Tokens merge across the border. Training needs the prompt that serving makes, so encode the answer alone.
        answer = list(tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"])
    last = len(answer) - answer[::-1].index(stop) if stop in answer else len(answer)
    # The model never generates the text after the end of a turn (a line feed in Gemma's template): do not learn it.
    return answer[:last] if stop in answer else [*answer, stop]


def _check_lengths(tokenizer: Any, rows: Sequence[Row], lengths: Ints, max_length: int, source: str) -> None:
    sample = rows[:MEAN_ROWS]
    contents = tokenizer([row.content for row in sample], add_special_tokens=False)["input_ids"]
    mean = sum(map(len, contents)) / len(sample)
    if mean < MIN_MEAN_TOKENS:
        raise data_error(
            f"the rows of {source} have {mean:.1f} tokens on average; expected at least {MIN_MEAN_TOKENS}",
            "check the format and the columns: such short rows are usually fragments",
        )
    long = int((lengths > max_length).sum())
    if long > MAX_TRUNCATED * len(rows):
        raise data_error(
            f"{long} of {len(rows)} rows of {source} ({long / len(rows):.0%}) are longer than training.max_length "
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
