"""Routes of a REST API: a verb and a path template each, a handler that takes a `Call` and returns JSON.

An API with protobuf messages gets its routes from `rpc.rest_routes`; any other API lists its own. Templates are those
of google.api.http: `{name=projects/*/topics/*}` is a resource name (`*`: one segment without "/" and ":"; `**`: any
number of segments), `{name}` is one segment of any characters. base/server renders an `ApiError` as Google's error.
"""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from aiohttp import web
from multidict import MultiMapping

from dropforge_local.base.errors import ApiError

JSON_TYPE = "application/json; charset=UTF-8"
_VARIABLE = re.compile(r"\{([a-z][a-zA-Z_.]*)(?:=([^}]+))?\}")


@dataclass(frozen=True)
class Call:
    """One request. `names` are the variables of the matched path; `request` is None for a part of a batch."""

    method: str
    path: str
    query: MultiMapping[str]
    headers: Mapping[str, str]
    base_url: str
    body: bytes = b""
    request: web.Request | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """The body's JSON object, {} without a body. Raises INVALID_ARGUMENT."""
        try:
            return parse_object(self.body)
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", f"Invalid JSON payload received: {error}") from error

    def text(self, parameter: str) -> str:
        """A query parameter, "" when it is absent."""
        return self.query.get(parameter, "")

    def flag(self, parameter: str) -> bool:
        """A boolean query parameter, False when it is absent. Raises INVALID_ARGUMENT."""
        value = self.text(parameter).lower()
        if value not in ("", "true", "false"):
            raise ApiError("INVALID_ARGUMENT", f"Invalid value at {parameter!r}: {value!r} is not a boolean")
        return value == "true"

    def number(self, parameter: str) -> int:
        """An integer query parameter, 0 when it is absent. Raises INVALID_ARGUMENT."""
        try:
            return int(self.text(parameter) or 0)
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", f"Invalid value at {parameter!r}: {error}") from error


@dataclass(frozen=True)
class Reply:
    """An answer in JSON, or without a body for None; for a handler that sets a status or headers."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return b"" if self.body is None else json.dumps(self.body).encode()

    def response(self) -> web.Response:
        content = {} if self.body is None else {"Content-Type": JSON_TYPE}
        return web.Response(body=self.encode(), status=self.status, headers={**self.headers, **content})


Handler = Callable[[Call], Any]
"""Returns JSON, a `Reply` or an aiohttp response, at once or as a coroutine."""


@dataclass(frozen=True)
class Route:
    """One method of an API."""

    verb: str
    path: str
    handler: Handler


def mount(routes: Sequence[Route]) -> list[web.RouteDef]:
    """The routes for aiohttp's router."""
    return [web.route(route.verb, _VARIABLE.sub(_for_aiohttp, route.path), _serve(route)) for route in routes]


class Router:
    """Finds the route of a call without aiohttp, for calls inside a batch and names with quoted slashes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes: dict[str, list[tuple[re.Pattern[str], Handler]]] = {}
        for route in routes:
            self._routes.setdefault(route.verb, []).append((re.compile(_expression(route.path)), route.handler))

    def find(self, call: Call) -> tuple[Handler, Call] | None:
        """The handler of a call whose path is still quoted, and the call with `names`. Raises UnicodeDecodeError."""
        for expression, handler in self._routes.get(call.method, ()):
            if match := expression.fullmatch(call.path):
                names = {name: unquote_path(value) for name, value in match.groupdict().items()}
                return handler, replace(call, names=names)
        return None


def variable_of(rule: str) -> tuple[str, re.Pattern[str]]:
    """The first variable of a rule such as "GET /v2/{job.name=projects/*/jobs/*}": its field and what it matches."""
    variable = _VARIABLE.search(rule)
    assert variable, f"{rule!r} has no variable"
    return variable[1], re.compile(_parts(variable)[1])


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body, {} for an empty body. Raises ValueError."""
    try:
        value = json.loads(body) if body.strip() else {}
        json.dumps(value, ensure_ascii=False).encode()  # SQLite cannot store a lone surrogate such as "\\ud800"
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"the request body is a JSON {type(value).__name__}; expected an object")
    return value


def unquote_path(text: str) -> str:
    """A path segment without percent-encoding. Raises UnicodeDecodeError, a ValueError, when it is not UTF-8."""
    return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode()


async def answer(handler: Callable[[Any], Any], request: Any) -> Any:
    """What a handler returns, awaited where it is a coroutine. A full disk becomes RESOURCE_EXHAUSTED."""
    try:
        result = handler(request)
        return await result if inspect.isawaitable(result) else result
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_FULL":
            raise
        raise ApiError("RESOURCE_EXHAUSTED", "the local stack's disk is full; free some space and try again") from error


def _serve(route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def serve(request: web.Request) -> web.StreamResponse:
        origin = f"{request.scheme}://{request.host}"
        call = Call(
            request.method,
            request.path,
            request.query,
            request.headers,
            origin,
            await request.read(),
            request,
            request.match_info,
        )
        result = await answer(route.handler, call)
        if isinstance(result, web.StreamResponse):
            return result
        return (result if isinstance(result, Reply) else Reply(result)).response()

    return serve


def _for_aiohttp(variable: re.Match[str]) -> str:
    name, expression = _parts(variable)
    return f"{{{name}:{expression}}}"


def _expression(template: str) -> str:
    """The template as a regular expression with a group for each variable."""
    pieces, end = [], 0
    for variable in _VARIABLE.finditer(template):
        name, expression = _parts(variable)
        pieces += [re.escape(template[end : variable.start()]), f"(?P<{name}>{expression})"]
        end = variable.end()
    return "".join([*pieces, re.escape(template[end:])])


def _parts(variable: re.Match[str]) -> tuple[str, str]:
    """A variable's name, "__" in place of its dots, and the expression that it matches."""
    name, pattern = variable.groups()
    expression = pattern.replace("**", ".+").replace("*", "[^/:]+") if pattern else "[^/]*"
    return name.replace(".", "__"), expression
