"""Restate: `python with_restate.py SERVER speed|start|continue URL STATE`, where Restate's SDK is and no dropforge.

SERVER is the program of Restate's server. It keeps the log, and calls the handler over HTTP/2, in this process.
https://docs.restate.dev/develop/python/durable-steps
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

STEPS, RUNNING = 20, 200  # as in bench/engine.py
PATIENCE_SECONDS = 60
service = restate.Service("peers")
client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
url = sys.argv[3]


async def step(workflow: str, number: int) -> int:
    headers = {"Idempotency-Key": f"{workflow}-{number}"}
    return int((await client.get(f"{url}/step?n={number}", headers=headers)).json()["n"])


@service.handler()
async def flow(context: restate.Context, workflow: str) -> int:
    last = 0
    for number in range(STEPS):
        last = await context.run_typed("step", step, workflow=workflow, number=number)
    return last


class Server:
    """Restate's server, and the handler that it calls."""

    def __init__(self, program: str, state: Path, ports: list[int]) -> None:
        self.handler, ingress, self.admin, node = ports
        self.ingress = f"http://127.0.0.1:{ingress}"
        settings = {
            "RESTATE_BASE_DIR": str(state / "server"), "RESTATE_NODE_NAME": "peers", "RESTATE_LOG_FILTER": "error",
            "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
            "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{self.admin}",
            "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}", "RESTATE_ADVERTISED_ADDRESS": f"http://127.0.0.1:{node}",
            "DO_NOT_TRACK": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [program], env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    async def ready(self, is_new: bool) -> None:
        """Wait until the server serves; a new server does not know the handler yet."""
        deployment = {"uri": f"http://127.0.0.1:{self.handler}"}
        admin = f"http://127.0.0.1:{self.admin}"
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if not is_new:
                    answer = await client.get(f"{admin}/health")
                else:
                    answer = await client.post(f"{admin}/deployments", json=deployment)
                if answer.is_success:
                    return
            except httpx.TransportError:
                pass  # the server does not listen yet; the time limit below ends the wait
            if time.monotonic() > give_up:
                raise TimeoutError(f"Restate's server was not ready after {PATIENCE_SECONDS} s")
            await asyncio.sleep(0.05)

    async def run_once(self, workflow: str) -> float:
        begin = time.perf_counter()
        answer = await client.post(f"{self.ingress}/peers/flow", json=workflow)
        assert answer.json() == 1, answer.text
        return time.perf_counter() - begin


async def speed(server: Server) -> dict[str, float]:
    for number in range(10):
        await server.run_once(f"warm-{number}")
    latency = statistics.median([await server.run_once(f"one-{number}") for number in range(50)])
    places = asyncio.Semaphore(16)

    async def limited(number: int) -> None:
        async with places:
            await server.run_once(f"many-{number}")

    begin = time.perf_counter()
    await asyncio.gather(*(limited(number) for number in range(200)))
    return {"latency_ms": latency * 1e3, "rate": 200 / (time.perf_counter() - begin)}


async def send_all(server: Server) -> None:
    """Start the workflows, and wait for none."""
    for number in range(RUNNING):
        (await client.post(f"{server.ingress}/peers/flow/send", json=f"run-{number}")).raise_for_status()


async def main(program: str, mode: str, state: Path) -> None:
    state.mkdir(exist_ok=True)
    kept = state / "ports.json"  # the server's log names the handler's address
    is_new = not kept.exists()
    ports = free_ports(4) if is_new else json.loads(kept.read_text())
    kept.write_text(json.dumps(ports))
    config = Config()
    config.bind, config.errorlog = [f"127.0.0.1:{ports[0]}"], None
    handler = asyncio.create_task(serve(restate.app([service]), config))  # ends with this process
    server = Server(program, state, ports)
    try:
        await server.ready(is_new)
        if mode == "speed":
            print(json.dumps(await speed(server)))
        elif mode == "start":
            await send_all(server)
            (state / "started").touch()
        if mode != "speed":
            await asyncio.sleep(600)
    finally:
        server.process.terminate()
        server.process.wait()
    assert not handler.done(), "the handler has served until now"
    sys.stdout.flush()
    os._exit(0)  # hypercorn prints an error for each connection that a cancelled server closes


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[4])))
