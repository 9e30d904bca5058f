"""The Workflows engine: durable steps, throughput, pure steps, waiting executions, recovery after SIGKILL.

The services that the workflows call run in another process. All processes share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from workflows_engine import Engine, HttpRequest, HttpResponse, Limits, PooledTransport

FLOW = "projects/bench/locations/local/workflows/flow"
STEPS = 20
WAITING = 10_000
RUNNING = 200


def main() -> None:
    """Print the median of each measurement."""
    print(f"engine   cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with Peer(home) as peer:
            asyncio.run(measure_durable(home, peer.url))
            measure_recovery(home, peer)
        asyncio.run(measure_pure(home))
        measure_workflows_emulator(home)
        measure_waiting(home)


def report(name: str, value: str, goal: str) -> None:
    print(f"  {name:<58} {value:>22}   goal {goal}")


# Durable steps


def calls(url: str, verb: str = "get") -> str:
    steps = "".join(
        f"    - step{n}: {{call: http.{verb}, args: {{url: '{url}/step?n={n}'}}, result: r}}\n" for n in range(STEPS)
    )
    return f"main:\n  steps:\n{steps}    - done: {{return: '${{r.body.n}}'}}\n"


async def measure_durable(home: Path, url: str) -> None:
    """Reads share an fsync; a POST waits for an fsync of its own, whose cost is printed first."""
    report("fsync of 4 KiB, p50", f"{_fsync_seconds(home) * 1e3:.2f} ms", "")
    engine = Engine(Database(home / "durable.db"), clock=SystemClock())
    await engine.start()

    async def run_once() -> float:
        begin = time.perf_counter()
        record = await engine.wait(engine.create_execution(FLOW).name)
        assert record.state == "SUCCEEDED", record.error
        return time.perf_counter() - begin

    for verb, goal in (("get", "<= 10 ms"), ("post", "20 fsyncs + 10 ms")):
        engine.deploy(FLOW, calls(url, verb))
        for _ in range(10):
            await run_once()
        before = time.process_time()
        medians = [statistics.median([await run_once() for _ in range(50)]) for _ in range(3)]
        cpu = (time.process_time() - before) / 150
        value = f"{statistics.median(medians) * 1e3:.1f} ms, CPU {cpu * 1e3:.1f} ms"
        report(f"durable {STEPS}-step workflow, http.{verb}, p50", value, goal)
        rates = [await throughput(run_once, 200, 16) for _ in range(3)]
        report(f"200 such workflows, 16 at a time, http.{verb}", f"{statistics.median(rates):.0f} /s", ">= 250 /s")
    await engine.stop()


def _fsync_seconds(home: Path) -> float:
    """The median time of an fsync after a write."""
    times = []
    with (home / "fsync").open("wb") as file:
        for _ in range(50):
            file.write(bytes(4096))
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


async def throughput(run_once: Any, count: int, at_once: int) -> float:
    semaphore = asyncio.Semaphore(at_once)

    async def limited() -> None:
        async with semaphore:
            await run_once()

    begin = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(count)))
    return count / (time.perf_counter() - begin)


# Pure steps

LOOP = """
main:
  params: [args]
  steps:
    - init: {assign: [{x: 0}, {items: "${args}"}]}
    - loop:
        for:
          value: i
          range: [1, 90000]
          steps:
            - add: {assign: [{x: "${x + i}"}]}
    - done: {return: "${x}"}
"""


async def measure_pure(home: Path) -> None:
    engine = Engine(Database(home / "pure.db"), clock=SystemClock())
    await engine.start()
    engine.deploy(FLOW, LOOP)
    for name, argument in (("", "[]"), (", a list of 4,000 in scope", json.dumps(list(range(4000))))):
        rates = []
        for _ in range(5):
            begin = time.perf_counter()
            record = await engine.wait(engine.create_execution(FLOW, argument).name)
            rates.append(record.steps / (time.perf_counter() - begin))
        report(f"pure steps{name}", f"{statistics.median(rates):,.0f} /s", ">= 100,000 /s")
    await engine.stop()


# The fastest other emulator, in its own environment. Its loop is shorter because the emulator is slower

EMULATOR_PYTHON = Path("build/peers/workflows-emulator/bin/python")
EMULATOR_SCRIPT = """
import copy, sys, time
from workflows_emulator.main import execute_workflow, load_workflow
config = load_workflow(sys.argv[1])
for argument in ([], list(range(1000))):
    begin = time.perf_counter()
    execute_workflow(copy.deepcopy(config), {"args": argument})
    print(int(sys.argv[2]) / (time.perf_counter() - begin))
"""


def measure_workflows_emulator(home: Path) -> None:
    if not EMULATOR_PYTHON.exists():
        folder = EMULATOR_PYTHON.parent.parent
        print(f"  workflows-emulator 1.10.0 is not installed in {folder}; to compare:")
        print(f"    python3.11 -m venv {folder} && {folder}/bin/pip install workflows-emulator==1.10.0")
        return
    source = home / "loop.yaml"
    source.write_text(LOOP.replace("90000", "500"))
    command = [str(EMULATOR_PYTHON), "-c", EMULATOR_SCRIPT, str(source), "500"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if done.returncode != 0:
        print(f"  workflows-emulator 1.10.0 failed with status {done.returncode}")
        return
    for name, rate in zip(("", ", a list of 1,000 in scope"), done.stdout.split(), strict=True):
        report(f"  workflows-emulator 1.10.0, pure steps{name}", f"{float(rate):,.0f} /s", "(side by side)")


# Waiting

WAITER = """
main:
  steps:
    - make: {call: events.create_callback_endpoint, result: c}
    - wait: {call: events.await_callback, args: {callback: "${c}", timeout: 86400}, result: r}
    - done: {return: "${r.http_request.body}"}
"""


def measure_waiting(home: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "bench.engine", "--waiting", str(home / "waiting.db")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured = json.loads(child.stdout)
    report(f"{WAITING:,} waiting on callbacks: memory", f"{measured['memory']:.0f} MB", "<= 200 MB")
    report(f"{WAITING:,} waiting on callbacks: processor", f"{measured['cpu']:.2f} %", "<= 1 %")
    report(f"{WAITING:,} executions started and waiting", f"{measured['create']:.1f} s", "(Restate 11 s)")
    report("from a callback to the end of its execution", f"{measured['callback'] * 1e3:.2f} ms", "~2 ms")


async def wait_many(path: str) -> None:
    """In another process: start the executions, then measure their memory and CPU time."""
    engine = Engine(Database(path), clock=SystemClock(), limits=Limits(active_executions=WAITING * 2))
    await engine.start()
    engine.deploy(FLOW, WAITER)
    begin = time.perf_counter()
    names = []
    for n in range(WAITING):
        names.append(engine.create_execution(FLOW).name)
        if n % 100 == 0:
            await asyncio.sleep(0)
    while not engine.is_idle:
        await asyncio.sleep(0.01)
    create = time.perf_counter() - begin
    process = psutil.Process()
    before = process.cpu_times()
    await asyncio.sleep(5)
    after = process.cpu_times()
    cpu = (after.user + after.system - before.user - before.system) / 5 * 100
    times = []
    for name in names[:50]:
        ref = engine.list_callbacks(name)[0][0]
        begin = time.perf_counter()
        await engine.deliver_callback(name, ref, "POST", {"Authorization": "Bearer t"}, {}, 1, "/")
        await engine.wait(name)
        times.append(time.perf_counter() - begin)
    memory = process.memory_info().rss / 2**20
    print(json.dumps({"memory": memory, "cpu": cpu, "create": create, "callback": statistics.median(times)}))
    await engine.stop()


# Recovery


def measure_recovery(home: Path, peer: Peer) -> None:
    """SIGKILL an engine with 200 running workflows, start it again, and count the effects."""
    peer.pause = 0.25
    command = [sys.executable, "-m", "bench.engine", "--recover", str(home / "recover.db"), peer.url]
    first = subprocess.Popen([*command, "start"], stdout=subprocess.PIPE, text=True)
    while peer.count() < RUNNING * 5:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = peer.count()
    killed = time.monotonic()
    second = subprocess.Popen([*command, "continue"], stdout=subprocess.PIPE, text=True)
    while peer.count() == before:
        time.sleep(0.001)
    resumed = time.monotonic() - killed
    output, _ = second.communicate(timeout=120)
    measured = json.loads(output)
    done = time.monotonic() - killed
    effects = peer.effects()
    repeated = sum(effects.values()) - len(effects)
    report(f"SIGKILL with {RUNNING} running: first request", f"{resumed:.2f} s", "(with the interpreter's start)")
    report("  of which after the engine's start", f"{measured['first']:.3f} s", "<= 0.5 s")
    report("  all done", f"{done:.2f} s", "(Restate 5.1 s)")
    report("  lost; sent again (GET, same key)", f"{RUNNING * STEPS - len(effects)}; {repeated}", "0 lost")


async def recover(path: str, url: str, mode: str) -> None:
    sent: list[float] = []

    class Recorder(PooledTransport):
        async def send(self, request: HttpRequest) -> HttpResponse:
            sent.append(time.monotonic())
            return await super().send(request)

    engine = Engine(Database(path), clock=SystemClock(), http=Recorder())
    begin = time.monotonic()
    await engine.start()
    if mode == "start":
        engine.deploy(FLOW, calls(url))
        for _ in range(RUNNING):
            engine.create_execution(FLOW)
        await asyncio.sleep(600)
    for record in list(engine.list(FLOW)):
        await engine.wait(record.name)
    print(json.dumps({"first": sent[0] - begin}))
    await engine.stop()


# The services


class Peer:
    """A process that answers GET /step at once or after a pause, and records idempotency keys."""

    def __init__(self, home: Path) -> None:
        self._pause = home / "pause"
        self._log = home / "effects"
        self._log.touch()
        self._pause.write_text("0")

    def __enter__(self) -> Peer:
        command = [sys.executable, "-m", "bench.engine", "--peer", str(self._log), str(self._pause)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def pause(self) -> float:
        return float(self._pause.read_text())

    @pause.setter
    def pause(self, seconds: float) -> None:
        self._pause.write_text(str(seconds))
        self._process.send_signal(signal.SIGHUP)
        self._log.write_text("")
        time.sleep(0.1)

    def count(self) -> int:
        return self._log.stat().st_size // 64

    def effects(self) -> dict[str, int]:
        keys: dict[str, int] = {}
        for line in self._log.read_text().split():
            keys[line] = keys.get(line, 0) + 1
        return keys


async def serve_peer(log: str, pause: str) -> None:
    """A bare HTTP/1.1 server, so that the benchmark measures the engine and not its peer."""
    delay = 0.0
    loop = asyncio.get_running_loop()

    def reload() -> None:
        nonlocal delay
        delay = float(Path(pause).read_text())

    class Step(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if delay:
                key = re.search(rb"Idempotency-Key: (\S+)", data)
                assert key is not None
                loop.call_later(delay, self.answer, key.group(1).decode())
            else:
                self.answer(None)

        def answer(self, key: str | None) -> None:
            if key is not None:
                with open(log, "a") as file:
                    file.write(key.ljust(63) + "\n")
            head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n"
            self.transport.write(f'{head}{{"n":1}}'.encode())

    loop.add_signal_handler(signal.SIGHUP, reload)
    server = await loop.create_server(Step, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", nargs=2)
    parser.add_argument("--waiting")
    parser.add_argument("--recover", nargs=3)
    options = parser.parse_args()
    if options.peer:
        asyncio.run(serve_peer(*options.peer))
    elif options.waiting:
        asyncio.run(wait_many(options.waiting))
    elif options.recover:
        asyncio.run(recover(*options.recover))
    else:
        main()
