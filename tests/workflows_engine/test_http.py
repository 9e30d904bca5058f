"""HTTP calls over real sockets: the requests, the responses, the tag of each failure."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import pytest
from aiohttp import web

GZIP = {"Content-Encoding": "gzip"}
GZIPPED = gzip.compress('{"ü": 1}'.encode())
CATCH = "    except: {as: e, steps: [{back: {return: '${e}'}}]}\n"


def call(served: Any, arguments: dict[str, Any], function: str = "http.post") -> Any:
    """The value of a call, or the error that it raised."""
    source = (
        f"main:\n  params: [args]\n  steps:\n    - t:\n        try: {{call: {function}, args: {json.dumps(arguments)}, "
        "result: r}\n        except: {as: e, steps: [{back: {return: '${e}'}}]}\n    - done: {return: '${r}'}\n"
    )
    record = served.run(source)
    assert record.state == "SUCCEEDED", record.error
    return json.loads(record.result)


def test_json_is_sent_and_received(served: Any) -> None:
    value = call(
        served, {"url": f"{served.peer_url}/a?x=1", "body": {"n": [1, None]}, "query": {"y": "2 ü", "z": [1, True]}}
    )
    assert value["code"] == 200
    assert value["body"]["query"] == {"x": "1", "y": "2 ü", "z": "1"}
    assert value["headers"]["Content-Type"] == "application/json; charset=utf-8"
    ((method, path, headers, body),) = served.peer.received("a")
    assert (method, json.loads(body)) == ("POST", {"n": [1, None]})
    assert path == "/peer/a?x=1&y=2+%C3%BC&z=1&z=true"
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["User-Agent"].startswith("GoogleCloudWorkflows; (+")
    assert "Idempotency-Key" in headers


@pytest.mark.parametrize(
    ("arguments", "body", "content_type"),
    [
        ({"body": "text"}, b'"text"', "application/json; charset=utf-8"),
        ({"body": "text", "headers": {"Content-Type": "text/plain"}}, b"text", "text/plain"),
        (
            {"body": {"a": 1, "b": ["x", "y"]}, "headers": {"content-type": "application/x-www-form-urlencoded"}},
            b"a=1&b=x&b=y",
            "application/x-www-form-urlencoded",
        ),
        (
            {"body": {"a": 1}, "headers": {"Content-Type": "application/merge-patch+json"}},
            b'{"a":1}',
            "application/merge-patch+json",
        ),
    ],
)
def test_bodies_are_encoded_by_their_content_type(served: Any, arguments: Any, body: bytes, content_type: str) -> None:
    call(served, {"url": f"{served.peer_url}/b", **arguments})
    ((_, _, headers, sent),) = served.peer.received("b")
    assert (sent, headers["Content-Type"]) == (body, content_type)


def test_bytes_are_sent_unchanged(served: Any) -> None:
    source = f"- a: {{call: http.put, args: {{url: '{served.peer_url}/bytes', body: '${{text.encode(\"x\")}}'}}}}\n"
    served.run(source)
    ((method, _, headers, body),) = served.peer.received("bytes")
    assert (method, headers["Content-Type"], body) == ("PUT", "application/octet-stream", b"x")


@pytest.mark.parametrize(("function", "method"), [(f"http.{m}", m.upper()) for m in ("get", "put", "patch", "delete")])
def test_methods(served: Any, function: str, method: str) -> None:
    call(served, {"url": f"{served.peer_url}/m"}, function)
    assert served.peer.received("m")[0][0] == method
    call(served, {"url": f"{served.peer_url}/r", "method": "OPTIONS"}, "http.request")
    assert served.peer.received("r")[0][0] == "OPTIONS"


@pytest.mark.parametrize(
    ("auth", "token"),
    [
        ({"type": "OIDC"}, "OIDC:{url}"),
        ({"type": "OIDC", "audience": "https://me"}, "OIDC:https://me"),
        ({"type": "OAuth2"}, "OAuth2:https://www.googleapis.com/auth/cloud-platform"),
        ({"type": "OAuth2", "scopes": ["a", "b"]}, "OAuth2:a b"),
    ],
)
def test_auth_blocks_become_bearer_tokens(served: Any, auth: dict[str, Any], token: str) -> None:
    url = f"{served.peer_url}/auth"
    call(served, {"url": url + "?x=1", "auth": auth})
    assert served.peer.received("auth")[0][2]["Authorization"] == "Bearer " + token.format(url=url)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (lambda: web.Response(text="plain", content_type="text/html"), "plain"),
        (lambda: web.Response(body=b"{}", content_type="application/problem+json"), {}),
        (lambda: web.Response(status=204), None),
        (lambda: web.Response(text="{oops", content_type="application/json"), "{oops"),
        (lambda: web.Response(text="NaN", content_type="application/vnd.x+json"), "NaN"),
        (lambda: web.Response(body=GZIPPED, content_type="application/json", headers=GZIP), {"ü": 1}),
    ],
)
def test_responses_are_parsed_by_their_content_type(served: Any, answer: Any, body: Any) -> None:
    served.peer.answers["c"] = lambda request: answer()
    assert call(served, {"url": f"{served.peer_url}/c"})["body"] == body


def test_a_status_of_400_or_more_is_an_http_error(served: Any) -> None:
    served.peer.answers["no"] = lambda request: web.json_response({"why": "not here"}, status=404)
    error = call(served, {"url": f"{served.peer_url}/no"})
    assert error["tags"] == ["HttpError"]
    assert error["message"] == "HTTP server responded with error code 404"
    assert (error["code"], error["body"]) == (404, {"why": "not here"})
    assert error["headers"]["Content-Type"].startswith("application/json")


def test_a_refused_connection_is_a_connection_failed_error(served: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert call(served, {"url": f"http://127.0.0.1:{port}/"})["tags"] == ["ConnectionFailedError"]
    assert call(served, {"url": "http://no-such-host.invalid/"})["tags"] == ["ConnectionFailedError"]


def test_a_broken_connection_is_a_connection_error(served: Any) -> None:
    def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    served.peer.answers["cut"] = cut
    assert call(served, {"url": f"{served.peer_url}/cut"})["tags"] == ["ConnectionError"]


def test_a_silent_server_is_a_timeout_error(served: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        assert call(served, {"url": f"http://127.0.0.1:{port}/", "timeout": 0.1})["tags"] == ["TimeoutError"]


def test_a_response_over_two_megabytes_cannot_be_caught(served: Any) -> None:
    served.peer.answers["big"] = lambda request: web.Response(body=b"x" * (2**21 + 1), content_type="text/plain")
    source = f"- t:\n    try: {{call: http.get, args: {{url: '{served.peer_url}/big'}}}}\n{CATCH}"
    record = served.run(source)
    assert record.state == "FAILED"
    assert json.loads(record.error["payload"])["tags"] == ["ResourceLimitError"]


@pytest.mark.parametrize("url", ["http://[bad", "http://host:port/", "nourl", ""])
def test_a_malformed_url_is_a_value_error(served: Any, url: str) -> None:
    assert call(served, {"url": url})["tags"] == ["ValueError"]


def test_redirects_are_followed_with_the_method_of_their_status(served: Any) -> None:
    for status in (302, 307):
        answer = web.Response(status=status, headers={"Location": f"/peer/to{status}"})
        served.peer.answers[f"from{status}"] = lambda request, answer=answer: answer
        assert call(served, {"url": f"{served.peer_url}/from{status}", "body": 1})["code"] == 200
    assert [(served.peer.received(path)[0][0], served.peer.received(path)[0][3]) for path in ("to302", "to307")] == [
        ("GET", b""),
        ("POST", b"1"),
    ]
