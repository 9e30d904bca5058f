"""Sends the HTTP requests of executions, and turns each response into the value that the workflow sees."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import WorkflowError, limit_error, system_error
from ..interpreter.http_requests import DEFAULT_TIMEOUT, canonical_header, has_idempotency_key
from ..limits import Limits
from ..values import Value, from_json


@dataclass(frozen=True)
class HttpRequest:
    """A request as a transport sends it. `timeout` is in seconds."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout: float = DEFAULT_TIMEOUT


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpTransport(Protocol):
    """Sends requests. `send` raises WorkflowError (ConnectionError, ConnectionFailedError, TimeoutError)."""

    async def send(self, request: HttpRequest) -> HttpResponse: ...

    async def close(self) -> None: ...


class HttpCaller:
    """Sends stored requests with their token and idempotency key.

    `token(kind, audience_or_scope)` returns the bearer token of `auth: {type: OIDC|OAuth2}`.
    """

    def __init__(self, transport: HttpTransport, token: Callable[[str, str], str], limits: Limits) -> None:
        self._transport = transport
        self._token = token
        self._limits = limits

    async def call(self, request: Mapping[str, Value], effect_id: str) -> Value:
        """The response as {body, code, headers}. Raises WorkflowError, also for every status of 400 or more."""
        response = await self._transport.send(self._bind(request, effect_id))
        return self._result(response)

    async def close(self) -> None:
        await self._transport.close()

    def _bind(self, request: Mapping[str, Value], effect_id: str) -> HttpRequest:
        headers = dict(request["headers"])
        if (auth := request.get("auth")) is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token(auth[0], auth[1])}"
            except Exception as error:  # the embedder's function may raise anything; the workflow sees AuthError
                raise system_error("AuthError", f"no {auth[0]} token for {auth[1]}: {error}") from error
        if not has_idempotency_key(headers):
            headers["Idempotency-Key"] = effect_id
        body = base64.b64decode(request["body"]) if "body" in request else None
        return HttpRequest(request["method"], request["url"], headers, body, request["timeout"])

    def _result(self, response: HttpResponse) -> Value:
        if len(response.body) > self._limits.response_bytes:
            raise limit_error(f"HTTP response of more than {self._limits.response_bytes} bytes")
        headers = dict(response.headers)
        body = parse_body(response.body, _content_type(headers))
        return check_status({"body": body, "code": response.status, "headers": headers})


def check_status(response: dict[str, Value]) -> Value:
    """The response {body, code, headers} itself. Raises HttpError for a code of 400 or more."""
    if response["code"] < 400:
        return response
    message = f"HTTP server responded with error code {response['code']}"
    raise WorkflowError({"tags": ["HttpError"], "message": message, **response}, context=message)


def request_body(request: Mapping[str, Value]) -> Value:
    """The body of a stored request, parsed by its Content-Type."""
    if "body" not in request:
        return None
    return parse_body(base64.b64decode(request["body"]), _content_type(request["headers"]))


def parse_body(body: bytes, content_type: str) -> Value:
    """A body by its Content-Type: JSON parsed, text as a string, other types as bytes, an empty body as null."""
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


def _content_type(headers: Mapping[str, str]) -> str:
    return next((value for name, value in headers.items() if name.lower() == "content-type"), "")


# For transports


def join_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers under their canonical names; the values of a repeated header are joined with a comma."""
    joined: dict[str, str] = {}
    for name, value in headers:
        name = canonical_header(name)
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def timeout_error(request: HttpRequest) -> WorkflowError:
    return system_error("TimeoutError", f"{request.method} {request.url} took longer than {request.timeout:g} s")


def connection_failed(request: HttpRequest, reason: object) -> WorkflowError:
    return system_error("ConnectionFailedError", f"cannot connect for {request.method} {request.url}: {reason}")


def connection_broke(request: HttpRequest, reason: object) -> WorkflowError:
    return system_error("ConnectionError", f"the connection for {request.method} {request.url} broke: {reason}")
