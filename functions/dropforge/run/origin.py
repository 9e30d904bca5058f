"""The model of another deployment: what its runs bucket says of it, and how its files are copied.

    gs://OTHER-RUNS-BUCKET/models/<run>

This deployment does not have the keys of the other deployment's runs, so it cannot check the proof of a manifest
(proof.py). It trusts those who may write into that bucket instead, and an operator names the bucket (`model_buckets`).
The manifest that was read with the request is kept. Each file is copied in the generation that the manifest names, so
the copy is the model that the other deployment has committed, or there is no copy. The manifest of the copy has the
proof of a run of this deployment: servers and stages then read the copy as every other model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import Malformed, NotFound, first_problem
from dropforge.cloud.clients import TIMEOUT_SECONDS as TIMEOUT
from dropforge.cloud.objects import read_at_most

from .artifacts import ArtifactFile, Manifest, attempt_directory, delete_blobs, model_prefix, model_uri, read_manifest
from .events import dumps
from .record import Record, Stored
from .store import RunStore

MAX_RECORD_BYTES = 4 << 20
LOOKERS = 8  # parallel requests
MOST_PROBLEMS = 3  # that a message names


class Origin(Stored):
    """Where the model of a run was copied from: bucket and run of another deployment, and the manifest of its model.

    `digest` is that of the manifest there (`manifest_digest`). `manifest` names the generation of every file.
    """

    bucket: str
    run: str
    digest: str
    manifest: Manifest

    @property
    def uri(self) -> str:
        return model_uri(self.bucket, self.run)


class Copied(Stored):
    """How far a copy is: the path of the file that is being copied, and Cloud Storage's token to continue with it."""

    path: str = ""
    token: str = ""


def bucket_and_run(uri: str) -> tuple[str, str] | None:
    """The bucket and the run in `gs://BUCKET/models/RUN`; None for another text."""
    match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,221})/models/([^/]+)/?", uri)
    return (match[1], match[2]) if match and names.is_run_id(match[2]) else None


def manifest_digest(manifest: Manifest) -> str:
    """The digest by which records of endpoints name a model: equal in the records of two deployments."""
    return sha256(dumps(manifest.model_dump(mode="json"))).hexdigest()


def find_origin(client: Any, bucket: str, run: str) -> Origin:
    """The model of a run of another deployment, as its bucket has it now.

    Raises NotFound for a run without a committed model, Malformed for a manifest that does not match its files, client
    errors.
    """
    uri = model_uri(bucket, run)
    manifest = read_manifest(client, bucket, run)
    if manifest is None:
        raise NotFound(f"{uri} has no committed model: there is no MANIFEST.json")
    files, problems = _found(client, bucket, manifest)
    if problems:
        more = f", and {len(problems) - MOST_PROBLEMS} more problems" if len(problems) > MOST_PROBLEMS else ""
        raise Malformed(f"{uri} does not match its MANIFEST.json: {'; '.join(problems[:MOST_PROBLEMS])}{more}")
    pinned = evolve(manifest, files=files)
    return Origin(bucket=bucket, run=run, digest=manifest_digest(manifest), manifest=pinned)


def read_other(client: Any, bucket: str, name: str, limit: int) -> bytes:
    """A small object of another deployment. Raises NotFound, Malformed, client errors."""
    data = read_at_most(client.bucket(bucket).blob(name), limit + 1)
    if data is None:
        raise NotFound(f"gs://{bucket}/{name} does not exist")
    if len(data) > limit:
        raise Malformed(f"gs://{bucket}/{name} has more than {limit} bytes")
    return data


def read_other_record(client: Any, bucket: str, run: str) -> Record:
    """The record of a run of another deployment. Raises NotFound, Malformed, client errors."""
    name = names.record_object(run)
    try:
        record = Record.model_validate_json(read_other(client, bucket, name, MAX_RECORD_BYTES))
    except ValidationError as error:
        problem = first_problem(error)
        raise Malformed(f"gs://{bucket}/{name} is not a record that this version reads: {problem}") from None
    if record.run != run:
        raise Malformed(f"gs://{bucket}/{name} is the record of another run; expected the run in its name")
    return record


def keep_origin(store: RunStore, run: str, origin: Origin) -> None:
    """Note where the model of a run comes from. A note stays: a repeated request copies what the first one saw."""
    store.put_new(names.origin_object(run), origin.model_dump_json().encode())


def read_origin(store: RunStore, run: str) -> Origin:
    """Raises NotFound, and Malformed for an object that is no such note."""
    name = names.origin_object(run)
    try:
        return Origin.model_validate_json(store.read(name).data)
    except ValidationError as error:
        raise Malformed(f"{name} does not say where a model comes from: {first_problem(error)}") from None


def copy_files(
    client: Any, bucket: str, run: str, origin: Origin, done: Copied, is_over: Callable[[], bool]
) -> Copied | None:
    """Copy the files of a model that `bucket` does not have yet, until `is_over`; None once it has all of them.

    Cloud Storage copies by itself: no byte passes through this process. `done` is the answer of the call before. Raises
    NotFound for a file that has changed since the request, client errors.
    """
    prefix = model_prefix(run)
    present = {blob.name.removeprefix(prefix) for blob in client.list_blobs(bucket, prefix=prefix)}
    for file in origin.manifest.files:
        if file.path in present:
            continue
        token = done.token if done.path == file.path else ""
        while (token := _copy(client, bucket, run, origin, file, token)) and not is_over():
            pass
        if token or is_over():
            return Copied(path=file.path, token=token)
    return None


def copy_of(client: Any, bucket: str, run: str, origin: Origin) -> Manifest:
    """The manifest of a finished copy. Raises Malformed if the copy is not the model of the origin."""
    prefix = model_prefix(run)
    blobs = {blob.name.removeprefix(prefix): blob for blob in client.list_blobs(bucket, prefix=prefix)}
    files = []
    for file in origin.manifest.files:
        if problem := _problem(file, blobs.get(file.path)):
            raise Malformed(f"the copy of {origin.uri} differs: {problem}")
        files.append(evolve(file, generation=int(blobs[file.path].generation)))
    return evolve(origin.manifest, run=run, files=files)


def delete_copy(client: Any, bucket: str, run: str) -> None:
    """Delete the copied model of a run, its manifest first. Raises client errors."""
    blobs = list(client.list_blobs(bucket, prefix=model_prefix(run)))
    delete_blobs(sorted(blobs, key=lambda blob: "/attempt-" in blob.name))


def _found(client: Any, bucket: str, manifest: Manifest) -> tuple[list[ArtifactFile], list[str]]:
    """The files of a model of another deployment with their generations, from a request for each of them.

    Also how they differ from the manifest.
    """
    directory = f"{attempt_directory(manifest.attempt)}/"
    if outside := [file.path for file in manifest.files if not file.path.startswith(directory)]:
        return [], [f"{path!r} is not below {directory}" for path in outside]
    place, prefix = client.bucket(bucket), model_prefix(manifest.run)
    with ThreadPoolExecutor(LOOKERS) as pool:
        blobs = list(pool.map(lambda file: place.get_blob(prefix + file.path, timeout=TIMEOUT), manifest.files))
    files, problems = [], [] if manifest.files else ["it lists no file"]
    for file, blob in zip(manifest.files, blobs, strict=True):
        if problem := _problem(file, blob):
            problems.append(problem)
        elif file.generation not in (None, int(blob.generation)):
            problems.append(f"{file.path} was written again after the commit")
        else:
            files.append(evolve(file, generation=int(blob.generation)))
    return files, problems


def _problem(file: ArtifactFile, blob: Any) -> str:
    if blob is None:
        return f"{file.path} is missing"
    if (blob.size, blob.crc32c) != (file.size, file.crc32c):
        return f"{file.path} has {blob.size} bytes, crc32c {blob.crc32c}; expected {file.size} bytes, {file.crc32c}"
    return ""


def _copy(client: Any, bucket: str, run: str, origin: Origin, file: ArtifactFile, token: str) -> str:
    """Copy a file, or continue its copy; Cloud Storage's token to continue with, "" once the file is there."""
    from google.api_core.exceptions import NotFound as Missing
    from google.api_core.exceptions import PreconditionFailed

    source = client.bucket(origin.bucket).blob(model_prefix(origin.run) + file.path, generation=file.generation)
    target = client.bucket(bucket).blob(model_prefix(run) + file.path)
    try:
        left, _, _ = target.rewrite(source, token=token or None, if_generation_match=0, timeout=TIMEOUT)
    except PreconditionFailed:
        return ""  # it is there: the reply of an earlier call was lost
    except Missing:
        raise NotFound(
            f"{origin.uri}/{file.path} does not exist any more as it was when its model was requested"
        ) from None
    return left or ""
