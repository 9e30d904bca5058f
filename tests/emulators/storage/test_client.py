"""The acceptance suite: the unmodified google-cloud-storage client against the emulator.

Set STORAGE_CONFORMANCE_HOST=http://HOST:PORT to run it against another server and compare the two.
"""

from __future__ import annotations

import gzip
import io
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[storage.Client]:
    if host := os.environ.get("STORAGE_CONFORMANCE_HOST"):
        client = storage.Client("p", credentials=AnonymousCredentials(), client_options={"api_endpoint": host})
    else:
        client = request.getfixturevalue("running").client
    yield client
    client.close()


@pytest.fixture
def bucket(client: storage.Client) -> storage.Bucket:
    return client.create_bucket(f"conf-{uuid.uuid4().hex[:20]}", retry=None)


def put(bucket: storage.Bucket, name: str, data: bytes | str = b"data", **options: Any) -> storage.Blob:
    blob = bucket.blob(name)
    blob.upload_from_string(data, retry=None, **options)
    return blob


def names(bucket: storage.Bucket, **options: Any) -> list[str]:
    return [blob.name for blob in bucket.list_blobs(retry=None, **options)]


class TestBuckets:
    def test_create_get_list_delete(self, client: storage.Client) -> None:
        name = f"conf-{uuid.uuid4().hex[:20]}"
        created = client.create_bucket(name, location="europe-west4", retry=None)
        assert (created.location, created.metageneration, created.storage_class) == ("EUROPE-WEST4", 1, "STANDARD")
        assert client.lookup_bucket(name, retry=None) is not None
        assert name in [b.name for b in client.list_buckets(retry=None)]
        created.delete(retry=None)
        assert client.lookup_bucket(name, retry=None) is None

    def test_second_create_conflicts(self, client: storage.Client, bucket: storage.Bucket) -> None:
        with pytest.raises(exceptions.Conflict):
            client.create_bucket(bucket.name, retry=None)

    def test_bucket_with_objects_is_not_deleted(self, bucket: storage.Bucket) -> None:
        put(bucket, "x")
        with pytest.raises(exceptions.Conflict, match="not empty"):
            bucket.delete(retry=None)

    def test_force_delete_empties_first(self, client: storage.Client, bucket: storage.Bucket) -> None:
        put(bucket, "x")
        bucket.delete(force=True, retry=None)
        assert client.lookup_bucket(bucket.name, retry=None) is None

    def test_labels_and_lifecycle_are_kept(self, client: storage.Client, bucket: storage.Bucket) -> None:
        bucket.labels = {"team": "search", "env": "dev"}
        bucket.add_lifecycle_delete_rule(age=30)
        bucket.patch(retry=None)
        again = client.get_bucket(bucket.name, retry=None)
        assert again.labels == {"team": "search", "env": "dev"}
        assert [rule["action"]["type"] for rule in again.lifecycle_rules] == ["Delete"]
        assert again.metageneration == 2

    def test_label_removed_by_patch(self, client: storage.Client, bucket: storage.Bucket) -> None:
        bucket.labels = {"a": "1", "b": "2"}
        bucket.patch(retry=None)
        bucket.labels = {"b": "2"}
        bucket.patch(retry=None)
        assert client.get_bucket(bucket.name, retry=None).labels == {"b": "2"}

    def test_iam_policy_read_modify_write(self, bucket: storage.Bucket) -> None:
        policy = bucket.get_iam_policy(retry=None)
        policy.bindings.append({"role": "roles/storage.objectViewer", "members": {"allUsers"}})
        bucket.set_iam_policy(policy, retry=None)
        (binding,) = bucket.get_iam_policy(retry=None).bindings
        assert (binding["role"], set(binding["members"])) == ("roles/storage.objectViewer", {"allUsers"})
        assert bucket.test_iam_permissions(["storage.objects.get"], retry=None) == ["storage.objects.get"]

    def test_stale_bucket_metageneration(self, bucket: storage.Bucket) -> None:
        bucket.labels = {"a": "1"}
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.patch(if_metageneration_match=99, retry=None)

    def test_service_account(self, client: storage.Client) -> None:
        assert "@" in client.get_service_account_email(retry=None)


class TestObjects:
    def test_upload_download(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "a.txt", "héllo", content_type="text/plain; charset=utf-8")
        assert bucket.blob("a.txt").download_as_text(retry=None) == "héllo"
        assert (blob.size, blob.content_type, blob.metageneration) == (6, "text/plain; charset=utf-8", 1)
        assert blob.md5_hash
        assert blob.crc32c
        assert blob.etag
        assert blob.generation > 10**15
        assert blob.time_created == blob.updated

    def test_empty_object(self, bucket: storage.Bucket) -> None:
        put(bucket, "empty", b"")
        assert bucket.blob("empty").download_as_bytes(retry=None) == b""
        assert bucket.get_blob("empty", retry=None).size == 0

    def test_missing_object(self, bucket: storage.Bucket) -> None:
        assert bucket.get_blob("none", retry=None) is None
        assert not bucket.blob("none").exists(retry=None)
        for act in (bucket.blob("none").download_as_bytes, bucket.blob("none").delete, bucket.blob("none").reload):
            with pytest.raises(exceptions.NotFound):
                act(retry=None)

    def test_missing_bucket(self, client: storage.Client) -> None:
        with pytest.raises(exceptions.NotFound, match="bucket does not exist"):
            client.bucket("no-such-bucket-here").blob("x").upload_from_string("x", retry=None)

    def test_overwrite_makes_a_new_generation(self, bucket: storage.Bucket) -> None:
        first, second = put(bucket, "x", b"1"), put(bucket, "x", b"2")
        assert second.generation > first.generation
        assert bucket.blob("x").download_as_bytes(retry=None) == b"2"
        with pytest.raises(exceptions.NotFound):
            bucket.blob("x", generation=first.generation).download_as_bytes(retry=None)

    def test_patch_metadata(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "x")
        blob.metadata = {"run": "r1", "ключ": "значение"}
        blob.cache_control = "no-store"
        blob.patch(retry=None)
        again = bucket.get_blob("x", retry=None)
        assert again.metadata == {"run": "r1", "ключ": "значение"}
        assert (again.metageneration, again.generation, again.cache_control) == (2, blob.generation, "no-store")
        assert again.updated >= again.time_created

    def test_update_replaces_metadata(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "x")
        blob.metadata = {"a": "1"}
        blob.patch(retry=None)
        blob.metadata = {"b": "2"}
        blob.update(retry=None)
        assert bucket.get_blob("x", retry=None).metadata == {"b": "2"}

    def test_metadata_with_upload(self, bucket: storage.Bucket) -> None:
        blob = bucket.blob("x")
        blob.metadata = {"k": "v"}
        blob.content_language = "de"
        blob.upload_from_string("x", retry=None)
        again = bucket.get_blob("x", retry=None)
        assert (again.metadata, again.content_language) == ({"k": "v"}, "de")

    def test_delete(self, bucket: storage.Bucket) -> None:
        put(bucket, "x").delete(retry=None)
        assert not bucket.blob("x").exists(retry=None)

    @pytest.mark.parametrize(("first", "last"), [(0, 3), (2, None), (5, 5), (0, 100)])
    def test_range(self, bucket: storage.Bucket, first: int, last: int | None) -> None:
        put(bucket, "x", b"0123456789")
        expected = b"0123456789"[first : None if last is None else last + 1]
        assert bucket.blob("x").download_as_bytes(start=first, end=last, retry=None) == expected

    def test_range_beyond_the_end(self, bucket: storage.Bucket) -> None:
        put(bucket, "x", b"0123456789")
        with pytest.raises(exceptions.RequestRangeNotSatisfiable):
            bucket.blob("x").download_as_bytes(start=10, retry=None)

    def test_file_upload_and_download(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        data = os.urandom(3_000_001)
        (tmp_path / "in").write_bytes(data)
        bucket.blob("f").upload_from_filename(str(tmp_path / "in"), retry=None)
        bucket.blob("f").download_to_filename(str(tmp_path / "out"), retry=None)
        assert (tmp_path / "out").read_bytes() == data

    def test_resumable_upload_in_chunks(self, bucket: storage.Bucket) -> None:
        data = os.urandom(5 * 256 * 1024 + 17)
        blob = bucket.blob("big", chunk_size=256 * 1024)
        blob.upload_from_file(io.BytesIO(data), size=len(data), retry=None)
        assert bucket.blob("big").download_as_bytes(retry=None) == data

    @pytest.mark.parametrize("size", [0, 1, 256 * 1024, 3 * 256 * 1024, 600_000])
    def test_upload_of_unknown_size(self, bucket: storage.Bucket, size: int) -> None:
        data = os.urandom(size)
        with bucket.blob("w").open("wb", chunk_size=256 * 1024, retry=None) as writer:
            writer.write(data)
        assert bucket.blob("w").download_as_bytes(retry=None) == data

    def test_reading_as_a_file(self, bucket: storage.Bucket) -> None:
        put(bucket, "lines", "one\ntwo\nthree\n")
        with bucket.blob("lines").open("rt", chunk_size=4, retry=None) as file:
            assert list(file) == ["one\n", "two\n", "three\n"]

    def test_chunked_download(self, bucket: storage.Bucket, tmp_path: Path) -> None:
        data = os.urandom(2 * 1024 * 1024 + 3)
        put(bucket, "big", data)
        blob = bucket.blob("big")
        transfer_manager.download_chunks_concurrently(
            blob, str(tmp_path / "out"), chunk_size=512 * 1024, worker_type=transfer_manager.THREAD
        )
        assert (tmp_path / "out").read_bytes() == data

    def test_compose(self, bucket: storage.Bucket) -> None:
        parts = [put(bucket, f"p{i}", f"part{i};") for i in range(3)]
        whole = bucket.blob("whole")
        whole.content_type = "text/plain"
        whole.compose(parts, retry=None)
        assert bucket.blob("whole").download_as_bytes(retry=None) == b"part0;part1;part2;"
        assert (whole.component_count, whole.md5_hash, whole.content_type) == (3, None, "text/plain")

    def test_copy_keeps_metadata(self, bucket: storage.Bucket, client: storage.Client) -> None:
        source = put(bucket, "x", b"data", content_type="text/x")
        source.metadata = {"a": "1"}
        source.patch(retry=None)
        other = client.create_bucket(f"conf-{uuid.uuid4().hex[:20]}", retry=None)
        copy = bucket.copy_blob(source, other, "y", retry=None)
        assert (copy.content_type, copy.metadata, copy.metageneration) == ("text/x", {"a": "1"}, 1)
        source.delete(retry=None)
        assert other.blob("y").download_as_bytes(retry=None) == b"data"

    def test_rewrite(self, bucket: storage.Bucket) -> None:
        source = put(bucket, "x", b"data")
        token, done, total = bucket.blob("y").rewrite(source, retry=None)
        assert (token, done, total) == (None, 4, 4)
        assert bucket.blob("y").download_as_bytes(retry=None) == b"data"

    def test_move(self, bucket: storage.Bucket) -> None:
        source = put(bucket, "x", b"data")
        bucket.move_blob(source, "y", retry=None)
        assert names(bucket) == ["y"]
        assert bucket.blob("y").download_as_bytes(retry=None) == b"data"

    def test_gzip_is_decoded_by_the_client(self, bucket: storage.Bucket) -> None:
        blob = bucket.blob("z")
        blob.content_encoding = "gzip"
        packed = gzip.compress(b"text " * 1000)
        blob.upload_from_string(packed, content_type="text/plain", retry=None)
        assert bucket.blob("z").download_as_bytes(retry=None) == b"text " * 1000
        assert bucket.blob("z").download_as_bytes(raw_download=True, retry=None) == packed

    @pytest.mark.parametrize("checksum", ["md5", "crc32c", None])
    def test_checksums(self, bucket: storage.Bucket, checksum: str | None) -> None:
        data = os.urandom(100_000)
        bucket.blob("c").upload_from_string(data, checksum=checksum, retry=None)
        assert bucket.blob("c").download_as_bytes(checksum=checksum, retry=None) == data

    @pytest.mark.parametrize(
        "name",
        ["a//b", "../up", "t/", "/lead", "a/../b", "ü/名前 🎉", "q?x=1&y#z%2F+", "..a", "%2F", "x" * 1024, "é" * 512],
    )
    def test_odd_names(self, bucket: storage.Bucket, name: str) -> None:
        put(bucket, name, name.encode())
        assert bucket.blob(name).download_as_bytes(retry=None) == name.encode()
        assert names(bucket) == [name]
        bucket.blob(name).delete(retry=None)
        assert names(bucket) == []

    def test_object_and_prefix_with_the_same_name(self, bucket: storage.Bucket) -> None:
        put(bucket, "a", b"object")
        put(bucket, "a/b", b"below")
        assert bucket.blob("a").download_as_bytes(retry=None) == b"object"
        assert names(bucket) == ["a", "a/b"]

    @pytest.mark.parametrize("name", ["x" * 1025, "é" * 513, ".", "..", "a\nb", "a\rb", ".well-known/acme-challenge/x"])
    def test_refused_names(self, bucket: storage.Bucket, name: str) -> None:
        with pytest.raises(exceptions.BadRequest):
            put(bucket, name)

    def test_client_signs_urls_itself(self, bucket: storage.Bucket) -> None:
        with pytest.raises(AttributeError, match="private key"):
            bucket.blob("x").generate_signed_url(timedelta(minutes=1))


class TestPreconditions:
    def test_create_if_absent(self, bucket: storage.Bucket) -> None:
        put(bucket, "x", b"1", if_generation_match=0)
        with pytest.raises(exceptions.PreconditionFailed):
            put(bucket, "x", b"2", if_generation_match=0)
        assert bucket.blob("x").download_as_bytes(retry=None) == b"1"

    def test_create_if_absent_resumable(self, bucket: storage.Bucket) -> None:
        put(bucket, "x", b"1")
        blob = bucket.blob("x", chunk_size=256 * 1024)
        with pytest.raises(exceptions.PreconditionFailed):
            blob.upload_from_file(io.BytesIO(b"y" * 300_000), if_generation_match=0, retry=None)
        assert bucket.blob("x").download_as_bytes(retry=None) == b"1"

    def test_stale_generation_on_every_verb(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "x", b"1")
        stale = {"if_generation_match": blob.generation - 1, "retry": None}
        blob.metadata = {"a": "b"}
        for act in (blob.delete, blob.patch, blob.update, blob.reload, blob.download_as_bytes):
            with pytest.raises(exceptions.PreconditionFailed):
                act(**stale)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.copy_blob(blob, bucket, "y", if_source_generation_match=blob.generation - 1, retry=None)
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.blob("z").compose([blob], if_generation_match=5, retry=None)
        assert names(bucket) == ["x"]

    def test_stale_metageneration(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "x")
        blob.metadata = {"a": "b"}
        blob.patch(if_metageneration_match=1, retry=None)
        with pytest.raises(exceptions.PreconditionFailed):
            blob.patch(if_metageneration_match=1, retry=None)

    def test_not_match_on_read_is_304(self, bucket: storage.Bucket) -> None:
        blob = put(bucket, "x")
        with pytest.raises(exceptions.NotModified):
            blob.reload(if_generation_not_match=blob.generation, retry=None)
        with pytest.raises(exceptions.NotModified):
            blob.reload(if_etag_not_match=blob.etag, retry=None)
        blob.reload(if_etag_match=blob.etag, retry=None)

    def test_metageneration_not_match_on_upload(self, bucket: storage.Bucket) -> None:
        put(bucket, "x", b"1")
        with pytest.raises(exceptions.NotModified):
            put(bucket, "x", b"2", if_metageneration_not_match=1)


class TestListing:
    @pytest.fixture
    def tree(self, bucket: storage.Bucket) -> storage.Bucket:
        for name in ("a.json", "b/1.json", "b/2.txt", "b/c/3.json", "b/c/4.json", "d/5.json", "e"):
            put(bucket, name)
        return bucket

    def test_prefix_and_delimiter(self, tree: storage.Bucket) -> None:
        listing = tree.list_blobs(prefix="b/", delimiter="/", retry=None)
        assert [blob.name for blob in listing] == ["b/1.json", "b/2.txt"]
        assert listing.prefixes == {"b/c/"}

    def test_pages(self, tree: storage.Bucket) -> None:
        pages = [[blob.name for blob in page] for page in tree.list_blobs(page_size=3, retry=None).pages]
        assert [len(page) for page in pages] == [3, 3, 1]
        assert [name for page in pages for name in page] == names(tree)
        assert names(tree, max_results=2) == ["a.json", "b/1.json"]

    def test_offsets(self, tree: storage.Bucket) -> None:
        assert names(tree, start_offset="b/2.txt", end_offset="d/5.json") == ["b/2.txt", "b/c/3.json", "b/c/4.json"]

    def test_glob(self, tree: storage.Bucket) -> None:
        assert names(tree, match_glob="b/*.json") == ["b/1.json"]
        assert names(tree, match_glob="**/{3,5}.json") == ["b/c/3.json", "d/5.json"]

    def test_versions(self, client: storage.Client, bucket: storage.Bucket) -> None:
        bucket.versioning_enabled = True
        bucket.patch(retry=None)
        first, second = put(bucket, "x", b"1"), put(bucket, "x", b"2")
        put(bucket, "y", b"3")
        versions = [(b.name, b.generation) for b in bucket.list_blobs(versions=True, prefix="x", retry=None)]
        assert versions == [("x", first.generation), ("x", second.generation)]
        old = bucket.blob("x", generation=first.generation)
        assert old.download_as_bytes(retry=None) == b"1"
        bucket.blob("x").delete(retry=None)
        assert names(bucket) == ["y"]
        assert bucket.get_blob("x", generation=second.generation, retry=None).time_deleted is not None
        old.delete(retry=None)
        assert len(list(bucket.list_blobs(versions=True, prefix="x", retry=None))) == 1


class TestBatch:
    def test_batch_of_patches_and_deletes(self, client: storage.Client, bucket: storage.Bucket) -> None:
        blobs = [put(bucket, f"o/{i} ü", b"x") for i in range(4)]
        with client.batch():
            for blob in blobs[:2]:
                blob.metadata = {"k": "ü"}
                blob.patch()
            for blob in blobs[2:]:
                blob.delete()
        assert blobs[0].metageneration == 2
        assert names(bucket) == ["o/0 ü", "o/1 ü"]

    def test_failures_have_distinct_errors(self, client: storage.Client, bucket: storage.Bucket) -> None:
        there = put(bucket, "there")
        with client.batch(raise_exception=False) as batch:
            there.delete()
            bucket.blob("gone").delete()
        assert [response.status_code for response in batch._responses] == [204, 404]


def test_a_list_has_the_selected_fields_alone(bucket: storage.Bucket) -> None:
    blob = put(bucket, "a")
    blob.metadata = {"k": "v"}
    blob.patch()
    [blob] = bucket.list_blobs(fields="items(name,metadata/k),nextPageToken")
    assert (blob.name, blob.metadata, blob.size, blob.generation) == ("a", {"k": "v"}, None, None)
