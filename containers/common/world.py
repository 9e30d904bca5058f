"""How many processes train together, and the place of this process among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = "DROPFORGE_LAUNCH_DIRECTORY"  # only train_trl/launch.py sets it, for the ranks that it starts
PORT = 29500
_MAX_COUNT = 4096


@dataclass(frozen=True)
class World:
    """The processes of one training: `processes` on each of `machines`.

    `rank` is None in a process that trains alone or starts the ranks of its machine.
    """

    processes: int = 1
    machines: int = 1
    machine: int = 0
    address: str = ""
    rank: int | None = None
    local_rank: int = 0
    directory: Path | None = None

    @property
    def size(self) -> int:
        return self.processes * self.machines

    @property
    def starts_ranks(self) -> bool:
        return self.size > 1 and self.rank is None

    @property
    def sharded(self) -> bool:
        """Whether this process is a rank: it holds one shard of the model and of each step's rows."""
        return self.rank is not None

    @property
    def main(self) -> bool:
        """Whether this is the process that evaluates and exports."""
        return self.rank == 0 or self.size == 1

    @property
    def first_here(self) -> bool:
        """Whether this is the process that downloads and uploads on this machine."""
        return self.local_rank == 0

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The address at which the ranks of several machines find each other."""
        host, _, port = self.address.partition(":")
        return host, int(port or PORT)


def read_world(environ: Mapping[str, str], problems: list[str]) -> World:
    """The world that the environment describes; adds every malformed variable to `problems`."""
    processes = _number(environ, "DROPFORGE_NUM_PROCESSES", 1, problems)
    machines = _number(environ, "DROPFORGE_NUM_MACHINES", 1, problems)
    # Kubernetes numbers the pods of an Indexed Job in this variable.
    name = "DROPFORGE_MACHINE_RANK" if "DROPFORGE_MACHINE_RANK" in environ else "JOB_COMPLETION_INDEX"
    machine = _number(environ, name, 0, problems, first=0) if machines > 1 else 0
    address = environ.get("DROPFORGE_MAIN_ADDRESS", "")
    if machine >= machines:
        problems.append(f"{name} is {machine}; expected less than DROPFORGE_NUM_MACHINES, {machines}")
    if machines > 1 and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[1-9][0-9]{0,4})?", address):
        problems.append(f"DROPFORGE_MAIN_ADDRESS is {address!r}; expected machine 0's host or host:port")
    rank = local_rank = None  # torchrun sets both variables
    if directory := environ.get(DIRECTORY):
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    return World(processes, machines, machine, address, rank, local_rank or 0, Path(directory) if directory else None)


def _number(environ: Mapping[str, str], name: str, default: int, problems: list[str], first: int = 1) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isdecimal() and first <= int(text) <= _MAX_COUNT):
        problems.append(f"{name} is {text!r}; expected {first} to {_MAX_COUNT}")
        return default
    return int(text)
