"""Exact match and loss on the held-out rows; the same code judges the model before and after training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dropforge.base.log import log
from dropforge.fit.phases import ANSWER_TOKENS, GENERATION_ROWS, GENERATION_TOKENS, LOSS_TOKENS
from dropforge.rows import Row
from dropforge.spec import JobSpec

from .chat import IGNORED, Encoded, answer_of, encode_prompt, end_of_turn, stop_ids, visible_answer
from .errors import config_error
from .rows import Split
from .token_rows import Ints

SAMPLES = 5
# The curve of the held-out loss: its points at most, and the most that it adds to the work of the training.
CURVE_POINTS, CURVE_SHARE = 20, 0.05


@dataclass(frozen=True)
class Score:
    """A model's result. `exact_match` is None for plain text, which has no answer to match."""

    loss: float
    exact_match: float | None
    answers: list[str] = field(default_factory=list)


class AnswerLimit(NamedTuple):
    """How many tokens a judged answer may have, and how many held-out answers are longer: they count as wrong."""

    tokens: int
    beyond: int


NO_LIMIT = AnswerLimit(0, 0)  # where no answers are judged


def evaluate(model: Any, tokenizer: Any, rows: Sequence[Row], encoded: Encoded, max_new_tokens: int) -> Score:
    """The model's loss on the rows, and the share of answers that greedy decoding reproduces exactly."""
    model.eval()
    loss = mean_loss(model, tokenizer, encoded)
    if not all(row.messages for row in rows):
        return Score(loss, None)
    answers = generate(
        model, tokenizer, [encode_prompt(tokenizer, row.prompt, row.tools) for row in rows], max_new_tokens
    )
    right = sum(answer == answer_of(tokenizer, row) for answer, row in zip(answers, rows, strict=True))
    return Score(loss, right / len(rows), answers)


def answer_limit(
    spec: JobSpec, tokenizer: Any, rows: Sequence[Row], encoded: Encoded | None, most: int = ANSWER_TOKENS
) -> AnswerLimit:
    """evaluation.max_new_tokens, or else the longest held-out answer with the token that ends it, at most `most`."""
    if spec.evaluation is None or encoded is None:
        return NO_LIMIT
    sizes = answer_sizes(tokenizer, encoded)
    limit = spec.evaluation.max_new_tokens
    if limit is None:
        limit = min(most, max([1, *sizes]))
    beyond = sum(size - 1 > limit for size in sizes) if all(row.messages for row in rows) else 0
    return AnswerLimit(limit, beyond)


def warn_of_long_answers(limit: AnswerLimit, run: str) -> None:
    """Log how many held-out answers count as wrong because they are too long."""
    if limit.beyond:
        log(
            f"{limit.beyond} held-out answers are longer than the {limit.tokens} tokens of a judged answer, and count "
            "as wrong: raise evaluation.max_new_tokens",
            stage="train",
            run=run,
            severity="WARNING",
        )


def answer_sizes(tokenizer: Any, encoded: Encoded) -> list[int]:
    """`answer_tokens` of each row."""
    stop, ids, labels = end_of_turn(tokenizer), encoded.input_ids, encoded.labels
    return [answer_tokens(ids.row(index), labels.row(index), stop) for index in range(len(ids))]


def answer_tokens(ids: Ints, labels: Ints, stop: int) -> int:
    """The number of labelled tokens at the end of a row; 0 if the row does not end as an answer."""
    if ids[-1] != stop:
        return 0
    before = np.flatnonzero(labels == IGNORED)
    return int(len(ids) - 1 - before[-1]) if len(before) else len(ids)


def mean_loss(model: Any, tokenizer: Any, encoded: Encoded, most_tokens: int = LOSS_TOKENS) -> float:
    """Cross-entropy per labelled token. `most_tokens` are in one batch, unless a row has more.

    Without inference mode: the tensors that it makes are of no use to a training that goes on (FSDP keeps some).
    """
    import torch

    total, count = 0.0, 0
    for batch in _batches(encoded.lengths, most_tokens):
        inputs, attention = _padded([encoded.input_ids[i] for i in batch], tokenizer.pad_token_id, left=False)
        labels, _ = _padded([encoded.labels[i] for i in batch], IGNORED, left=False)
        with torch.no_grad():
            logits = model(input_ids=inputs.to(model.device), attention_mask=attention.to(model.device)).logits
        labelled = labels[:, 1:] != IGNORED
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1][labelled.to(model.device)].float(), labels[:, 1:][labelled].to(model.device), reduction="sum"
        )
        total, count = total + float(losses), count + int(labelled.sum())
    return total / max(1, count)


def generate(model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
    """Greedy answers in the order of the prompts, without special tokens, thoughts and surrounding space."""
    answers = generate_ids(model, tokenizer, prompts, max_new_tokens)
    return [visible_answer(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def generate_ids(model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """The token ids of greedy answers in the order of the prompts; padding may follow the token that ends an answer."""
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_ids(tokenizer, model.generation_config),
    )
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in _generation_batches([len(prompts[index]) + max_new_tokens for index in order]):
        batch = [order[position] for position in batch]
        inputs, attention = _padded([prompts[i] for i in batch], tokenizer.pad_token_id, left=True)
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs.to(model.device),
                attention_mask=attention.to(model.device),
                generation_config=config,
            )
        for index, ids in zip(batch, output[:, inputs.shape[1] :].tolist(), strict=True):
            answers[index] = ids
    return answers


def compare(before: Score, after: Score) -> dict[str, float | None]:
    """The metrics of the evaluation, as the manifest has them."""
    return {
        "exact_match": after.exact_match,
        "exact_match_before": before.exact_match,
        "loss": after.loss,
        "loss_before": before.loss,
    }


def write_samples(directory: Path, rows: Sequence[Row], before: Sequence[str], after: Sequence[str]) -> None:
    """Write samples.json: a few rows with the model's answers before and after training; none for plain texts."""
    triples = list(zip(rows, before, after, strict=True)) if after else []
    samples = [
        {"prompt": row.prompt, "expected": row.answer, "before": old, "after": new}
        for row, old, new in triples[:SAMPLES]
    ]
    (directory / "samples.json").write_text(json.dumps(samples, indent=2, ensure_ascii=False), encoding="utf-8")


def check_gate(spec: JobSpec, split: Split) -> None:
    """Refuse, before training, a gate that no model can pass. Raises JobError."""
    gate = spec.evaluation.gate if spec.evaluation else None
    if gate and gate.metric == "exact_match" and not all(row.messages for row in split.held_out):
        message = "evaluation.gate.metric is 'exact_match', but the rows are plain text: there is no answer to match"
        raise config_error(message, "use the metric 'loss', or rows with prompts and completions")


def _batches(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Indices sorted by length, in batches of about `tokens` tokens with padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _generation_batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices in batches of at most GENERATION_ROWS prompts and GENERATION_TOKENS tokens; `lengths` are sorted."""
    batch: list[int] = []
    for index, length in enumerate(lengths):
        if len(batch) == GENERATION_ROWS or (batch and (len(batch) + 1) * length > GENERATION_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _padded(sequences: list[list[int]], filler: int, *, left: bool) -> tuple[Any, Any]:
    import torch

    length = max(map(len, sequences))
    values = torch.full((len(sequences), length), filler)
    mask = torch.zeros((len(sequences), length), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        where = slice(length - len(sequence), length) if left else slice(len(sequence))
        values[row, where] = torch.tensor(sequence)
        mask[row, where] = 1
    return values, mask


def steps_between(steps: int, rows_per_step: int, rows: int) -> int:
    """After how many steps of a training the loss on held-out rows is measured again.

    A forward pass is a third of the work of a step on as many rows.
    """
    times = min(CURVE_POINTS, int(CURVE_SHARE * 3 * steps * rows_per_step / rows))
    return -(-steps // times) if times else steps
