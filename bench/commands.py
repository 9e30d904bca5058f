"""The command line: seconds from the start of a command to its end, in a process of its own, as a user starts it.

`--help` imports nothing heavy; `runs` reads the records of a runs bucket in the storage emulator, in another process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from dropforge.run.record import Record, RunState, Transition
from dropforge.run.store import RunStore

from . import storage

TIMES = 5
RUNS = 200
COMMAND = [str(Path(sys.executable).with_name("dropforge"))]
NAMES = "PROJECT LOCATION SPECS_BUCKET RUNS_BUCKET WORKFLOW REQUESTS_TOPIC OPERATIONS_TOPIC JOB_EVENTS_TOPIC "
NAMES += "RUN_EVENTS_TOPIC TRAIN_TRL_IMAGE SERVE_VLLM_IMAGE TRAINER_SERVICE_ACCOUNT SERVER_SERVICE_ACCOUNT"


def main() -> None:
    measure(["--help"])
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-P", "-c", storage.SERVER, root]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            os.environ["STORAGE_EMULATOR_HOST"] = server.stdout.readline().strip()
            os.environ |= {f"DROPFORGE_{name}": name.lower().replace("_", "-") for name in NAMES.split()}
            write_records()
            measure(["runs", "--json"])
        finally:
            server.communicate("")


def measure(arguments: list[str]) -> None:
    """Print the median of a few processes, after one that warms the files."""
    seconds = []
    for _ in range(TIMES + 1):
        began = time.monotonic()
        subprocess.run([*COMMAND, *arguments], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.monotonic() - began)
    median = statistics.median(seconds[1:])
    print(f"dropforge {' '.join(arguments):14} {median * 1000:8.0f} ms (median of {TIMES})", flush=True)


def write_records() -> None:
    client, now = storage.client(), datetime.now(UTC)
    client.create_bucket("runs-bucket")
    store = RunStore(client, "runs-bucket")
    history = [Transition(state=RunState.REJECTED, time=now)]
    for number in range(RUNS):
        run = f"bench-{number:012x}"
        record = Record(run=run, name="bench", source="s", state=RunState.REJECTED, created=now, history=history)
        store.create(record)
    print(f"{RUNS} records in the runs bucket")


if __name__ == "__main__":
    main()
