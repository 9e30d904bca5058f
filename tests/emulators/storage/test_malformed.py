"""The emulator answers every request in Cloud Storage's JSON, and never with an unintended 5xx."""

from __future__ import annotations

import gc
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import Api

METHODS = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"])
SEGMENTS = st.one_of(
    st.sampled_from(
        ["b", "o", "BUCKET", "x", "copyTo", "rewriteTo", "moveTo", "compose", "iam", "acl", "%FF", "%00", "%"]
    ),
    st.text(max_size=8).map(lambda text: quote(text, safe="")),
)
ROOTS = st.sampled_from(
    ["/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/", "/resumable/upload/storage/v1/"]
)
PARAMETERS = st.sampled_from(
    [
        "uploadType",
        "name",
        "generation",
        "ifGenerationMatch",
        "ifMetagenerationNotMatch",
        "alt",
        "upload_id",
        "prefix",
        "maxResults",
        "pageToken",
        "matchGlob",
        "delimiter",
        "versions",
        "project",
        "sourceGeneration",
        "permissions",
    ]
)
VALUES = st.one_of(
    st.sampled_from(["media", "multipart", "resumable", "x", "0", "-1", "9" * 30, "true", "1_0", "٣"]),
    st.text(max_size=8),
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Range", "Content-Range", "X-Goog-Hash", "Content-MD5", "If-Match", "Content-Type", "X-Upload-Content-Type"]
    ),
    st.one_of(
        st.sampled_from(
            ["bytes=0-", "bytes */*", "bytes 0-0/*", "multipart/related; boundary=b", "multipart/mixed; boundary=b"]
        ),
        st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    ),
    max_size=3,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "name",
            "metadata",
            "contentType",
            "labels",
            "lifecycle",
            "versioning",
            "bindings",
            "sourceObjects",
            "destination",
            "iamConfiguration",
            "location",
            "storageClass",
            "md5Hash",
            "crc32c",
            "acl",
            "retention",
            "cors",
        ]
    ),
    JSON,
    max_size=3,
)
BODIES = st.one_of(FIELDS.map(json.dumps).map(str.encode), st.binary(max_size=40), JSON.map(json.dumps).map(str.encode))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=METHODS,
    root=ROOTS,
    segments=st.lists(SEGMENTS, max_size=8),
    query=st.dictionaries(PARAMETERS, VALUES, max_size=4),
    headers=HEADERS,
    body=BODIES,
)
def test_any_request(
    api: Api, method: str, root: str, segments: list[str], query: dict[str, str], headers: dict[str, str], body: bytes
) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", b"data")
    path = root + "/".join(bucket if segment == "BUCKET" else segment for segment in segments)
    encoded = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    status, answer = send(api, method, f"{path}?{encoded}", headers, body)
    check(status, answer)
    assert api.call("GET", "b", params={"project": "p"}).status_code == 200


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=FIELDS,
    verb=st.sampled_from(["bucket", "patch-bucket", "patch", "put", "compose", "copy", "iam", "resumable"]),
)
def test_any_resource(api: Api, fields: dict[str, Any], verb: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "x", b"data")
    method, path = {
        "bucket": ("POST", "/storage/v1/b?project=p"),
        "patch-bucket": ("PATCH", f"/storage/v1/b/{bucket}"),
        "patch": ("PATCH", f"/storage/v1/b/{bucket}/o/x"),
        "put": ("PUT", f"/storage/v1/b/{bucket}/o/x"),
        "compose": ("POST", f"/storage/v1/b/{bucket}/o/y/compose"),
        "copy": ("POST", f"/storage/v1/b/{bucket}/o/x/copyTo/b/{bucket}/o/y"),
        "iam": ("PUT", f"/storage/v1/b/{bucket}/iam"),
        "resumable": ("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name=z"),
    }[verb]
    check(*send(api, method, path, {"Content-Type": "application/json"}, json.dumps(fields).encode()))
    for name in ("x", "y"):
        assert api.object("GET", bucket, name).status_code in (200, 404)
        assert api.object("GET", bucket, name, params={"alt": "media"}).status_code in (200, 404)


HEADS = st.sampled_from(
    [b"", b"Content-Type: application/http", b"Content-Type: multipart/mixed", b"GET /storage/v1/b HTTP/1.1", b"\x80"]
)


def in_batch(part_head: bytes, head: bytes, body: bytes) -> bytes:
    return b"\r\n".join([b"--b", part_head, b"", head, b"", body, b"--b--"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.one_of(st.binary(max_size=60), st.builds(in_batch, HEADS, HEADS, st.binary(max_size=30))))
def test_any_batch(api: Api, body: bytes) -> None:
    status, _ = send(api, "POST", "/batch/storage/v1", {"Content-Type": "multipart/mixed; boundary=b"}, body)
    assert status in (200, 400)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Collect no garbage: at the parser's greatest depth, the callback of a collection (hypothesis has one) fails."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"name": "\\ud800"}',
        b'{"name": "' + b"\xff" * 5 + b'"}',
        b"1" * 10_000,
        b"nul",
    ],
    ids=range(6),
)
def test_poisonous_json(api: Api, body: bytes) -> None:
    status, answer = send(api, "POST", "/storage/v1/b?project=p", {"Content-Type": "application/json"}, body)
    assert (status, json.loads(answer)["error"]["errors"][0]["reason"]) == (400, "parseError")


def test_endless_json(api: Api) -> None:
    status, _ = send(api, "POST", "/storage/v1/b?project=p", {}, b" " * (17 * 2**20))
    assert status == 413


@pytest.mark.parametrize("raw", [b"5\r\nabc", b"zz\r\nabc\r\n0\r\n\r\n", b"ffffffffffffffffffff\r\nabc"])
def test_broken_chunked_body(api: Api, raw: bytes) -> None:
    bucket = api.bucket()
    parts = urlsplit(api.url)
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name=x"
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as connection:
        connection.sendall(head + raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1000)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert api.object("GET", bucket, "x").status_code == 404


def test_body_that_lies_about_gzip(api: Api) -> None:
    status, _ = send(api, "POST", "/storage/v1/b?project=p", {"Content-Encoding": "gzip"}, b"not gzip")
    assert status == 400


@pytest.mark.parametrize("path", ["/storage/v1/b/B/o/%ff", "/storage/v1/b/B/o?prefix=%ff", "/storage/v1/b/B/o/%0A"])
def test_path_without_a_valid_name_is_refused(api: Api, path: str) -> None:
    status, _ = send(api, "GET", path.replace("B", api.bucket()), {}, b"")
    assert status in (400, 404)


def send(api: Api, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """Send a request literally; the requests library would normalize it."""
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc, timeout=60)
    try:
        connection.request(method, target, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def check(status: int, answer: bytes) -> None:
    """Success, a redirect of a session, or a refusal; 501 only with the text that the feature is not emulated."""
    if status >= 400 and status != 499:
        error = json.loads(answer)["error"]
        assert error["code"] == status
        assert status < 500 or (status == 501 and "not emulated" in error["message"]), error
