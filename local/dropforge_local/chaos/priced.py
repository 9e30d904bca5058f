"""Platforms whose placements have different prices: each costs more than the one before it in the spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dropforge.platforms import get_target
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.prices import HourlyPrice
from dropforge.spec import JobSpec

DEARER = 0.5  # of the first placement's price, for each further placement


class _Dearer:
    """A target of the catalogue with other prices."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def price(self, spec: JobSpec, placement: int | None = 0) -> HourlyPrice:
        price: HourlyPrice = self._target.price(spec, placement)
        share = 1 + DEARER * (placement or 0)
        return price if price.usd_per_hour is None else replace(price, usd_per_hour=price.usd_per_hour * share)


def dearer_platforms() -> Platforms:
    """All platforms, of which the targets have other prices."""
    targets = {}

    def target(kind: str) -> Any:
        if kind not in targets:
            targets[kind] = _Dearer(get_target(kind))
        return targets[kind]

    return Platforms(target=target)
