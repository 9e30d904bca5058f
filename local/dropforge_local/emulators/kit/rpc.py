"""Unary methods of an API with protobuf messages, served over gRPC and, by the API's google.api.http rules, over REST.

A handler takes the request message and returns the response message, or raises `ApiError`. Bodies and query parameters
are parsed strictly: a field that the API does not have is INVALID_ARGUMENT, as it is at Google.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import grpc
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2, json_format
from google.rpc import status_pb2

from dropforge_local.base.errors import RPC_CODE, ApiError

from .routing import Call, Route, answer, variable_of

log = logging.getLogger(__name__)

Message = Any  # a protobuf message; the generated classes carry no types
SYSTEM_PARAMETERS = frozenset(
    ("$alt", "alt", "$.xgafv", "access_token", "callback", "fields", "key", "quotaUser", "uploadType")
) | {"prettyPrint", "$prettyPrint"}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_METHOD = re.compile(r"(\w+)\((\w*)\) (\w+)(?: (.+))?")
_COMMON = {"Empty": empty_pb2.Empty, "Operation": operations_pb2.Operation}
GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class Method:
    """One unary RPC. `http` holds rules such as "POST /v1/{topic=projects/*/topics/*}:publish *": verb, path, body.

    The body is "*" for the whole request, the name of a field of the request, or absent (query parameters only).
    """

    name: str
    request: Any
    response: Any
    http: tuple[str, ...] = ()


def methods(types: Any, table: str) -> tuple[Method, ...]:
    """Methods from a table with a line for each: `CreateTopic(Topic) Topic PUT /v1/{name=projects/*/topics/*} *`.

    The request's class is NAMERequest for empty parentheses. The classes are proto-plus classes of the module `types`,
    or Empty and google.longrunning's Operation. The HTTP rule may be absent.
    """
    return tuple(_method(types, line.strip()) for line in table.strip().splitlines())


@dataclass(frozen=True)
class Service:
    """A gRPC service whose RPC `CreateTopic` is `implementation.create_topic`, a function or a coroutine.

    At Google each API has its own host. Here, several emulators have a `shared` service such as Operations on one port:
    each answers the calls whose routing header has a name that its HTTP rules match.
    """

    name: str
    methods: tuple[Method, ...]
    implementation: object
    shared: bool = False

    def handler(self, method: Method) -> Callable[[Message], Any]:
        handler: Callable[[Message], Any] = getattr(self.implementation, snake_case(method.name))
        return handler


def grpc_handlers(services: Sequence[Service]) -> list[grpc.GenericRpcHandler]:
    """The services' unary methods for `grpc.aio.Server.add_generic_rpc_handlers`."""
    return [_Shared(service) if service.shared else _generic(service) for service in services]


def rest_routes(services: Sequence[Service]) -> list[Route]:
    """The services' HTTP rules as routes of the kit."""
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


def parse_dict(body: dict[str, Any], message: Message) -> Message:
    """Fill `message` from JSON, strictly. Raises INVALID_ARGUMENT."""
    # ParseDict raises more than ParseError: the other exceptions come from values of a wrong shape.
    try:
        return json_format.ParseDict(body, message)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ApiError("INVALID_ARGUMENT", f"Invalid JSON payload received. {error}") from error


class _Shared(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A shared service. gRPC asks the next handler if this one returns None."""

    def __init__(self, service: Service) -> None:
        self._handler = _generic(service)
        self._names = {f"/{service.name}/{method.name}": variable_of(method.http[0])[1] for method in service.methods}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        names = parse_qs(dict(details.invocation_metadata).get("x-goog-request-params", "")).get("name", [""])
        pattern = self._names.get(details.method)
        is_other = names[0] and (pattern is None or not pattern.fullmatch(names[0]))
        return None if is_other else self._handler.service(details)


def _generic(service: Service) -> grpc.GenericRpcHandler:
    handlers = {method.name: _grpc_method(service.handler(method), method) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.name, handlers)


def _method(types: Any, line: str) -> Method:
    match = _METHOD.fullmatch(line)
    assert match, f"{line!r} is not NAME(REQUEST) RESPONSE [VERB PATH [BODY]]"
    name, request, response, rule = match.groups()
    request_class, response_class = (_message_class(types, text) for text in (request or f"{name}Request", response))
    return Method(name, request_class, response_class, (rule,) if rule else ())


def _message_class(types: Any, name: str) -> Any:
    message = getattr(types, name, None) or _COMMON[name]
    return message.pb() if hasattr(message, "pb") else message


def _grpc_method(handler: Callable[[Message], Any], method: Method) -> grpc.RpcMethodHandler:
    async def serve(request: Message, context: grpc.aio.ServicerContext) -> Message:
        try:
            return await answer(handler, request)
        except ApiError as error:
            await abort(context, error)
        except Exception:
            # As render_errors does for HTTP. The exception that context.abort raises is not an Exception.
            log.exception("%s", method.name)
            await context.abort(grpc.StatusCode.INTERNAL, "the emulator failed; its log has the traceback")

    return grpc.unary_unary_rpc_method_handler(
        serve, request_deserializer=method.request.FromString, response_serializer=method.response.SerializeToString
    )


def _route(rule: str, method: Method, handler: Callable[[Message], Any]) -> Route:
    verb, path, body_field = [*rule.split(), ""][:3]

    async def serve(call: Call) -> dict[str, Any]:
        message = method.request()
        if body_field:
            part = message if body_field == "*" else getattr(message, body_field)
            parse_dict(call.json(), part)
            part.SetInParent()
        if body_field != "*":
            parse_dict(_with_booleans(_query(call), message.DESCRIPTOR), message)
        for name, value in call.names.items():
            _set_path_field(message, name.split("__"), value)
        response: dict[str, Any] = json_format.MessageToDict(await answer(handler, message))
        return response

    return Route(verb, path, serve)


def _query(call: Call) -> dict[str, Any]:
    """Query parameters as a request's JSON: dotted names nest; parameters of Google's front end are dropped."""
    body: dict[str, Any] = {}
    for name, value in call.query.items():
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
    """Convert texts to booleans where the message has booleans (clients write true, True and 1), and field masks."""
    fields = {name: field for field in descriptor.fields for name in (field.name, field.json_name)}
    for name, value in query.items():
        field = fields.get(name)
        if field is not None and isinstance(value, dict) and field.message_type is not None:
            _with_booleans(value, field.message_type)
        elif field is not None and field.type == field.TYPE_BOOL and isinstance(value, str):
            query[name] = BOOLEANS.get(value.lower(), value)
        elif field is not None and field.message_type is not None and field.message_type.name == "FieldMask":
            # JSON has masks in lowerCamelCase; the APIs accept the fields' own names too.
            query[name] = re.sub("_([a-z])", lambda letter: letter[1].upper(), value)
    return query


def _set_path_field(message: Message, path: list[str], value: str) -> None:
    for part in path[:-1]:
        message = getattr(message, part)
    try:
        setattr(message, path[-1], value)
    except (TypeError, ValueError) as error:
        raise ApiError("INVALID_ARGUMENT", f"invalid name {value!r} in the path: {error}") from error
