"""The spans of a run's trace, made from its record: what the run did, from when to when.

A span that has ended never changes, so it can be sent again. The states of the run follow each other without a gap and
add up to the run. Spans of attempts with their phases, of resources and of the endpoint may overlap the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit

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


class Steps(NamedTuple):
    """When an attempt reported its first and its last step, by the runs bucket's clock. `first` is never later."""

    first: datetime
    last: datetime


def read_steps(store: RunStore, record: Record) -> dict[int, Steps]:
    """The times of the steps of a run's attempts, from their series."""
    read = {attempt.number: store.series(record.run, attempt.number) for attempt in record.attempts}
    return steps_of({number: kept for number, kept in read.items() if kept is not None})


def steps_of(read: Mapping[int, Kept]) -> dict[int, Steps]:
    """The times of the steps of attempts by number, whose series the caller has read.

    A container chooses the times in its series; none of these is later than the bucket's.
    """
    times = {number: (kept.received_at(0), kept.received_at(-1)) for number, kept in read.items() if kept.series.step}
    return {number: Steps(min(both), max(both)) for number, both in times.items()}


def in_order(spans: Iterable[Span]) -> list[Span]:
    """The spans below the root, each after the span that it is in, in the order in which they began."""
    below: dict[str, list[Span]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)

    def walk(path: str) -> list[Span]:
        inside = sorted(below.get(path, []), key=lambda span: span.began)
        return [found for span in inside for found in (span, *walk(span.path))]

    return walk(ROOT)


def spans_of(record: Record, steps: Mapping[int, Steps] | None = None) -> list[Span]:
    """Every span of a run so far, each after the span that it is in. `steps` is what `read_steps` found."""
    found = [_root(record), *_states(record)]
    for attempt in record.attempts:
        found += _attempt(attempt, (steps or {}).get(attempt.number))
    found += _resources(record.resources)
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


def _attempt(attempt: Attempt, steps: Steps | None) -> list[Span]:
    attributes: dict[str, Value] = {"dropforge.attempt": attempt.number, "cloud.region": attempt.region}
    if attempt.ended:
        attributes["dropforge.attempt.ending"] = attempt.ending
    if attempt.wait_reason:
        attributes["dropforge.attempt.wait_reason"] = attempt.wait_reason
    span = Span(f"{ROOT}/attempt-{attempt.number}", "attempt", attempt.started, attempt.ended, attributes)
    return [_failed(span, attempt.error), *_phases(attempt, span.path, steps)]


def _phases(attempt: Attempt, path: str, steps: Steps | None) -> list[Span]:
    """The phases of an attempt, which follow each other: each lasts until the next begins, the last until the end."""
    begins = [("launch", attempt.started)]
    if attempt.launched and attempt.launched != attempt.running:
        begins.append(("wait for capacity", attempt.launched))
    if attempt.running:
        begins.append(("prepare", attempt.running))
    if steps is not None:
        begins.append(("train", steps.first))
        # What follows the last step of a training that succeeded: evaluation, export and upload.
        begins += [("finish", steps.last)] if attempt.ending == "success" else []
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
