"""Containers' output as the API serves it: from a time or line on, and followed until the container ends."""

from __future__ import annotations

import asyncio
import bisect
import heapq
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from dropforge_local.base.db import Database

from ....containers.logs import LOG, TIMES, last_lines
from ..refusals import Refusal
from ..store import Object
from ..times import timestamp
from . import status
from .runner import id_of

FOLLOW_SECONDS = 0.2  # how often a file is looked at while somebody follows it


@dataclass(frozen=True)
class LogRequest:
    """What of the output is wanted; `since` is a Unix time."""

    follow: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None
    since: float | None = None


async def read_log(directory: Path, request: LogRequest, has_ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The output in pieces. Lines have the time at which their piece was written, half a second more or less."""
    ended = has_ended()  # asked before reading: what is read afterwards is all there is
    lines = [one for name in (f"{LOG}.1", LOG) for one in _read_lines(directory, name)]
    position = (directory / LOG).stat().st_size if (directory / LOG).exists() else 0
    if request.since is not None:
        lines = [one for one in lines if one[0] >= request.since]
    if request.tail_lines is not None:
        lines = lines[-request.tail_lines :] if request.tail_lines else []
    data = b"".join(_stamped(at) + line if request.timestamps else line for at, line in lines)
    if request.limit_bytes is not None:
        yield data[: request.limit_bytes]
        return
    if data:
        yield data
    while request.follow and not ended:
        await asyncio.sleep(FOLLOW_SECONDS)
        ended = has_ended()
        pieces, position = _read_new(directory, position)
        for at, line in pieces:
            yield _stamped(at) + line if request.timestamps else line


def read_workload_log(db: Database, directory: Path, cluster: str, workload: str, tail: int | None) -> str | None:
    """What all containers of a workload wrote, in order of time; also after its deletion. None if none has run.

    `workload` is as Cloud Asset Inventory names it below its cluster: namespaces/NAMESPACE/batch/jobs/NAME.
    """
    rows = db.connection.execute(
        "SELECT id FROM kubernetes_containers WHERE cluster = ? AND workload = ? ORDER BY started", [cluster, workload]
    ).fetchall()
    if not rows:
        return None
    outputs = [[one for name in (f"{LOG}.1", LOG) for one in _read_lines(directory / row["id"], name)] for row in rows]
    lines = heapq.merge(*outputs, key=lambda one: one[0])
    return last_lines(b"".join(line for _, line in lines).decode("utf-8", errors="replace"), tail)


def _read_new(directory: Path, position: int) -> tuple[list[tuple[float, bytes]], int]:
    """Lines written since `position`; the file may have been rotated since."""
    path = directory / LOG
    size = path.stat().st_size if path.exists() else 0
    pieces = []
    if size < position:
        pieces = _read_lines(directory, f"{LOG}.1", position)
        position = 0
    return pieces + _read_lines(directory, LOG, position), size


def _read_lines(directory: Path, name: str, start: int = 0) -> list[tuple[float, bytes]]:
    """(time, line) of one file from an offset on."""
    try:
        data = (directory / name).read_bytes()[start:]
    except FileNotFoundError:
        return []
    marks = _read_marks(directory / name.replace(LOG, TIMES))
    offsets = [offset for _, offset in marks]
    lines = []
    for line in data.splitlines(keepends=True):
        index = bisect.bisect_right(offsets, start) - 1
        lines.append((marks[index][0] if index >= 0 else 0.0, line))
        start += len(line)
    return lines


def _read_marks(path: Path) -> list[tuple[float, int]]:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [(float(pair[0]), int(pair[1])) for pair in words if len(pair) == 2]


def _stamped(at: float) -> bytes:
    return f"{timestamp(at)} ".encode()


def container_of(pod: Object, name: str) -> str:
    """The container that a log request means. Refuses when it does not say which of several."""
    names = [one["name"] for one in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]]
    if name and name not in names:
        raise Refusal(400, f"container {name} is not valid for pod {pod['metadata']['name']}")
    if not name and len(pod["spec"]["containers"]) > 1:
        choices = [one["name"] for one in pod["spec"]["containers"]]
        text = f"a container name must be specified for pod {pod['metadata']['name']}, choose one of: {choices}"
        raise Refusal(400, text)
    return name or str(pod["spec"]["containers"][0]["name"])


def log_id(pod: Object, name: str, *, previous: bool) -> str:
    """The container whose output is wanted. Refuses while there is none."""
    one = next((one for one in status.all_entries(pod) if one["name"] == name), None)
    attempt = one["restartCount"] if one else 0
    if previous:
        if not one or not one.get("lastState"):
            raise Refusal(400, f'previous terminated container "{name}" in pod "{pod["metadata"]["name"]}" not found')
        waiting = "waiting" in one["state"] and one["state"]["waiting"].get("reason") == status.BACK_OFF
        return id_of(pod, name, attempt if waiting else attempt - 1)
    state = one["state"] if one else {"waiting": {"reason": "ContainerCreating"}}
    if "waiting" in state and not (one and one.get("lastState")):
        why = state["waiting"].get("reason", "ContainerCreating")
        text = f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: {why}'
        raise Refusal(400, text)
    if "waiting" in state and state["waiting"].get("reason") != status.BACK_OFF:
        attempt -= 1
    return id_of(pod, name, max(attempt, 0))
