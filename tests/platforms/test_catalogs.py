"""The catalogs: every entry has a source and a date, and the prices that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from importlib import import_module
from typing import Any

import pytest

from dropforge.platforms.facts import Source
from dropforge.platforms.prices import Price
from dropforge.platforms.tpus import tpu_price

MODULES = [
    "dropforge.platforms.gpus",
    "dropforge.platforms.images",
    "dropforge.platforms.tpus",
    *(f"dropforge.platforms.{name}.catalog" for name in ("cloud_run", "gke", "ray", "tpu_vm")),
]
NOT_FACTS = {"GKE_DRIVER_VERSION", "TPU_HOST_CHIPS", "SECONDS_PER_HOUR", "TYPE_CHECKING"}  # choices and definitions
FIRST = date(2026, 1, 1)


def entries(value: Any) -> Iterator[Any]:
    """Yield the entries of a table, or the value itself."""
    if isinstance(value, dict):
        for item in value.values():
            yield from entries(item)
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        for item in value:
            yield from entries(item)
    else:
        yield value


def tables() -> list[tuple[str, Any]]:
    """Return every public constant of the catalogs with each of its entries."""
    found = []
    for module in MODULES:
        for name, value in vars(import_module(module)).items():
            if name.isupper() and not name.startswith("_") and name not in NOT_FACTS:
                found += [(f"{module}.{name}", entry) for entry in entries(value)]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_tables(module: str) -> None:
    assert any(name.startswith(f"{module}.") for name, _ in tables())


def test_every_entry_has_a_source_and_a_date() -> None:
    without = []
    for name, entry in tables():
        origin = Source(entry.source, entry.as_of) if isinstance(entry, Price) else getattr(entry, "source", None)
        if not (isinstance(origin, Source) and origin.url and FIRST <= origin.as_of <= date.today()):
            without.append(f"{name}: {entry}")
    assert without == []


@pytest.mark.parametrize(
    ("generation", "chips", "region", "capacity", "expected"),
    [
        ("v5e", 8, "us-central1", "on_demand", 9.6),
        ("v5e", 8, "us-west1", "spot", 9.6),
        ("v5e", 4, "us-south1", "guaranteed", 5.664),
        ("v5p", 4, "us-east5", "reservation", 16.8),
        ("v6e", 16, "us-east5", "on_demand", 43.2),
        ("v6e", 16, "us-east5", "flex_start", 21.6),
        ("v6e", 1, "us-central1", "flex_start", None),
        ("v6e", 1, "europe-west1", "on_demand", None),
        ("v4", 4, "us-central2", "on_demand", None),
    ],
)
def test_prices_of_tpus(generation: str, chips: int, region: str, capacity: str, expected: float | None) -> None:
    price = tpu_price(generation, chips, region, capacity, "target.price_usd_per_hour")
    assert price.usd_per_hour == expected
    if expected is None:
        assert price.source.endswith(f"{region} as {capacity} in the catalog; set target.price_usd_per_hour")
    else:
        assert price.as_of is not None
        assert ("at most" in price.source) is (capacity == "spot")
