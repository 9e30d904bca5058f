"""The spans of a run's trace, made from its record: what the run did, from when to when.

A span that has ended never changes, so it can be sent again. The states of the run follow each other without a gap and
add up to the run. Attempts with their phases, resources and the endpoint lie beside the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit

from dropforge.base import names

from .record import Attempt, LedgerEntry, Record, RunError, RunState
from .store import RunStore

ROOT = "run"
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

    def seconds(self, now: datetime) -> float:
        return ((self.ended or now) - self.began).total_seconds()


class Reports(NamedTuple):
    """When the runs bucket received job events of an attempt: the first, the first and the last about progress."""

    first: datetime
    progress: tuple[datetime, datetime] | None


def read_reports(store: RunStore, run: str) -> dict[int, Reports]:
    """The times of a run's job events by attempt, from one listing: no event is read.

    A container chooses what its events say. The times are those of the bucket.
    """
    found: dict[int, Reports] = {}
    prefix = names.events_prefix(run)
    for name, received in store.written(prefix):
        number, _, rest = name.removeprefix(prefix).partition("-")
        if not number.isdecimal():
            continue
        known = found.get(int(number), Reports(received, None))
        if rest.endswith("-progress.json"):
            first, last = known.progress or (received, received)
            known = known._replace(progress=(min(first, received), max(last, received)))
        found[int(number)] = known._replace(first=min(known.first, received))
    return found


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
