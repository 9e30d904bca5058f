"""The artifacts of a run in the runs bucket: checkpoints, the model, and the manifest that makes the model valid.

    runs/<run>/record.json                        the record, with the accepted spec (a large spec is in spec.json)
    checkpoints/<run>/step-00000100/…, _COMPLETE  a checkpoint; incomplete without its marker
    checkpoints/<run>/tokens/<key>.safetensors    the token ids of the rows, for later attempts
    models/<run>/attempt-1/{model,adapter}/…      the export of that attempt
    models/<run>/series/attempt-1.json.gz         the progress of that attempt (series.py)
    models/<run>/MANIFEST.json                    written last, once: it names the attempt whose files are the model

Each attempt writes below its own prefix: an abandoned attempt that still runs cannot damage another attempt's files.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import Conflict, DropforgeError, Malformed, NotFound, first_problem
from dropforge.base.redact import cut
from dropforge.base.threads import Threads
from dropforge.cloud.objects import read_at_most

from .proof import is_document_proved, with_proof

MANIFEST = "MANIFEST.json"
COMPLETE = "_COMPLETE"
MAX_MANIFEST_BYTES = 16 << 20  # some 50,000 files; a function has 512 MiB of memory

_STEP = re.compile(r"step-(\d{8,})/")
_BLOCK_BYTES = 1 << 20
_COMMIT_TRIES = 5
_THREADS = Threads()
_WORKERS = 8  # Cloud Storage serves a stream at about 100 MB/s; the client keeps ten connections
# Of a file, in one request; the default of Google's Java client. The client holds two parts of each file in memory, and
# its own default is 100 MiB (google.cloud.storage.Blob.upload_from_file).
_PART_BYTES = 16 << 20
_TIMEOUT_SECONDS = 120.0  # to connect, and between two reads; not for a whole transfer
# From the first byte of a file, for its part after a broken connection; the client's default is 120 s.
_DOWNLOAD_SECONDS = 3600.0


class ArtifactFile(BaseModel):
    """A file below a prefix: its relative path, size, checksums and generation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str
    crc32c: str
    # The object's generation, which Cloud Storage gives each write. A crc32c can be forged. None: not uploaded.
    generation: int | None = None

    def has_content_of(self, other: ArtifactFile) -> bool:
        """Whether both describe the same path and the same content."""
        return (self.path, self.size, self.sha256) == (other.path, other.size, other.sha256)


class Source(BaseModel):
    """The origin of a model or a data set; `revision` is a Hub commit, or a digest of the objects.

    `files` are the objects of a data set of several files, in the order of their rows, each with its revision.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str
    revision: str
    files: dict[str, str] = {}


MAX_FIELDS, MAX_FIELD = 20, 60  # names of fields in a manifest, and characters of each


class Manifest(BaseModel):
    """The commit marker of models/<run>/: the files of the model, its origin and its metrics."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")

    version: Literal[1] = 1
    run: str
    attempt: int
    created: datetime
    spec_sha256: str
    base: Source
    dataset: Source
    # Relative to models/<run>/, as are the paths of `files`.
    serve_path: str
    adapter_path: str | None = None
    metrics: dict[str, float | None] = {}
    files: list[ArtifactFile]
    versions: dict[str, str] = {}
    # Of the data set's rows and messages: the training used none of them.
    unused_fields: list[Annotated[str, Field(max_length=MAX_FIELD + 3)]] = Field(default=[], max_length=MAX_FIELDS)
    template_date: date | None = None  # that the chat template always shows, where the base model's shows today's
    proof: str = ""  # run/proof.py; `write_manifest` adds it


class Checkpoint(NamedTuple):
    """A checkpoint with its marker. `files` are relative to `uri`; `extra` is data of the writer."""

    step: int
    uri: str
    files: list[ArtifactFile]
    extra: dict[str, JsonValue]


def model_uri(bucket: str, run: str) -> str:
    return f"gs://{bucket}/{model_prefix(run)}".rstrip("/")


def manifest_uri(bucket: str, run: str) -> str:
    return f"gs://{bucket}/{model_prefix(run)}{MANIFEST}"


def model_prefix(run: str) -> str:
    return f"models/{run}/"


def files_below(manifest: Manifest, directory: str) -> list[ArtifactFile]:
    """The files of a model below a directory, with paths relative to the directory."""
    prefix = f"{directory}/"
    found = (file for file in manifest.files if file.path.startswith(prefix))
    return [evolve(file, path=file.path.removeprefix(prefix)) for file in found]


def files_digest(manifest: Manifest, directory: str, counts: Callable[[str], bool] = bool) -> str:
    """A digest of the names and contents below a directory of a model: equal for equal files of any two runs.

    `counts` says of a path below the directory whether its file counts.
    """
    lines = sorted(f"{file.path} {file.sha256}" for file in files_below(manifest, directory) if counts(file.path))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def attempt_directory(attempt: int) -> str:
    """The directory of an attempt's export, relative to models/<run>/."""
    return f"attempt-{attempt}"


def checkpoint_prefix(run: str, step: int | None = None) -> str:
    return f"checkpoints/{run}/" + ("" if step is None else f"step-{step:08d}/")


def tokens_object(run: str, key: str) -> str:
    return f"{checkpoint_prefix(run)}tokens/{key}.safetensors"


def read_manifest(client: Any, bucket: str, run: str, key: str = "") -> Manifest | None:
    """The manifest of a run; None while it does not exist.

    With the run's key, a manifest without its proof counts as none: a container of another run may have written it.
    Raises Malformed if the manifest is unreadable, or of another run.
    """
    uri, name = manifest_uri(bucket, run), model_prefix(run) + MANIFEST
    data = read_at_most(client.bucket(bucket).blob(name), MAX_MANIFEST_BYTES, _TIMEOUT_SECONDS)
    if data is None:
        return None
    if not is_document_proved(key, name, data):
        return None
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise Malformed(f"{uri} is not a manifest that this version reads: {first_problem(error)}") from None
    if manifest.run != run:
        raise Malformed(f"{uri} is the manifest of {cut(manifest.run, 80)!r}; expected the run in its name")
    return manifest


def write_manifest(client: Any, bucket: str, manifest: Manifest, key: str = "") -> Manifest:
    """Commit a model with the proof of its run; return the committed manifest.

    Writing the same manifest again has no effect. A manifest without proof is replaced, because no attempt of the run
    wrote it. Raises Conflict if another attempt has committed before: its files stay the model.
    """
    from google.api_core.exceptions import PreconditionFailed

    name = model_prefix(manifest.run) + MANIFEST
    data = with_proof(key, name, json.loads(manifest.model_dump_json(exclude={"proof"})))
    generation = 0
    for _ in range(_COMMIT_TRIES):
        blob = client.bucket(bucket).blob(name)
        try:
            blob.upload_from_string(data, "application/json", if_generation_match=generation, timeout=_TIMEOUT_SECONDS)
            return Manifest.model_validate_json(data)
        except PreconditionFailed:
            present = client.bucket(bucket).get_blob(name, timeout=_TIMEOUT_SECONDS)
            generation = int(present.generation) if present else 0
            if committed := read_manifest(client, bucket, manifest.run, key):
                if committed.attempt == manifest.attempt and committed.files == manifest.files:
                    return committed  # this attempt's write, whose reply was lost
                uri = manifest_uri(bucket, manifest.run)
                raise Conflict(f"{uri} was committed by attempt {committed.attempt}") from None
    raise Conflict(f"{manifest_uri(bucket, manifest.run)} was replaced by another writer {_COMMIT_TRIES} times")


def verify_manifest(client: Any, bucket: str, manifest: Manifest) -> list[str]:
    """Problems of the committed files, from a single listing: missing, changed and added files.

    A file that was written again since the commit, such as a restored file, is read and compared by its SHA-256.
    """
    prefix = model_prefix(manifest.run)
    blobs = {blob.name.removeprefix(prefix): blob for blob in client.list_blobs(bucket, prefix=prefix)}
    listed = {file.path for file in manifest.files}
    added = sorted(path for path in blobs if path.startswith(f"{manifest.serve_path}/") and path not in listed)
    problems = [f"{path} is not in the manifest" for path in added]
    for file in manifest.files:
        blob = blobs.get(file.path)
        if blob is None:
            problems.append(f"{file.path} is missing")
        elif (blob.size, blob.crc32c) != (file.size, file.crc32c):
            problems.append(
                f"{file.path} is {blob.size} bytes, crc32c {blob.crc32c}; expected {file.size} bytes, {file.crc32c}"
            )
        elif file.generation not in (None, blob.generation) and _sha256_of(blob) != file.sha256:
            problems.append(f"{file.path} was replaced after the commit: its SHA-256 is not {file.sha256[:12]}…")
    return problems


def read_artifact(client: Any, bucket: str, manifest: Manifest, name: str) -> bytes:
    """A small file of the model, such as samples.json, by its path below the attempt.

    Raises NotFound, and Malformed if the object is not the file that the manifest lists.
    """
    path = f"{attempt_directory(manifest.attempt)}/{name}"
    file = next((file for file in manifest.files if file.path == path), None)
    if file is None:
        listing = ", ".join(file.path for file in manifest.files)
        raise NotFound(f"{model_uri(bucket, manifest.run)} has no {path!r}; it has {listing}")
    data = read_at_most(
        client.bucket(bucket).blob(model_prefix(manifest.run) + path), max(file.size, 1), _TIMEOUT_SECONDS
    )
    if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
        where = f"{model_uri(bucket, manifest.run)}/{path}"
        raise Malformed(f"{where} differs from its manifest: its SHA-256 is not {file.sha256[:12]}…")
    return data


def checkpoints(client: Any, bucket: str, run: str, key: str = "") -> list[Checkpoint]:
    """The complete checkpoints of a run, newest first.

    A checkpoint is incomplete if its marker is unreadable or, with the run's key, if the marker has no proof.
    """
    prefix = checkpoint_prefix(run)
    markers = []
    for blob in client.list_blobs(bucket, prefix=prefix):
        match = _STEP.match(blob.name.removeprefix(prefix))
        if match and blob.name.endswith(f"/{COMPLETE}"):
            markers.append((int(match[1]), blob))
    read = (_read_marker(bucket, step, blob, key) for step, blob in sorted(markers, key=lambda item: -item[0]))
    return [checkpoint for checkpoint in read if checkpoint is not None]


def newest_complete_checkpoint(client: Any, bucket: str, run: str, key: str = "") -> Checkpoint | None:
    """The checkpoint that the next attempt resumes from; None if there is no complete checkpoint."""
    return next(iter(checkpoints(client, bucket, run, key)), None)


def upload_checkpoint(
    client: Any, bucket: str, run: str, step: int, directory: Path, extra: dict[str, JsonValue], key: str = ""
) -> Checkpoint:
    """Upload a checkpoint, its marker last."""
    files = upload_directory(client, directory, f"gs://{bucket}/{checkpoint_prefix(run, step)}")
    return complete_checkpoint(client, bucket, run, step, files, extra, key)


def complete_checkpoint(
    client: Any,
    bucket: str,
    run: str,
    step: int,
    files: list[ArtifactFile],
    extra: dict[str, JsonValue],
    key: str = "",
) -> Checkpoint:
    """Write the marker of a checkpoint whose files, perhaps of several machines, have all been uploaded."""
    prefix = checkpoint_prefix(run, step)
    marker = {"step": step, "files": [file.model_dump() for file in files], "extra": extra}
    blob = client.bucket(bucket).blob(prefix + COMPLETE)
    blob.upload_from_string(with_proof(key, prefix + COMPLETE, marker), "application/json", timeout=_TIMEOUT_SECONDS)
    return Checkpoint(step, f"gs://{bucket}/{prefix}", files, extra)


def prune_checkpoints(client: Any, bucket: str, run: str, keep: int, key: str = "") -> None:
    """Keep the newest `keep` complete checkpoints; delete all older checkpoints, the markers first."""
    prefix = checkpoint_prefix(run)
    kept = [checkpoint.step for checkpoint in checkpoints(client, bucket, run, key)[:keep]]
    if len(kept) < keep:
        return
    stale = [
        blob
        for blob in client.list_blobs(bucket, prefix=prefix)
        if (match := _STEP.match(blob.name.removeprefix(prefix))) and int(match[1]) < min(kept)
    ]
    delete_blobs(sorted(stale, key=lambda blob: not blob.name.endswith(f"/{COMPLETE}")))


def delete_blobs(blobs: Iterable[Any]) -> None:
    """Delete objects in sequence; ignore objects that do not exist."""
    from google.api_core.exceptions import NotFound as ObjectNotFound

    for blob in blobs:
        try:
            blob.delete(timeout=_TIMEOUT_SECONDS)
        except ObjectNotFound:
            continue


def upload_directory(client: Any, directory: Path, uri: str, threads: Threads = _THREADS) -> list[ArtifactFile]:
    """Upload every file below `directory`, several at once, checked by crc32c. Returns them sorted by path."""
    bucket, prefix = names.parse_gs_uri(uri)
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return threads.map(lambda path: _upload(client, bucket, prefix, directory, path), paths, _WORKERS)


def download_prefix(client: Any, uri: str, directory: Path) -> list[ArtifactFile]:
    """Download every object below `uri`, several at once, checked by crc32c. Raises NotFound if there is no object."""
    bucket, prefix = names.parse_gs_uri(uri)
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    blobs = [blob for blob in client.list_blobs(bucket, prefix=prefix) if not blob.name.endswith("/")]
    if not blobs:
        raise NotFound(f"there are no objects below gs://{bucket}/{prefix}")
    files = _THREADS.map(lambda blob: _download(blob, prefix, directory), blobs, _WORKERS)
    return sorted(files, key=lambda file: file.path)


def download_files(
    client: Any, uri: str, directory: Path, files: Iterable[ArtifactFile], threads: Threads = _THREADS
) -> None:
    """Download these files below `uri`, and no other objects, several at once.

    Raises NotFound for a file that is missing, or differs from what was committed.
    """
    from google.api_core.exceptions import NotFound as Missing

    bucket, prefix = names.parse_gs_uri(uri)
    prefix = f"{prefix.rstrip('/')}/"
    committed = {file.path: file for file in files}
    blobs = [client.bucket(bucket).blob(prefix + path) for path in committed]
    try:
        downloaded = threads.map(lambda blob: _download(blob, prefix, directory), blobs, _WORKERS)
    except Missing as error:
        raise NotFound(f"a file below gs://{bucket}/{prefix} is missing: {error.message}") from None
    for file in downloaded:
        if not file.has_content_of(committed[file.path]):
            raise NotFound(f"gs://{bucket}/{prefix}{file.path} is not the file that was committed")


def prefix_revision(client: Any, uri: str) -> str:
    """A digest of the names and contents below a prefix, from a single listing: the revision of a model kept there."""
    bucket, prefix = names.parse_gs_uri(uri)
    prefix = f"{prefix.rstrip('/')}/"
    lines = sorted(f"{b.name.removeprefix(prefix)} {b.crc32c}" for b in client.list_blobs(bucket, prefix=prefix))
    return f"sha256:{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def describe_file(path: Path, name: str) -> ArtifactFile:
    """Size and checksums of a local file, read once."""
    import google_crc32c

    sha256, crc32c, size = hashlib.sha256(), google_crc32c.Checksum(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha256.update(block)
            crc32c.update(block)
            size += len(block)
    return ArtifactFile(
        path=name, size=size, sha256=sha256.hexdigest(), crc32c=b64encode(crc32c.digest()).decode("ascii")
    )


def _upload(client: Any, bucket: str, prefix: str, directory: Path, path: Path) -> ArtifactFile:
    file = describe_file(path, path.relative_to(directory).as_posix())
    blob = client.bucket(bucket).blob(prefix + file.path, chunk_size=_PART_BYTES)
    blob.upload_from_filename(str(path), checksum="crc32c", timeout=_TIMEOUT_SECONDS)
    if blob.crc32c != file.crc32c:
        raise DropforgeError(
            f"gs://{bucket}/{blob.name} arrived with crc32c {blob.crc32c!r}; expected {file.crc32c!r}: "
            "another writer, or the file changed while it was uploaded"
        )
    return evolve(file, generation=int(blob.generation))


def _sha256_of(blob: Any) -> str:
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(blob: Any, prefix: str, directory: Path) -> ArtifactFile:
    from google.cloud.storage.retry import DEFAULT_RETRY

    name = blob.name.removeprefix(prefix)
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise DropforgeError(f"object name {blob.name!r} would be written outside of {str(directory)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    retry = DEFAULT_RETRY.with_timeout(_DOWNLOAD_SECONDS)
    blob.download_to_filename(str(path), checksum="crc32c", timeout=_TIMEOUT_SECONDS, retry=retry)
    return describe_file(path, name)


def _read_marker(bucket: str, step: int, blob: Any, key: str) -> Checkpoint | None:
    from google.api_core.exceptions import NotFound as Missing

    try:
        data = blob.download_as_bytes(timeout=_TIMEOUT_SECONDS)
        if not is_document_proved(key, blob.name, data):
            return None
        marker = json.loads(data)
        files = [ArtifactFile.model_validate(file) for file in marker["files"]]
    except (Missing, ValueError, KeyError, TypeError):  # pruned since it was listed; ValidationError is a ValueError
        return None
    return Checkpoint(step, f"gs://{bucket}/{blob.name.removesuffix(COMPLETE)}", files, marker.get("extra") or {})
