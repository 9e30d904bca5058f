"""One sweep among many open marks and junk specs: are the endpoints past their ttl deleted in time, and what is left?

endpoints gone     seconds from the start of the sweep until the cloud listed none of them
whole sweep        at most the 540 s of a function, whatever is left; the next sweep continues there

`python -m bench.crowd --marks 300000 --junk 100000` takes a quarter of an hour. The objects are written into the
database of the stack, because 400,000 uploads take longer. The specs have no events, so the sweep itself must reject
each of them: the worst case. The sweep runs in this process, as it runs in its function.
"""

from __future__ import annotations

import argparse
import io
import resource
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any

from dropforge.base.settings import Settings

from .stack import User, running_stack

MARKS, JUNK, ENDPOINTS = 2_000, 200, 5
BATCH = 5_000  # objects in one transaction, for whose end the stack waits
RARELY = 86_400.0  # seconds between two sweeps of the stack itself
OLD_SECONDS = 11.0  # a younger spec may still get its event
LOOK_SECONDS = 0.25


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crowd")
    parser.add_argument("--marks", type=int, default=MARKS, metavar="N", help="open marks of runs without a record")
    parser.add_argument("--junk", type=int, default=JUNK, metavar="N", help="objects below specs/ that are no spec")
    parser.add_argument("--endpoints", type=int, default=ENDPOINTS, metavar="N", help="endpoints past their ttl")
    options = parser.parse_args(arguments)
    with running_stack(sweep_seconds=RARELY) as (state, info):
        user, began = User(info), time.perf_counter()
        marks = (f"runs/open/marked-{number:012x}" for number in range(options.marks))
        write(state, user.settings.runs_bucket, marks, b"")
        write(state, user.settings.specs_bucket, (f"specs/junk-{n:06}.json" for n in range(options.junk)), b"{")
        for number in range(options.endpoints):
            serve(user.clients, user.settings, f"served-{number:012x}")
        written = f"{options.marks} marks, {options.junk} specs and {options.endpoints} endpoints"
        print(f"wrote {written} in {time.perf_counter() - began:.0f} s", flush=True)
        time.sleep(OLD_SECONDS)
        measure(user, options.endpoints)


def write(state: Path, bucket: str, names: Iterable[str], data: bytes) -> None:
    """Write objects with the same bytes into the database of a stack. No function gets an event."""
    from dropforge_local.base.clock import SystemClock
    from dropforge_local.base.db import Database
    from dropforge_local.emulators.storage.blobs import BlobStore, Digest
    from dropforge_local.emulators.storage.buckets import Buckets
    from dropforge_local.emulators.storage.models import Content
    from dropforge_local.emulators.storage.objects import Objects
    from dropforge_local.emulators.storage.preconditions import Preconditions

    db, clock, digest = Database(state / "state.db"), SystemClock(), Digest()
    blobs = BlobStore(db, state / "blobs")
    objects = Objects(db, clock, Buckets(db, clock), blobs, lambda change: None)
    digest.update(data)
    left = iter(names)
    while batch := list(islice(left, BATCH)):
        with db.transaction():
            for name in batch:
                content = Content(uuid.uuid4().hex, digest.size, digest.crc32c, digest.md5, data=data)
                objects.create(bucket, name, content, {"contentType": "text/plain"}, Preconditions())
    blobs.close()
    db.connection.close()


def serve(clients: Any, settings: Settings, run: str) -> None:
    """Create the endpoint of a run; the endpoint is past its ttl."""
    from dropforge.base import names

    now = int(time.time())
    owner = {names.DEPLOYMENT_LABEL: settings.deployment, names.EXPIRES_LABEL: str(now - 60)}
    service: dict[str, Any] = {"labels": names.labels(run, owner)}
    service["template"] = {"containers": [{"image": settings.serve_vllm_image}]}
    service_id = names.endpoint_name(run)
    clients.run_services().create_service(parent=_parent(settings), service=service, service_id=service_id)


def measure(user: User, endpoints: int) -> None:
    """Sweep once and print the figures. Every endpoint must be gone, and the sweep must end in a function's time."""
    from dropforge.stages.sweep import cursor
    from dropforge.stages.sweep.sweep import sweep

    gone = list[float]()
    began = time.monotonic()
    watcher = threading.Thread(target=lambda: gone.append(_until_gone(user) - began), daemon=True)
    watcher.start()
    with redirect_stderr(io.StringIO()):
        answer = sweep(user.context)
    spent = time.monotonic() - began
    watcher.join(LOOK_SECONDS * 100)
    assert len(answer.deleted) == endpoints, answer.problems[:5]
    stopped = cursor.read(user.context)
    print(f"endpoints gone   {gone[0]:6.1f} s   {endpoints} endpoints")
    print(f"whole sweep      {spent:6.1f} s   {len(answer.resubmitted)} junk specs rejected")
    print(f"stopped at       {stopped.run or 'the last mark'}, {stopped.spec or 'the last spec'}")
    print(f"memory           {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:6.0f} MiB at most")


def _until_gone(user: User) -> float:
    """Wait until the cloud lists no service; return when that was."""
    while list(user.clients.run_services().list_services(parent=_parent(user.settings))):
        time.sleep(LOOK_SECONDS)
    return time.monotonic()


def _parent(settings: Settings) -> str:
    return f"projects/{settings.project}/locations/us-central1"


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
