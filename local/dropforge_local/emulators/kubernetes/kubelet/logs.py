"""Containers' output as the API serves it: from a given time or line, and followed until the container ends."""

from __future__ import annotations

import asyncio
import bisect
import heapq
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dropforge_local.base.db import Database

from ....containers.logs import LOG, TIMES
from ...kit.times import rfc3339
from ..paths import flag, number
from ..refusals import Refusal, bad_request
from ..store import Object
from ..times import seconds
from . import status
from .runner import id_of

FOLLOW_SECONDS = 0.2  # how often a followed file is read


@dataclass(frozen=True)
class LogRequest:
    """The requested part of the output, by the query of a log request; `since` is a Unix time."""

    container: str
    previous: bool
    follow: bool
    timestamps: bool
    tail_lines: int | None
    limit_bytes: int | None
    since: float | None

    @classmethod
    def parse(cls, query: Mapping[str, str], now: float) -> LogRequest:
        """Refuses a malformed query with 400."""
        return cls(
            query.get("container", ""),
            flag(query, "previous"),
            flag(query, "follow"),
            flag(query, "timestamps"),
            number(query, "tailLines"),
            number(query, "limitBytes"),
            _since(query, now),
        )


async def read_log(directory: Path, request: LogRequest, has_ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The output in pieces. A line's time is the time of the write that contained it, accurate to half a second."""
    ended = has_ended()  # checked before reading: after the end, the read returns all output
    lines = _read_all(directory)
    position = (directory / LOG).stat().st_size if (directory / LOG).exists() else 0
    if request.since is not None:
        lines = [line for line in lines if line[0] >= request.since]
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


def read_workload_log(db: Database, directory: Path, cluster: str, workload: str) -> str | None:
    """The output of all containers of a workload by time, also after its deletion. None if no container has run.

    `workload` is as Cloud Asset Inventory names it below its cluster: namespaces/NAMESPACE/batch/jobs/NAME.
    """
    rows = db.rows(
        "SELECT id FROM kubernetes_containers WHERE cluster = ? AND workload = ? ORDER BY started", [cluster, workload]
    )
    if not rows:
        return None
    lines = heapq.merge(*(_read_all(directory / row["id"]) for row in rows), key=lambda line: line[0])
    return b"".join(line for _, line in lines).decode("utf-8", errors="replace")


def _since(query: Mapping[str, str], now: float) -> float | None:
    ago, text = number(query, "sinceSeconds"), query.get("sinceTime", "")
    if not text:
        return None if ago is None else now - ago
    if ago is not None:
        raise bad_request("at most one of `sinceTime` or `sinceSeconds` may be specified")
    try:
        return seconds(text)
    except ValueError as error:
        raise bad_request(f"sinceTime is {text!r}; expected a time as in RFC 3339") from error


def _read_new(directory: Path, position: int) -> tuple[list[tuple[float, bytes]], int]:
    """(lines written since `position`, new position); the file may have been rotated meanwhile."""
    path = directory / LOG
    size = path.stat().st_size if path.exists() else 0
    pieces = []
    if size < position:
        pieces = _read_lines(directory, f"{LOG}.1", position)
        position = 0
    return pieces + _read_lines(directory, LOG, position), size


def _read_all(directory: Path) -> list[tuple[float, bytes]]:
    return [*_read_lines(directory, f"{LOG}.1"), *_read_lines(directory, LOG)]


def _read_lines(directory: Path, name: str, start: int = 0) -> list[tuple[float, bytes]]:
    """(time, line) of a file, from an offset."""
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
    """The prefix of a line: the kubelet writes nine digits of a second, of which a write's time has six."""
    return f"{rfc3339(at).removesuffix('Z')}000Z ".encode()


def container_of(pod: Object, name: str) -> str:
    """The container of a log request. Refuses a request without a name if the pod has several containers."""
    names = [item["name"] for item in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]]
    if name and name not in names:
        raise Refusal(400, f"container {name} is not valid for pod {pod['metadata']['name']}")
    if not name and len(pod["spec"]["containers"]) > 1:
        choices = [item["name"] for item in pod["spec"]["containers"]]
        text = f"a container name must be specified for pod {pod['metadata']['name']}, choose entry of: {choices}"
        raise Refusal(400, text)
    return name or str(pod["spec"]["containers"][0]["name"])


def log_id(pod: Object, name: str, *, previous: bool) -> str:
    """The id of the container whose output is requested. Refuses while that container has no output."""
    entry = status.find_entry(pod, name)
    attempt = entry["restartCount"] if entry else 0
    if previous:
        if not entry or not entry.get("lastState"):
            raise Refusal(400, f'previous terminated container "{name}" in pod "{pod["metadata"]["name"]}" not found')
        waiting = "waiting" in entry["state"] and entry["state"]["waiting"].get("reason") == status.BACK_OFF
        return id_of(pod, name, attempt if waiting else attempt - 1)
    state = entry["state"] if entry else {"waiting": {"reason": "ContainerCreating"}}
    if "waiting" in state and not (entry and entry.get("lastState")):
        why = state["waiting"].get("reason", "ContainerCreating")
        text = f'container "{name}" in pod "{pod["metadata"]["name"]}" is waiting to start: {why}'
        raise Refusal(400, text)
    if "waiting" in state and state["waiting"].get("reason") != status.BACK_OFF:
        attempt -= 1
    return id_of(pod, name, max(attempt, 0))
