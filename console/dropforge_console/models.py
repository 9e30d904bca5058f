"""The committed models and where each comes from: data, base, run, gate, parity, size, and where it is served."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.base.figures import number
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.artifacts import Source, model_uri

from .reader import Committed, Run
from .views import UNKNOWN, Status, labels

REVISION_CHARACTERS = 12
BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))  # as clouds sell them


class Origin(NamedTuple):
    """A model or a data set that a model was made of. `run` is the run that made it, or ""."""

    uri: str
    revision: str
    run: str


class Served(NamedTuple):
    """Where a model answers. `path` is the page of it."""

    text: str
    path: str


class Model(NamedTuple):
    """A committed model as the page shows it. `commands` are pairs of a title and a command."""

    run: str
    name: str
    created: datetime
    method: str
    base: Origin
    dataset: Origin
    labels: list[str]
    metrics: str
    gate: Status
    gate_rule: str
    parity: Status
    size: str
    served: list[Served]
    commands: list[tuple[str, str]]


def model(run: Run, committed: Committed, endpoints: Sequence[EndpointRecord], bucket: str) -> Model:
    """Return what the page shows of the model of a run."""
    record, spec = run
    uri = f"{model_uri(bucket, record.run)}/{committed.serve_path}"
    return Model(
        record.run,
        record.name or record.run,
        committed.created,
        f"{spec.training.method}, adapter {spec.training.adapter.type}" if spec else UNKNOWN,
        _origin(committed.base, bucket),
        _origin(committed.dataset, bucket),
        labels(spec.labels if spec else {}),
        _metrics(committed.metrics),
        *_gate(run),
        _parity(run),
        f"{size_text(committed.size)} in {committed.files:,} files",
        _served(run, endpoints),
        [
            ("Serve it behind a name", f"dropforge serve {record.origin or record.run} --as NAME"),
            ("Download it", f"gcloud storage cp --recursive {shlex.quote(uri)} {shlex.quote(record.name or 'model')}"),
        ],
    )


def size_text(size: int) -> str:
    """Return a size in bytes with a unit and three digits."""
    for unit, length in BYTES:
        if size >= length:
            return f"{size / length:.3g} {unit}"
    return f"{size} B"


def _origin(source: Source, bucket: str) -> Origin:
    """A model in this deployment's own bucket is the model of another run."""
    match = re.match(rf"gs://{re.escape(bucket)}/models/([^/]+)", source.uri)
    run = match[1] if match and names.is_run_id(match[1]) else ""
    return Origin(source.uri, source.revision.removeprefix("sha256:")[:REVISION_CHARACTERS], run)


def _metrics(metrics: dict[str, float | None]) -> str:
    shown = [
        f"{name.replace('_', ' ')} {number(metrics[f'{name}_before'])} → {number(value)}"
        for name, value in metrics.items()
        if value is not None and f"{name}_before" in metrics
    ]
    return " · ".join(shown) or UNKNOWN


def _gate(run: Run) -> tuple[Status, str]:
    record, spec = run
    gate = spec.evaluation.gate if spec and spec.evaluation else None
    if gate is None:
        return Status("no gate", "off", "ring"), ""
    rule = f"{gate.metric.replace('_', ' ')} {'≥' if gate.min is not None else '≤'} {gate.min or gate.max or 0:g}"
    if record.error is not None and record.error.error_class is ErrorClass.GATE:
        return Status("not passed", "fail", "cross"), rule
    if gate.passes(record.metrics.get(gate.metric)):
        return Status("passed", "good", "tick"), rule
    return Status("not decided", "hold", "sand"), rule


_PARITY = {
    "sealed": Status("sealed", "good", "tick"),
    "checking": Status("checking", "run", "half"),
    "unsealed": Status("unsealed", "hold", "triangle"),
    "failed": Status("failed", "fail", "cross"),
}


def _parity(run: Run) -> Status:
    parity = run.record.parity
    return _PARITY[parity.state] if parity else Status("not compared", "off", "ring")


def _served(run: Run, endpoints: Sequence[EndpointRecord]) -> list[Served]:
    record = run.record
    named = [
        Served(f"{each.name}, revision {each.serving.number}", f"/endpoints#endpoint-{each.name}")
        for each in endpoints
        if each.serving is not None and each.serving.run == record.run
    ]
    own = record.endpoint
    if own is None or own.ended:
        return named
    return [*named, Served(f"its own endpoint in {own.region}", f"/runs/{record.run}")]
