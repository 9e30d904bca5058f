"""The checkpoints of a run on a Ray cluster, which all hosts write to the bucket at once, by Orbax.

    checkpoints/<run>/maxtext/imported/…                  the base model's weights, where training begins with them
    checkpoints/<run>/maxtext/run/checkpoints/<step>/…    commit_success.txt is there once the checkpoint is whole
    checkpoints/<run>/maxtext/notes/<step>.json           what an attempt that goes on from the step must know

Every function takes the root, gs://<bucket>/checkpoints/<run>/maxtext.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from job import Job

from dropforge.base.log import log
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import checkpoint_prefix, delete_blobs, parse_gs_uri

_CLIENTS = Clients()
PREFIX = "maxtext"
STEPS = "run/checkpoints"
WHOLE = "commit_success.txt"  # what Orbax writes last, where directories cannot be renamed
KEEP = 2
TRANSFERS = 8


def root_of(job: Job) -> str:
    return f"gs://{job.bucket}/{checkpoint_prefix(job.run)}{PREFIX}"


def newest(root: str) -> int:
    """The newest step of which the bucket has a whole checkpoint; 0 when it has none."""
    whole = (step for step in reversed(_steps(root)) if _blob(f"{root}/{STEPS}/{step}/{WHOLE}").exists())
    return next(whole, 0)


def prune(root: str, step: int) -> None:
    """Delete checkpoints, the newest of which is `step`, but for the newest KEEP; Tunix keeps them all."""
    older = [one for one in _steps(root) if one < step]
    for stale in older[: len(older) - KEEP + 1]:
        bucket, prefix = parse_gs_uri(f"{root}/{STEPS}/{stale}/")
        delete_blobs([*_CLIENTS.storage().list_blobs(bucket, prefix=prefix), _blob(_notes(root, stale))])


def write_notes(root: str, step: int, notes: dict[str, Any]) -> None:
    _blob(_notes(root, step)).upload_from_string(json.dumps(notes), "application/json")


def read_notes(root: str, step: int) -> dict[str, Any]:
    """What was noted of a step; nothing when the attempt ended before it noted it."""
    blob = _blob(_notes(root, step))
    return dict(json.loads(blob.download_as_bytes())) if blob.exists() else {}


def upload(source: Path, target: str) -> None:
    """Copy a directory to the bucket."""
    files = [path for path in source.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(lambda path: _blob(f"{target}/{path.relative_to(source)}").upload_from_filename(path), files))
    log("uploaded the imported weights", stage="train", files=len(files), uri=target)


def _steps(root: str) -> list[int]:
    """All steps that have anything, in order."""
    bucket, prefix = parse_gs_uri(f"{root}/{STEPS}/")
    found = _CLIENTS.storage().list_blobs(bucket, prefix=prefix, delimiter="/")
    list(found)  # prefixes are known once all pages have been read
    names = (one.removeprefix(prefix).rstrip("/") for one in found.prefixes)
    return sorted(int(name) for name in names if name.isdecimal())


def _notes(root: str, step: int) -> str:
    return f"{root}/notes/{step}.json"


def _blob(uri: str) -> Any:
    bucket, name = parse_gs_uri(uri)
    return _CLIENTS.storage().bucket(bucket).blob(name)
