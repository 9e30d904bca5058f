"""Multipart uploads of the XML API: Google's transfer manager, and requests as S3's clients send them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import requests
from google.cloud import storage
from google.cloud.storage import transfer_manager

from .conftest import Api, Running

MIB = 2**20
NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class Xml:
    """Requests of the XML API about one object."""

    def __init__(self, api: Api, bucket: str, name: str) -> None:
        self.api = api
        self.url = f"{api.url}/{bucket}/{name}"
        self.upload = ""

    def start(self, **headers: str) -> str:
        self.upload = text(self.call("POST", "uploads", headers=headers), "UploadId")
        return self.upload

    def put(self, number: int, data: bytes, **headers: str) -> requests.Response:
        return self.call("PUT", f"partNumber={number}&uploadId={self.upload}", data=data, headers=headers)

    def complete(self, *parts: tuple[int, str]) -> requests.Response:
        items = "".join(f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in parts)
        body = f"<CompleteMultipartUpload>{items}</CompleteMultipartUpload>"
        return self.call("POST", f"uploadId={self.upload}", data=body)

    def call(self, method: str, query: str, **options: Any) -> requests.Response:
        return self.api.session.request(method, f"{self.url}?{query}", timeout=60, **options)


def text(response: requests.Response, name: str) -> str:
    assert response.status_code == 200, response.text
    return str(ElementTree.fromstring(response.content).findtext(f"{NAMESPACE}{name}"))


def every(response: requests.Response, name: str) -> list[str]:
    return [str(found.text) for found in ElementTree.fromstring(response.content).iter(f"{NAMESPACE}{name}")]


def problem(response: requests.Response) -> tuple[int, str]:
    error = ElementTree.fromstring(response.content)
    assert error.findtext("Message")
    assert error.findtext("Details")
    return response.status_code, str(error.findtext("Code"))


@pytest.fixture
def xml(running: Running) -> Xml:
    return Xml(running.api, running.api.bucket(), "folder/object")


@pytest.mark.parametrize("checksum", ["auto", "md5", "crc32c"])
def test_the_transfer_manager_uploads_chunks_at_once(
    running: Running, bucket: storage.Bucket, tmp_path: Path, checksum: Any
) -> None:
    data = random.Random(1).randbytes(12 * MIB + 3)
    (tmp_path / "file").write_bytes(data)
    blob = bucket.blob("a folder/ä?#")
    blob.metadata, blob.cache_control = {"Key": "value"}, "no-store"
    upload = transfer_manager.upload_chunks_concurrently
    threads = transfer_manager.THREAD
    upload(str(tmp_path / "file"), blob, "text/x-own", chunk_size=5 * MIB, worker_type=threads, checksum=checksum)
    assert blob.download_as_bytes(checksum="crc32c") == data
    blob.reload()
    assert (blob.content_type, blob.metadata, blob.cache_control) == ("text/x-own", {"key": "value"}, "no-store")
    assert blob.md5_hash is None
    assert [change.event for change in running.changes] == ["finalized"]
    assert len(running.blobs()) == 1


def test_parts_come_in_any_order_and_may_be_sent_again(xml: Xml, running: Running) -> None:
    xml.start()
    last = xml.put(9, b"end").headers["ETag"]
    xml.put(2, b"wrong")
    first = xml.put(2, b"a" * 5 * MIB)
    assert first.headers["ETag"] == f'"{hashlib.md5(b"a" * 5 * MIB).hexdigest()}"'
    listed = xml.call("GET", f"uploadId={xml.upload}")
    assert (every(listed, "PartNumber"), every(listed, "Size")) == (["2", "9"], [str(5 * MIB), "3"])
    assert every(listed, "ETag") == [first.headers["ETag"], last]
    assert xml.complete((2, first.headers["ETag"].strip('"')), (9, last)).status_code == 200
    bucket, name = xml.url.removeprefix(f"{xml.api.url}/").split("/", 1)
    assert xml.api.object("GET", bucket, name, params={"alt": "media"}).content == b"a" * 5 * MIB + b"end"
    assert len(running.blobs()) == 1
    assert problem(xml.complete((2, "x"))) == (404, "NoSuchUpload")


def test_an_aborted_upload_leaves_nothing(xml: Xml, running: Running) -> None:
    xml.start()
    xml.put(1, b"small")
    xml.put(2, b"b" * MIB)
    assert len(running.blobs()) == 2
    assert xml.call("DELETE", f"uploadId={xml.upload}").status_code == 204
    assert not running.blobs()
    for response in (xml.put(3, b"late"), xml.complete((1, "x")), xml.call("GET", f"uploadId={xml.upload}")):
        assert problem(response) == (404, "NoSuchUpload")
    assert not running.blobs()


def test_uploads_and_parts_are_listed_in_pages(running: Running) -> None:
    bucket = running.api.bucket()
    started = {name: Xml(running.api, bucket, name).start() for name in ("b/2", "a/1", "b/1", "c")}
    one = Xml(running.api, bucket, "")
    one.url = one.url.rstrip("/")
    listed = one.call("GET", "uploads&prefix=b/")
    assert (every(listed, "Key"), every(listed, "UploadId")) == (["b/1", "b/2"], [started["b/1"], started["b/2"]])
    first = one.call("GET", "uploads&max-uploads=3")
    assert (every(first, "Key"), text(first, "IsTruncated")) == (["a/1", "b/1", "b/2"], "true")
    markers = f"key-marker={text(first, 'NextKeyMarker')}&upload-id-marker={text(first, 'NextUploadIdMarker')}"
    rest = one.call("GET", f"uploads&{markers}")
    assert (every(rest, "Key"), text(rest, "IsTruncated")) == (["c"], "false")
    upload = Xml(running.api, bucket, "c")
    upload.upload = started["c"]
    for number in (1, 2, 3):
        upload.put(number, b"x")
    page = upload.call("GET", f"uploadId={upload.upload}&max-parts=1&part-number-marker=1")
    assert (every(page, "PartNumber"), text(page, "NextPartNumberMarker")) == (["2"], "2")


def test_an_upload_continues_after_a_restart(start: Callable[[], Running]) -> None:
    api = start().api
    xml = Xml(api, api.bucket(), "x")
    xml.start(**{"Content-Type": "text/x-own"})
    etags = [xml.put(1, b"c" * 5 * MIB).headers["ETag"]]
    again = start()
    xml.api, xml.url = again.api, xml.url.replace(api.url, again.api.url)
    etags.append(xml.put(2, b"end").headers["ETag"])
    assert xml.complete(*enumerate(etags, 1)).status_code == 200
    found = again.api.object("GET", xml.url.split("/")[-2], "x").json()
    assert (found["size"], found["contentType"]) == (str(5 * MIB + 3), "text/x-own")
    assert len(again.blobs()) == 1


def test_wrong_hashes_leave_no_part(xml: Xml, running: Running) -> None:
    xml.start()
    assert problem(xml.put(1, b"data", **{"Content-MD5": "AAAAAAAAAAAAAAAAAAAAAA=="})) == (400, "BadDigest")
    assert problem(xml.put(1, b"data", **{"X-Goog-Hash": "crc32c=AAAAAA=="})) == (400, "BadDigest")
    assert not every(xml.call("GET", f"uploadId={xml.upload}"), "PartNumber")
    assert not running.blobs()


def test_wrong_requests_have_the_codes_of_the_api(xml: Xml) -> None:
    xml.start()
    one, two = (xml.put(number, b"x" * number).headers["ETag"] for number in (1, 2))
    assert problem(xml.complete((1, one), (2, two))) == (400, "EntityTooSmall")
    assert problem(xml.complete((2, two), (1, one))) == (400, "InvalidPartOrder")
    assert problem(xml.complete((1, two))) == (400, "InvalidPart")
    assert problem(xml.complete((3, two))) == (400, "InvalidPart")
    assert problem(xml.complete()) == (400, "MalformedXML")
    for body in ("", "<a", "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>", "<a><Part><ETag>x</ETag></Part></a>"):
        assert problem(xml.call("POST", f"uploadId={xml.upload}", data=body)) == (400, "MalformedXML")
    for number in ("0", "10001", "-1", "x"):
        answer = xml.call("PUT", f"partNumber={number}&uploadId={xml.upload}", data=b"x")
        assert problem(answer) == (400, "InvalidArgument")
    assert problem(xml.call("POST", "uploadId=none", data="")) == (404, "NoSuchUpload")
    assert problem(Xml(xml.api, "no-such-bucket", "x").call("POST", "uploads")) == (404, "NoSuchBucket")
    assert problem(xml.call("PUT", "uploads")) == (501, "NotImplemented")
    assert xml.api.session.get(f"{xml.url}", timeout=60).status_code == 501


def test_two_completions_at_once_make_one_object(xml: Xml, running: Running) -> None:
    xml.start()
    etag = xml.put(1, b"d" * 6 * MIB).headers["ETag"]
    with ThreadPoolExecutor() as pool:
        body = f"<a><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part></a>"
        url = f"{xml.url}?uploadId={xml.upload}"
        answers = list(pool.map(lambda _: requests.post(url, data=body, timeout=60).status_code, range(4)))
    assert sorted(answers) == [200, 404, 404, 404]
    assert [change.event for change in running.changes] == ["finalized"]
    assert len(running.blobs()) == 1
