"""Copies of models of other deployments, with the storage emulator and Google's client."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage

from dropforge.base import names
from dropforge.base.errors import Malformed, NotFound
from dropforge.run.artifacts import (
    MANIFEST,
    Manifest,
    Source,
    model_prefix,
    model_uri,
    read_manifest,
    upload_directory,
    verify_manifest,
    write_manifest,
)
from dropforge.run.origin import (
    Copied,
    Origin,
    bucket_and_run,
    copy_files,
    copy_of,
    delete_copy,
    find_origin,
    manifest_digest,
)

THEIRS, COPY = "theirs-0123456789ab", names.copy_id("rollout-1")
KEY, OTHER_KEY = "k" * 64, "o" * 64
FILES = {"attempt-2/model/a.safetensors": b"a" * 1000, "attempt-2/model/b.safetensors": b"b" * 1000}


@pytest.fixture
def buckets(client: Any, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The runs buckets of this and of the other deployment."""
    names = tuple(f"{word}-{abs(hash(request.node.nodeid)):x}" for word in ("ours", "theirs"))
    for name in names:
        client.create_bucket(name)
    return names[0], names[1]


@pytest.fixture
def origin(client: Any, buckets: tuple[str, str], tmp_path: Path) -> Origin:
    """A model that another key has committed, as the request finds it."""
    for path, content in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    files = upload_directory(client, tmp_path, model_uri(buckets[1], THEIRS))
    source = Source(uri="owner/base", revision="main")
    about: dict[str, Any] = {"spec_sha256": "0" * 64, "base": source, "dataset": source}
    manifest = Manifest(
        run=THEIRS, attempt=2, created=datetime.now(UTC), serve_path="attempt-2/model", files=files, **about
    )
    write_manifest(client, buckets[1], manifest, OTHER_KEY)
    return find_origin(client, buckets[1], THEIRS)


def never() -> bool:
    return False


def test_a_copy_has_the_proof_of_its_own_run(client: Any, buckets: tuple[str, str], origin: Origin) -> None:
    ours = buckets[0]
    assert copy_files(client, ours, COPY, origin, Copied(), never) is None
    for _ in range(2):  # the reply of the first call was lost
        assert copy_files(client, ours, COPY, origin, Copied(), never) is None
        write_manifest(client, ours, copy_of(client, ours, COPY, origin), KEY)
    committed = read_manifest(client, ours, COPY, KEY)
    assert committed is not None
    assert verify_manifest(client, ours, committed) == []
    assert [file.path for file in committed.files] == list(FILES)
    assert read_manifest(client, ours, COPY, OTHER_KEY) is None


def test_a_long_copy_continues_where_the_call_before_ended(
    client: Any, buckets: tuple[str, str], origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cloud Storage copies to another place in parts, each with the token of the part before."""
    rewrite, asked = storage.Blob.rewrite, list[tuple[str, str | None]]()

    def in_parts(target: Any, source: Any, token: str | None = None, **options: Any) -> tuple[str | None, int, int]:
        asked.append((target.name.rpartition("/")[2], token))
        part = {None: "part 1", "part 1": "part 2"}.get(token)
        return (part, 400, 1000) if part else rewrite(target, source, None, **options)

    monkeypatch.setattr(storage.Blob, "rewrite", in_parts)
    copied: Copied | None = Copied()
    calls = 0
    while copied is not None:
        copied = copy_files(client, buckets[0], COPY, origin, copied, lambda: True)
        calls += 1
        assert calls < 20
    each = [None, "part 1", "part 2"]
    assert asked == [(f"{name}.safetensors", token) for name in "ab" for token in each]
    assert copy_of(client, buckets[0], COPY, origin).run == COPY


def test_a_file_that_was_written_again_is_not_copied(client: Any, buckets: tuple[str, str], origin: Origin) -> None:
    path = origin.manifest.files[1].path
    client.bucket(buckets[1]).blob(model_prefix(THEIRS) + path).upload_from_string(FILES[path])  # the same bytes
    with pytest.raises(
        NotFound, match=r"b\.safetensors does not exist any more as it was when its model was requested"
    ):
        copy_files(client, buckets[0], COPY, origin, Copied(), never)
    with pytest.raises(Malformed, match=r"b\.safetensors was written again after the commit"):
        find_origin(client, buckets[1], THEIRS)


def test_a_manifest_without_generations_is_pinned_at_the_request(
    client: Any, buckets: tuple[str, str], origin: Origin
) -> None:
    """Older manifests name no generations. The digest is that of the manifest as it is."""
    old = [file.model_copy(update={"generation": None}) for file in origin.manifest.files]
    manifest = origin.manifest.model_copy(update={"files": old})
    client.bucket(buckets[1]).blob(model_prefix(THEIRS) + MANIFEST).upload_from_string(manifest.model_dump_json())
    found = find_origin(client, buckets[1], THEIRS)
    assert found.manifest.files == origin.manifest.files
    assert found.digest == manifest_digest(manifest)
    assert found.digest != origin.digest


def test_other_bytes_at_the_place_of_a_copy_are_no_copy(client: Any, buckets: tuple[str, str], origin: Origin) -> None:
    path = origin.manifest.files[0].path
    client.bucket(buckets[0]).blob(model_prefix(COPY) + path).upload_from_string(b"x" * 1000)
    assert copy_files(client, buckets[0], COPY, origin, Copied(), never) is None
    with pytest.raises(Malformed, match=r"the copy of gs://theirs-.* differs: .*a\.safetensors has 1000 bytes"):
        copy_of(client, buckets[0], COPY, origin)


def test_a_deleted_copy_takes_nothing_else_along(client: Any, buckets: tuple[str, str], origin: Origin) -> None:
    others = [model_prefix(run) + "x" for run in (names.copy_id("rollout-2"), "copy-0123456789ab", THEIRS)]
    for name in others:
        client.bucket(buckets[0]).blob(name).upload_from_string(b"x")
    copy_files(client, buckets[0], COPY, origin, Copied(), never)
    before = {blob.name: blob.generation for blob in client.list_blobs(buckets[1])}
    delete_copy(client, buckets[0], COPY)
    assert {blob.name for blob in client.list_blobs(buckets[0])} == set(others)
    assert {blob.name: blob.generation for blob in client.list_blobs(buckets[1])} == before
    delete_copy(client, buckets[0], COPY)  # again, after a lost reply


def test_a_missing_model_is_named(client: Any, buckets: tuple[str, str]) -> None:
    with pytest.raises(NotFound, match=f"models/{THEIRS} has no committed model: there is no {MANIFEST}"):
        find_origin(client, buckets[1], THEIRS)


@pytest.mark.parametrize(
    "text",
    [
        f"gs://b/models/{THEIRS}",  # a bucket's name has three characters or more
        "gs://bucket/models/no-run",
        f"gs://bucket/models/{THEIRS}/attempt-1/model",
        f"gs://bucket/models/../{THEIRS}",
        f"gs://bucket/{THEIRS}",
        f"https://bucket/models/{THEIRS}",
        THEIRS,
    ],
)
def test_other_texts_name_no_model(text: str) -> None:
    assert bucket_and_run(text) is None


def test_a_model_is_named_by_its_bucket_and_its_run() -> None:
    for end in ("", "/"):
        assert bucket_and_run(f"gs://other-project.example/models/{THEIRS}{end}") == (
            "other-project.example",
            THEIRS,
        )
