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

    `number` counts GPUs or chips. `quota` is None when it is unknown.
    `listed_by` is the API that lists where Google has the accelerator, if such an API exists. `beside` is what the same
    machines demand of other quotas: vCPUs, and GiB of memory.
    """

    name: str
    number: int
    place: str
    quota: Quota | None = None
    capacity: str = "on_demand"
    listed_by: Literal["compute", "tpu", ""] = ""
    beside: tuple[Demand, ...] = ()

    @property
    def unknown(self) -> str:
        """Why no quota is known, as a sentence; "" if the quota is known."""
        if self.quota is not None:
            return ""
        uncounted = self.name if is_counted(self.capacity) else f"capacity {self.capacity!r}"
        return f"which quota counts {uncounted} is not known"

    def __str__(self) -> str:
        return f"{self.number} {self.name} in {self.place}"


def is_counted(capacity: str) -> bool:
    """Whether it is known which quota counts a capacity."""
    return capacity == "on_demand" or is_preemptible(capacity)


def is_preemptible(capacity: str) -> bool:
    """Whether the quota for preemptible accelerators counts a capacity."""
    return capacity in ("spot", "flex_start")
