"""The summary of a run, from which lists of runs are made. The metadata of the record's object has the summary.

One write writes both, so they never differ. One listing of the bucket reads the summaries of 1,000 runs. Custom
metadata has at most 8 KiB (https://cloud.google.com/storage/docs/metadata#custom-metadata). It should be ASCII, because
some interfaces send it in HTTP headers. A new upload has only the metadata that the upload names.
"""

from __future__ import annotations

import json
from datetime import datetime

from pydantic import ValidationError

from dropforge.base.changes import evolve

from .record import About, Attempt, Record, RunState, Stored

KEY = "summary-1"  # the number grows when another version would misread the summary
MOST_BYTES = 7168  # of the 8 KiB; the rest is for other keys


class Tick(Stored):
    """A price in US dollars that counts from `since` on, at the longest until `until`."""

    usd_per_hour: float
    since: datetime
    until: datetime | None = None

    def cost(self, now: datetime) -> float:
        end = now if self.until is None else min(now, self.until)
        return self.usd_per_hour * max(0.0, (end - self.since).total_seconds()) / 3600


class Meter(Stored):
    """A cost in US dollars that may still grow: `spent` is final, and each tick adds to it."""

    spent: float = 0.0
    ticks: list[Tick] = []

    def cost(self, now: datetime) -> float:
        return round(self.spent + sum(tick.cost(now) for tick in self.ticks), 6)


class Served(Stored):
    """The endpoint of a run: when it expires, and when it ended."""

    expires: datetime
    ended: datetime | None = None


class Summary(Stored):
    """The part of a record that lists of runs show. `training` and `serving` are None if a price is unknown.

    `about` is None for a run that was never accepted. `place` is the run's number in the queue. `is_waiting`: the
    record says why the run waits. `has_trained`: an attempt succeeded, so the run may have a committed model.
    """

    run: str
    name: str
    state: RunState
    created: datetime
    about: About | None = None
    submitter: str = ""  # who dropped the spec in the console; "": no console says who
    attempt: int = 0
    place: int | None = None
    is_waiting: bool = False
    has_trained: bool = False
    metrics: dict[str, float | None] = {}
    training: Meter | None = Meter()
    serving: Meter | None = Meter()
    endpoint: Served | None = None

    @classmethod
    def of(cls, record: Record) -> Summary:
        """The summary of a record."""
        endpoint = record.endpoint
        return cls(
            run=record.run,
            name=record.name,
            state=record.state,
            created=record.created,
            about=record.about,
            submitter=record.submitter,
            attempt=record.attempt,
            place=record.queued.place if record.queued else None,
            is_waiting=bool(record.wait_reason),
            has_trained=any(attempt.ending == "success" for attempt in record.attempts),
            metrics=record.metrics,
            training=_training(record.attempts),
            serving=_serving(record),
            endpoint=Served(expires=endpoint.expires, ended=endpoint.ended) if endpoint else None,
        )

    @property
    def target(self) -> str | None:
        return self.about.target if self.about else None

    @property
    def model(self) -> str | None:
        return self.about.model if self.about else None

    @property
    def labels(self) -> dict[str, str]:
        return self.about.labels if self.about else {}

    def training_cost(self, now: datetime) -> float | None:
        """US dollars that the attempts have cost so far; None if a price is unknown."""
        return self.training.cost(now) if self.training else None

    def serving_cost(self, now: datetime) -> float | None:
        """The most that the endpoint has cost so far, in US dollars; None if the price is unknown."""
        return self.serving.cost(now) if self.serving else None

    def cost(self, now: datetime) -> float | None:
        """The most that training and endpoint have cost so far, in US dollars; None if a price is unknown."""
        training, serving = self.training_cost(now), self.serving_cost(now)
        return None if training is None or serving is None else round(training + serving, 6)

    def is_open(self, now: datetime) -> bool:
        """Whether the run or its endpoint may still cost something."""
        serves = self.endpoint is not None and not self.endpoint.ended and now < self.endpoint.expires
        return serves or not self.state.is_terminal


def text_of(record: Record) -> str:
    """The summary of a record as the metadata has it: JSON in ASCII; "" if it is too long: readers read the record."""
    values = json.loads(Summary.of(record).model_dump_json(exclude_defaults=True))
    text = json.dumps(values, separators=(",", ":"))
    return text if len(text) <= MOST_BYTES else ""


def read_summary(run: str, text: str) -> Summary | None:
    """The summary of this run in the metadata of its record; None for anything else."""
    try:
        summary = Summary.model_validate_json(text)
    except ValidationError:
        return None
    return summary if summary.run == run else None


def _training(attempts: list[Attempt]) -> Meter | None:
    meter = Meter(spent=0.0, ticks=[])
    for attempt in attempts:
        if attempt.usd_per_hour is None:
            return None
        if attempt.ended is not None:
            meter.spent += attempt.cost(attempt.ended) or 0.0
        elif attempt.running is not None:
            meter.ticks.append(Tick(usd_per_hour=attempt.usd_per_hour, since=attempt.running))
    return meter


def _serving(record: Record) -> Meter | None:
    began = record.serving_began
    if began is None:
        return Meter()
    if record.serving_usd_per_hour is None:
        return None
    tick = Tick(usd_per_hour=record.serving_usd_per_hour, since=began)
    if record.endpoint is not None and record.endpoint.ended is None:
        return Meter(ticks=[evolve(tick, until=record.endpoint.expires)])
    if record.endpoint is None and not record.state.is_terminal:
        return Meter(ticks=[tick])
    ended = record.endpoint.ended if record.endpoint else None
    return Meter(spent=tick.cost(ended or record.history[-1].time))
