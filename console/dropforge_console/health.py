"""The health of a deployment: the findings of the last sweep, and the differences between ledgers and cloud."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from dropforge.base.errors import Malformed
from dropforge.context import Context
from dropforge.stages.sweep import findings
from dropforge.stages.sweep.audit import Audit, audit
from dropforge.stages.sweep.findings import Findings

from .views import Status

LATE_AFTER = timedelta(hours=1)  # as the alert no_sweep of terraform/alerts.tf
AUDIT_EVERY = timedelta(minutes=2)  # an audit lists every kind of resource in every region
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


class Looked(NamedTuple):
    """The result of an audit and its time. `trouble`: why there is no result."""

    time: datetime
    result: Audit | None
    trouble: str = ""

    @property
    def status(self) -> Status:
        if self.result is None or self.result.problems:
            return Status("Incomplete", "fail", "triangle")
        return Status("Differ", "fail", "cross") if self.result.differences else Status("Agree", "good", "tick")


class Auditor:
    """Compares the ledgers with the cloud in the background, while somebody looks at the page.

    `latest` is the last result, None before the first. `tell` is called when there is a new result.
    """

    def __init__(self, context: Context, tell: Callable[[], None]) -> None:
        self.latest: Looked | None = None
        self._context = context
        self._tell = tell
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Begin an audit, unless an audit runs or the last result is recent."""
        is_fresh = self.latest is not None and self._context.now() - self.latest.time < AUDIT_EVERY
        if not is_fresh and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._audit())

    async def _audit(self) -> None:
        try:
            result, trouble = await asyncio.to_thread(audit, self._context), ""
        except Exception as error:  # noqa: BLE001  # the page says why
            result, trouble = None, f"{type(error).__name__}: {error}"[:300]
        self.latest = Looked(self._context.now(), result, trouble)
        self._tell()
