"""Compares the exported model with the trained one by the probabilities that both give to the next tokens.

Logits cannot be compared with a fixed tolerance: rounding to 16 bits moves them by more in a deep model than a wrong
adapter does in a small one. The divergence of the probabilities separates the two (docs/measurements.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from containers.common.errors import code_error, finite
from containers.common.sealing import other_kernel

ROWS = 8
POSITIONS = 16  # of each row, at its end: all of them together hold 128 times the vocabulary
DIVERGENCE = 5e-4  # mean Kullback-Leibler divergence of a good export, in nats: measured 5.3e-5 at most
FLOOR_FACTOR = 10  # how far above the noise of another attention kernel a good export may lie


def log_probabilities(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logarithms of the next tokens' probabilities at the last positions of the rows: positions x vocabulary."""
    parts = []
    for ids in rows[:ROWS]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, -POSITIONS:]
            parts.append(logits.float().log_softmax(-1).cpu())
    return torch.cat(parts)


def check(trained: torch.Tensor, served: Any, rows: Sequence[Sequence[int]]) -> float:
    """The mean divergence of the served model from `trained`. Raises JobError if rounding does not explain it.

    Raises JobError, too, for probabilities that are not finite: a model of NaN would differ from no model.
    """
    actual = log_probabilities(served, rows)
    divergence = _divergence(trained, actual)
    if divergence < DIVERGENCE:
        return divergence
    limit = max(DIVERGENCE, FLOOR_FACTOR * _noise(served, actual, rows))
    if not divergence < limit:
        raise code_error(
            f"the exported model differs from the trained one: the probabilities of the next tokens diverge by "
            f"{divergence:.2g} nats; expected less than {limit:.2g}",
            "nothing was published; the export has a bug",
        )
    return divergence


def _divergence(expected: torch.Tensor, actual: torch.Tensor) -> float:
    mean = float((expected.exp() * (expected - actual)).sum(-1).mean())
    return max(0.0, finite(mean, "the mean divergence of the next tokens' probabilities"))  # rounding can make it < 0


def _noise(model: Any, usual: torch.Tensor, rows: Sequence[Sequence[int]]) -> float:
    """The divergence between two attention kernels on the same weights: rounding alone."""
    with other_kernel(model):
        return _divergence(usual, log_probabilities(model, rows))
