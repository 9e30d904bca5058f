"""Curves: whatever a training reports, a chart has round ticks around its values and a path inside its plane."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dropforge_console.charts import LARGEST, UNITS, Curve, chart, smoothed, thinned, ticks

finite = st.floats(-1e12, 1e12, allow_nan=False, allow_infinity=False)
wild = st.floats(allow_nan=True, allow_infinity=True)
points = st.lists(st.tuples(st.floats(0, 1e9), finite), min_size=1, max_size=50).map(sorted)


@given(finite, finite)
def test_ticks_enclose_the_values_at_equal_distances(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 12
    assert found[0] <= low + step * 1e-6
    assert found[-1] >= high - step * 1e-6
    assert all(math.isclose(b - a, step, rel_tol=1e-6, abs_tol=abs(high) * 1e-9) for a, b in pairwise(found))


def test_ticks_are_round() -> None:
    assert ticks(0, 1800) == [0, 500, 1000, 1500, 2000]
    assert [f"{tick:.4g}" for tick in ticks(0.31, 2.3)] == ["0", "0.5", "1", "1.5", "2", "2.5"]


@given(points)
def test_a_path_stays_inside_the_plane(found: list[tuple[float, float]]) -> None:
    drawn = chart([Curve("bold", found)], "")
    assert drawn is not None
    for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", drawn.lines[0].path):
        assert -0.1 <= float(x) <= UNITS + 1.1
        assert -0.1 <= float(y) <= UNITS + 0.1


@given(st.lists(st.tuples(wild, wild), max_size=20), st.booleans())
def test_no_value_breaks_a_chart(found: list[tuple[float, float]], logarithmic: bool) -> None:
    usable = [
        (x, y) for x, y in found if 0 <= x < LARGEST and abs(y) < LARGEST and (y > 1 / LARGEST or not logarithmic)
    ]
    assert (chart([Curve("bold", found)], "", logarithmic=logarithmic) is None) == (not usable)


@given(st.lists(finite, min_size=1, max_size=3000))
def test_a_thinned_curve_keeps_its_peaks_and_its_order(values: list[float]) -> None:
    found = [(float(x), y) for x, y in enumerate(values)]
    kept = thinned(found, buckets=100)
    assert len(kept) <= 200
    assert max(y for _, y in kept) == max(values)
    assert min(y for _, y in kept) == min(values)
    assert kept == sorted(kept)


def test_a_smoothed_curve_begins_at_its_first_value() -> None:
    assert [round(y, 6) for _, y in smoothed([(0, 4.0), (1, 4.0), (2, 4.0)])] == [4.0, 4.0, 4.0]


def test_a_logarithmic_chart_names_the_values() -> None:
    drawn = chart([Curve("bold", [(0, 1.0), (10, 0.001), (20, 0.0)])], "", logarithmic=True)
    assert drawn is not None
    assert drawn.y_labels == ["1", "0.1", "0.01", "0.001"]
