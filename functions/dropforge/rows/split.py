"""How the training orders, limits and splits the rows of a data set. A check finds the same rows."""

from __future__ import annotations

import random
from array import array
from typing import Any

from dropforge.base.changes import evolve
from dropforge.spec import Dataset, Evaluation

MIN_TRAIN_ROWS = 8
MAX_BAD_ROWS = 0.1  # share of the rows that cannot be trained on; fewer are left out and counted
FIRST_ROWS = 100  # all of their columns decide the form: a row of JSON lines need not have each


def shuffled(count: int, seed: int) -> array[int]:
    """The numbers of the rows in the order in which the training takes them: 4 bytes each."""
    order = array("I", range(count))
    random.Random(seed).shuffle(order)
    return order


def evaluation_dataset(dataset: Dataset, evaluation: Evaluation | None) -> Dataset | None:
    """The data set to evaluate on, in the form of the training rows; None where training rows are held out."""
    if evaluation is None or not (evaluation.source or evaluation.split):
        return None
    changes: dict[str, Any] = {"split": evaluation.split or dataset.split, "limit": None}
    if evaluation.source is not None and [evaluation.source] != dataset.sources:
        changes |= {"source": evaluation.source, "config": None, "revision": "main"}
    return evolve(dataset, **changes)


def held_out_count(rows: int, evaluation: Evaluation | None) -> int:
    """How many of the usable rows are held out: the first ones in the shuffled order."""
    if evaluation is None:
        return 0
    return min(int(rows * evaluation.holdout_fraction), evaluation.max_rows)


def rows_to_hold_out_one(fraction: float) -> int:
    """The least number of rows of which this fraction is a row."""
    least = int(1 / fraction)
    while int(least * fraction) < 1:  # also one less than enough for some fractions, by rounding
        least += 1
    return least
