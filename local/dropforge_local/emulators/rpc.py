"""Unary Google APIs written once and served twice: over gRPC, and as REST by the API's own google.api.http rules.

A handler takes the request message and returns the response message; a refusal is an `ApiError`. Bodies and query
parameters are parsed strictly: a field that the API does not have is INVALID_ARGUMENT, as it is at Google.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp import web
from google.protobuf import any_pb2, json_format
from google.rpc import status_pb2

from dropforge_local.base.errors import RPC_CODE, ApiError

log = logging.getLogger(__name__)

Message = Any  # a protobuf message; the generated classes carry no types
SYSTEM_PARAMETERS = frozenset(
    ("$alt", "alt", "$.xgafv", "access_token", "callback", "fields", "key", "prettyPrint", "quotaUser", "uploadType")
)
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
VARIABLE = re.compile(r"\{([a-z_.]+)=([^}]+)\}")
GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class Method:
    """One unary RPC. `http` holds rules such as "POST /v1/{topic=projects/*/topics/*}:publish *": verb, path, body.

    The body is "*" for the whole request, the name of the field that it fills, or absent (query parameters only).
    """

    name: str
    request: Any
    response: Any
    http: tuple[str, ...] = ()


@dataclass(frozen=True)
class Service:
    """A gRPC service whose RPC `CreateTopic` is `implementation.create_topic`, a function or a coroutine."""

    name: str
    methods: tuple[Method, ...]
    implementation: object

    def handler(self, method: Method) -> Callable[[Message], Any]:
        handler: Callable[[Message], Any] = getattr(self.implementation, snake_case(method.name))
        return handler


def grpc_handlers(services: Sequence[Service]) -> list[grpc.GenericRpcHandler]:
    """The services' unary methods for `grpc.aio.Server.add_generic_rpc_handlers`."""
    return [
        grpc.method_handlers_generic_handler(
            service.name, {method.name: _grpc_method(service.handler(method), method) for method in service.methods}
        )
        for service in services
    ]


def routes(services: Sequence[Service]) -> list[web.RouteDef]:
    """The services' HTTP rules as aiohttp routes."""
    return [
        _route(rule, method, service.handler(method))
        for service in services
        for method in service.methods
        for rule in method.http
    ]


async def abort(context: grpc.aio.ServicerContext, error: ApiError) -> None:
    """End a gRPC call with `error`; details travel as google.rpc.Status, where the clients look for them."""
    code = RPC_CODE[error.status]
    trailers: tuple[tuple[str, bytes], ...] = ()
    if error.details:
        status = status_pb2.Status(code=code, message=error.message)
        status.details.extend(json_format.ParseDict(detail, any_pb2.Any()) for detail in error.details)
        trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(GRPC_CODES[code], error.message, trailers)


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def parse_json(text: bytes, message: Message) -> Message:
    """Fill `message` from JSON bytes, strictly; raise INVALID_ARGUMENT for anything that it is not."""
    try:
        body = json.loads(text or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError("INVALID_ARGUMENT", f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("INVALID_ARGUMENT", f"the request body is a JSON {type(body).__name__}; expected an object")
    return parse_dict(body, message)


def parse_dict(body: dict[str, Any], message: Message) -> Message:
    # UnicodeEncodeError (a lone surrogate) is a ValueError; the others come from values of a wrong shape.
    try:
        return json_format.ParseDict(body, message)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ApiError("INVALID_ARGUMENT", f"invalid request: {error}") from error


async def _call(handler: Callable[[Message], Any], request: Message) -> Message:
    try:
        result = handler(request)
        return await result if inspect.isawaitable(result) else result
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_FULL":
            raise
        raise ApiError("RESOURCE_EXHAUSTED", "the local stack's disk is full; free some space and try again") from error


def _grpc_method(handler: Callable[[Message], Any], method: Method) -> grpc.RpcMethodHandler:
    async def serve(request: Message, context: grpc.aio.ServicerContext) -> Message:
        try:
            return await _call(handler, request)
        except ApiError as error:
            await abort(context, error)
        except Exception:
            # The last line of defence, as render_errors is for HTTP; abort's own exception is no Exception.
            log.exception("%s", method.name)
            await context.abort(grpc.StatusCode.INTERNAL, "the emulator failed; its log has the traceback")

    return grpc.unary_unary_rpc_method_handler(
        serve, request_deserializer=method.request.FromString, response_serializer=method.response.SerializeToString
    )


def _route(rule: str, method: Method, handler: Callable[[Message], Any]) -> web.RouteDef:
    verb, path, body_field = [*rule.split(), ""][:3]

    async def serve(request: web.Request) -> web.Response:
        message = method.request()
        if body_field:
            parse_json(await request.read(), message if body_field == "*" else getattr(message, body_field))
            if body_field != "*":
                getattr(message, body_field).SetInParent()
        if body_field != "*":
            parse_dict(_with_booleans(_query(request), message.DESCRIPTOR), message)
        for name, value in request.match_info.items():
            _set_path_field(message, name.split("__"), value)
        response = await _call(handler, message)
        return web.json_response(json_format.MessageToDict(response))

    return web.route(verb, VARIABLE.sub(_path_pattern, path), serve)


def _path_pattern(variable: re.Match[str]) -> str:
    """`{topic.name=projects/*/topics/*}` as aiohttp writes it; no name of Google's holds a slash or a colon."""
    field, template = variable.groups()
    return "{" + field.replace(".", "__") + ":" + template.replace("*", "[^/:]+") + "}"


def _query(request: web.Request) -> dict[str, Any]:
    """Query parameters as a request's JSON: dotted names nest; parameters of Google's front end are dropped."""
    body: dict[str, Any] = {}
    for name, value in request.query.items():
        if name in SYSTEM_PARAMETERS:
            continue
        *parents, last = name.split(".")
        target = body
        for parent in parents:
            nested = target.setdefault(parent, {})
            if not isinstance(nested, dict):
                raise ApiError("INVALID_ARGUMENT", f"query parameter {name!r} contradicts {parent!r}")
            target = nested
        target[last] = value
    return body


def _with_booleans(query: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Texts as booleans where the message has them: clients write true, True and 1 in query parameters."""
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    for name, value in query.items():
        field = fields.get(name)
        if field is not None and isinstance(value, dict) and field.message_type is not None:
            _with_booleans(value, field.message_type)
        elif field is not None and field.type == field.TYPE_BOOL and isinstance(value, str):
            query[name] = BOOLEANS.get(value.lower(), value)
    return query


def _set_path_field(message: Message, path: list[str], value: str) -> None:
    for part in path[:-1]:
        message = getattr(message, part)
    try:
        setattr(message, path[-1], value)
    except (TypeError, ValueError) as error:
        raise ApiError("INVALID_ARGUMENT", f"invalid name {value!r} in the path: {error}") from error
