"""Supervised fine-tuning: the model learns the assistant's answers of conversations, or whole plain texts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from containers.common import chat
from containers.common import rows as data
from containers.common.errors import config_error
from containers.common.evaluation import AnswerLimit, answer_limit, answer_sizes, check_gate, warn_of_long_answers
from containers.common.job import Job
from containers.common.publish import Description, describe_fine_tuning
from containers.common.tokenise import TokenCache, Tokeniser, encode_split
from dropforge.fit.maxtext import padded_length
from dropforge.run.seal import ROWS
from dropforge.spec import Dataset, JobSpec

from ..batches import Data, pack
from ..work import Work
from . import Prepared

# The trained loss and the exported model's loss are compared on so many rows and tokens, on a CPU: 8192 tokens of a
# model with 8 billion parameters take it some minutes.
PROBE_ROWS, PROBE_TOKENS = 64, 8192
SEALED_ROWS = 4 * ROWS  # training rows to choose from: a seal has the first ROWS that are short enough


def read(work: Work, client: Any, base: str, tokenizer: Any, vocabulary: int, tpu: bool) -> Prepared:
    """The spec's rows, as token ids with labels. Raises JobError."""
    spec = work.spec
    assert isinstance(spec.dataset, Dataset), "the spec's validation refuses other data"
    job = Job.from_environment()
    cache = TokenCache.of(job, client, work.directory / "tokens")
    tokeniser = Tokeniser(tokenizer, base, spec.model.trust_remote_code, spec.training.method, cache)
    directory = work.directory / "data"
    split, source = data.load_split(spec.dataset, spec.evaluation, spec.training.seed, client, directory)
    check_gate(spec, split)
    split, encoded, held = encode_split(tokeniser, split, spec)
    held_out = held or encoded
    check_vocabulary(encoded, vocabulary)
    packing, length = sequence_shape(spec, encoded.lengths, held_out.lengths, tpu)
    # A forward pass costs the same for any length, so no other limit than that of the spec.
    limit = answer_limit(spec, tokenizer, split.held_out, held, most=length)
    warn_of_long_answers(limit, job.run)
    prepared = Data(
        train=encoded,
        probe=held_out[: probe_rows(held_out.lengths)],
        sequences=pack(encoded.lengths, length) if packing else [[row] for row in range(len(encoded.input_ids))],
        length=length,
        **judged(split, held, tokenizer, limit),
    )
    return Prepared(
        prepared,
        source,
        packing,
        held_out=tuple(split.held_out),
        sealed=tuple(split.held_out or split.train[:SEALED_ROWS]),
        dropped=split.dropped,
        truncated=encoded.truncated,
        answers=(encoded.given, encoded.learnt),
        unused_fields=split.unused,
        limit=limit,
    )


def judged(split: data.Split, held_out: chat.Encoded | None, tokenizer: Any, limit: AnswerLimit) -> dict[str, Any]:
    """The fields of Data for the held-out rows, which the chips judge; {} if none are held out.

    Greedy decoding cannot match an answer that was cut, or that is longer than the limit. Nor does it
    match the answers of the rows that were dropped, of which nothing is left to judge. Plain texts have no answers.
    """
    if held_out is None:
        return {}
    if not all(row.messages for row in split.held_out):
        return {"held_out": held_out}
    longest = limit.tokens + 1  # with the token that ends the answer
    answers = [size if size <= longest else 0 for size in answer_sizes(tokenizer, held_out)]
    answers += [0] * (held_out.dropped - len(held_out.refused))
    return {"held_out": held_out, "answers": np.array(answers, np.int32)}


def probe_rows(lengths: list[int]) -> int:
    """How many of the first rows are at most PROBE_ROWS, and together at most PROBE_TOKENS; at least one."""
    ends = accumulate(lengths[:PROBE_ROWS])
    return max(1, sum(end <= PROBE_TOKENS for end in ends))


def check_vocabulary(encoded: chat.Encoded, size: int) -> None:
    """Refuse token ids that the model lacks: on a TPU, an embedding returns zeros beyond its end, and no error."""
    largest = int(encoded.input_ids.values.max())
    if largest >= size:
        raise config_error(
            f"the tokenizer makes token {largest}; expected less than the model's vocab_size, {size}",
            "give the tokenizer that belongs to the model",
        )


def sequence_shape(spec: JobSpec, train: list[int], held_out: list[int], tpu: bool) -> tuple[bool, int]:
    """Whether rows are packed, and the length of all sequences: XLA compiles for a single length.

    A batch size in the spec counts rows, so that only `packing: true` makes it count packed sequences.
    """
    longest, mean = max([*train, *held_out]), sum(train) / len(train)
    packing = spec.training.packing
    if packing == "auto":
        unset = spec.training.per_device_train_batch_size is None
        packing = tpu and unset and mean < spec.training.max_length / 2
    return bool(packing), padded_length(spec.training.max_length if packing else longest, tpu)


def describe(spec: JobSpec) -> Description:
    return describe_fine_tuning(spec)
