"""Samples of a running stack during a soak (_soak.py): their table, and the measures that grow steadily."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dropforge_local.base.recording import FILE
from dropforge_local.containers import processes
from dropforge_local.stack.config import StackInfo, container_directories

MIB, KIB = 2**20, 2**10
SETTLED = 1 / 3  # of the time: until then, caches fill and pools start their threads
WINDOWS = 4  # of the rest: what grows in each of them grows steadily
LEAST_SECONDS = 120.0  # of the rest: in less time, the start of a process looks like a leak
OBJECTS = (
    "record.json",
    "events/",
    "series/",
    "checkpoints/",
    "models/",
)  # the first that occurs in a name is its kind
RUN_ID = re.compile(r"-[0-9a-f]{12}(?=/)")


class Measure(NamedTuple):
    """A quantity with its unit, and the process, folder or object that has it."""

    what: str
    of: str

    @property
    def is_counted(self) -> bool:
        """Whether a steady growth of the measure is a leak for certain: a descriptor or a thread is never a cache."""
        return self.what in ("descriptors", "threads")


class Point(NamedTuple):
    seconds: float
    value: float


Series = dict[Measure, list[Point]]


class Sampler:
    """Measures a stack, its containers, its state directory and the objects of its runs bucket."""

    def __init__(self, state: Path, info: StackInfo, storage: Any, bucket: str) -> None:
        self.state, self.info, self.storage, self.bucket = state, info, storage, bucket
        self.series: Series = defaultdict(list)
        self.began = time.monotonic()
        self._calls = (state / FILE).open()
        self._counted: list[tuple[float, Counter[str]]] = []

    def sample(self) -> None:
        """Add a point to each measure."""
        seconds = time.monotonic() - self.began
        found = family(self.state, self.info)
        for measures in (of_processes(found), disk(self.state), self._objects(), self._requests(seconds)):
            for measure, value in measures.items():
                self.series[measure].append(Point(seconds, value))

    def _requests(self, seconds: float) -> dict[Measure, float]:
        """The calls in the last minute by their caller, 0 of a caller that sent none; empty in the first minute."""
        self._counted.append((seconds, Counter(str(json.loads(line)["caller"]) for line in self._calls)))
        if seconds < 60:
            return {}
        callers = {name for _, counts in self._counted for name in counts}
        last = [counts for at, counts in self._counted if at > seconds - 60]
        return {Measure("requests a minute", name): sum(counts[name] for counts in last) for name in callers}

    def _objects(self) -> dict[Measure, float]:
        found: dict[Measure, float] = defaultdict(float)
        for blob in self.storage.list_blobs(self.bucket):
            kind = next((kind for kind in OBJECTS if kind in blob.name), "other")
            name = RUN_ID.sub("", blob.name).partition("/")[0]
            found[Measure("objects KiB", f"{name}: {kind}")] += blob.size / KIB
            found[Measure("objects", f"{name}: {kind}")] += 1
        return found


def family(state: Path, info: StackInfo) -> list[psutil.Process]:
    """Every live process of a stack and of its containers, which are no children of the stack."""
    pids = {
        pid
        for folder in container_directories(state)
        for each in processes.find_members(folder).values()
        for pid in each
    }
    with suppress(psutil.NoSuchProcess):
        stack = psutil.Process(info.pid)
        pids |= {stack.pid, *(child.pid for child in stack.children(recursive=True))}
    found = list[psutil.Process]()
    for pid in sorted(pids):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def of_processes(found: Sequence[psutil.Process]) -> dict[Measure, float]:
    """Memory, descriptors and threads of each kind of process, whose name is that of its program."""
    sums: dict[Measure, float] = defaultdict(float)
    for process in found:
        with suppress(psutil.Error), process.oneshot():
            kind = program(process.cmdline())
            values = {
                "memory MiB": process.memory_info().rss / MIB,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
            for what, value in values.items():
                sums[Measure(what, kind)] += value
    return sums


def program(command: Sequence[str]) -> str:
    """The program of a command line: for Python, the module or the script that it runs."""
    if not command:
        return "ended"
    name = Path(command[0]).name
    if not name.startswith("python"):
        return name.partition(" ")[0]
    rest = iter(command[1:])
    for argument in rest:
        if argument == "-m":
            return next(rest, name).removeprefix("dropforge_local.")
        if argument == "-c":
            break
        if not argument.startswith("-"):
            return Path(argument).stem
    return name


def disk(state: Path) -> dict[Measure, float]:
    """The size of each folder of a state directory, and of the files beside them."""
    sizes: dict[Measure, float] = defaultdict(float)
    for folder, _, files in os.walk(state):
        top = Path(folder).relative_to(state).parts[:1]
        for file in files:
            if file != FILE:  # it grows by this measurement
                with suppress(FileNotFoundError):
                    name = f"{top[0]}/" if top else file.partition("-")[0]
                    sizes[Measure("disk MiB", name)] += os.lstat(f"{folder}/{file}").st_size / MIB
    return {measure: size for measure, size in sizes.items() if size >= 0.01}


def slope(points: Sequence[Point]) -> float:
    """The growth in a minute over the last two thirds of the time: a line of least squares."""
    later = _settled(points)
    seconds, value = (sum(column) / len(later) for column in zip(*later, strict=True))
    spread = sum((point.seconds - seconds) ** 2 for point in later)
    return 60 * sum((p.seconds - seconds) * (p.value - value) for p in later) / spread if spread else 0.0


def grows_steadily(points: Sequence[Point]) -> bool:
    """Whether the least value in each quarter of the last two thirds is above that of the quarter before.

    False of a process that was seen too seldom, or not for LEAST_SECONDS.
    """
    later = _settled(points)
    if len(later) < 2 * WINDOWS or later[-1].seconds - later[0].seconds < LEAST_SECONDS:
        return False
    each = len(later) / WINDOWS
    least = [min(p.value for p in later[round(n * each) : round((n + 1) * each)]) for n in range(WINDOWS)]
    return all(before < after for before, after in pairwise(least))


def _settled(points: Sequence[Point]) -> Sequence[Point]:
    first, last = points[0].seconds, points[-1].seconds
    return [point for point in points if point.seconds >= first + (last - first) * SETTLED]


def leaks(series: Mapping[Measure, Sequence[Point]]) -> list[str]:
    """A line for each kind of process whose descriptors or threads grow steadily."""
    return [
        f"the {measure.what} of {measure.of} grow steadily: by {slope(points):.1f} a minute, to {points[-1].value:.0f}"
        for measure, points in sorted(series.items())
        if measure.is_counted and grows_steadily(points)
    ]


def table(series: Mapping[Measure, Sequence[Point]]) -> Iterator[str]:
    """A line for each measure: its first, last and largest value, and the growth in a minute."""
    yield f"{'':56} {'first':>10} {'last':>10} {'most':>10} {'a minute':>10}"
    for measure, points in sorted(series.items()):
        most = max(point.value for point in points)
        numbers = (points[0].value, points[-1].value, most)
        yield (
            f"{f'{measure.what}: {measure.of}':56}"
            + "".join(f" {n:10.1f}" for n in numbers)
            + f" {slope(points):+10.2f}"
        )
