"""The whole stack with containers that train nothing: what dropforge itself costs, from upload to terminal state.

upload → execution started     from the storage client's call to the execution's start time
last job event → terminal      from the publication of `succeeded` to the record's terminal transition, train only
no-op runs per second          N specs dropped at once, until the last is terminal
memory                         of the stack's two processes, idle and with N runs waiting for their containers
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from dropforge_local import stack as local
from dropforge_local.stack import IMAGES, StackConfig

ROOT = Path(__file__).resolve().parents[1]
SEQUENTIAL, TOGETHER, WAITING = 40, 100, int(os.environ.get("BENCH_WAITING", "1000"))
SETTINGS = {
    "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-noop:bench",
    "DROPFORGE_SLACK_WEBHOOK_SECRET": "",
    "DROPFORGE_CHECK_INTERVAL_SECONDS": "300",  # as in the cloud; a laptop's stack looks every five seconds
}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "stack"
        config = StackConfig(images=str(ROOT / "tests" / "images"), settings=SETTINGS, cloud_run={"gpu_quota": 10**6})
        config.save(state)
        info = local.up(state)
        os.environ.update(info.environment)
        try:
            measure(info)
        finally:
            local.down(state)


def measure(info: local.StackInfo) -> None:
    from dropforge import clients
    from dropforge.runs import RunStore
    from dropforge.settings import settings

    store = RunStore(clients.storage(), settings().runs_bucket)
    wait_for(store, [drop("warm-up")])
    print(f"memory idle: {memory(info):.0f} MB")
    started, ended = [], []
    for number in range(SEQUENTIAL):
        began = time.time()
        run = drop(f"one-{number}")
        wait_for(store, [run])
        started.append(execution_start(store.record(run)) - began)
        ended.append(terminal_delay(store, run))
    show("upload → execution started", started)
    show("last job event → terminal", ended)
    began = time.monotonic()
    wait_for(store, [drop(f"many-{number}") for number in range(TOGETHER)], timeout=300)
    print(f"no-op runs per second: {TOGETHER / (time.monotonic() - began):.1f} ({TOGETHER} at once)")
    wait_for_waiting(store, [drop(f"wait-{number}", behave="hang") for number in range(WAITING)])
    before = cpu_seconds(info)
    time.sleep(10)
    percent = (cpu_seconds(info) - before) * 10
    print(f"memory with {WAITING} runs waiting: {memory(info):.0f} MB, {percent:.1f} % of a core")


def drop(name: str, behave: str = "succeed") -> str:
    """Upload a train-only spec with the ordinary client; its run id."""
    from dropforge import clients, names
    from dropforge.settings import settings

    spec = {
        "api_version": "dropforge/v1",
        "name": "noop",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": None,
        "labels": {"behave": behave},
    }
    blob = clients.storage().bucket(settings().specs_bucket).blob(f"specs/{name}.json")
    blob.upload_from_string(json.dumps(spec), "application/json")
    return names.run_id_of_object(settings().specs_bucket, blob.name, blob.generation)


def wait_for(store: Any, runs: list[str], timeout: float = 60) -> None:
    left, deadline = set(runs), time.monotonic() + timeout
    while left and time.monotonic() < deadline:
        left = {run for run in left if (record := store.find(run)) is None or not record.state.is_terminal}
        time.sleep(0.02)
    if left:
        raise SystemExit(f"{len(left)} runs did not end, among them {store.find(left.pop())}")


def wait_for_waiting(store: Any, runs: list[str]) -> None:
    """Until every run waits for its container, which has reported that it started."""
    left, deadline = set(runs), time.monotonic() + 900
    while left and time.monotonic() < deadline:
        left = {run for run in left if (record := store.find(run)) is None or record.state != "TRAINING"}
        time.sleep(1)
    if left:
        print(f"  ({len(left)} of them had not started)")


def execution_start(record: Any) -> float:
    from dropforge import clients
    from dropforge.settings import settings

    name = f"{settings().workflow_name}/executions/{record.execution}"
    return float(clients.workflow_executions().get_execution(name=name).start_time.timestamp())


def terminal_delay(store: Any, run: str) -> float:
    """Seconds from the container's `succeeded` to the terminal state."""
    event = next(name for name in store.names(f"runs/{run}/events/") if name.endswith("-succeeded.json"))
    published = datetime.fromisoformat(json.loads(store.read(event).data)["time"])
    return float((store.record(run).history[-1].time - published).total_seconds())


def memory(info: local.StackInfo) -> float:
    """Megabytes (RSS) of the stack and the functions, without containers."""
    return sum(process.memory_info().rss for process in processes(info)) / 1e6


def cpu_seconds(info: local.StackInfo) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes(info))


def processes(info: local.StackInfo) -> list[psutil.Process]:
    """The stack and the functions' master and worker; containers are children of nobody."""
    stack = psutil.Process(info.pid)
    return [stack, *(p for p in stack.children(recursive=True) if "functions_host" in " ".join(p.cmdline()))]


def show(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(f"{what}: p50 {statistics.median(ordered) * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms (n={len(ordered)})")
