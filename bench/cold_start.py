"""The start of a server with vLLM's CPU build: each part in seconds, with and without compiled code of a start before.

Needs `make vllm` and a C++ compiler; takes some minutes. Each start has an empty machine but for what the operating
system has in its cache of files: the model, the engine's files and the compiled code come from the bucket.

eager       --enforce-eager, as in the local stack: nothing is compiled
first       what is compiled is kept in the bucket
next        what the first one compiled is got from the bucket
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge.base.changes import evolve
from dropforge.run.artifacts import Manifest, Source, model_uri, upload_directory, write_manifest
from dropforge_local import tiny
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.ports import free_port
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.stack.deployment import libraries_environment

ROOT = Path(__file__).resolve().parent.parent
BUCKET, RUN = "runs", "bench-0123456789ab"
PARTS = ("program", "check of the model", "weights", "compiled code", "engine")
READY, KEPT = "ready", "kept the compiled code"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cache = directory / "cache"
        with BackgroundServer(lambda: [_storage(directory)]) as server:
            client = storage.Client("p", AnonymousCredentials(), client_options={"api_endpoint": server.url})
            client.create_bucket(BUCKET)
            commit(client, BUCKET, RUN, tiny.base_model(ROOT / "build" / "tiny"))
            environment = {
                **os.environ,
                **libraries_environment(server.url, server.grpc_address, "local"),
                "PATH": f"{ROOT / 'build' / 'vllm' / 'bin'}:{os.environ['PATH']}",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
                "DROPFORGE_MODEL_URI": model_uri(BUCKET, RUN),
                "DROPFORGE_SERVED_MODEL_NAME": "tiny",
                "DROPFORGE_MAX_MODEL_LEN": "128",
                "DROPFORGE_MAX_NUM_SEQS": "2",
                "HOST": "127.0.0.1",
                "PORT": str(free_port(range(20_000, 30_000), set())),
            }
            compiling = {"DROPFORGE_COMPILE_CACHE": str(cache), "DROPFORGE_CPU_COMPILE": "1"}
            print(f"{'':8} {'all':>7}  " + "  ".join(f"{part:>18}" for part in PARTS))
            show("eager", start(environment, READY))
            show("first", start({**environment, **compiling}, KEPT))
            (archive,) = client.list_blobs(BUCKET, prefix="caches/")
            shutil.rmtree(cache)
            show("next", start({**environment, **compiling}, READY))
            print(f"the compiled code is {archive.size / 1e6:.1f} MB in the bucket")


def _storage(directory: Path) -> StorageEmulator:
    clock = SystemClock()
    return StorageEmulator(Database(directory / "state.db"), directory / "blobs", clock)


def commit(client: Any, bucket: str, run: str, model: Path, key: str = "") -> None:
    """Commit a model as if an attempt of the run had exported it. `key` is that of the run; "" if it has none."""
    files = upload_directory(client, model, f"{model_uri(bucket, run)}/attempt-1/model")
    below = [evolve(file, path=f"attempt-1/model/{file.path}") for file in files]
    source = Source(uri=str(model), revision="1")
    manifest = Manifest(
        run=run,
        attempt=1,
        created=datetime.now(UTC),
        spec_sha256="0" * 64,
        base=source,
        dataset=source,
        serve_path="attempt-1/model",
        files=below,
    )
    write_manifest(client, bucket, manifest, key)


def start(environment: Mapping[str, str], last: str) -> dict[str, Any]:
    """Start a server, wait for its entry `last`, and end it; its entry about the start. Raises RuntimeError."""
    command = [sys.executable, "-P", "-m", "containers.serve_vllm.serve"]
    output: list[str] = []
    found: dict[str, Any] = {}
    with subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            output.append(line)
            entry = json.loads(line) if line.startswith('{"time"') else {}
            if entry.get("message") == READY:
                found = entry
            if entry.get("message") == last:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate()
    if not found:
        raise RuntimeError(f"the server ended with {process.returncode}: {''.join(output[-20:])}")
    return found


def show(name: str, entry: Mapping[str, Any]) -> None:
    seconds = entry["parts"]
    print(
        f"{name:8} {entry['seconds']:7.1f}  " + "  ".join(f"{seconds.get(part, 0):18.1f}" for part in PARTS), flush=True
    )


if __name__ == "__main__":
    main()
