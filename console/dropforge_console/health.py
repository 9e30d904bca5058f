"""The health of a deployment: the findings of the last sweep, the differences between ledgers and cloud, the dead
letters and the alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Generic, NamedTuple, TypeVar

from dropforge.base.errors import DropforgeError, Malformed
from dropforge.context import Context
from dropforge.stages.sweep import findings
from dropforge.stages.sweep.audit import Audit
from dropforge.stages.sweep.findings import Findings

from .monitoring import Alert, DeadLetters
from .views import Status

T = TypeVar("T")

LATE_AFTER = timedelta(hours=1)  # as the alert no_sweep of terraform/alerts.tf
AUDIT_EVERY = timedelta(minutes=2)  # an audit lists every kind of resource in every region
MONITORING_EVERY = timedelta(minutes=1)  # as often as the metrics are written
UNKNOWN = Status("Unknown", "hold", "triangle")
SENTENCES = {
    "deleted": ("resource deleted", "resources deleted"),
    "deleting": ("deletion not finished", "deletions not finished"),
    "restarted": ("run restarted", "runs restarted"),
    "resubmitted": ("spec submitted again", "specs submitted again"),
    "problems": ("problem", "problems"),
}


class Found(NamedTuple):
    """A list of a sweep's answer: a sentence with the number, and the first names or problems."""

    sentence: str
    names: list[str]


class Sweep(NamedTuple):
    """The last sweep as the page shows it; `ended` is None before the first sweep."""

    status: Status
    ended: datetime | None = None
    found: tuple[Found, ...] = ()
    trouble: str = ""


def last_sweep(context: Context) -> Sweep:
    """Read what the last sweep found."""
    try:
        kept = findings.read(context)
    except Malformed as error:
        return Sweep(Status("Unreadable", "fail", "triangle"), trouble=str(error))
    if kept is None:
        return Sweep(Status("No sweep yet", "hold", "sand"))
    shown = tuple(_found(name, kept) for name in SENTENCES if kept.counts.get(name))
    return Sweep(_status(kept, context.now()), kept.ended, shown)


def _status(kept: Findings, now: datetime) -> Status:
    if now - kept.ended > LATE_AFTER:
        return Status("Late", "fail", "cross")
    return Status("With problems", "fail", "triangle") if kept.problems else Status("In order", "good", "tick")


def _found(name: str, kept: Findings) -> Found:
    count = kept.counts[name]
    one, many = SENTENCES[name]
    return Found(f"{count:,} {one if count == 1 else many}", getattr(kept, name))


class Seen(NamedTuple, Generic[T]):
    """The result of a look and its time. `trouble`: why there is no result."""

    time: datetime
    result: T | None
    trouble: str = ""


class Background(Generic[T]):
    """Looks at something in the background, while people look at the page.

    `latest` is the last result, None before the first. `tell` is called when there is a new result.
    """

    def __init__(
        self, read: Callable[[], T], every: timedelta, now: Callable[[], datetime], tell: Callable[[], None]
    ) -> None:
        self.latest: Seen[T] | None = None
        self._read = read
        self._every = every
        self._now = now
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Begin a look, unless one runs or the last result is recent."""
        is_fresh = self.latest is not None and self._now() - self.latest.time < self._every
        if not is_fresh and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        try:
            seen = Seen[T](self._now(), await asyncio.to_thread(self._read))
        except Exception as error:  # noqa: BLE001  # the page says why
            text = str(error) if isinstance(error, DropforgeError) else f"{type(error).__name__}: {error}"
            seen = Seen[T](self._now(), None, text[:300])
        self.latest = seen
        self._tell()


def audit_status(seen: Seen[Audit]) -> Status:
    if seen.result is None or seen.result.problems:
        return Status("Incomplete", "fail", "triangle")
    return Status("Differ", "fail", "cross") if seen.result.differences else Status("Agree", "good", "tick")


def dead_letters_status(seen: Seen[list[DeadLetters]]) -> Status:
    if seen.result is None:
        return UNKNOWN
    if sum(each.messages or 0 for each in seen.result):
        return Status("Events wait", "fail", "cross")
    return Status("None", "good", "tick") if all(each.messages == 0 for each in seen.result) else UNKNOWN


def alerts_status(seen: Seen[list[Alert]]) -> Status:
    if seen.result is None:
        return UNKNOWN
    return Status("Open", "fail", "cross") if seen.result else Status("None open", "good", "tick")
