"""Target tpu_vm on a laptop: the seconds of each stage of the run and of MaxText's container, and the metrics.

Runs examples/local/tpu_vm.json without an endpoint on a new stack. Needs `make maxtext`; takes some minutes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dropforge_local.stack import control as local

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "local" / "tpu_vm.json"
RUN_SECONDS = 1200.0
LOSSES = ("loss_before", "loss", "probe_loss_before", "probe_loss", "probe_loss_exported", "exact_match")


def main() -> None:
    if not (ROOT / "build" / "maxtext" / ".installed").exists():
        print("build/maxtext does not exist: run `make maxtext`, which needs Python 3.12")
        return
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "stack"
        info = local.up(state)
        os.environ.update(info.environment)
        try:
            measure(info.http)
        finally:
            local.down(state)


def measure(http: str) -> None:
    """Run the example and print its durations and metrics."""
    from dropforge.context import Context
    from dropforge_local.stack.logs import read_log

    run, store = drop(), Context.from_environment().store
    record = wait_for_end(store, run)
    if record.state != "SUCCEEDED":
        raise SystemExit(f"run {run} ended {record.state}: {record.error or record.problems}")
    node = next(entry.name for entry in store.ledger(run).entries if "/nodes/" in entry.name)
    print("run        ", describe(record.stage_seconds(record.history[-1].time).items()))
    print("container  ", describe(stages(read_log(http, node) or "")))
    print("metrics    ", ", ".join(f"{name} {record.metrics[name]:.4f}" for name in LOSSES))


def drop() -> str:
    """Upload the example without endpoint and secrets, and its model and data; return the run id."""
    from dropforge.base import names
    from dropforge.context import Context
    from dropforge_cli.sources import upload_source

    context = Context.from_environment()
    spec: dict[str, Any] = {**json.loads(EXAMPLE.read_text()), "serve": None, "notify": {}, "secrets": {}}
    for uri in (spec["model"]["source"], spec["dataset"]["source"], spec["evaluation"]["source"]):
        upload_source(context.cloud.clients, uri)
    bucket = context.settings.specs_bucket
    blob = context.cloud.clients.storage().bucket(bucket).blob(f"specs/maxtext-{time.time_ns()}.json")
    blob.upload_from_string(json.dumps(spec), "application/json")
    return names.run_id_of_object(bucket, blob.name, blob.generation)


def wait_for_end(store: Any, run: str) -> Any:
    """Wait for the end of the run; return its record."""
    from dropforge.base.errors import NotFound

    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        with suppress(NotFound):
            record = store.record(run)
            if record.state.is_terminal:
                return record
        time.sleep(0.5)
    raise SystemExit(f"run {run} did not end in {RUN_SECONDS:.0f} s")


def stages(log: str) -> Iterator[tuple[str, float]]:
    """Yield each stage of the container and its seconds, from the driver's log."""
    for line in log.splitlines():
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "seconds" in entry and entry.get("message") == "done":
                yield entry["stage"], entry["seconds"]


def describe(seconds: Any) -> str:
    """Format (name, seconds) pairs on a single line."""
    return ", ".join(f"{name.lower()} {value:.1f} s" for name, value in seconds)
