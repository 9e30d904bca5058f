"""Curves as SVG paths, made on the server: a page needs no script to show them, and no style attribute.

A chart's plane is 1000 x 1000 units and is stretched to the size of its box. The ticks divide each axis evenly, so that
the labels are plain text beside the plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

UNITS = 1000.0
LARGEST = 1e100  # a hostile value beyond would overflow; no curve has it
BUCKETS = 300  # of a drawn curve; each bucket keeps its lowest and its highest point

Point = tuple[float, float]


class Line(NamedTuple):
    """A drawn curve: `kind` is its CSS class, `path` the `d` of an SVG path."""

    kind: str
    path: str


class Mark(NamedTuple):
    """A vertical line at `x` units, with a text."""

    x: float
    text: str


class Chart(NamedTuple):
    """A chart: its curves, the labels from left to right and from top to bottom, its marks, and a sentence for readers
    who do not see it."""

    lines: list[Line]
    x_labels: list[str]
    y_labels: list[str]
    marks: list[Mark]
    summary: str


class Curve(NamedTuple):
    """A curve to draw: its CSS class and its points, in order of x. `has_dots`: each point has a dot, too."""

    kind: str
    points: Sequence[Point]
    has_dots: bool = False


def chart(
    curves: Sequence[Curve],
    summary: str,
    *,
    x_end: float = 0.0,
    x_text: Callable[[float], str] = lambda x: f"{x:,g}",
    y_text: Callable[[float], str] = lambda y: f"{y:,.0f}" if abs(y) >= 1000 else f"{y:.4g}",
    from_zero: bool = False,
    logarithmic: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    """Return the chart of curves whose x begins at 0; None if no curve has a point.

    A logarithmic chart leaves out values that are not positive. `x_end` is the least end of the x axis.
    """
    seen = [_visible(curve.points, logarithmic) for curve in curves]
    drawn = [curve._replace(points=thinned(points)) for curve, points in zip(curves, seen, strict=True)]
    values = [y for curve in drawn for _, y in curve.points]
    if not values:
        return None
    last = max(x_end, *(points[-1][0] for points in seen if points))
    x_ticks = ticks(0.0, last or 1.0)
    y_ticks = ticks(0.0 if from_zero and not logarithmic else min(values), max(values))
    horizontal, vertical = _scale(x_ticks), _scale(y_ticks)
    lines = []
    for curve in drawn:
        placed = [(horizontal(x), UNITS - vertical(y)) for x, y in curve.points]
        lines.append(Line(curve.kind, path(placed)))
        if curve.has_dots:
            lines.append(Line(f"{curve.kind} dots", dots(placed)))
    return Chart(
        lines,
        [x_text(tick) for tick in x_ticks],
        [y_text(10**tick if logarithmic else tick) for tick in reversed(y_ticks)],
        [Mark(round(horizontal(x), 1), text) for x, text in marks],
        summary,
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers at equal distances around [low, high]: about `count` of them, and at least two."""
    if not high > low:
        high = low + (abs(low) * 0.1 or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(multiple for multiple in (1, 2, 2.5, 5, 10) if multiple * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """Return at most two points for each bucket of a long curve: its lowest and its highest, in order."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept: list[Point] = []
    for number in range(buckets):
        part = points[number * len(points) // buckets : (number + 1) * len(points) // buckets]
        kept += sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
    return kept


def smoothed(points: Sequence[Point], weight: float = 0.9) -> list[Point]:
    """Return the exponential moving average, without the bias of its first points."""
    average, seen, smooth = 0.0, 0.0, []
    for x, y in points:
        average, seen = weight * average + (1 - weight) * y, weight * seen + (1 - weight)
        smooth.append((x, average / seen))
    return smooth


def path(points: Sequence[Point]) -> str:
    """Return the `d` of an SVG path through points; a single point becomes a short line, which can be seen."""
    if len(points) == 1:
        (x, y), *_ = points
        points = [(x, y), (x + 1, y)]
    return "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))


def dots(points: Sequence[Point]) -> str:
    """Return the `d` of an SVG path of lines without length: with square ends, each is a square of the line's width."""
    return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)


def _visible(points: Sequence[Point], logarithmic: bool) -> list[Point]:
    usable = [(x, y) for x, y in points if 0 <= x < LARGEST and abs(y) < LARGEST]  # neither is true of NaN
    return [(x, math.log10(y)) for x, y in usable if y > 1 / LARGEST] if logarithmic else usable


def _scale(at: Sequence[float]) -> Callable[[float], float]:
    low, high = at[0], at[-1]
    return lambda value: (value - low) / (high - low) * UNITS
