"""DBOS: `python with_dbos.py speed|start|continue URL STATE`, in an environment that has DBOS and no dropforge.

A workflow is started as a program does that has DBOS in its own process: without DBOS's queue, which polls.
https://docs.dbos.dev/python/tutorials/workflow-tutorial
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from dbos import DBOS, DBOSConfig, SetWorkflowID

STEPS, RUNNING = 20, 200  # as in bench/engine.py
client = httpx.Client(timeout=60)
url = sys.argv[2]


@DBOS.step()
def step(workflow: str, number: int) -> int:
    headers = {"Idempotency-Key": f"{workflow}-{number}"}
    return int(client.get(f"{url}/step?n={number}", headers=headers).json()["n"])


@DBOS.workflow()
def flow(workflow: str) -> int:
    last = 0
    for number in range(STEPS):
        last = int(step(workflow, number))
    return last


def run_once(number: int) -> float:
    begin = time.perf_counter()
    assert flow(f"speed-{number}") == 1
    return time.perf_counter() - begin


def speed() -> dict[str, float]:
    for number in range(10):
        run_once(number)
    latency = statistics.median(run_once(100 + number) for number in range(50))
    begin = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run_once, range(1000, 1200)))
    return {"latency_ms": latency * 1e3, "rate": 200 / (time.perf_counter() - begin)}


def main(mode: str, state: str) -> None:
    Path(state).mkdir(exist_ok=True)
    config: DBOSConfig = {
        "name": "peers", "system_database_url": f"sqlite:///{state}/dbos.db", "application_version": "1",
        "log_level": "ERROR", "run_admin_server": False,
    }  # fmt: skip
    DBOS(config=config)
    DBOS.launch()  # it also continues the workflows of a process that has died
    if mode == "speed":
        print(json.dumps(speed()))
    elif mode == "start":
        for number in range(RUNNING):
            with SetWorkflowID(f"run-{number}"):
                DBOS.start_workflow(flow, f"run-{number}")
        (Path(state) / "started").touch()
    if mode != "speed":
        time.sleep(600)
    DBOS.destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3])
