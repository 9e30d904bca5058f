"""The series of an attempt: its progress over time, as one object of the runs bucket that the trainer writes again.

    models/<run>/series/attempt-1.json.gz   a JSON document (class Series), compressed with gzip

A training of days makes some 18,000 points, which are read by one request. The trainer writes the series, so it proves
no state of a run: people look at it, and `inspect` reads from it whether training makes progress. It carries the proof
of its run (run/proof.py). Only functions can check the proof; other readers show the values and decide nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dropforge.base.changes import evolve
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.objects import read_at_most

from .artifacts import model_prefix
from .proof import is_document_proved, proved

MOST_POINTS = 20_000
# Of the object, and of the document in it: 20,000 points have at most 2.1 MB. Other JSON of this size takes 63 MiB.
MAX_BYTES = 5 << 19
_MOST_MIB = 10**8  # of memory
_MOST_TOKENS = 10**15
_MOST_STEPS, _MOST_SECONDS = 10**12, 10**9  # a container can write any number: no number may be too large to use
_DIGITS = 6  # significant digits of a number
# The columns beside the step and its time: fields of Series and of Progress.
MEASURED = (
    *("epoch", "loss", "learning_rate", "tokens_per_second"),
    *("accelerator_mib", "accelerator_busy", "host_mib", "tokens", "held_out_loss"),
)
_GZIP = zlib.MAX_WBITS | 16


class Progress(BaseModel):
    """A point of the series. Rates and memory cover the last interval; `loss` is None if it is not finite.

    `accelerator_mib` is the most that the first process had allocated on its GPU, and `accelerator_busy` the share of
    the last second in which this GPU computed. `host_mib` is what this process has of the machine's memory. `tokens`
    counts the tokens of the training so far, without padding. `held_out_loss` is the loss on some held-out rows at this
    step. None: not measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempt: int = Field(ge=1, le=1000)
    time: datetime
    step: int = Field(ge=0)
    total_steps: int = Field(ge=0)
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    accelerator_mib: int | None = Field(default=None, ge=0)
    accelerator_busy: float | None = Field(default=None, ge=0, le=1)
    host_mib: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    held_out_loss: float | None = None


class Series(BaseModel):
    """The progress of an attempt in columns of the same length, one value for each point.

    `seconds` count from `began`. `written` is when the trainer wrote the object. Both come from the trainer's clock.
    `eta_seconds` belongs to the last point. Few points have a `held_out_loss`. A reader ignores fields that it does not
    know: the trainer may be newer.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    run: str
    attempt: int = Field(ge=1, le=1000)
    began: datetime
    written: datetime
    total_steps: int = Field(default=0, ge=0, le=_MOST_STEPS)
    eta_seconds: float | None = Field(default=None, ge=-_MOST_SECONDS, le=_MOST_SECONDS)
    step: list[int] = []
    seconds: list[float] = []
    epoch: list[float | None] = []
    loss: list[float | None] = []
    learning_rate: list[float | None] = []
    tokens_per_second: list[float | None] = []
    accelerator_mib: list[int | None] = []
    accelerator_busy: list[float | None] = []
    host_mib: list[int | None] = []
    tokens: list[int | None] = []
    held_out_loss: list[float | None] = []

    @model_validator(mode="after")
    def _is_regular(self) -> Self:
        for column, most in self._counts:
            if any(value is not None and not 0 <= value <= most for value in column):
                raise ValueError(f"a memory or a number of tokens is not between 0 and {most}")
        if any(value is not None and not 0 <= value <= 1 for value in self.accelerator_busy):
            raise ValueError("a share of accelerator_busy is not between 0 and 1")
        lengths = {len(column) for column in self._columns}
        if len(lengths) > 1 or max(lengths) > MOST_POINTS:
            raise ValueError(f"the columns have {sorted(lengths)} values; expected one length, at most {MOST_POINTS}")
        for name, value in (("began", self.began), ("written", self.written)):
            if value.tzinfo is None or not 2000 <= value.year <= 2999:
                raise ValueError(f"{name} is {value.isoformat()}; expected a time of this age with its time zone")
        if any(not 0 <= value <= _MOST_STEPS for value in self.step):
            raise ValueError(f"a step is not between 0 and {_MOST_STEPS}")
        if any(abs(value) > _MOST_SECONDS for value in self.seconds):
            raise ValueError(f"a point is more than {_MOST_SECONDS} s away from the first")
        return self

    @property
    def _columns(self) -> tuple[list[Any], ...]:
        return (self.step, self.seconds, *(getattr(self, name) for name in MEASURED))

    @property
    def _counts(self) -> tuple[tuple[list[int | None], int], ...]:
        """The columns of whole numbers that a trainer need not know, and their largest value."""
        return (self.accelerator_mib, _MOST_MIB), (self.host_mib, _MOST_MIB), (self.tokens, _MOST_TOKENS)

    def add(self, point: Progress) -> None:
        """Append a point. After MOST_POINTS, every second point of the older half is dropped.

        The held-out loss of a dropped point moves to the point after it.
        """
        self.step.append(point.step)
        self.seconds.append(round((point.time - self.began).total_seconds(), 3))
        for column, value in (
            (self.epoch, point.epoch),
            (self.loss, point.loss),
            (self.learning_rate, point.learning_rate),
            (self.tokens_per_second, point.tokens_per_second),
            (self.accelerator_busy, point.accelerator_busy),
            (self.held_out_loss, point.held_out_loss),
        ):
            column.append(_short(value))
        counted = (point.accelerator_mib, point.host_mib, point.tokens)
        for (counts, most), count in zip(self._counts, counted, strict=True):
            counts.append(None if count is None else min(count, most))
        left = _short(point.eta_seconds)
        self.eta_seconds = None if left is None or abs(left) > _MOST_SECONDS else left
        self.written, self.total_steps = point.time, point.total_steps
        if len(self.step) > MOST_POINTS:
            held_out = self.held_out_loss
            for index in range(1, MOST_POINTS // 2, 2):
                held_out[index + 1] = held_out[index] if held_out[index + 1] is None else held_out[index + 1]
            for points in self._columns:
                del points[1 : MOST_POINTS // 2 : 2]

    def continued_by(self, later: Series) -> Series:
        """This series, and after it `later`, which a restarted container of the same attempt has begun."""
        shift = (later.began - self.began).total_seconds()
        kept = sum(1 for seconds in self.seconds if seconds < shift + min(later.seconds, default=0.0))
        joined = evolve(self, total_steps=later.total_steps, eta_seconds=later.eta_seconds)
        joined.written = later.written
        for name in ("step", *MEASURED):
            setattr(joined, name, (getattr(self, name)[:kept] + getattr(later, name))[-MOST_POINTS:])
        moved = [round(seconds + shift, 3) for seconds in later.seconds]
        joined.seconds = (self.seconds[:kept] + moved)[-MOST_POINTS:]
        return joined

    def time_of(self, index: int) -> datetime:
        """When a point was measured, by the trainer's clock."""
        return self.began + timedelta(seconds=self.seconds[index])

    def changes(self) -> list[int]:
        """The points whose step is another than that of the point before: the same step again is no progress."""
        return [index for index, step in enumerate(self.step) if index == 0 or step != self.step[index - 1]]

    @property
    def last(self) -> datetime | None:
        """When the last point was measured; None without points."""
        return self.time_of(-1) if self.step else None

    def latest(self) -> Progress | None:
        """The last point, with the time that is left; None without points."""
        if not self.step:
            return None
        return evolve(self._point(len(self.step) - 1), eta_seconds=self.eta_seconds)

    def points(self) -> list[Progress]:
        """Every point; the last has the time that is left."""
        latest = self.latest()
        return [*map(self._point, range(len(self.step) - 1)), *([latest] if latest else [])]

    def _point(self, index: int) -> Progress:
        return Progress.model_construct(  # with every field: a default costs as much as five values
            eta_seconds=None,
            attempt=self.attempt,
            time=self.time_of(index),
            step=self.step[index],
            total_steps=self.total_steps,
            epoch=self.epoch[index],
            loss=self.loss[index],
            learning_rate=self.learning_rate[index],
            tokens_per_second=self.tokens_per_second[index],
            accelerator_mib=self.accelerator_mib[index],
            accelerator_busy=self.accelerator_busy[index],
            host_mib=self.host_mib[index],
            tokens=self.tokens[index],
            held_out_loss=self.held_out_loss[index],
        )

    def encoded(self, key: str) -> bytes:
        """The content of the object, with the proof of the run's key."""
        document = json.loads(self.model_dump_json())
        name = series_object(self.run, self.attempt)
        text = json.dumps(proved(key, name, document), separators=(",", ":"))
        packer = zlib.compressobj(wbits=_GZIP)
        return packer.compress(text.encode()) + packer.flush()


class Kept(NamedTuple):
    """A series as the bucket keeps it: with its generation, and the time at which the bucket received it.

    Only the trainer's clock knows when a point was measured. Its distance from the bucket's clock does not count: the
    trainer also noted when it wrote the object, which is when the bucket received the object.
    """

    series: Series
    generation: int
    received: datetime

    def advanced(self) -> datetime | None:
        """When training reached its present step, by the bucket's clock; None without points."""
        changes = self.series.changes()
        return self.received_at(changes[-1]) if changes else None

    def received_at(self, index: int) -> datetime:
        """When a point was measured, by the bucket's clock; never later than `received`."""
        return self.received - max(self.series.written - self.series.time_of(index), timedelta(0))


def series_object(run: str, attempt: int) -> str:
    """Beside the model: the trainer may write there, and the object stays as long as the model does."""
    return f"{model_prefix(run)}series/attempt-{attempt}.json.gz"


def decoded(data: bytes, run: str, attempt: int, key: str = "") -> Series | None:
    """The series in the content of an object.

    None for everything else: other data, the series of another run or attempt, too many bytes, and, with the run's key,
    a series without its proof.
    """
    try:
        unpacker = zlib.decompressobj(wbits=_GZIP)
        text = unpacker.decompress(data, MAX_BYTES)
        if not unpacker.eof or not is_document_proved(key, series_object(run, attempt), text):
            return None
        series = Series.model_validate_json(text)
    except (zlib.error, ValidationError):
        return None
    return series if (series.run, series.attempt) == (run, attempt) else None


class SeriesReader:
    """Reads the series of an attempt. It downloads the object only if the object has changed since the last read."""

    def __init__(self, client: Any, bucket: str, run: str, attempt: int, key: str = "") -> None:
        self._bucket = client.bucket(bucket)
        self._run, self._attempt, self._key = run, attempt, key
        self._name = series_object(run, attempt)
        self._generation = 0
        self._kept: Kept | None = None

    def read(self) -> Kept | None:
        """The series as it is now; None if there is none (see `decoded`). Raises client errors."""
        present = self._bucket.get_blob(self._name, timeout=TIMEOUT_SECONDS)
        if present is None:
            return None
        if int(present.generation) != self._generation:
            self._kept = self._download(present.updated) if present.size <= MAX_BYTES else None
            self._generation = int(present.generation)
        return self._kept

    def _download(self, received: datetime) -> Kept | None:
        blob = self._bucket.blob(self._name)  # of any generation: the trainer may have replaced the one that was seen
        data = read_at_most(blob, MAX_BYTES)
        series = None if data is None else decoded(data, self._run, self._attempt, self._key)
        return None if series is None else Kept(series, int(blob.generation), received)


def read_series(client: Any, bucket: str, run: str, attempt: int, key: str = "") -> Kept | None:
    """The series of an attempt; None if there is none (see `decoded`). Raises client errors."""
    return SeriesReader(client, bucket, run, attempt, key).read()


def write_series(client: Any, bucket: str, series: Series, key: str, generation: int) -> int | None:
    """Write a series if its object's generation is `generation` (0: it does not exist).

    Return the new generation; None if the object has another generation. Raises client errors.
    """
    from google.api_core.exceptions import PreconditionFailed

    blob = client.bucket(bucket).blob(series_object(series.run, series.attempt))
    try:
        blob.upload_from_string(
            series.encoded(key), "application/gzip", if_generation_match=generation, timeout=TIMEOUT_SECONDS
        )
    except PreconditionFailed:
        return None
    return int(blob.generation)


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
