"""The checkpoints of a run on a Ray cluster: all hosts write them to the bucket together, with Orbax.

    checkpoints/<run>/maxtext/imported/…                  the base model's weights, if training starts with them
    checkpoints/<run>/maxtext/run/checkpoints/<step>/…    a checkpoint; commit_success.txt marks it as complete
    checkpoints/<run>/maxtext/notes/<step>.json           the notes for an attempt that resumes at the step

Every function takes the root, gs://<bucket>/checkpoints/<run>/maxtext.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from containers.common.job import Job
from dropforge.base.log import log
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import checkpoint_prefix, delete_blobs, parse_gs_uri

_CLIENTS = Clients()
PREFIX = "maxtext"
STEPS = "run/checkpoints"
COMPLETE = "commit_success.txt"  # Orbax writes it last, where directories cannot be renamed
KEEP = 2
TRANSFERS = 8


def root_of(job: Job) -> str:
    return f"gs://{job.bucket}/{checkpoint_prefix(job.run)}{PREFIX}"


def newest(root: str) -> int:
    """The newest step with a complete checkpoint in the bucket; 0 if there is none."""
    complete = (step for step in reversed(_steps(root)) if _blob(f"{root}/{STEPS}/{step}/{COMPLETE}").exists())
    return next(complete, 0)


def prune(root: str, step: int) -> None:
    """Keep the newest KEEP checkpoints up to `step` and delete the older ones; Tunix keeps all."""
    older = [other for other in _steps(root) if other < step]
    for stale in older[: len(older) - KEEP + 1]:
        bucket, prefix = parse_gs_uri(f"{root}/{STEPS}/{stale}/")
        delete_blobs([*_CLIENTS.storage().list_blobs(bucket, prefix=prefix), _blob(_notes(root, stale))])


def write_notes(root: str, step: int, notes: dict[str, Any]) -> None:
    _blob(_notes(root, step)).upload_from_string(json.dumps(notes), "application/json")


def read_notes(root: str, step: int) -> dict[str, Any]:
    """The notes of a step; {} if the attempt ended before it wrote them."""
    blob = _blob(_notes(root, step))
    return dict(json.loads(blob.download_as_bytes())) if blob.exists() else {}


def upload(source: Path, target: str) -> None:
    """Copy a directory to the bucket."""
    files = [path for path in source.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(TRANSFERS) as pool:
        list(pool.map(lambda path: _blob(f"{target}/{path.relative_to(source)}").upload_from_filename(path), files))
    log("uploaded the imported weights", stage="train", files=len(files), uri=target)


def _steps(root: str) -> list[int]:
    """All steps with any object, in order."""
    bucket, prefix = parse_gs_uri(f"{root}/{STEPS}/")
    blobs = _CLIENTS.storage().list_blobs(bucket, prefix=prefix, delimiter="/")
    list(blobs)  # reads all pages, which fills `prefixes`
    names = (folder.removeprefix(prefix).rstrip("/") for folder in blobs.prefixes)
    return sorted(int(name) for name in names if name.isdecimal())


def _notes(root: str, step: int) -> str:
    return f"{root}/notes/{step}.json"


def _blob(uri: str) -> Any:
    bucket, name = parse_gs_uri(uri)
    return _CLIENTS.storage().bucket(bucket).blob(name)
