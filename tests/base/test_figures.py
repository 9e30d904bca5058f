"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from dropforge.base.figures import number


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (3.0, "3"), (0.25, "0.25"), (12345.6, "12,346"), (math.nan, "not finite"), (-math.inf, "not finite")],
)
def test_a_metric_is_a_number_or_says_what_it_is(value: float | None, text: str) -> None:
    assert number(value) == text
