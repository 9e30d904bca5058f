"""Downloads: ranges, headers, and decompression for clients that do not accept gzip."""

from __future__ import annotations

import gzip
import os

import pytest
import requests

from .conftest import Api, Running

DATA = b"0123456789"


@pytest.mark.parametrize(
    ("header", "content", "content_range"),
    [
        ("bytes=0-3", DATA[:4], "bytes 0-3/10"),
        ("bytes=4-", DATA[4:], "bytes 4-9/10"),
        ("bytes=-3", DATA[-3:], "bytes 7-9/10"),
        ("bytes=-30", DATA, "bytes 0-9/10"),
        ("bytes=0-99", DATA, "bytes 0-9/10"),
        ("bytes=9-9", DATA[9:], "bytes 9-9/10"),
    ],
)
def test_range(api: Api, header: str, content: bytes, content_range: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", DATA)
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Range": header})
    assert (reply.status_code, reply.content, reply.headers["Content-Range"]) == (206, content, content_range)
    assert "X-Goog-Hash" not in reply.headers


@pytest.mark.parametrize("header", ["bytes=a-b", "lines=0-1", "bytes=0-1,3-4", "bytes", "bytes=-"])
def test_header_without_a_single_range_is_ignored(api: Api, header: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", DATA)
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Range": header})
    assert (reply.status_code, reply.content) == (200, DATA)


@pytest.mark.parametrize(
    ("size", "header"), [(10, "bytes=10-"), (10, "bytes=99-100"), (0, "bytes=0-"), (10, "bytes=-0"), (10, "bytes=5-4")]
)
def test_range_beyond_the_end(api: Api, size: int, header: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", DATA[:size])
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Range": header})
    assert (reply.status_code, reply.json()["error"]["code"]) == (416, 416)


def test_range_of_a_large_object(api: Api) -> None:
    bucket, data = api.bucket(), os.urandom(5 * 2**20 + 3)
    api.put(bucket, "x", data)
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Range": "bytes=1000-4500000"})
    assert (reply.status_code, reply.content) == (206, data[1000:4500001])


def test_headers(api: Api) -> None:
    bucket = api.bucket()
    stored = api.put(bucket, "x", DATA, headers={"Content-Type": "text/plain"}).json()
    api.object(
        "PATCH", bucket, "x", json={"cacheControl": "no-store", "contentDisposition": 'attachment; filename="é"'}
    )
    headers = api.object("GET", bucket, "x", params={"alt": "media"}).headers
    assert headers["X-Goog-Generation"] == stored["generation"]
    assert headers["X-Goog-Metageneration"] == "2"
    assert headers["X-Goog-Hash"] == f"crc32c={stored['crc32c']},md5={stored['md5Hash']}"
    assert (headers["Content-Type"], headers["Cache-Control"]) == ("text/plain", "no-store")
    assert (headers["X-Goog-Stored-Content-Length"], headers["Content-Length"]) == ("10", "10")


@pytest.mark.parametrize("root", ["storage", "download/storage"])
def test_both_roots_serve_media(api: Api, root: str) -> None:
    bucket = api.bucket()
    stored = api.put(bucket, "a/b", DATA).json()
    reply = api.session.get(f"{api.url}/{root}/v1/b/{bucket}/o/a%2Fb?alt=media", timeout=60)
    assert reply.content == DATA
    assert api.session.get(stored["mediaLink"], timeout=60).content == DATA
    assert api.session.get(stored["selfLink"], timeout=60).json() == stored


@pytest.mark.parametrize("content", [b"", b"text " * 100, os.urandom(4_000_000), bytes(50_000_000)], ids=range(4))
def test_gzip_is_decompressed_for_clients_without_gzip(api: Api, content: bytes) -> None:
    bucket, packed = api.bucket(), gzip.compress(content[:1000]) + gzip.compress(content[1000:], 1)
    api.put(bucket, "x", packed, contentEncoding="gzip")
    plain = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Accept-Encoding": "identity"})
    assert plain.content == content
    assert (plain.headers["X-Goog-Stored-Content-Encoding"], "Content-Encoding" in plain.headers) == ("gzip", False)
    assert "X-Goog-Hash" not in plain.headers
    stream = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Accept-Encoding": "gzip"}, stream=True)
    assert stream.raw.read() == packed


def test_no_transform_is_honoured(api: Api) -> None:
    bucket, packed = api.bucket(), gzip.compress(b"text")
    api.put(bucket, "x", packed, contentEncoding="gzip")
    api.object("PATCH", bucket, "x", json={"cacheControl": "no-transform"})
    reply = api.object(
        "GET", bucket, "x", params={"alt": "media"}, headers={"Accept-Encoding": "identity"}, stream=True
    )
    assert reply.raw.read() == packed


def test_bytes_that_are_not_gzip(api: Api) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", b"plain", contentEncoding="gzip")
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, headers={"Accept-Encoding": "identity"})
    assert (reply.status_code, "its bytes are not gzip" in reply.text) == (400, True)


def test_a_download_outlives_the_object(running: Running) -> None:
    api, bucket, data = running.api, running.api.bucket(), os.urandom(30 * 2**20)
    api.put(bucket, "x", data)
    reply = api.object("GET", bucket, "x", params={"alt": "media"}, stream=True)
    head = reply.raw.read(1000)
    with requests.Session() as other:
        assert Api(api.url, other).object("DELETE", bucket, "x").status_code == 204
    assert head + reply.raw.read() == data
    assert running.blobs() == []
