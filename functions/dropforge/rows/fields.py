"""The fields of rows and messages: which are used, which say nothing, and which must not be lost.

A field that a form reads is used. A field that changes what a row means is honoured, or the data set is refused by its
name. A field of HARMLESS changes nothing. Any other field is listed once: in the log, the manifest and a message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from .values import UnsupportedRow, is_empty, kind_of, word

# By lower case. Names and places of a row, and statistics about it.
HARMLESS = frozenset((
    "id", "idx", "index", "uid", "uuid", "row", "row_id", "prompt_id", "conversation_id", "conv_id", "example_id",
    "hash", "name", "title", "source", "sources", "url", "origin", "dataset", "subset", "split", "lang", "language",
    "languages", "locale", "domain", "topic", "category", "categories", "subcategory", "type", "task", "tags",
    "keywords", "license", "licence", "author", "created", "created_at", "updated_at", "timestamp", "time", "date",
    "version", "model", "model_name", "generator", "num_turns", "turns", "turn", "n_turns", "length", "num_tokens",
    "tokens", "token_count", "word_count", "meta", "metadata", "extra", "info", "comment", "notes",
    "parallel_tool_calls", "tool_choice", "request_id", "finish_reason", "usage", "annotations",
))  # fmt: skip

# Why a field changes what the row means, and the names of such fields, by lower case.
_PREFERENCE = "rows of preferences need a method such as DPO, which dropforge does not have yet"
_QUALITY = "it may say how good the answer is"
_REASONS = {
    _PREFERENCE: (
        "chosen", "rejected", "rejected_response", "preferred", "non_preferred", "preferred_output",
        "non_preferred_output", "preference", "chosen_conversations", "rejected_conversations",
    ),
    "it may say that the answer is bad, as in rows for KTO": ("label", "labels", "kto_tag"),
    _QUALITY: ("score", "scores", "rating", "reward", "rewards", "quality"),
    "it may say that the row is not learnt": ("weight", "weights", "train", "loss", "trainable", "learn"),
    "it may say which parts are not learnt": ("mask", "train_mask", "loss_mask", "train_detail"),
    "it has thoughts of the model": ("thinking", "reasoning", "reasoning_content", "thoughts", "rationale"),
    "dropforge trains on text": ("image", "images", "video", "videos", "audio", "audios", "file", "files"),
    "it has tools or calls of tools": ("tools", "functions", "tool_calls", "function_call", "tool_call_id"),
    "it instructs the model": ("system", "system_prompt", "systeminstruction", "system_instruction"),
    "it may belong to the question": (
        "context", "contexts", "passage", "document", "documents", "history", "examples",
    ),
    "it may belong to the answer": ("prefix", "suffix"),
    "it changes what the chat template makes": ("chat_template_kwargs", "enable_thinking", "chat_template"),
    "it has an answer of the model": ("refusal",),
}  # fmt: skip
MEANING = {name: reason for reason, names in _REASONS.items() for name in names}
JUDGES = frozenset((*_REASONS[_PREFERENCE], *_REASONS[_QUALITY]))  # rows with these fields have good and bad answers

Verdict = Literal["used", "harmless", "refused", "unknown"]

LEARNT = ("weight", "train", "loss", "trainable")  # of a message or a row: whether its answer is learnt


def verdict(name: str, used: Collection[str], ignored: Collection[str]) -> Verdict:
    """What becomes of a field that has a value."""
    known = name.lower()
    if name in used:
        return "used"
    if name in ignored or known in HARMLESS:
        return "harmless"
    return "refused" if known in MEANING else "unknown"


def unused_fields(values: Mapping[str, Any], used: Collection[str], ignored: Collection[str], what: str) -> list[str]:
    """The fields of a row or message that nothing reads and no table names. Raises UnsupportedRow."""
    unused = []
    for name, value in values.items():
        if name in used or is_empty(value):
            continue
        found = verdict(str(name), used, ignored)
        if found == "refused":
            raise UnsupportedRow(
                f"{what}the field {name!r} ({kind_of(value)}), which training would lose: {MEANING[str(name).lower()]}",
                f"take the field out, or name it in dataset.ignore if it means nothing for the training: [{name!r}]",
            )
        if found == "unknown":
            unused.append(str(name))
    return unused


def is_learnt(values: Mapping[str, Any], what: str) -> bool:
    """Whether the fields of LEARNT allow that an answer is learnt. Raises UnsupportedRow for a weight of 0.5."""
    learnt = True
    for name in LEARNT:
        value = values.get(name)
        if is_empty(value):
            continue
        if value not in (0, 1):  # True and False are 1 and 0
            raise UnsupportedRow(
                f"{what} whose {name} is {word(value)}; expected 0 or 1",
                f"round {name} to 0 (read, not learnt) or 1 (learnt)",
            )
        learnt = learnt and bool(value)
    return learnt
