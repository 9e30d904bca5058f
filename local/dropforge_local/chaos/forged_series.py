"""The series that a hostile trainer forges or breaks."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime
from functools import cache
from typing import Any

from dropforge.run.proof import proved
from dropforge.run.series import MAX_BYTES, MEASURED, MOST_POINTS, Series, series_object

from .forgeries import NOBODY, STEP


def series_of(run: str, attempt: int, now: float, key: str) -> bytes:
    """A well-formed series that promises progress for ever, with the proof of a key."""
    time = datetime.fromtimestamp(now, UTC)
    points = {"step": [STEP], "seconds": [1e8], **{column: [1] for column in MEASURED}}
    forged = Series.model_validate({"run": run, "attempt": attempt, "began": time, "written": time, **points})
    return forged.encoded(key)


def broken_series(run: str, attempt: int, key: str) -> list[bytes]:
    """Objects that are no series of the attempt, with the proof of the run wherever they have room for it."""
    when, name = "2026-01-01T00:00:00Z", series_object(run, attempt)
    point: dict[str, Any] = {"step": [STEP], "seconds": [1.0], **{column: [1] for column in MEASURED}}
    good = {"run": run, "attempt": attempt, "began": when, "written": when, **point}
    documents = [
        {**good, "run": NOBODY},
        {**good, "attempt": attempt + 1},
        {**good, "loss": [float("nan")]},
        {**good, "seconds": [float("inf")]},
        {**good, "step": ["many"]},
        {**good, "step": [-1]},
        {**good, "step": [10**400]},
        {**good, "step": STEP},
        {**good, "began": "yesterday"},
        {**good, "began": "0001-01-01T00:00:00Z"},
        {**good, "seconds": [1.0, 2.0]},
        {**good, **{column: [1] * (MOST_POINTS + 1) for column in point}},
        {},
    ]
    texts = [json.dumps(proved(key, name, document)).encode() for document in documents]
    whole = _packed(texts[2])
    deep = b"[" * 100_000
    return [
        *map(_packed, texts),
        _packed(b"null"),
        _packed(deep),
        _packed(b'{"proof": "\\ud800"}'),
        *_huge(),
        whole[:-9],
        b"",
    ]


@cache
def _huge() -> tuple[bytes, bytes]:
    """A small object that unpacks to more than a series may have, and an object that has more itself."""
    return _packed(b" " * (4 * MAX_BYTES)), b"\x1f\x8b\x08" + b"\0" * MAX_BYTES


def _packed(text: bytes) -> bytes:
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    return packer.compress(text) + packer.flush()
