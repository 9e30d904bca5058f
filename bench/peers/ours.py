"""Our engine: `python -m bench.peers.ours speed|start|continue URL STATE` (see bench/peers/__init__.py)."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from bench.engine import FLOW, RUNNING, calls, throughput
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from workflows_engine import Engine, PooledTransport


async def main(mode: str, url: str, state: str) -> None:
    Path(state).mkdir(exist_ok=True)
    engine = Engine(Database(Path(state) / "engine.db"), clock=SystemClock(), http=PooledTransport())
    await engine.start()
    if mode != "continue":
        engine.deploy(FLOW, calls(url))
    if mode == "speed":
        print(json.dumps(await speed(engine)))
    elif mode == "start":
        for _ in range(RUNNING):
            engine.create_execution(FLOW)
        (Path(state) / "started").touch()
    if mode != "speed":
        await asyncio.sleep(600)
    await engine.stop()


async def speed(engine: Engine) -> dict[str, float]:
    async def run_once() -> float:
        begin = time.perf_counter()
        record = await engine.wait(engine.create_execution(FLOW).name)
        assert record.state == "SUCCEEDED", record.error
        return time.perf_counter() - begin

    for _ in range(10):
        await run_once()
    latency = statistics.median([await run_once() for _ in range(50)])
    return {"latency_ms": latency * 1e3, "rate": await throughput(run_once, 200, 16)}


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
