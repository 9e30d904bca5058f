"""The series of an attempt: written by a trainer's thread into the emulated Cloud Storage, read by one request."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containers.common.job import Job
from containers.common.redactor import Redactor
from containers.common.series import SeriesWriter
from dropforge.cloud.clients import Clients
from dropforge.run.series import (
    MAX_BYTES,
    MEASURED,
    MOST_POINTS,
    Kept,
    Progress,
    Series,
    SeriesReader,
    decoded,
    read_series,
    series_object,
    write_series,
)
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator

from ..patience import PATIENCE_SECONDS

BUCKET, KEY = "runs", "6b" * 32
MEMORY = ("accelerator_mib", "host_mib")
COLUMNS = ("step", "seconds", *MEASURED)
BEGAN = datetime(2026, 11, 24, 8, tzinfo=UTC)
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    home = tmp_path_factory.mktemp("series")

    def build() -> list[Any]:
        emulator = StorageEmulator(Database(home / "state.db"), home / "blobs", SystemClock())
        emulator.create_bucket(BUCKET)
        return [emulator]

    with BackgroundServer(build) as server:
        options = {"api_endpoint": server.url}
        with storage.Client("p1", AnonymousCredentials(), client_options=options) as storage_client:
            yield storage_client


@pytest.fixture
def run() -> str:
    return f"job-{next(_numbers):012x}"


@pytest.fixture
def writer(client: Any, run: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], SeriesWriter]:
    """Return a function that makes a writer, like a container that starts."""
    clients = Clients()
    monkeypatch.setattr(clients, "storage", lambda: client)
    job = Job(project="p1", run=run, attempt=1, bucket=BUCKET, topic="t", deadline=None, grace_seconds=10, key=KEY)
    return lambda: SeriesWriter(job, Redactor(), clients)


def point(run: str, step: int, seconds: float | None = None, **fields: Any) -> Progress:
    when = BEGAN + timedelta(seconds=30 * step if seconds is None else seconds)
    return Progress(attempt=1, time=when, step=step, total_steps=10**6, **fields)


def series_of(run: str, steps: int) -> Series:
    series = Series(run=run, attempt=1, began=BEGAN, written=BEGAN)
    for step in range(steps):
        loss = 4 / (1 + step) + 0.123456789
        series.add(point(run, step, loss=loss, learning_rate=2e-4 / (1 + step), tokens_per_second=10990.1 + step % 7))
    return series


def finish(writer: SeriesWriter) -> None:
    writer.close()
    writer.wait(PATIENCE_SECONDS)


def kept(client: Any, run: str, key: str = KEY) -> Kept:
    found = read_series(client, BUCKET, run, 1, key)
    assert found is not None
    return found


def test_a_training_of_days_is_one_object_of_less_than_a_mebibyte(client: Any, run: str) -> None:
    series = series_of(run, 18_000)
    assert write_series(client, BUCKET, series, KEY, 0)
    assert kept(client, run).series == series
    assert client.bucket(BUCKET).get_blob(series_object(run, 1)).size < 1 << 20
    latest = series.latest()
    assert latest is not None
    assert (latest.step, latest.time, latest.loss) == (17_999, BEGAN + timedelta(seconds=30 * 17_999), 0.123679)


def test_a_reader_downloads_a_series_again_only_if_it_has_changed(client: Any, run: str) -> None:
    reader, series = SeriesReader(client, BUCKET, run, 1, KEY), series_of(run, 2)
    assert reader.read() is None
    generation = write_series(client, BUCKET, series, KEY, 0)
    first = reader.read()
    assert first is not None
    assert reader.read() is first
    series.add(point(run, 2))
    assert write_series(client, BUCKET, series, KEY, generation or 0)
    second = reader.read()
    assert second is not None
    assert second.series.step == [0, 1, 2]


@pytest.mark.parametrize("left", [float("inf"), float("nan"), 1e12])
def test_a_trainer_that_seems_to_need_for_ever_has_a_series(run: str, left: float) -> None:
    series = series_of(run, 1)
    series.add(point(run, 1, eta_seconds=left, loss=left))
    read = decoded(series.encoded(KEY), run, 1, KEY)
    assert read is not None
    assert read.eta_seconds is None


def test_a_reader_gets_the_points_that_were_added(run: str) -> None:
    series = series_of(run, 3)
    points = series.points()
    assert [(found.step, found.time, found.attempt) for found in points] == [
        (step, series.time_of(index), series.attempt) for index, step in enumerate(series.step)
    ]
    assert points[-1] == series.latest()


def test_the_longest_series_with_the_longest_numbers_is_read(run: str) -> None:
    series, least = Series(run=run, attempt=1, began=BEGAN, written=BEGAN), -1.23456e-105
    longest: dict[str, Any] = {"epoch": least, "loss": least, "learning_rate": least, "tokens_per_second": least}
    longest |= dict.fromkeys(MEMORY, 10**12) | {"tokens": 10**16}
    for step in range(10**11, 10**11 + MOST_POINTS):
        series.add(point(run, step, 10**8 + 0.123 + step % MOST_POINTS, **longest))
    assert decoded(series.encoded(KEY), run, 1, KEY) == series


def test_a_series_with_a_wrong_column_is_refused(run: str) -> None:
    document = json.loads(series_of(run, 3).model_dump_json())
    for name, wrong in (
        *((name, []) for name in MEASURED),
        *(("host_mib", memory) for memory in ([1, 2], [-1, 0, 0], [10**9, 0, 0])),
        *(("accelerator_busy", shares) for shares in ([0.5, 0.5], [-0.1, 0, 0], [1.1, 0, 0])),
    ):
        assert decoded(gzip.compress(json.dumps(document | {name: wrong}).encode()), run, 1, "") is None


def test_a_series_never_has_more_points_than_it_may(run: str) -> None:
    """It keeps its first and its last point, and the newer half whole."""
    series = series_of(run, 2 * MOST_POINTS + 1)
    assert len(series.step) <= MOST_POINTS
    assert series.step == sorted(set(series.step))
    assert (series.step[0], series.step[-1]) == (0, 2 * MOST_POINTS)
    assert series.step[-1000:] == list(range(2 * MOST_POINTS - 999, 2 * MOST_POINTS + 1))
    assert decoded(series.encoded(KEY), run, 1, KEY) == series
    assert len(series.encoded(KEY)) < MAX_BYTES


def test_no_held_out_loss_is_lost_with_the_points_that_are_dropped(run: str) -> None:
    series = Series(run=run, attempt=1, began=BEGAN, written=BEGAN)
    measured = range(0, 2 * MOST_POINTS, MOST_POINTS // 10 + 1)
    for step in range(2 * MOST_POINTS):
        series.add(point(run, step, held_out_loss=float(step) if step in measured else None))
    found = {loss: step for step, loss in zip(series.step, series.held_out_loss, strict=True) if loss is not None}
    assert sorted(found) == list(measured)
    assert all(0 <= step - loss < 100 for loss, step in found.items())  # beside the step that was measured


def test_a_restarted_container_continues_its_series(client: Any, run: str, writer: Any) -> None:
    first = writer()
    for step in (1, 2, 3):
        first.add(point(run, step))
    finish(first)
    second = writer()
    for step, seconds in ((2, 100.0), (3, 130.0)):  # from the checkpoint of step 1
        second.add(point(run, step, seconds))
    finish(second)
    series = kept(client, run).series
    assert series.step == [1, 2, 3, 2, 3]
    assert series.began == BEGAN + timedelta(seconds=30)
    assert [series.time_of(index) for index in (0, 3)] == [
        BEGAN + timedelta(seconds=30),
        BEGAN + timedelta(seconds=100),
    ]


def test_a_write_whose_reply_was_lost_is_not_repeated(client: Any, run: str, writer: Any) -> None:
    series = series_of(run, 3)
    write_series(client, BUCKET, series, KEY, 0)
    again = writer()
    for step in range(4):
        again.add(point(run, step, loss=4 / (1 + step) + 0.123456789))
    finish(again)
    assert kept(client, run).series.step == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content", [b"", b"{}", gzip.compress(b"[1]", mtime=0), gzip.compress(b"{}", mtime=0), b"\x1f\x8b\x08cut"]
)
def test_a_foreign_object_is_no_series_and_does_not_keep_the_trainer_from_writing(
    client: Any, run: str, writer: Any, content: bytes
) -> None:
    client.bucket(BUCKET).blob(series_object(run, 1)).upload_from_string(content)
    assert read_series(client, BUCKET, run, 1, KEY) is None
    mine = writer()
    mine.add(point(run, 1))
    finish(mine)
    assert kept(client, run).series.step == [1]


def forged(of: str, key: str = KEY, **fields: Any) -> bytes:
    from dropforge.run.proof import proved

    document = json.loads(gzip.decompress(series_of(of, 2).encoded(""))) | fields
    return gzip.compress(json.dumps(proved(key, series_object(of, 1), document)).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "other-0123456789ab"},
        {"attempt": 2},
        {"step": [1, 2, 3]},
        {"step": [-1, 2]},
        {"step": [1, 10**30]},
        {"seconds": [0, 1e300]},
        {"loss": [float("nan"), 1]},
        {"loss": ["<script>", 1]},
        {"began": "2026-11-24T08:00:00"},
        {"written": "0001-01-01T00:00:00Z"},
        {"total_steps": -1},
        {"total_steps": 10**400},
        {"eta_seconds": 1e300},
        {"loss": [None] * (MOST_POINTS + 1)},
        {name: [1] * (MOST_POINTS + 1) for name in COLUMNS},
        {"later": "x" * MAX_BYTES},
    ],
)
def test_what_a_hostile_container_writes_is_no_series(run: str, fields: dict[str, Any]) -> None:
    assert decoded(forged(run), run, 1, KEY) is not None
    assert decoded(forged(run, **fields), run, 1, KEY) is None


def test_a_step_that_is_repeated_is_no_progress(run: str) -> None:
    series = Series(run=run, attempt=1, began=BEGAN, written=BEGAN)
    for step, seconds in ((1, 0), (2, 60), (2, 120), (2, 180)):
        series.add(point(run, step, seconds))
    received = BEGAN + timedelta(hours=1)  # the bucket's clock
    assert Kept(series, 1, received).advanced() == received - timedelta(seconds=120)


def test_no_point_is_later_than_its_object(run: str) -> None:
    """A hostile trainer could promise progress for years."""
    series = series_of(run, 2).model_copy(update={"seconds": [0.0, 1e9]})
    received = BEGAN + timedelta(hours=1)
    assert Kept(series, 1, received).advanced() == received


def test_a_series_without_the_proof_of_its_run_decides_nothing(run: str) -> None:
    assert decoded(forged(run, key="of another run"), run, 1, KEY) is None
    assert decoded(forged(run, key=""), run, 1, KEY) is None
    assert decoded(gzip.compress(bytes(MAX_BYTES + 1)), run, 1, "") is None, "it unpacks to more than a reader takes"


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    assert decoded(data, "r-0123456789ab", 1, KEY) is None
    assert decoded(gzip.compress(data), "r-0123456789ab", 1, "") is None


def test_a_dead_storage_costs_the_training_nothing(run: str, writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = writer()

    def refuse() -> Any:
        raise RuntimeError("no storage")

    monkeypatch.setattr(mine._clients, "storage", refuse)
    for step in range(1000):
        mine.add(point(run, step))
    mine.close()
    deadline = time.monotonic() + PATIENCE_SECONDS
    mine.wait(PATIENCE_SECONDS)
    assert time.monotonic() < deadline
