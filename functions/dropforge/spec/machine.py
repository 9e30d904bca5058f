"""The machine of a target or an endpoint: the memory of its accelerators, the memory of a host, and the disk."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """One host of a target or an endpoint: its accelerators, its memory and its disk, in bytes.

    accelerator: the accelerator's name. accelerators: how many a host has. hosts: how many hosts work together.
    accelerator_bytes: the memory of one accelerator, as its runtime reports it.
    host_bytes, disk_bytes: of one host; None where the catalog does not know. files_in_memory: the files are in the
    host's memory, so there is no disk. host_field, disk_field: the fields of the spec's part that decide both; "" where
    no field does.
    """

    accelerator: str
    accelerators: int
    accelerator_bytes: int
    hosts: int = 1
    host_bytes: int | None = None
    disk_bytes: int | None = None
    files_in_memory: bool = False
    host_field: str = ""
    disk_field: str = ""

    @property
    def devices(self) -> int:
        """The accelerators of all hosts."""
        return self.accelerators * self.hosts


def gib(count: float) -> int:
    """A number of GiB in bytes."""
    return int(count * GIB)
