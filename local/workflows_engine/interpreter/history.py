"""An execution's event log as the step entries of the Executions API, and as a timeline for people.

The machine logs only which mark a thread passed, and when. `read_entries` derives from the log which step contains
which, and how each step ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..language.program import Mark, Program
from ..values import Value
from .machine import ENDED, FAILED, FORKED, LOGGED, POP, PUSH, RESUMED

_PROGRESS = {
    "STEP_FOR": "PROGRESS_TYPE_FOR",
    "STEP_SWITCH": "PROGRESS_TYPE_SWITCH",
    "STEP_TRY_RETRY_EXCEPT": "PROGRESS_TYPE_RETRY",
    "STEP_PARALLEL_FOR": "PROGRESS_TYPE_PARALLEL_FOR",
    "STEP_PARALLEL_BRANCH": "PROGRESS_TYPE_PARALLEL_BRANCH",
}


@dataclass(slots=True, eq=False)
class Entry:
    """A step, or a part of a step, that an execution ran."""

    mark: Mark
    number: int  # the mark's
    depth: int
    thread: int
    parent: Entry | None
    started: float
    ended: float | None = None
    state: str = "IN_PROGRESS"
    exception: str | None = None
    children: list[Entry] = field(default_factory=list)
    logs: list[tuple[str, Value]] = field(default_factory=list)
    id: int = 0
    siblings: list[Entry] = field(default_factory=list)
    position: int = 0  # among the siblings
    progress: int = 1  # among the siblings of the same type: 2 for the second TRY


@dataclass(slots=True)
class _Thread:
    parent: Entry | None = None
    depth: int = 0
    open: list[Entry] = field(default_factory=list)
    failing: str | None = None
    failed_at: float = 0.0


class _Reader:
    def __init__(self, marks: Sequence[Mark]) -> None:
        self.entries: list[Entry] = []
        self.threads: dict[int, _Thread] = {0: _Thread()}
        self._marks = marks
        self._ancestors: dict[int, frozenset[int]] = {0: frozenset()}

    def read(self, events: Sequence[Sequence[Any]]) -> None:
        for run in events:
            number = run[0]
            thread = self.threads.setdefault(number, _Thread())
            at = 1
            while at < len(run):
                code, moment = run[at], run[at + 1]
                at += 2
                if code > 0:
                    self._step(number, thread, code, moment)
                elif code == FAILED:
                    thread.failing, thread.failed_at = run[at], moment
                    self._fail(thread)
                    at += 1
                elif code == FORKED:
                    self.threads[run[at]] = _Thread(thread.open[-1] if thread.open else None)
                    at += 2
                elif code == LOGGED:
                    if thread.open:
                        thread.open[-1].logs.append((run[at], run[at + 1]))
                    at += 2
                else:
                    self._move(thread, code, moment)

    def _move(self, thread: _Thread, code: int, moment: float) -> None:
        if code == PUSH:
            thread.depth += 1
        elif code == POP:
            self._close(thread, moment, thread.depth)
            thread.depth -= 1
        elif code == ENDED:
            self._close(thread, moment, 0)
        else:
            assert code == RESUMED

    def _step(self, number: int, thread: _Thread, code: int, moment: float) -> None:
        around = self._around(code)
        while thread.open and thread.open[-1].depth == thread.depth and thread.open[-1].number not in around:
            # A step that an error ended has ended when the error was thrown, not after the wait of a retry.
            self._end(thread.open.pop(), moment if thread.failing is None else thread.failed_at, thread.failing)
        thread.failing = None
        parent = thread.open[-1] if thread.open else thread.parent
        entry = Entry(self._marks[code], code, thread.depth, number, parent, moment)
        if parent is not None:
            parent.children.append(entry)
        thread.open.append(entry)
        self.entries.append(entry)

    def _around(self, code: int) -> frozenset[int]:
        if code not in self._ancestors:
            parent = self._marks[code].parent
            self._ancestors[code] = self._around(parent) | {parent}
        return self._ancestors[code]

    def _close(self, thread: _Thread, moment: float, depth: int) -> None:
        while thread.open and thread.open[-1].depth >= depth:
            self._end(thread.open.pop(), moment, thread.failing)

    @staticmethod
    def _fail(thread: _Thread) -> None:
        if thread.open:
            thread.open[-1].exception = thread.failing

    @staticmethod
    def _end(entry: Entry, moment: float, failing: str | None) -> None:
        entry.ended = moment
        entry.state = "SUCCEEDED" if failing is None else "FAILED"
        entry.exception = failing


def read_entries(events: Sequence[Sequence[Any]], program: Program, state: str) -> list[Entry]:
    """The entries of an execution in the order of their start, numbered from 1. `state` is the execution's."""
    reader = _Reader(program.marks)
    reader.read(events)
    kept = [entry for entry in reader.entries if entry.children or entry.mark.type != "STEP_FOR_ITERATION"]
    for number, entry in enumerate(kept, 1):
        entry.id = number
        if entry.ended is None and state == "CANCELLED":
            entry.state = "CANCELLED"
    for entry in kept:
        entry.children = [child for child in entry.children if child.id]
        _place(entry.children)
    _place([entry for entry in kept if entry.parent is None])
    return kept


def _place(siblings: list[Entry]) -> None:
    counts: dict[str, int] = {}
    for position, entry in enumerate(siblings):
        counts[entry.mark.type] = counts.get(entry.mark.type, 0) + 1
        entry.siblings, entry.position, entry.progress = siblings, position, counts[entry.mark.type]


def step_entry(entry: Entry, execution: str, timestamp: Any) -> dict[str, Any]:
    """An entry as the REST API's StepEntry; `timestamp` formats seconds since the epoch."""
    siblings, position = entry.siblings, entry.position
    navigation: dict[str, Any] = {}
    if entry.parent is not None:
        navigation["parent"] = str(entry.parent.id)
    if entry.children:
        navigation["children"] = [str(child.id) for child in entry.children]
    if position < len(siblings) - 1:
        navigation["next"] = str(siblings[position + 1].id)
    if position > 0:
        navigation["previous"] = str(siblings[position - 1].id)
    shown: dict[str, Any] = {
        "name": f"{execution}/stepEntries/{entry.id}",
        "createTime": timestamp(entry.started),
        "updateTime": timestamp(entry.ended if entry.ended is not None else entry.started),
        "routine": entry.mark.routine,
        "step": entry.mark.step,
        "stepType": entry.mark.type,
        "state": f"STATE_{entry.state}",
        "entryId": str(entry.id),
        "navigationInfo": navigation,
        "stepEntryMetadata": _metadata(entry),
    }
    if entry.exception is not None:
        shown["exception"] = {"payload": entry.exception}
    return shown


def _metadata(entry: Entry) -> dict[str, Any]:
    metadata: dict[str, Any] = {"threadId": str(entry.thread)}
    if entry.parent is not None and (progress := _PROGRESS.get(entry.parent.mark.type)):
        metadata |= {"progressType": progress, "progressNumber": str(entry.progress)}
    return metadata


def timeline(entries: Sequence[Entry], *, origin: float) -> Iterator[str]:
    """The entries as indented lines: start, duration, step, outcome; log entries follow their step."""
    for entry in entries:
        level, parent = 0, entry.parent
        while parent is not None:
            level, parent = level + 1, parent.parent
        duration = "…" if entry.ended is None else _seconds(entry.ended - entry.started)
        kind = entry.mark.type.removeprefix("STEP_").lower()
        outcome = "" if entry.state == "SUCCEEDED" else f"  {entry.state}"
        error = f"  {entry.exception}" if entry.exception and not entry.children else ""
        name = f"{'  ' * level}{entry.mark.step or '-'} ({kind})"
        yield f"{_seconds(entry.started - origin):>10} {duration:>9}  {name}{outcome}{error}"
        for severity, value in entry.logs:
            yield f"{'':>22}{'  ' * level}{severity}: {value}"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.1f}ms"
    return f"{value:.2f}s" if value < 600 else f"{value / 3600:.2f}h"
