"""The spans of a run's trace, made from its record: what the run did, from when to when.

A span that has ended never changes, so it can be sent again. The states of the run follow each other without a gap and
add up to the run. Spans of attempts with their phases, of resources and of the endpoint may overlap the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from dropforge.base import names

from .record import Attempt, LedgerEntry, Record, RunError, RunState
from .series import Kept
from .store import RunStore

ROOT = "run"
# The attribute that tells spans of the same name apart.
NAMED_BY = {"attempt": "dropforge.attempt", "resource": "dropforge.resource.kind"}
Value = str | int | float | bool


class Span(NamedTuple):
    """A part of a run. `path` is unique within the run, and begins with the path of the span that this span is in.

    `ended` is None while the part continues. `problem` says why the part failed, `error_type` is the error's class.
    """

    path: str
    name: str
    began: datetime
    ended: datetime | None
    attributes: Mapping[str, Value] = {}
    problem: str = ""
    error_type: str = ""

    @property
    def parent(self) -> str:
        """The path of the span that this span is in; "" for the root."""
        return self.path.rpartition("/")[0]

    @property
    def depth(self) -> int:
        """The number of spans between the root and this span."""
        return max(0, self.path.count("/") - 1)

    @property
    def label(self) -> str:
        """The name, with what tells the span from others of its name."""
        told = str(self.attributes.get(NAMED_BY.get(self.name, ""), "")).rpartition("/")[2]
        return f"{self.name} {told}".rstrip()

    def seconds(self, now: datetime) -> float:
        return ((self.ended or now) - self.began).total_seconds()


class Reports(NamedTuple):
    """When an attempt reported, by the runs bucket's clock: its first report, and its first and last about progress."""

    first: datetime
    progress: tuple[datetime, datetime] | None

    def with_progress(self, first: datetime, last: datetime) -> Reports:
        """These reports, and progress from `first` to `last`."""
        known = self.progress or (first, last)
        return Reports(min(self.first, first), (min(known[0], first), max(known[1], last)))


def read_reports(store: RunStore, record: Record) -> dict[int, Reports]:
    """The times of the reports of a run's attempts, from their series, and from one listing of events if they need it.

    A container chooses what its events say. Their times are those of the bucket. The times in a series are the
    container's; none is later than the bucket's.
    """
    read = {attempt.number: store.series(record.run, attempt.number) for attempt in record.attempts}
    return reports_of(store, record, {number: kept for number, kept in read.items() if kept is not None})


def reports_of(store: RunStore, record: Record, read: Mapping[int, Kept]) -> dict[int, Reports]:
    """The times of the reports of a run's attempts, whose series the caller has read."""
    series = {number: kept for number, kept in read.items() if kept.series.step}
    is_known = all(attempt.running and attempt.number in series for attempt in record.attempts)
    found = {} if is_known else _read_events(store, record.run)
    for number, kept in series.items():
        first, last = kept.received_at(0), kept.received_at(-1)
        found[number] = found.get(number, Reports(first, None)).with_progress(first, last)
    return found


def _read_events(store: RunStore, run: str) -> dict[int, Reports]:
    """The times of the job events by attempt. Images from before 2026-11-24 report progress by events."""
    found: dict[int, Reports] = {}
    prefix = names.events_prefix(run)
    for name, received in store.written(prefix):
        number, _, rest = name.removeprefix(prefix).partition("-")
        if not number.isdecimal():
            continue
        known = found.get(int(number), Reports(received, None))
        if rest.endswith("-progress.json"):
            known = known.with_progress(received, received)
        found[int(number)] = known._replace(first=min(known.first, received))
    return found


def in_order(spans: Iterable[Span]) -> list[Span]:
    """The spans below the root, each after the span that it is in, in the order in which they began."""
    below: dict[str, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)

    def walk(path: str) -> list[Span]:
        inside = sorted(below.get(path, []), key=lambda span: span.began)
        return [found for span in inside for found in (span, *walk(span.path))]

    return walk(ROOT)


def spans_of(record: Record, reports: Mapping[int, Reports] | None = None) -> list[Span]:
    """Every span of a run so far, each after the span that it is in. `reports` is what `read_reports` found."""
    found = [_root(record), *_states(record)]
    for attempt in record.attempts:
        found += _attempt(attempt, (reports or {}).get(attempt.number))
    found += _resources(record.resources or ())
    return [*found, *_endpoint(record)]


def _root(record: Record) -> Span:
    attributes: dict[str, Value] = {
        "dropforge.run.id": record.run,
        "dropforge.run.name": record.name,
        "dropforge.run.source": record.source,
        "dropforge.run.state": record.state,
        "dropforge.run.attempts": len(record.attempts),
    }
    if record.execution:
        attributes["dropforge.execution"] = record.execution
    span = Span(ROOT, ROOT, record.history[0].time, _end(record), attributes)
    if record.state is RunState.REJECTED:
        return span._replace(problem=f"the spec has {len(record.problems)} problems", error_type="config")
    return _failed(span, record.error) if record.state is RunState.FAILED else span


def _states(record: Record) -> Iterator[Span]:
    """One span for each state that the run entered; the terminal state takes no time."""
    ends = [*(entered.time for entered in record.history[1:]), None]
    for index, (entered, ended) in enumerate(zip(record.history, ends, strict=True)):
        state = entered.state
        if state.is_terminal:
            continue
        span = Span(f"{ROOT}/{index}-{state.lower()}", state.lower().replace("_", " "), entered.time, ended)
        attributes: dict[str, Value] = {"dropforge.attempt": entered.attempt} if entered.attempt else {}
        if state is RunState.DEPLOYING:
            attributes |= _parity(record)
            is_failed = record.state is RunState.FAILED and record.endpoint is None
            span = _failed(span, record.error) if is_failed else span
        yield span._replace(attributes=attributes)
        if state is RunState.ACCEPTED and (record.placed or record.queued):
            yield Span(f"{span.path}/place", "wait for a place", entered.time, record.placed)


def _parity(record: Record) -> dict[str, Value]:
    if (parity := record.parity) is None:
        return {}
    return {
        "dropforge.parity.state": parity.state,
        "dropforge.parity.rows": parity.rows,
        "dropforge.parity.tokens": parity.tokens,
    }


def _attempt(attempt: Attempt, reports: Reports | None) -> list[Span]:
    attributes: dict[str, Value] = {"dropforge.attempt": attempt.number, "cloud.region": attempt.region}
    if attempt.ended:
        attributes["dropforge.attempt.ending"] = attempt.ending
    if attempt.wait_reason:
        attributes["dropforge.attempt.wait_reason"] = attempt.wait_reason
    span = Span(f"{ROOT}/attempt-{attempt.number}", "attempt", attempt.started, attempt.ended, attributes)
    return [_failed(span, attempt.error), *_phases(attempt, span.path, reports)]


def _phases(attempt: Attempt, path: str, reports: Reports | None) -> list[Span]:
    """The phases of an attempt, which follow each other: each lasts until the next begins, the last until the end."""
    begins = [("launch", attempt.started)]
    if attempt.launched and attempt.launched != attempt.running:
        begins.append(("wait for capacity", attempt.launched))
    if attempt.running:
        begins.append(("prepare", attempt.running))
    if reports is not None:
        begins += [] if attempt.running else [("prepare", reports.first)]
        begins += [("train", reports.progress[0])] if reports.progress else []
        # What follows the last step of a training that succeeded: evaluation, export and upload.
        begins += [("finish", reports.progress[1])] if reports.progress and attempt.ending == "success" else []
    # The clocks of the bucket and of the functions differ a little: no phase begins before the phase before it.
    spans, latest = [], attempt.started
    for index, (name, began) in enumerate(begins):
        latest = max(latest, began if attempt.ended is None else min(began, attempt.ended))
        spans.append(Span(f"{path}/{index}-{name.replace(' ', '-')}", name, latest, None))
    ends = [*(span.began for span in spans[1:]), attempt.ended]
    return [span._replace(ended=ended) for span, ended in zip(spans, ends, strict=True)]


def _resources(entries: Iterable[LedgerEntry]) -> Iterator[Span]:
    """One span for each resource, from the intent: the create call follows at once, `created` may be noted later."""
    for index, entry in enumerate(entries):
        attributes: dict[str, Value] = {
            "cloud.resource_id": entry.name,
            "dropforge.resource.kind": entry.kind,
            "dropforge.attempt": entry.attempt,
        }
        ended = max(entry.gone, entry.intended) if entry.gone else None
        yield Span(f"{ROOT}/resource-{index}", "resource", entry.intended, ended, attributes)


def _endpoint(record: Record) -> Iterator[Span]:
    if (endpoint := record.endpoint) is None:
        return
    attributes: dict[str, Value] = {
        "cloud.region": endpoint.region,
        "cloud.resource_id": endpoint.service,
        "dropforge.endpoint.model": endpoint.model,
        "server.address": urlsplit(endpoint.url).netloc,
    }
    ended = max(endpoint.ended, endpoint.ready) if endpoint.ended else None
    yield Span(f"{ROOT}/endpoint", "endpoint", endpoint.ready, ended, attributes)


def _failed(span: Span, error: RunError | None) -> Span:
    """The span with the error that ended it, if one did."""
    return span if error is None else span._replace(problem=error.message, error_type=str(error.error_class))


def _end(record: Record) -> datetime | None:
    return record.history[-1].time if record.state.is_terminal else None
