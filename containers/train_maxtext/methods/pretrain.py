"""Pre-training from random weights on random tokens: it measures machines, and the model learns nothing useful."""

from __future__ import annotations

from typing import Any

import numpy as np

from containers.common.chat import Encoded
from containers.common.publish import DROPFORGE, Description
from containers.common.token_rows import TokenRows
from dropforge.fit.maxtext import padded_length
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec, SyntheticDataset

from ..batches import Data
from ..work import Work
from . import Prepared

# The trained loss and the exported model's loss are compared on so many tokens, on a CPU.
PROBE_TOKENS = 16_384


def read(work: Work, client: Any, base: str, tokenizer: Any, vocabulary: int, tpu: bool) -> Prepared:
    return synthetic(work.spec, vocabulary, tpu)


def synthetic(spec: JobSpec, vocabulary: int, tpu: bool) -> Prepared:
    """Full sequences of random tokens, all with a loss, as MaxText's `dataset_type=synthetic`.

    MaxText repeats one batch; here the seed makes as many rows as the spec says.
    """
    assert isinstance(spec.dataset, SyntheticDataset), "the spec's validation refuses other data"
    length, count = padded_length(spec.training.max_length, tpu), spec.dataset.rows
    ids = np.random.default_rng(spec.training.seed).integers(0, vocabulary, count * length, dtype=np.int32)
    rows = TokenRows(ids, np.arange(count + 1, dtype=np.int64) * length)
    train = Encoded(rows, rows)
    prepared = Data(train, train[: max(1, PROBE_TOKENS // length)], [[index] for index in range(count)], length)
    return Prepared(prepared, Source(uri=spec.dataset.source, revision=f"seed-{spec.training.seed}"))


def describe(spec: JobSpec) -> Description:
    introduction = f"""Pre-trained by {DROPFORGE} on random tokens, with shapes and tokenizer of another model. It shows
that the machines train. The model has learnt nothing useful."""
    return Description("pre-training from random weights; loss on every token", introduction)
