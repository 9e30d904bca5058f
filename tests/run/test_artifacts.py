"""The layout of the runs bucket, tested with the storage emulator and Google's client."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dropforge.base.errors import Conflict, DropforgeError, Malformed, NotFound
from dropforge.run import artifacts
from dropforge.run.artifacts import Manifest, Source
from dropforge.run.proof import with_proof

RUN = "tiny-0123456789ab"
KEY, OTHER_KEY = "k" * 64, "o" * 64


@pytest.fixture
def bucket(client: Any, request: pytest.FixtureRequest) -> str:
    name = f"runs-{abs(hash(request.node.nodeid)):x}"
    client.create_bucket(name)
    return name


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    directory = tmp_path / "exported"
    (directory / "model").mkdir(parents=True)
    (directory / "model" / "model.safetensors").write_bytes(b"weights" * 1000)
    (directory / "README.md").write_text("a model")
    (directory / "empty").write_bytes(b"")
    return directory


def manifest(files: list[artifacts.ArtifactFile], attempt: int = 1) -> Manifest:
    prefix = artifacts.attempt_directory(attempt)
    return Manifest(
        run=RUN,
        attempt=attempt,
        created=datetime.now(UTC),
        spec_sha256="0" * 64,
        base=Source(uri="google/gemma-2b", revision="abc"),
        dataset=Source(uri="gs://data/x.jsonl", revision="def"),
        serve_path=f"{prefix}/model",
        metrics={"exact_match": 0.9, "loss": float("nan")},
        files=[file.model_copy(update={"path": f"{prefix}/{file.path}"}) for file in files],
    )


def upload(client: Any, bucket: str, exported: Path, attempt: int = 1) -> Manifest:
    uri = f"{artifacts.model_uri(bucket, RUN)}/{artifacts.attempt_directory(attempt)}"
    return manifest(artifacts.upload_directory(client, exported, uri), attempt)


def test_a_directory_is_unchanged_after_upload_and_download(
    client: Any, bucket: str, exported: Path, tmp_path: Path
) -> None:
    sent = artifacts.upload_directory(client, exported, f"gs://{bucket}/a/b")
    received = artifacts.download_prefix(client, f"gs://{bucket}/a/b/", tmp_path / "back")
    assert all(file.has_content_of(back) for file, back in zip(sent, received, strict=True))
    assert [file.path for file in sent] == ["README.md", "empty", "model/model.safetensors"]
    assert (tmp_path / "back" / "model" / "model.safetensors").read_bytes() == b"weights" * 1000


def test_an_absent_prefix_is_not_found(client: Any, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"gs://{bucket}/nothing/"):
        artifacts.download_prefix(client, f"gs://{bucket}/nothing", tmp_path)


def test_a_prefix_does_not_include_its_neighbours(client: Any, bucket: str, tmp_path: Path) -> None:
    client.bucket(bucket).blob("model-2/x").upload_from_string("no")
    client.bucket(bucket).blob("model/x").upload_from_string("yes")
    files = artifacts.download_prefix(client, f"gs://{bucket}/model", tmp_path)
    assert [file.path for file in files] == ["x"]
    assert (tmp_path / "x").read_text() == "yes"


def test_no_object_is_written_outside_of_the_directory(client: Any, bucket: str, tmp_path: Path) -> None:
    client.bucket(bucket).blob("model/../../evil").upload_from_string("no")
    with pytest.raises(DropforgeError, match="outside"):
        artifacts.download_prefix(client, f"gs://{bucket}/model", tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_the_revision_of_a_prefix_changes_with_its_content(client: Any, bucket: str) -> None:
    blob = client.bucket(bucket).blob("model/x")
    blob.upload_from_string("first")
    first = artifacts.prefix_revision(client, f"gs://{bucket}/model")
    assert first == artifacts.prefix_revision(client, f"gs://{bucket}/model/")
    blob.upload_from_string("two")
    assert artifacts.prefix_revision(client, f"gs://{bucket}/model") != first


def test_there_is_no_manifest_before_the_commit(client: Any, bucket: str, exported: Path) -> None:
    assert artifacts.read_manifest(client, bucket, RUN) is None
    written = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    read = artifacts.read_manifest(client, bucket, RUN)
    assert read is not None
    assert read.files == written.files
    assert read.metrics == {"exact_match": 0.9, "loss": None}


def test_the_same_manifest_is_committed_only_once(client: Any, bucket: str, exported: Path) -> None:
    written = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    second_write = artifacts.write_manifest(client, bucket, written.model_copy(update={"created": datetime.now(UTC)}))
    assert second_write.created == written.created


def test_a_second_writer_loses_and_spoils_nothing(client: Any, bucket: str, exported: Path) -> None:
    first = artifacts.write_manifest(client, bucket, upload(client, bucket, exported, attempt=1))
    (exported / "README.md").write_text("another model")
    with pytest.raises(Conflict, match="attempt 1"):
        artifacts.write_manifest(client, bucket, upload(client, bucket, exported, attempt=2))
    assert artifacts.verify_manifest(client, bucket, first) == []
    assert artifacts.read_artifact(client, bucket, first, "README.md") == b"a model"


def test_verification_names_missing_and_different_files(client: Any, bucket: str, exported: Path) -> None:
    committed = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    prefix = artifacts.model_prefix(RUN)
    client.bucket(bucket).blob(f"{prefix}attempt-1/empty").delete()
    client.bucket(bucket).blob(f"{prefix}attempt-1/README.md").upload_from_string("changed")
    missing, changed = sorted(artifacts.verify_manifest(client, bucket, committed), reverse=True)
    assert missing == "attempt-1/empty is missing"
    assert changed.startswith("attempt-1/README.md is 7 bytes")


def test_an_artifact_that_the_manifest_does_not_list_is_not_read(client: Any, bucket: str, exported: Path) -> None:
    committed = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    with pytest.raises(NotFound, match=r"samples\.json"):
        artifacts.read_artifact(client, bucket, committed, "samples.json")


@pytest.mark.parametrize("key", ["", OTHER_KEY], ids=["no proof", "another run's proof"])
def test_a_forged_manifest_counts_as_none_and_stops_no_commit(
    client: Any, bucket: str, exported: Path, key: str
) -> None:
    forged = artifacts.write_manifest(client, bucket, manifest([], attempt=2), key)
    assert artifacts.read_manifest(client, bucket, RUN) == forged
    assert artifacts.read_manifest(client, bucket, RUN, KEY) is None
    written = artifacts.write_manifest(client, bucket, upload(client, bucket, exported), KEY)
    assert artifacts.read_manifest(client, bucket, RUN, KEY) == written
    assert written.attempt == 1
    with pytest.raises(Conflict, match="attempt 1"):
        artifacts.write_manifest(client, bucket, manifest([], attempt=2), KEY)


def test_the_manifest_of_another_name_has_no_proof(client: Any, bucket: str) -> None:
    """Otherwise a manifest of the same run, of an earlier bucket or under another name, could be copied."""
    data = with_proof(KEY, "models/other/MANIFEST.json", json.loads(manifest([]).model_dump_json(exclude={"proof"})))
    client.bucket(bucket).blob(f"models/{RUN}/MANIFEST.json").upload_from_string(data)
    assert artifacts.read_manifest(client, bucket, RUN, KEY) is None


def test_a_file_that_was_written_again_is_compared_by_its_content(client: Any, bucket: str, exported: Path) -> None:
    """A crc32c can be forged. So the SHA-256 decides about a file that is not the committed generation."""
    committed = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    name = f"{artifacts.model_prefix(RUN)}attempt-1/model/model.safetensors"
    client.bucket(bucket).blob(name).upload_from_string(b"weights" * 1000)
    assert artifacts.verify_manifest(client, bucket, committed) == []  # as after a restore
    files = [file.model_copy(update={"sha256": "0" * 64}) for file in committed.files]
    [problem] = artifacts.verify_manifest(client, bucket, committed.model_copy(update={"files": files}))
    assert problem.startswith("attempt-1/model/model.safetensors was replaced after the commit")


def test_a_file_that_was_added_to_the_model_is_told(client: Any, bucket: str, exported: Path) -> None:
    """A server loads all weights below the model's prefix."""
    committed = artifacts.write_manifest(client, bucket, upload(client, bucket, exported))
    prefix = f"{artifacts.model_prefix(RUN)}attempt-1"
    client.bucket(bucket).blob(f"{prefix}/model/model-2.safetensors").upload_from_string(b"x")
    client.bucket(bucket).blob(f"{prefix}/beside").upload_from_string(b"x")
    assert artifacts.verify_manifest(client, bucket, committed) == [
        "attempt-1/model/model-2.safetensors is not in the manifest"
    ]


def test_only_the_listed_files_are_downloaded_and_none_that_differs(
    client: Any, bucket: str, exported: Path, tmp_path: Path
) -> None:
    uri = f"gs://{bucket}/c"
    files = artifacts.upload_directory(client, exported, uri)
    client.bucket(bucket).blob("c/more").upload_from_string(b"x")
    artifacts.download_files(client, uri, tmp_path / "same", files)
    assert not (tmp_path / "same" / "more").exists()
    assert (tmp_path / "same" / "model" / "model.safetensors").read_bytes() == b"weights" * 1000
    client.bucket(bucket).blob("c/README.md").upload_from_string(b"another")
    with pytest.raises(NotFound, match=r"c/README\.md is not the file that was committed"):
        artifacts.download_files(client, uri, tmp_path / "changed", files)
    client.bucket(bucket).blob("c/README.md").delete()
    with pytest.raises(NotFound, match=r"below gs://.*/c/ is missing"):
        artifacts.download_files(client, uri, tmp_path / "missing", files)


def test_a_forged_checkpoint_is_neither_resumed_nor_a_reason_to_prune(client: Any, bucket: str, exported: Path) -> None:
    for step in (10, 20):
        artifacts.upload_checkpoint(client, bucket, RUN, step, exported, {}, KEY)
    for step, key in ((30, ""), (40, OTHER_KEY), (50, OTHER_KEY)):
        artifacts.upload_checkpoint(client, bucket, RUN, step, exported, {}, key)
    newest = artifacts.newest_complete_checkpoint(client, bucket, RUN, KEY)
    assert newest is not None
    assert newest.step == 20
    artifacts.prune_checkpoints(client, bucket, RUN, 2, KEY)
    assert [checkpoint.step for checkpoint in artifacts.checkpoints(client, bucket, RUN, KEY)] == [20, 10]


def test_a_manifest_that_cannot_be_parsed_is_an_error(client: Any, bucket: str) -> None:
    client.bucket(bucket).blob(f"models/{RUN}/MANIFEST.json").upload_from_string('{"version": 2}')
    with pytest.raises(Malformed, match=r"MANIFEST\.json is not a manifest"):
        artifacts.read_manifest(client, bucket, RUN)


def test_the_manifest_of_another_run_is_an_error(client: Any, bucket: str) -> None:
    other = manifest([]).model_copy(update={"run": "other-0123456789ab"})
    client.bucket(bucket).blob(f"models/{RUN}/MANIFEST.json").upload_from_string(other.model_dump_json())
    with pytest.raises(Malformed, match="expected the run in its name"):
        artifacts.read_manifest(client, bucket, RUN)


def test_the_newest_complete_checkpoint_is_used_and_incomplete_checkpoints_are_not(
    client: Any, bucket: str, exported: Path
) -> None:
    assert artifacts.newest_complete_checkpoint(client, bucket, RUN) is None
    for step in (20, 100):
        artifacts.upload_checkpoint(client, bucket, RUN, step, exported, {"seconds": step})
    artifacts.upload_directory(client, exported, f"gs://{bucket}/{artifacts.checkpoint_prefix(RUN, 120)}")
    blob = client.bucket(bucket).blob(f"{artifacts.checkpoint_prefix(RUN, 140)}{artifacts.COMPLETE}")
    blob.upload_from_string("{not json")
    newest = artifacts.newest_complete_checkpoint(client, bucket, RUN)
    assert newest is not None
    assert (newest.step, newest.extra) == (100, {"seconds": 100})
    assert newest.uri == f"gs://{bucket}/checkpoints/{RUN}/step-00000100/"


def test_pruning_keeps_the_newest_and_never_deletes_the_only_checkpoint(
    client: Any, bucket: str, exported: Path
) -> None:
    torn = f"gs://{bucket}/{artifacts.checkpoint_prefix(RUN, 5)}"
    artifacts.upload_directory(client, exported, torn)
    for step in (10, 20):
        artifacts.upload_checkpoint(client, bucket, RUN, step, exported, {})
    artifacts.prune_checkpoints(client, bucket, RUN, keep=3)
    assert {name.split("/")[2] for name in names(client, bucket)} == {"step-00000005", "step-00000010", "step-00000020"}
    artifacts.upload_checkpoint(client, bucket, RUN, 30, exported, {})
    artifacts.prune_checkpoints(client, bucket, RUN, keep=2)
    assert {name.split("/")[2] for name in names(client, bucket)} == {"step-00000020", "step-00000030"}


def test_the_marker_is_the_last_object_of_a_checkpoint(client: Any, bucket: str, exported: Path) -> None:
    checkpoint = artifacts.upload_checkpoint(client, bucket, RUN, 7, exported, {})
    blobs = {blob.name: blob for blob in client.list_blobs(bucket)}
    marker = blobs.pop(f"checkpoints/{RUN}/step-00000007/_COMPLETE")
    assert all(blob.generation < marker.generation for blob in blobs.values())
    listed = [file["path"] for file in json.loads(marker.download_as_bytes())["files"]]
    assert listed == [file.path for file in checkpoint.files]


def names(client: Any, bucket: str) -> list[str]:
    return [blob.name for blob in client.list_blobs(bucket)]
