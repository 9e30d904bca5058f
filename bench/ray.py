"""Target ray on a laptop: the duration and memory of a real Ray cluster, and the loss with 1 host and with 2 hosts.

Needs `make maxtext`; takes some minutes.

RayJob → driver, first step    from the attempt's launch to the job event `started` and the first point of the series
memory                         largest proportional set size of all processes of the cluster's pods
loss                           of the same rows, 16 in each step: 8 on each of 2 hosts, or 16 on 1 host
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from dropforge_local.containers.processes import find_members
from dropforge_local.stack import control as local

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "local" / "ray.json"
RUN_SECONDS = 1200.0
POLL_SECONDS = 2.0
ROWS, STEPS = 16, 10
TOPOLOGIES = {2: "2x2x2", 1: "2x2x1"}  # hosts of v5p


def main() -> None:
    if not (ROOT / "build" / "maxtext" / ".installed").exists():
        raise SystemExit("build/maxtext does not exist: run `make maxtext`, which needs Python 3.12")
    with running_stack() as state:
        cloud = Cloud()
        losses = [measure(cloud, state, hosts) for hosts in TOPOLOGIES]
    difference = abs(losses[0] - losses[1])
    print(
        f"loss on 64 of the rows after {STEPS} steps: {losses[0]:.7f} and {losses[1]:.7f}, difference {difference:.1e}"
    )


@contextmanager
def running_stack() -> Iterator[Path]:
    """Start a new stack with the real images; yield its state directory."""
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "stack"
        os.environ.update(local.up(state).environment)
        try:
            yield state
        finally:
            local.down(state)


class Cloud:
    """Drops specs and reads job events, through ordinary clients."""

    def __init__(self) -> None:
        from google.cloud import pubsub_v1

        from dropforge.context import Context

        context = Context.from_environment()
        self.settings = context.settings
        self.clients = context.cloud.clients
        self.client = self.clients.storage()
        self.store = context.store
        self._subscriber = pubsub_v1.SubscriberClient()
        self._subscription = f"projects/{self.settings.project}/subscriptions/bench"
        topic = self.settings.topic(self.settings.job_events_topic)
        self._subscriber.create_subscription(name=self._subscription, topic=topic)

    def drop(self, spec: dict[str, Any]) -> str:
        """Upload a spec, its model and its data; return the run id."""
        from dropforge.base import names
        from dropforge_cli.sources import upload_source

        for uri in (spec["model"]["source"], spec["dataset"]["source"], spec["evaluation"]["source"]):
            upload_source(self.clients, uri)
        blob = self.client.bucket(self.settings.specs_bucket).blob(f"specs/ray-{time.time_ns()}.json")
        blob.upload_from_string(json.dumps(spec), "application/json")
        return names.run_id_of_object(self.settings.specs_bucket, blob.name, blob.generation)

    def events(self) -> list[dict[str, Any]]:
        """Return the job events since the last call, in any order."""
        answer = self._subscriber.pull(
            subscription=self._subscription, max_messages=1000, return_immediately=True, timeout=60
        )
        if ack_ids := [received.ack_id for received in answer.received_messages]:
            self._subscriber.acknowledge(subscription=self._subscription, ack_ids=ack_ids)
        return [json.loads(received.message.data) for received in answer.received_messages]


def measure(cloud: Cloud, state: Path, hosts: int) -> float:
    """Train on `hosts` hosts, print durations and memory, and return the loss."""
    run = cloud.drop(small_spec(hosts))
    received, largest, processes, began = [], 0.0, 0, time.monotonic()
    while not (ended := _ended(cloud, run)):
        if time.monotonic() > began + RUN_SECONDS:
            raise SystemExit(f"run {run} did not end in {RUN_SECONDS:.0f} s")
        received += cloud.events()
        largest, processes = max((largest, processes), memory(state))
        time.sleep(POLL_SECONDS)
    received += cloud.events()
    if ended.state != "SUCCEEDED":
        raise SystemExit(f"run {run} ended {ended.state}: {ended.error}")
    launched = ended.attempts[-1].launched
    kept = cloud.store.series(run, len(ended.attempts))
    assert kept is not None, "a container that succeeds has written its series"
    first = [_first(received, "started") - launched, kept.series.time_of(0) - launched]
    seconds = (ended.history[-1].time - ended.created).total_seconds()
    print(
        f"{hosts} hosts: RayJob → driver {first[0].total_seconds():.0f} s, → first step "
        f"{first[1].total_seconds():.0f} s; upload → all deleted {seconds:.0f} s; "
        f"{largest / 2**30:.1f} GiB in {processes} processes"
    )
    return float(ended.metrics["probe_loss"])


def small_spec(hosts: int) -> dict[str, Any]:
    """The laptop's example with few steps and without an endpoint."""
    spec: dict[str, Any] = json.loads(EXAMPLE.read_text())
    spec["training"] |= {"max_steps": STEPS, "checkpoint_steps": STEPS, "per_device_train_batch_size": ROWS // hosts}
    spec["target"] |= {"topology": TOPOLOGIES[hosts]}
    return {**spec, "evaluation": None, "serve": None, "notify": {}, "$schema": None}


def memory(state: Path) -> tuple[float, int]:
    """Return the bytes of the processes of all pods, shared pages counted once; and the number of processes."""
    total, count = 0.0, 0
    for pids in find_members(state / "pods").values():
        for pid in pids:
            with suppress(psutil.Error):
                total, count = total + psutil.Process(pid).memory_full_info().pss, count + 1
    return total, count


def _ended(cloud: Cloud, run: str) -> Any:
    """Return the record if it is terminal."""
    from dropforge.base.errors import NotFound

    with suppress(NotFound):
        record = cloud.store.record(run)
        return record if record.state.is_terminal else None
    return None


def _first(events: list[dict[str, Any]], kind: str) -> datetime:
    return min(datetime.fromisoformat(event["time"]) for event in events if event["type"] == kind)


if __name__ == "__main__":
    main()
