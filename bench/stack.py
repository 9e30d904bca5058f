"""The whole stack with containers that train nothing: the cost of dropforge itself, from upload to terminal state.

upload → execution started     from the storage client's call to the execution's start time
last job event → terminal      from the publication of `succeeded` to the record's terminal transition, train only
no-op runs per second          N specs dropped at once, until the last run ends (`python -m bench.stack --runs N`)
CPU per run                    of all processes of the stack; other work on the machine disturbs CPU time less than time

Only the training of a no-op run is not real: its container has two processes (the shim and the trainer) and sends four
job events and a manifest, and its Cloud Run job is created and deleted. The benchmark checks that every run succeeded,
had one execution, and left nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dropforge_local.containers import shim
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackConfig, StackInfo
from dropforge_local.stack.deployment import IMAGES

ROOT = Path(__file__).resolve().parents[1]
SEQUENTIAL, TOGETHER = 40, 100
RUN_SECONDS = 3.0  # the benchmark fails if a run takes longer on average; generous, for a busy laptop
SETTINGS = {
    "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-noop:bench",
    "DROPFORGE_SLACK_WEBHOOK_SECRET": "",
    "DROPFORGE_CHECK_INTERVAL_SECONDS": "300",  # as in the cloud; the local stack's default is five seconds
    "DROPFORGE_PROVISION_DEADLINE_SECONDS": "86400",
}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stack")
    parser.add_argument("--one-by-one", type=int, default=SEQUENTIAL, metavar="N", help="runs for the latencies")
    parser.add_argument("--runs", type=int, default=TOGETHER, metavar="N", help="runs at once, for the rate")
    options = parser.parse_args(arguments)
    with running_stack() as (state, info):
        user = User(info)
        user.wait([user.drop("warm-up")])
        print(f"memory idle: {describe_memory(info)}")
        measure_latency(user, options.one_by_one)
        measure_rate(user, options.runs)
        check_nothing_left(state)


@contextmanager
def running_stack(**changes: Any) -> Iterator[tuple[Path, StackInfo]]:
    """Start a new stack with enough GPUs for all runs; yield its state directory and its addresses.

    `changes` are further fields of its configuration.
    """
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory) / "stack"
        images, quota = str(ROOT / "tests" / "images"), {"gpu_quota": 10**6}
        config = StackConfig(images=images, settings=SETTINGS, cloud_run=quota, **changes)
        config.save(state)
        info = local.up(state)
        os.environ.update(info.environment)
        try:
            yield state, info
        finally:
            local.down(state)


class User:
    """Drops specs and reads run events, through ordinary clients."""

    def __init__(self, info: StackInfo) -> None:
        from google.cloud import pubsub_v1

        from dropforge.context import Context

        self.info = info
        self.context = Context.from_environment()
        self.settings, self.store = self.context.settings, self.context.store
        self.clients = self.context.cloud.clients
        self.published: Counter[tuple[str, str]] = Counter()  # (run, state) → number of distinct event ids
        self._ids: set[str] = set()
        self._subscriber = pubsub_v1.SubscriberClient()
        self._subscription = f"projects/{self.settings.project}/subscriptions/bench"
        topic = self.settings.topic(self.settings.run_events_topic)
        self._subscriber.create_subscription(name=self._subscription, topic=topic)

    def drop(self, name: str, behave: str = "succeed") -> str:
        """Upload a train-only spec; return its run id."""
        from dropforge.base import names

        spec = {
            "api_version": "dropforge/v1",
            "name": "noop",
            "model": {"source": "owner/tiny-1m"},
            "dataset": {"source": "owner/data"},
            "training": {"adapter": {"type": "none"}},
            "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
            "serve": None,
            "labels": {"behave": behave},
        }
        blob = self.clients.storage().bucket(self.settings.specs_bucket).blob(f"specs/{name}.json")
        blob.upload_from_string(json.dumps(spec), "application/json")
        return names.run_id_of_object(self.settings.specs_bucket, blob.name, blob.generation)

    def drop_all(self, names: Sequence[str]) -> list[str]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(self.drop, names))

    def cancel_all(self, runs: Sequence[str]) -> None:
        topic = self.settings.topic(self.settings.operations_topic)
        sent = [self.clients.publisher().publish(topic, json.dumps({"cancel": run}).encode()) for run in runs]
        for future in sent:
            future.result(120)

    def wait(self, runs: Sequence[str], *states: str, seconds_each: float = RUN_SECONDS) -> None:
        """Wait until a run event has reported one of `states` (default: the terminal states) for every run."""
        wanted = states or ("SUCCEEDED", "FAILED", "CANCELLED", "REJECTED")
        left, deadline = set(runs), time.monotonic() + 60 + seconds_each * len(runs)
        while left := {run for run in left if not any((run, state) in self.published for state in wanted)}:
            if time.monotonic() > deadline:
                raise SystemExit(f"LOST: {len(left)} of {len(runs)} runs never became {wanted}: {sorted(left)[:5]}")
            self._pull()

    def check_ended(self, runs: Sequence[str], state: str) -> None:
        """Check each run: its record is in `state`, the state was published once, the run had one execution."""
        counts = Counter(str(self.store.record(run).state) for run in runs)
        if counts != {state: len(runs)}:
            raise SystemExit(f"expected {len(runs)} runs {state}; the records say {dict(counts)}")
        if repeated := [run for run in runs if self.published[run, state] != 1]:
            raise SystemExit(f"{len(repeated)} runs published {state} with more than one event id: {repeated[:5]}")
        executions = self.executions()
        if wrong := [run for run in runs if executions[run] != 1]:
            raise SystemExit(f"{len(wrong)} runs do not have exactly one execution: {wrong[:5]}")

    def executions(self, state: str = "") -> Counter[str]:
        """Count the executions of each run; only the executions in `state`, if given."""
        from google.cloud.workflows import executions_v1

        from dropforge.base import names

        request = executions_v1.ListExecutionsRequest(
            parent=self.settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=1000
        )
        listed = self.clients.workflow_executions().list_executions(request)
        return Counter(execution.labels[names.RUN_LABEL] for execution in listed if state in ("", execution.state.name))

    def _pull(self) -> None:
        answer = self._subscriber.pull(subscription=self._subscription, max_messages=1000, timeout=60)
        for received in answer.received_messages:
            event = json.loads(received.message.data)
            if event["id"] not in self._ids:
                self._ids.add(event["id"])
                self.published[event["run"], event["state"]] += 1
        if ack_ids := [received.ack_id for received in answer.received_messages]:
            self._subscriber.acknowledge(subscription=self._subscription, ack_ids=ack_ids)
            time.sleep(0.1)  # without a pause this client would be part of the load


def measure_latency(user: User, count: int) -> None:
    started, ended = [], []
    for number in range(count):
        began = time.time()
        run = user.drop(f"sequential-{number}")
        user.wait([run])
        started.append(_execution_start(user, run) - began)
        ended.append(_terminal_delay(user, run))
    if count:
        show("upload → execution started", started)
        show("last job event → terminal", ended)


def measure_rate(user: User, count: int) -> None:
    """Drop `count` specs at once and wait until the last run is terminal, three times; print the medians."""
    seconds: list[float] = []
    used: list[Cpu] = []
    for turn in range(3):
        before, began = Cpu.now(user.info), time.monotonic()
        runs = user.drop_all([f"many-{turn}-{number}" for number in range(count)])
        user.wait(runs)
        seconds.append(time.monotonic() - began)
        used.append(Cpu.now(user.info).since(before))
        user.check_ended(runs, "SUCCEEDED")
    middle = statistics.median(seconds)
    print(f"{count} no-op runs at once: all succeeded in {middle:.1f} s, {count / middle:.1f} per second")
    cpu = Cpu(*map(statistics.median, zip(*used, strict=True)))
    print(f"CPU per run: {cpu.each(count)}; memory: {describe_memory(user.info)}")


class Cpu(NamedTuple):
    """Seconds of CPU that the stack's processes have used."""

    stack: float
    functions: float
    containers: float

    @classmethod
    def now(cls, info: StackInfo) -> Cpu:
        stack, functions = processes(info)
        # Containers are the ended children of the stack, and the processes that fork their shims, with their children.
        forks = [child for child in stack.children() if shim.__file__ in child.cmdline()]
        own, ended = _times(stack)
        containers = ended + sum(sum(_times(process)) for process in forks)
        return cls(own, sum(_times(process)[0] for process in functions), containers)

    def since(self, before: Cpu) -> Cpu:
        return Cpu(*(now - then for now, then in zip(self, before, strict=True)))

    def each(self, runs: int) -> str:
        """Milliseconds for each of the runs."""
        parts = ", ".join(f"{name} {value / runs * 1000:.0f}" for name, value in zip(self._fields, self, strict=True))
        return f"{sum(self) / runs * 1000:.0f} ms ({parts})"


def _times(process: psutil.Process) -> tuple[float, float]:
    """Seconds of CPU of a process, and of its ended children."""
    times = process.cpu_times()
    return times.user + times.system, times.children_user + times.children_system


def processes(info: StackInfo) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return the stack's process and the functions' processes: one, or two in trees before 2026-11-28."""
    stack = psutil.Process(info.pid)
    return stack, [child for child in stack.children(recursive=True) if "functions_host" in " ".join(child.cmdline())]


def describe_memory(info: StackInfo) -> str:
    """Describe the memory of the stack and of the functions, without containers: PSS, which counts shared pages once.

    Where the system has no PSS (macOS), it is USS, without shared pages.
    """
    stack, functions = processes(info)
    figures = [process.memory_full_info() for process in (stack, *functions)]
    mebibytes = [getattr(figure, "pss", figure.uss) / 2**20 for figure in figures]
    return f"stack {mebibytes[0]:.0f} MiB, functions {sum(mebibytes[1:]):.0f} MiB"


def check_nothing_left(state: Path) -> None:
    left = local.leftovers(state).resources
    if left:
        raise SystemExit(f"{len(left)} resources are left: {left[:5]}")


def show(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(f"{name}: p50 {statistics.median(ordered) * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms (n={len(ordered)})")


def _execution_start(user: User, run: str) -> float:
    name = f"{user.settings.workflow_name}/executions/{user.store.record(run).execution}"
    return float(user.clients.workflow_executions().get_execution(name=name).start_time.timestamp())


def _terminal_delay(user: User, run: str) -> float:
    """Return the seconds from the container's `succeeded` to the terminal state."""
    event = next(name for name in user.store.names(f"runs/{run}/events/") if name.endswith("-succeeded.json"))
    published: Any = datetime.fromisoformat(json.loads(user.store.read(event).data)["time"])
    return float((user.store.record(run).history[-1].time - published).total_seconds())


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
