"""The metrics of the held-out rows, each with its range and with its better end."""

from __future__ import annotations

from typing import Literal, NamedTuple

MetricName = Literal["exact_match", "loss"]


class Metric(NamedTuple):
    """A metric: what it is, whether a higher value is better, and its range.

    `least` and `most` bound its values; `most` is None for a metric without an upper bound. `reaches_least`: the least
    value itself is possible.
    """

    what: str
    is_higher_better: bool
    least: float
    most: float | None
    reaches_least: bool = True

    @property
    def bound(self) -> Literal["min", "max"]:
        """The bound of a gate that keeps bad models out."""
        return "min" if self.is_higher_better else "max"

    def is_possible(self, value: float) -> bool:
        """Whether a model can have the value."""
        above = value >= self.least if self.reaches_least else value > self.least
        return above and (self.most is None or value <= self.most)

    def range(self, value: float) -> str:
        """The possible values, after the one that a percentage in place of a share means."""
        least = f"{self.least:g}" if self.reaches_least else f"more than {self.least:g}"
        text = f"{least} to {self.most:g}" if self.most is not None else least
        meant = meant_share(value) if (self.least, self.most) == (0, 1) else ""
        return f"{meant} {text[0].upper()}{text[1:]}" if meant else text


METRICS: dict[str, Metric] = {
    "exact_match": Metric("the share of the answers that are right to the letter", True, 0, 1),
    "loss": Metric("the mean cross-entropy of a token", False, 0, None, reaches_least=False),
}


def meant_share(value: object) -> str:
    """ "did you mean 0.8?" for the percentage 80 in place of a share; "" for another value."""
    is_percentage = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value <= 100
    return f"did you mean {value / 100:g}?" if is_percentage else ""  # type: ignore[operator]
