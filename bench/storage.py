"""The storage emulator in another process, under the real client: milliseconds per call and calls per second.

Run `python -m bench.storage`. The emulator listens on a free loopback port and stores its files in a temporary folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

CALLS = 300
THREADS = 8
CALLS_PER_THREAD = 100
BIG_BYTES = 64 * 2**20
KIBIBYTE = b"x" * 1024

SERVER = """
import pathlib, sys
from dropforge_local.base.db import Database
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.base.server import BackgroundServer
from dropforge_local.base.clock import SystemClock
root = pathlib.Path(sys.argv[1])
build = lambda: [StorageEmulator(Database(root / "state.sqlite"), root / "blobs", SystemClock())]
with BackgroundServer(build) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            measure(server.stdout.readline().strip())
            print(f"{'resident memory of the server':38} {_resident_mib(server.pid):8.1f} MiB")
        finally:
            server.communicate("")


def measure(url: str) -> None:
    """Print the figures of the server at `url`."""
    os.environ["STORAGE_EMULATOR_HOST"] = url
    bucket = client().create_bucket("bench")
    blob = bucket.blob("object")
    blob.upload_from_string(KIBIBYTE)
    for index in range(1000):
        bucket.blob(f"many/{index:04}").upload_from_string(b"")
    _report("upload 1 KiB", lambda index: bucket.blob(f"up/{index}").upload_from_string(KIBIBYTE))
    _report("overwrite 1 KiB", lambda index: blob.upload_from_string(KIBIBYTE))
    _report("download 1 KiB", lambda index: bucket.blob("object").download_as_bytes())
    _report("get metadata", lambda index: bucket.get_blob("object"))
    _report("patch metadata", lambda index: _patch(blob, index))
    _report("list 1 of 1,000 by prefix", lambda index: list(bucket.list_blobs(prefix=f"many/{index:04}")))
    _report("delete", lambda index: bucket.blob(f"up/{index}").delete())
    _report_threads()
    _report_throughput(bucket)


def client() -> storage.Client:
    return storage.Client(project="local-project", credentials=AnonymousCredentials())


def _patch(blob: storage.Blob, index: int) -> None:
    blob.metadata = {"index": str(index)}
    blob.patch()


def _report(name: str, call: Callable[[int], object]) -> None:
    seconds = []
    for index in range(CALLS):
        start = time.perf_counter()
        call(index)
        seconds.append(time.perf_counter() - start)
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(f"{name:38} {statistics.median(seconds) * 1000:8.2f} ms p50 {p99 * 1000:8.2f} ms p99")


def _report_threads() -> None:
    """Upload from several threads; the client's own Python code takes most of the time."""

    def work(thread: int) -> None:
        bucket = client().bucket("bench")
        for index in range(CALLS_PER_THREAD):
            bucket.blob(f"threads/{thread}/{index}").upload_from_string(KIBIBYTE)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    rate = THREADS * CALLS_PER_THREAD / (time.perf_counter() - start)
    print(f"{f'upload 1 KiB, {THREADS} threads':38} {rate:8.0f} per second")


def _report_throughput(bucket: storage.Bucket) -> None:
    blob = bucket.blob("big")
    data = os.urandom(BIG_BYTES)
    for name, call in (("upload", lambda: blob.upload_from_string(data)), ("download", blob.download_as_bytes)):
        start = time.perf_counter()
        call()
        mebibytes = BIG_BYTES / 2**20 / (time.perf_counter() - start)
        print(f"{f'{name} {BIG_BYTES >> 20} MiB':38} {mebibytes:8.0f} MiB/s")


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    kibibytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kibibytes) / 1024


if __name__ == "__main__":
    main()
