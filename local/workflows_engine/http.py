"""HTTP calls of a workflow: the request that `http.*` arguments mean, the sending, and what an answer becomes."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol

import aiohttp

from .errors import WorkflowError, limit_error, system_error
from .limits import Limits
from .values import NotJson, Value, from_json, kind, to_json

USER_AGENT: Final = "GoogleCloudWorkflows; (+https://cloud.google.com/workflows/docs)"
DEFAULT_TIMEOUT: Final = 1800.0
CLOUD_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"
IDEMPOTENT: Final = frozenset(("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"))
GOOGLE_HOSTS: Final = re.compile(r"(\.|^)(googleapis\.com|run\.app|cloudfunctions\.net|cloud\.goog)\Z")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")


@dataclass(frozen=True)
class HttpRequest:
    """One request as a transport sends it. `effect_id` is the same whenever the same effect is sent again."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout: float = DEFAULT_TIMEOUT
    effect_id: str = ""
    call: str = ""


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpTransport(Protocol):
    """What sends requests. `send` raises WorkflowError (ConnectionError, ConnectionFailedError, TimeoutError)."""

    async def send(self, request: HttpRequest) -> HttpResponse: ...

    async def close(self) -> None: ...


class AiohttpTransport:
    """Keep-alive connections to every host, made when first needed."""

    def __init__(self, response_bytes: int = Limits().response_bytes, connections: int = 256) -> None:
        self._response_bytes = response_bytes
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest) -> HttpResponse:
        session = self._open()
        timeout = aiohttp.ClientTimeout(total=request.timeout or None)
        try:
            async with session.request(
                request.method, request.url, headers=request.headers, data=request.body, timeout=timeout
            ) as answer:
                return HttpResponse(answer.status, _joined(answer.headers), await self._read(answer))
        except TimeoutError as error:
            raise timeout_error(request) from error
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise connection_failed(request, error) from error
        except (aiohttp.ClientError, ConnectionError, ssl.SSLError, ValueError) as error:
            raise connection_broke(request, error) from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.content_length is not None and answer.content_length <= self._response_bytes:
            return await answer.read()
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > self._response_bytes:
                break  # `result_of` refuses it
        return bytes(body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=["User-Agent"]
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def timeout_error(request: HttpRequest) -> WorkflowError:
    return system_error("TimeoutError", f"{request.method} {request.url} took longer than {request.timeout:g} s")


def connection_failed(request: HttpRequest, why: object) -> WorkflowError:
    return system_error("ConnectionFailedError", f"cannot connect for {request.method} {request.url}: {why}")


def connection_broke(request: HttpRequest, why: object) -> WorkflowError:
    return system_error("ConnectionError", f"the connection for {request.method} {request.url} broke: {why}")


def _joined(headers: Any) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in headers.items():
        name = canonical(name)
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


@lru_cache(1024)
def canonical(name: str) -> str:
    """A header's name as the service shows it: Content-Type."""
    return "-".join(part[:1].upper() + part[1:].lower() for part in name.split("-"))


def prepare(call: str, arguments: Mapping[str, Value], limits: Limits) -> dict[str, Value]:
    """The request that an `http.*` call means, as a value that can be stored. Raises WorkflowError."""
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
        parts.port  # noqa: B018  # reading it checks it
    except ValueError as error:
        raise system_error("ValueError", f"{call}: url {url[:200]!r} is not valid: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise system_error("ValueError", f"{call}: url {url[:200]!r} must start with http:// or https://")


def _argument(call: str, arguments: Mapping[str, Value], name: str, wanted: type, *, required: bool = False) -> Any:
    value = arguments.get(name)
    if value is None and not required:
        return None
    if type(value) is not wanted:
        expected = "a string" if wanted is str else "a map"
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
    """Bytes go as they are; without a Content-Type all else is JSON; with one, text and forms are encoded by it."""
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
        headers["Content-Type"] = "application/json; charset=utf-8"  # so documented with http.post
    try:
        return to_json(body).encode("utf-8", "replace")
    except NotJson as error:
        raise system_error("ValueError", f"{call}: body: {error}") from error


def with_query(url: str, query: Mapping[str, Value]) -> str:
    """`url` with more query parameters; a list gives one for each item."""
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
    """[kind, audience or scope], from which the engine's token function makes a bearer token."""
    type_ = auth.get("type")
    if type_ not in ("OIDC", "OAuth2"):
        raise system_error("ValueError", f"{call}: auth.type must be OIDC or OAuth2; got: {to_text(type_)}")
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


def to_text(value: Value) -> str:
    return json.dumps(value) if value is None or isinstance(value, str | int | float | bool) else kind(value)


def is_external(url: str) -> bool:
    """True where Google bills an external step: not a Google domain."""
    return not GOOGLE_HOSTS.search((urllib.parse.urlsplit(url).hostname or "").lower())


def keyed(headers: Mapping[str, str]) -> bool:
    """True if the workflow itself made the request safe to repeat."""
    return any(name.lower() in ("idempotency-key", "x-idempotency-key") for name in headers)


def bind(request: Mapping[str, Value], effect_id: str, call: str, token: Callable[[str, str], str]) -> HttpRequest:
    """A prepared request with its token and idempotency key. Raises AuthError when no token can be had."""
    headers = dict(request["headers"])
    if (auth := request.get("auth")) is not None:
        try:
            headers["Authorization"] = f"Bearer {token(auth[0], auth[1])}"
        except Exception as error:  # whatever the injected function raises, the workflow sees AuthError
            raise system_error("AuthError", f"no {auth[0]} token for {auth[1]}: {error}") from error
    if not keyed(headers):
        headers["Idempotency-Key"] = effect_id
    body = base64.b64decode(request["body"]) if "body" in request else None
    return HttpRequest(request["method"], request["url"], headers, body, request["timeout"], effect_id, call)


def result_of(response: HttpResponse, limits: Limits) -> Value:
    """{body, code, headers}. Raises HttpError from status 400 on."""
    if len(response.body) > limits.response_bytes:
        raise limit_error(f"HTTP response of more than {limits.response_bytes} bytes")
    headers = dict(response.headers)
    content_type = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
    return checked({"body": parse_body(response.body, content_type), "code": response.status, "headers": headers})


def checked(value: dict[str, Value]) -> Value:
    """A response's value. Raises HttpError from status 400 on."""
    if value["code"] < 400:
        return value
    message = f"HTTP server responded with error code {value['code']}"
    raise WorkflowError({"tags": ["HttpError"], "message": message, **value}, context=message)


def body_of(request: Mapping[str, Value]) -> Value:
    """The body that a prepared request carries, parsed by its Content-Type."""
    content_type = next((value for name, value in request["headers"].items() if name.lower() == "content-type"), "")
    return parse_body(base64.b64decode(request["body"]), content_type) if "body" in request else None


def parse_body(body: bytes, content_type: str) -> Value:
    """A body by its Content-Type: JSON parsed, text as string, the rest as bytes, nothing as null."""
    if not body:
        return None
    media = content_type.split(";")[0].strip().lower()
    if media == "application/json" or media.endswith("+json"):
        try:
            return from_json(body.decode())
        except ValueError:
            return body.decode("utf-8", "replace")
    if media.startswith("text/") or media in ("application/xml", "application/x-www-form-urlencoded"):
        charset = re.search(r"charset=\"?([\w-]+)", content_type)
        try:
            return body.decode(charset.group(1) if charset else "utf-8", "replace")
        except LookupError:
            return body.decode("utf-8", "replace")
    return body
