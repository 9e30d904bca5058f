"""The batches of an evaluation: their memory has a bound that does not depend on the data."""

from __future__ import annotations

import pytest

from containers.common.evaluation import _generation_batches
from dropforge.fit.phases import GENERATION_ROWS, GENERATION_TOKENS


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([10] * 130, [64, 64, 2]),
        ([16_384] * 3, [2, 1]),
        ([100, 40_000], [1, 1]),  # a row is never divided
        ([500] * 64, [64]),
        ([513] * 64, [63, 1]),
        ([], []),
    ],
)
def test_a_generation_holds_a_bounded_number_of_rows_and_tokens(lengths: list[int], sizes: list[int]) -> None:
    batches = list(_generation_batches(lengths))
    assert [len(batch) for batch in batches] == sizes
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= GENERATION_ROWS
        assert len(batch) == 1 or len(batch) * lengths[batch[-1]] <= GENERATION_TOKENS
