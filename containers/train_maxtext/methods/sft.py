"""Supervised fine-tuning: the model learns the assistant's answers of conversations, or whole plain texts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from containers.common import chat
from containers.common import rows as data
from containers.common.errors import config_error
from containers.common.evaluation import check_gate
from containers.common.job import Job
from containers.common.publish import Description, describe_fine_tuning
from containers.common.tokenise import TokenCache, Tokeniser
from dropforge.fit.maxtext import padded_length
from dropforge.spec import Dataset, JobSpec

from ..batches import Data, Rows, pack
from ..work import Work
from . import Prepared

STARTS_FROM_BASE = True
# The trained loss and the exported model's loss are compared on so many rows and tokens, on a CPU: 8192 tokens of a
# model with 8 billion parameters take it some minutes.
PROBE_ROWS, PROBE_TOKENS = 64, 8192


def read(work: Work, client: Any, base: str, vocabulary: int, tpu: bool) -> Prepared:
    """The spec's rows, as token ids with labels. Raises JobError."""
    spec = work.spec
    assert isinstance(spec.dataset, Dataset), "the spec's validation refuses other data"
    cache = TokenCache.of(Job.from_environment(), client, work.directory / "tokens")
    tokeniser = Tokeniser.load(base, spec.model.trust_remote_code, spec.training.method, cache)
    directory = work.directory / "data"
    split, source = data.load_split(spec.dataset, spec.evaluation, spec.training.seed, client, directory)
    check_gate(spec, split)
    max_length, named = spec.training.max_length, spec.dataset.source
    encoded = tokeniser.encode(split.train, max_length, named)
    held_out = tokeniser.encode(split.held_out, max_length, named) if split.held_out else encoded
    check_vocabulary(encoded, vocabulary)
    packing, length = sequence_shape(spec, encoded.lengths, held_out.lengths, tpu)
    train = Rows.of(encoded.input_ids, encoded.labels)
    probed = probe_rows(held_out.lengths)
    prepared = Data(
        train=train,
        probe=Rows.of(held_out.input_ids[:probed], held_out.labels[:probed]),
        sequences=pack(train.lengths, length) if packing else [[index] for index in range(len(train))],
        length=length,
    )
    dropped = split.dropped + encoded.dropped
    return Prepared(prepared, source, packing, tuple(split.held_out), dropped, encoded.truncated)


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
