"""Merges or uploads an export in a process of its own, and prints what that took as JSON: bytes written, and memory.

The kernel counts both. `wchar` of /proc/self/io has the bytes that all threads gave to files, without those that they
sent to a socket; `VmHWM` of /proc/self/status is the peak of the resident memory
(https://docs.kernel.org/filesystems/proc.html).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path


def merge(base: str, checkpoint: str, directory: str) -> Callable[[], object]:
    from containers.train_trl.merge import merge_adapter

    return lambda: merge_adapter(Path(base), Path(checkpoint), Path(directory))


def upload(url: str, bucket: str, run: str, directory: str, spec: str) -> Callable[[], object]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    from containers.common.job import Job
    from containers.common.publish import Provenance, publish
    from dropforge.run.artifacts import Source
    from dropforge.spec import parse_spec

    options = {"api_endpoint": url}
    client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options)
    job = Job("p", run, 1, bucket, "", None, 10)
    provenance = Provenance(Source(uri="gs://data/base", revision="1"), Source(uri="gs://data/rows", revision="1"))
    return lambda: publish(client, job, Path(directory), parse_spec(spec.encode()), provenance, {}, ())


def written() -> int:
    return _number(Path("/proc/self/io"), "wchar")


def peak() -> int:
    return _number(Path("/proc/self/status"), "VmHWM") << 10


def _number(path: Path, name: str) -> int:
    (line,) = [line for line in path.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


if __name__ == "__main__":
    works: dict[str, Callable[..., Callable[[], object]]] = {"merge": merge, "upload": upload}
    work = works[sys.argv[1]](*sys.argv[2:])
    before = written(), peak()
    work()
    print(json.dumps({"written": written() - before[0], "memory": peak() - before[1]}))
