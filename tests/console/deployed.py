"""A console over a bucket in memory: runs with records, specs, series and samples, as the control plane leaves them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.testclient import TestClient

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.run.artifacts import ArtifactFile, Manifest, Source
from dropforge.run.record import Record
from dropforge.run.series import Progress, Series, write_series
from dropforge_console.access import Access
from dropforge_console.app import create_app
from dropforge_console.pages import LogReader
from dropforge_console.passes import SESSION, Passes

from ..deployments import Memory, context_with

HOST = "127.0.0.1:8899"


class Deployed:
    """The runs bucket of a deployment, in memory."""

    def __init__(self, now: datetime | None = None) -> None:
        self.storage = Memory()
        self._now = now

    def put(self, name: str, data: bytes) -> None:
        generation = self.storage.objects.get(name, (b"", 0))[1]
        self.storage.blob(name).upload_from_string(data, if_generation_match=generation)

    def add(self, record: Record, spec: Mapping[str, Any] | None = None) -> None:
        if spec is not None:
            self.put(names.spec_object(record.run), json.dumps(spec).encode())
        self.put(names.record_object(record.run), record.model_dump_json().encode())

    def report(self, run: str, attempt: int, points: Sequence[Progress]) -> None:
        """The series of an attempt, whose first point was measured at `points[0].time`."""
        series = Series(run=run, attempt=attempt, began=points[0].time, written=points[0].time)
        for point in points:
            series.add(point)
        write_series(self.storage, "runs", series, "", 0)

    def commit(self, run: str, samples: Any, metrics: Mapping[str, float | None] | None = None) -> None:
        """The manifest of a run with its samples, as a container writes them."""
        data = json.dumps(samples).encode()
        path = "attempt-1/samples.json"
        self.put(f"models/{run}/{path}", data)
        manifest = Manifest(
            run=run,
            attempt=1,
            created=utc_now(),
            spec_sha256="0" * 64,
            base=Source(uri="google/gemma-2b", revision="a" * 40),
            dataset=Source(uri="owner/data", revision="b" * 40),
            serve_path="attempt-1/model",
            metrics=dict(metrics or {}),
            files=[ArtifactFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), crc32c="AAAAAA==")],
        )
        self.put(f"models/{run}/MANIFEST.json", manifest.model_dump_json().encode())

    def app(self, access: Access, read_log: LogReader | None = None) -> Starlette:
        now = self._now
        return create_app(context_with(now=(lambda: now) if now else utc_now, storage=self.storage), access, read_log)

    @contextmanager
    def opened(self, directory: Path, read_log: LogReader | None = None) -> Iterator[TestClient]:
        """A browser with a session on this machine."""
        passes = Passes(directory, lambda: 1000.0)
        access = Access(HOST, passes)
        cookies = {access.cookie: passes.issue(SESSION)}
        with TestClient(self.app(access, read_log), base_url=f"http://{HOST}", cookies=cookies) as client:
            yield client


def points(began: datetime, steps: int, attempt: int = 1, loss: float = 2.0) -> list[Progress]:
    """The progress of a training of 40 s a step, whose held-out loss is measured at every fifth step."""
    return [
        Progress(
            attempt=attempt,
            time=began + timedelta(seconds=40 * step),
            step=step,
            total_steps=steps,
            epoch=step / steps,
            loss=loss / (1 + 0.1 * step),
            learning_rate=2e-4 * (1 - step / steps),
            tokens_per_second=3000.0 + 100 * (step % 3),
            accelerator_mib=18_000,
            accelerator_busy=0.93,
            host_mib=4_000,
            tokens=120_000 * step,
            held_out_loss=1.1 * loss / (1 + 0.1 * step) if step % 5 == 0 else None,
        )
        for step in range(1, steps + 1)
    ]
