"""Uploads on the wire: sessions that break, resume, end twice or are cancelled, and bodies of a wrong length."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import google_crc32c
import pytest
from tests.patience import PATIENCE_SECONDS

from .conftest import Api, Running

KIB256 = 256 * 1024


def read(api: Api, bucket: str, name: str) -> bytes:
    reply = api.object("GET", bucket, name, params={"alt": "media"})
    assert reply.status_code == 200, reply.text
    return reply.content


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


class TestResumable:
    def test_chunks_of_a_known_size(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(2 * KIB256 + 5)
        url = api.start_upload(bucket, "x")
        first = api.send(url, data[:KIB256], f"bytes 0-{KIB256 - 1}/{len(data)}")
        assert (first.status_code, first.headers["Range"]) == (308, f"bytes=0-{KIB256 - 1}")
        assert api.object("GET", bucket, "x").status_code == 404
        last = api.send(url, data[KIB256:], f"bytes {KIB256}-{len(data) - 1}/{len(data)}")
        assert (last.status_code, last.json()["size"]) == (200, str(len(data)))
        assert read(api, bucket, "x") == data

    def test_chunks_of_an_unknown_size(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(KIB256 + 5)
        url = api.start_upload(bucket, "x")
        assert api.send(url, data[:KIB256], f"bytes 0-{KIB256 - 1}/*").status_code == 308
        assert api.send(url, data[KIB256:], f"bytes {KIB256}-{len(data) - 1}/{len(data)}").status_code == 200
        assert read(api, bucket, "x") == data

    def test_request_without_bytes_ends_the_upload(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(KIB256)
        url = api.start_upload(bucket, "x")
        api.send(url, data, f"bytes 0-{KIB256 - 1}/*")
        assert api.send(url, b"", f"bytes */{KIB256}").json()["md5Hash"] == md5(data)

    @pytest.mark.parametrize("data", [b"", b"abc"])
    def test_whole_upload_without_a_range(self, api: Api, data: bytes) -> None:
        bucket = api.bucket()
        url = api.start_upload(bucket, "x")
        assert api.session.put(url, data=data, timeout=60).status_code == 200
        assert read(api, bucket, "x") == data

    def test_session_state_is_reported(self, api: Api) -> None:
        bucket = api.bucket()
        url = api.start_upload(bucket, "x")
        nothing = api.send(url, b"", "bytes */*")
        assert (nothing.status_code, "Range" in nothing.headers) == (308, False)
        api.send(url, b"a" * KIB256, f"bytes 0-{KIB256 - 1}/*")
        some = api.send(url, b"", f"bytes */{KIB256 * 2}")
        assert (some.status_code, some.headers["Range"]) == (308, f"bytes=0-{KIB256 - 1}")

    def test_complete_upload_repeats_its_result(self, api: Api) -> None:
        bucket = api.bucket()
        url = api.start_upload(bucket, "x")
        done = api.send(url, b"abc", "bytes 0-2/3").json()
        assert api.send(url, b"abc", "bytes 0-2/3").json() == done
        assert api.send(url, b"", "bytes */*").json() == done
        assert api.object("GET", bucket, "x").json()["generation"] == done["generation"]

    def test_bytes_sent_twice_are_stored_once(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(3 * KIB256)
        url = api.start_upload(bucket, "x")
        api.send(url, data[: 2 * KIB256], f"bytes 0-{2 * KIB256 - 1}/*")
        assert api.send(url, data[KIB256:], f"bytes {KIB256}-{3 * KIB256 - 1}/{3 * KIB256}").status_code == 200
        assert read(api, bucket, "x") == data

    def test_gap_is_refused(self, api: Api) -> None:
        url = api.start_upload(api.bucket(), "x")
        reply = api.send(url, b"a" * 10, "bytes 5-14/15")
        assert (reply.status_code, "exceeds already uploaded size of 0" in reply.text) == (400, True)

    def test_unaligned_chunk_keeps_its_complete_granules(self, api: Api) -> None:
        url = api.start_upload(api.bucket(), "x")
        assert api.send(url, b"a" * 1000, "bytes 0-999/*").status_code == 400
        reply = api.send(url, b"a" * (KIB256 + 1000), f"bytes 0-{KIB256 + 999}/*")
        assert (reply.status_code, reply.headers["Range"]) == (308, f"bytes=0-{KIB256 - 1}")

    def test_cancel(self, running: Running) -> None:
        api, bucket = running.api, running.api.bucket()
        url = api.start_upload(bucket, "x")
        api.send(url, b"a" * KIB256, f"bytes 0-{KIB256 - 1}/*")
        assert api.session.delete(url, timeout=60).status_code == 499
        assert api.send(url, b"", "bytes */*").status_code == 404
        assert running.blobs() == []

    def test_precondition_is_checked_again_at_the_end(self, running: Running) -> None:
        api, bucket = running.api, running.api.bucket()
        url = api.start_upload(bucket, "x", ifGenerationMatch=0)
        api.put(bucket, "x", b"other")
        assert api.send(url, b"abc", "bytes 0-2/3").status_code == 412
        assert read(api, bucket, "x") == b"other"
        assert len(running.blobs()) == 1

    def test_bucket_deleted_during_the_upload(self, api: Api) -> None:
        bucket = api.bucket()
        url = api.start_upload(bucket, "x")
        api.call("DELETE", f"b/{bucket}")
        assert api.send(url, b"abc", "bytes 0-2/3").status_code == 404

    def test_metadata_of_the_session(self, api: Api) -> None:
        bucket = api.bucket()
        started = api.upload(
            "POST",
            bucket,
            {"uploadType": "resumable"},
            json={"name": "x", "metadata": {"k": "v"}},
            headers={"X-Upload-Content-Type": "text/x"},
        )
        stored = api.send(started.headers["Location"], b"abc", "bytes 0-2/3").json()
        assert (stored["contentType"], stored["metadata"]) == ("text/x", {"k": "v"})

    @pytest.mark.parametrize("where", ["header", "resource"])
    def test_wrong_hash_leaves_no_object(self, running: Running, where: str) -> None:
        api, bucket = running.api, running.api.bucket()
        resource = {"name": "x", "crc32c": crc32c(b"abd")} if where == "resource" else {"name": "x"}
        url = api.upload("POST", bucket, {"uploadType": "resumable"}, json=resource).headers["Location"]
        headers = {"x-goog-hash": f"crc32c={crc32c(b'abd')}"} if where == "header" else {}
        reply = api.send(url, b"abc", "bytes 0-2/3", **headers)
        assert (reply.status_code, "doesn't match calculated CRC32C" in reply.text) == (400, True)
        assert api.object("GET", bucket, "x").status_code == 404
        assert running.blobs() == []

    def test_upload_continues_after_a_restart(self, start: Callable[[], Running]) -> None:
        api, data = start().api, os.urandom(3 * KIB256 + 1)
        bucket = api.bucket()
        url = api.start_upload(bucket, "x")
        api.send(url, data[: 2 * KIB256], f"bytes 0-{2 * KIB256 - 1}/*")
        again = start().api
        url = again.url + url.removeprefix(api.url)
        assert again.send(url, b"", "bytes */*").headers["Range"] == f"bytes=0-{2 * KIB256 - 1}"
        headers = {"x-goog-hash": f"crc32c={crc32c(data)},md5={md5(data)}"}
        done = again.send(url, data[2 * KIB256 :], f"bytes {2 * KIB256}-{len(data) - 1}/{len(data)}", **headers)
        assert (done.status_code, done.json()["md5Hash"]) == (200, md5(data))
        assert read(again, bucket, "x") == data

    def test_broken_connection_keeps_the_received_granules(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(10 * KIB256)
        url = api.start_upload(bucket, "x")
        hang_up_after(url, data[: 6 * KIB256 + 100], f"bytes 0-{len(data) - 1}/{len(data)}", len(data))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "Range" not in (state := api.send(url, b"", "bytes */*")).headers:  # writing takes a moment
            assert time.monotonic() < deadline, "the emulator kept nothing"
        received = int(state.headers["Range"].split("-")[1]) + 1
        assert 0 < received <= 6 * KIB256
        assert received % KIB256 == 0
        tail = api.send(url, data[received:], f"bytes {received}-{len(data) - 1}/{len(data)}")
        assert tail.status_code == 200
        assert read(api, bucket, "x") == data

    def test_body_shorter_than_its_range(self, api: Api) -> None:
        url = api.start_upload(api.bucket(), "x")
        reply = api.send(url, b"abc", "bytes 0-9/10")
        assert (reply.status_code, "3 byte(s) arrived" in reply.text) == (400, True)
        assert api.send(url, b"0123456789", "bytes 0-9/10").status_code == 200


def hang_up_after(url: str, data: bytes, content_range: str, length: int) -> None:
    """Announce `length` bytes, send fewer, and end the connection; return when the emulator has ended it, too."""
    parts = urlsplit(url)
    head = f"PUT {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {length}\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as connection:
        connection.sendall(f"{head}Content-Range: {content_range}\r\n\r\n".encode() + data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


class TestMedia:
    def test_hashes_in_headers(self, running: Running) -> None:
        api, bucket, data = running.api, running.api.bucket(), os.urandom(1000)
        good = {"X-Goog-Hash": f"crc32c={crc32c(data)}, md5={md5(data)}", "Content-MD5": md5(data)}
        assert api.put(bucket, "x", data, headers=good).status_code == 200
        for wrong in (
            {"X-Goog-Hash": f"md5={md5(b'')}"},
            {"Content-MD5": md5(b"")},
            {"X-Goog-Hash": "crc32c=AAAAAA=="},
        ):
            assert api.put(bucket, "y", data, headers=wrong).status_code == 400
        for malformed in ("md5=!!", "sha1=AAAA", "crc32c=" + md5(b"")):
            assert api.put(bucket, "y", data, headers={"X-Goog-Hash": malformed}).status_code == 400
        assert api.object("GET", bucket, "y").status_code == 404
        assert len(running.blobs()) == 1

    def test_large_body_is_streamed_and_exact(self, api: Api) -> None:
        bucket, data = api.bucket(), os.urandom(9 * 1024 * 1024 + 7)
        stored = api.put(bucket, "x", data).json()
        assert (stored["md5Hash"], stored["crc32c"]) == (md5(data), crc32c(data))
        assert read(api, bucket, "x") == data

    def test_aborted_upload_leaves_no_blob(self, running: Running) -> None:
        api, bucket = running.api, running.api.bucket()
        url = urlsplit(f"{api.url}/upload/storage/v1/b/{bucket}/o")
        head = (
            f"POST {url.path}?uploadType=media&name=x HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 9999999\r\n\r\n"
        )
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=60) as connection:
            connection.sendall(head.encode() + b"a" * 3_000_000)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while running.blobs():
            assert time.monotonic() < deadline, running.blobs()
        assert api.object("GET", bucket, "x").status_code == 404


class TestMultipart:
    # google-cloud-storage writes the first form, gcloud the second.
    @pytest.mark.parametrize("newline", [b"\r\n", b"\n"])
    @pytest.mark.parametrize("quote", ['"', "'", ""])
    @pytest.mark.parametrize(
        "data", [b"", b"plain", b"\r\n--b", b"--bound\r\n\n\n", b"x\n--boundar\n", os.urandom(3_000_000)], ids=range(6)
    )
    def test_bytes_are_exact(self, api: Api, newline: bytes, quote: str, data: bytes) -> None:
        bucket = api.bucket()
        lines = [
            b"--boundary",
            b"Content-Type: application/json",
            b"",
            b'{"name": "x", "metadata": {"k": "v"}}',
            b"--boundary",
            b"content-type: text/x",
            b"Content-Transfer-Encoding: binary",
            b"",
            data,
            b"--boundary--",
        ]
        headers = {"Content-Type": f"multipart/related; boundary={quote}boundary{quote}"}
        body = newline.join(lines)
        stored = api.upload("POST", bucket, {"uploadType": "multipart"}, data=body, headers=headers).json()
        assert (stored["contentType"], stored["metadata"]) == ("text/x", {"k": "v"})
        assert read(api, bucket, "x") == data

    def test_wrong_hash_in_the_resource(self, running: Running) -> None:
        api, bucket = running.api, running.api.bucket()
        body = b'--b\r\n\r\n{"name": "x", "md5Hash": "%s"}\r\n--b\r\n\r\nabc\r\n--b--' % md5(b"abd").encode()
        headers = {"Content-Type": "multipart/related; boundary=b"}
        reply = api.upload("POST", bucket, {"uploadType": "multipart"}, data=body, headers=headers)
        assert (reply.status_code, "doesn't match calculated MD5" in reply.text) == (400, True)
        assert running.blobs() == []

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"--b",
            b"--b\r\n\r\n{}",
            b'--b\r\n\r\n{"name": "x"}\r\n--b\r\n\r\nno closing boundary',
            b"--b\r\n\r\nnot json\r\n--b\r\n\r\nabc\r\n--b--",
            b"--b\r\n\r\n[]\r\n--b\r\n\r\nabc\r\n--b--",
            b'--b\r\n\r\n{"name": 5}\r\n--b\r\n\r\nabc\r\n--b--',
            b'--b\r\n\r\n{"name": "x", "metadata": "m"}\r\n--b\r\n\r\nabc\r\n--b--',
        ],
    )
    def test_malformed_body_is_refused(self, running: Running, body: bytes) -> None:
        bucket = running.api.bucket()
        headers = {"Content-Type": "multipart/related; boundary=b"}
        reply = running.api.upload("POST", bucket, {"uploadType": "multipart"}, data=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
        assert running.blobs() == []
