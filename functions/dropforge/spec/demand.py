"""The accelerators that a spec requests at a place, and the quota that counts them."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Quota(NamedTuple):
    """A quota at a place. Each accelerator takes `units` of the quota."""

    service: str
    id: str
    dimensions: dict[str, str]
    units: int = 1


class Demand(NamedTuple):
    """The accelerators that a target or an endpoint may request at a place: a region, or a zone of TPU VMs.

    `number` counts GPUs or chips. `quota` is None when the right quota is unknown; `unknown` says why.
    `listed_by` is the API that lists where Google has the accelerator, if such an API exists.
    """

    name: str
    number: int
    place: str
    quota: Quota | None = None
    unknown: str = ""
    listed_by: Literal["compute", "tpu", ""] = ""

    def __str__(self) -> str:
        return f"{self.number} {self.name} in {self.place}"


def is_preemptible(capacity: str) -> bool:
    """Whether the quota for preemptible accelerators counts a capacity."""
    return capacity in ("spot", "flex_start")


def unknown_quota(name: str, capacity: str = "on_demand") -> str:
    """Why no quota is known, as a sentence."""
    if capacity not in ("on_demand", "spot", "flex_start"):
        return f"which quota counts capacity {capacity!r} is not known"
    return f"which quota counts {name} is not known"
