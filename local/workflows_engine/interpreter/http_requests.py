"""The request that an `http.*` call means, as a value that the database can store."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from ..errors import system_error
from ..limits import Limits
from ..values import NotJson, Value, kind, to_json

USER_AGENT: Final = "GoogleCloudWorkflows; (+https://cloud.google.com/workflows/docs)"
DEFAULT_TIMEOUT: Final = 1800.0  # seconds
CLOUD_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
READS: Final = frozenset(("GET", "HEAD", "OPTIONS"))  # by HTTP's definition they tell the server nothing
IDEMPOTENT: Final = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"))
GOOGLE_HOSTS: Final = re.compile(r"(\.|^)(googleapis\.com|run\.app|cloudfunctions\.net|cloud\.goog)\Z")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")


def stored_request(call: str, arguments: Mapping[str, Value], limits: Limits) -> dict[str, Value]:
    """The request of an `http.*` call: method, url, headers, timeout, body, auth. Raises WorkflowError."""
    url = _argument(call, arguments, "url", str, required=True)
    _check_url(call, url)
    method = call.removeprefix("http.").upper()
    if method == "REQUEST":
        method = _argument(call, arguments, "method", str, required=True).upper()
        if method not in _METHODS:
            raise system_error(
                "ValueError", f"{call}: unknown method {method!r}; expected one of {', '.join(_METHODS)}"
            )
    headers = _headers(call, _argument(call, arguments, "headers", dict))
    body = _body(call, arguments.get("body"), headers)
    query = _argument(call, arguments, "query", dict)
    if query:
        url = with_query(url, query)
    request = {"method": method, "url": url, "headers": headers, "timeout": _timeout(call, arguments, limits)}
    if body is not None:
        request["body"] = base64.b64encode(body).decode()
    if (auth := _argument(call, arguments, "auth", dict)) is not None:
        request["auth"] = _auth(call, auth, url)
    return request


def _check_url(call: str, url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018  # reading the port checks it
    except ValueError as error:
        raise system_error("ValueError", f"{call}: url {url[:200]!r} is not valid: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise system_error("ValueError", f"{call}: url {url[:200]!r} must start with http:// or https://")


def _argument(call: str, arguments: Mapping[str, Value], name: str, type_: type, *, required: bool = False) -> Any:
    value = arguments.get(name)
    if value is None and not required:
        return None
    if type(value) is not type_:
        expected = "a string" if type_ is str else "a map"
        raise system_error("TypeError", f"{call}: argument '{name}' must be {expected}; got: {kind(value)}")
    return value


def _timeout(call: str, arguments: Mapping[str, Value], limits: Limits) -> float:
    value = arguments.get("timeout")
    if value is None:
        return DEFAULT_TIMEOUT
    if type(value) is not int and type(value) is not float:
        raise system_error("TypeError", f"{call}: argument 'timeout' must be a number; got: {kind(value)}")
    if not 0 < value <= limits.http_timeout_seconds:
        raise system_error(
            "ValueError",
            f"{call}: timeout must be above 0 and at most {limits.http_timeout_seconds} seconds; got: {value}",
        )
    return float(value)


def _headers(call: str, headers: Mapping[str, Value] | None) -> dict[str, str]:
    plain: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if value is None:
            continue
        if isinstance(value, dict | list | bytes):
            raise system_error("TypeError", f"{call}: header {name!r} must be a string; got: {kind(value)}")
        text = value if isinstance(value, str) else to_json(value)
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or any(char in "\r\n\0" for char in text):
            raise system_error("ValueError", f"{call}: header {name[:100]!r} or its value is not valid in HTTP")
        plain[name] = text
    agent = next((name for name in plain if name.lower() == "user-agent"), "User-Agent")
    plain[agent] = f"{plain[agent]} {USER_AGENT}" if agent in plain else USER_AGENT
    return plain


def _body(call: str, body: Value, headers: dict[str, str]) -> bytes | None:
    """The encoded body; sets the Content-Type in `headers` when the workflow did not.

    Bytes are sent unchanged. Without a Content-Type every other value becomes JSON. With a Content-Type, a string is
    sent as text and a map as a form if the type says so.
    """
    declared = next((value for name, value in headers.items() if name.lower() == "content-type"), None)
    if body is None:
        return None
    if type(body) is bytes:
        if declared is None:
            headers["Content-Type"] = "application/octet-stream"
        return body
    if declared is not None and type(body) is str:
        return body.encode("utf-8", "replace")
    if declared is not None and declared.startswith("application/x-www-form-urlencoded") and type(body) is dict:
        return urllib.parse.urlencode(_pairs(body)).encode()
    if declared is None:
        headers["Content-Type"] = "application/json; charset=utf-8"  # the page of http.post documents this value
    try:
        return to_json(body).encode("utf-8", "replace")
    except NotJson as error:
        raise system_error("ValueError", f"{call}: body: {error}") from error


def with_query(url: str, query: Mapping[str, Value]) -> str:
    """`url` with more query parameters; a list becomes a parameter for each item."""
    encoded = urllib.parse.urlencode(_pairs(query))
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(query="&".join(filter(None, (parts.query, encoded)))))


def _pairs(values: Mapping[str, Value]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, dict | list | bytes):
                raise system_error("TypeError", f"parameter {name!r} must be of scalars; got: {kind(item)}")
            pairs.append((name, item if isinstance(item, str) else to_json(item)))
    return pairs


def _auth(call: str, auth: Mapping[str, Value], url: str) -> list[str]:
    """[kind, audience or scope]: the arguments of the engine's token function."""
    type_ = auth.get("type")
    if type_ not in ("OIDC", "OAuth2"):
        raise system_error("ValueError", f"{call}: auth.type must be OIDC or OAuth2; got: {_shown(type_)}")
    if type_ == "OIDC":
        audience = auth.get("audience")
        if audience is None:
            parts = urllib.parse.urlsplit(url)
            audience = urllib.parse.urlunsplit(parts._replace(query="", fragment=""))
        return ["OIDC", str(audience)]
    scope = auth.get("scope", auth.get("scopes"))
    if isinstance(scope, list):
        scope = " ".join(map(str, scope))
    return ["OAuth2", str(scope).replace(",", " ") if scope else CLOUD_SCOPE]


def _shown(value: Value) -> str:
    return json.dumps(value) if value is None or isinstance(value, str | int | float | bool) else kind(value)


def is_external(url: str) -> bool:
    """True if Google bills a call to this URL as an external step: the host is not in a Google domain."""
    return not GOOGLE_HOSTS.search((urllib.parse.urlsplit(url).hostname or "").lower())


def has_idempotency_key(headers: Mapping[str, str]) -> bool:
    """True if the workflow gave the request an idempotency key, so that the engine may send it again."""
    return any(name.lower() in ("idempotency-key", "x-idempotency-key") for name in headers)


@lru_cache(1024)
def canonical_header(name: str) -> str:
    """A header's name as the service shows it: `content-type` becomes `Content-Type`."""
    return "-".join(part[:1].upper() + part[1:].lower() for part in name.split("-"))
