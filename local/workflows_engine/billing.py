"""What Google bills for an execution's steps (cloud.google.com/workflows/pricing), without the free tier."""

from __future__ import annotations

from typing import Final

INTERNAL_PER_1000: Final = 0.01  # US dollars
EXTERNAL_PER_1000: Final = 0.025
FREE_INTERNAL: Final = 5_000  # steps a month
FREE_EXTERNAL: Final = 2_000


def cost_usd(internal: int, external: int) -> float:
    return (internal * INTERNAL_PER_1000 + external * EXTERNAL_PER_1000) / 1000


def billing_summary(steps: int, external: int) -> str:
    """The billed steps and their cost as a line of text."""
    internal = steps - external
    return (
        f"billed steps: {internal} internal, {external} external = ${cost_usd(internal, external):.6f} "
        f"beyond the free {FREE_INTERNAL:,} and {FREE_EXTERNAL:,} a month"
    )
