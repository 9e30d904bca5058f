"""Writes the series of an attempt (dropforge/run/series.py) in a thread of its own: training never waits for it."""

from __future__ import annotations

import threading
from typing import Any

from dropforge.base.log import log
from dropforge.base.threads import Thread
from dropforge.cloud.clients import Clients
from dropforge.run.series import Progress, Series, read_series, series_object, write_series

from .host import THIS_MACHINE, Host
from .job import Job
from .redactor import Redactor

WRITE_SECONDS = 2.0  # at least, between two writes; Cloud Storage takes one write a second of an object
PAUSE_SECONDS = 30.0  # after a write that failed
_TRIES = 3  # of a write that finds the object changed


class SeriesWriter:
    """Collects the points of one attempt, and writes all of them again whenever there are new points.

    A restarted container of the same attempt continues the series that its predecessor has left.
    """

    def __init__(self, job: Job, redact: Redactor, clients: Clients, host: Host = THIS_MACHINE) -> None:
        self._job, self._redact, self._clients, self._threads = job, redact, clients, host.threads
        self._lock = threading.Lock()
        self._series: Series | None = None
        self._generation = 0
        self._unwritten = False
        self._failures = 0
        self._changed, self._closing = self._threads.event(), self._threads.event()
        self._thread: Thread | None = None

    def add(self, point: Progress) -> None:
        """Append a point; the thread writes it soon."""
        with self._lock:
            if self._series is None:
                run, attempt = self._job.run, self._job.attempt
                self._series = Series(run=run, attempt=attempt, began=point.time, written=point.time)
                self._thread = self._threads.start("series", self._write_all)
            self._series.add(point)
            self._unwritten = True
        self._changed.set()

    def close(self) -> None:
        """Let the thread write the points that are not written yet, and end."""
        self._closing.set()
        self._changed.set()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _write_all(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            self._changed.wait()
            self._changed.clear()
            pause = WRITE_SECONDS if self._try_to_write() else PAUSE_SECONDS
        self._try_to_write()

    def _try_to_write(self) -> bool:
        """Write the points if there are new points; False if that failed."""
        try:
            return self._write()
        except Exception as error:  # noqa: BLE001  (a failure of Cloud Storage must not fail the run)
            self._failures += 1
            if self._failures in (1, 10, 100, 1000):
                name = series_object(self._job.run, self._job.attempt)
                message = self._redact(f"{name} was not written {self._failures} times; the last: {error!r}")
                log(message, stage="train", run=self._job.run, severity="WARNING")
            return False

    def _write(self) -> bool:
        client = self._clients.storage()
        for _ in range(_TRIES):
            with self._lock:
                if self._series is None or not self._unwritten:
                    return True
                copy = self._series.model_copy(deep=True)
                self._unwritten = False
            try:
                generation = write_series(client, self._job.bucket, copy, self._job.key, self._generation)
            except Exception:
                self._unwritten = True
                raise
            if generation is not None:
                self._generation = generation
                return True
            self._join(client)
        return False

    def _join(self, client: Any) -> None:
        """Continue the series in the bucket: a predecessor's, or our own after a lost reply. Other data is replaced."""
        job = self._job
        kept = read_series(client, job.bucket, job.run, job.attempt, job.key)
        if kept is None:
            present = client.bucket(job.bucket).get_blob(series_object(job.run, job.attempt))
            self._generation = int(present.generation) if present else 0
        with self._lock:
            if kept is not None and self._series is not None:
                self._generation = kept.generation
                self._series = kept.series.continued_by(self._series)
            self._unwritten = True
