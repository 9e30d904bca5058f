"""A Terraform provider that creates nothing: the real `terraform` validates, plans and applies without a network.

The provider serves the schemas of tests/data/google_provider.yaml over Terraform's plugin protocol 5
(https://developer.hashicorp.com/terraform/plugin/terraform-plugin-protocol), so that Terraform itself checks every
expression, reference, type, validation and condition. The provider invents the values that the cloud would give.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import msgpack

from ..schemas.google_provider import Argument, Schema

UNKNOWN = msgpack.ExtType(0, b"\0")
_LIST = 2  # Schema.NestedBlock.NestingMode
# The provider's own settings that terraform/versions.tf uses.
_SETTINGS = Schema(
    {
        **{name: Argument("string") for name in ("billing_project", "project", "region")},
        "default_labels": Argument("map(string)"),
        "user_project_override": Argument("bool"),
    }
)


class Provider:
    """`resources` and `data_sources` are schemas by type; `invent(type, argument, values)` returns a value."""

    def __init__(
        self, resources: dict[str, Schema], data_sources: dict[str, Schema], invent: Callable[[str, str, Any], Any]
    ) -> None:
        self.resources, self.data_sources, self._invent = resources, data_sources, invent
        self.applied: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def serving(self) -> Iterator[dict[str, Any]]:
        """Serve on a free port; yields the provider's entry in TF_REATTACH_PROVIDERS."""
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        names = [name for name in dir(self) if name[0].isupper()]
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._handler(name)) for name in names}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("tfplugin5.Provider", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            address = {"Network": "tcp", "String": f"127.0.0.1:{port}"}
            yield {"Protocol": "grpc", "ProtocolVersion": 5, "Pid": 1, "Test": True, "Addr": address}
        finally:
            server.stop(None).wait()

    def GetSchema(self, _: dict[int, Any]) -> bytes:
        answer = _field(1, _schema(_SETTINGS))
        for number, schemas in ((2, self.resources), (3, self.data_sources)):
            for name, schema in schemas.items():
                answer += _field(number, _field(1, name.encode()) + _field(2, _schema(schema)))
        return answer

    def PrepareProviderConfig(self, request: dict[int, Any]) -> bytes:
        return _field(1, request[1])

    def ValidateResourceTypeConfig(self, _: dict[int, Any]) -> bytes:
        return b""

    def ValidateDataSourceConfig(self, _: dict[int, Any]) -> bytes:
        return b""

    def Configure(self, _: dict[int, Any]) -> bytes:
        return b""

    def UpgradeResourceState(self, request: dict[int, Any]) -> bytes:
        return _field(1, _field(2, _fields(request[3])[1]))  # unchanged, in JSON

    def ReadResource(self, request: dict[int, Any]) -> bytes:
        return _field(1, request[2])

    def PlanResourceChange(self, request: dict[int, Any]) -> bytes:
        kind, prior, proposed = request[1].decode(), _value(request[2]), _value(request[3])
        if prior and proposed:  # Terraform keeps what the cloud gave to an argument, and not what it gave to a block
            kept = [name for name, block in self.resources[kind].blocks.items() if block.is_computed]
            proposed |= {name: proposed[name] or prior[name] for name in kept}
        planned = proposed and self._fill(self.resources[kind], proposed, lambda *_: UNKNOWN)
        return _field(1, _dynamic(planned)) + _field(5, 1)

    def ApplyResourceChange(self, request: dict[int, Any]) -> bytes:
        kind, planned = request[1].decode(), _value(request[3])
        if planned:  # empty: Terraform destroys the resource
            planned = self._fill(self.resources[kind], planned, lambda name: self._invent(kind, name, planned))
            self.applied.append((kind, planned))
        return _field(1, _dynamic(planned)) + _field(4, 1)

    def ReadDataSource(self, request: dict[int, Any]) -> bytes:
        kind, config = request[1].decode(), _value(request[2])
        values = self._fill(self.data_sources[kind], config, lambda name: self._invent(kind, name, config))
        return _field(1, _dynamic(values))

    def _handler(self, name: str) -> Callable[[bytes, Any], bytes]:
        method = getattr(self, name)
        return lambda request, context: method(_fields(request))

    def _fill(self, schema: Schema, values: dict[str, Any], invent: Callable[[str], Any]) -> dict[str, Any]:
        """`values`, and a value for every argument and block that the configuration leaves to the cloud."""
        filled = dict(values)
        for name, argument in schema.arguments.items():
            if filled.get(name) in (None, UNKNOWN) and not argument.required:
                filled[name] = invent(name) if argument.type == "string" else None
        for name, block in schema.blocks.items():
            filled[name] = self._fill_block(block, filled.get(name) or [], invent)
        return filled

    def _fill_block(self, block: Schema, bodies: Any, invent: Callable[[str], Any]) -> Any:
        if block.is_computed and bodies in ([], UNKNOWN):
            bodies = UNKNOWN if invent("") is UNKNOWN else [dict.fromkeys([*block.arguments, *block.blocks])]
        return bodies if bodies is UNKNOWN else [self._fill(block, body, invent) for body in bodies]


def _schema(schema: Schema) -> bytes:
    return _field(2, _block(schema))


def _block(schema: Schema) -> bytes:
    encoded = b""
    for name, argument in schema.arguments.items():
        usage = _field(4, 1) if argument.required else _field(6, 1)
        usage += b"" if argument.required or argument.is_output else _field(5, 1)
        encoded += _field(2, _field(1, name.encode()) + _field(2, _type(argument.type)) + usage)
    for name, block in schema.blocks.items():
        limits = _field(4, block.at_least) + _field(5, block.at_most)
        encoded += _field(3, _field(1, name.encode()) + _field(2, _block(block)) + _field(3, _LIST) + limits)
    return encoded


def _type(kind: str) -> bytes:
    """A type such as `map(string)` in Terraform's JSON notation."""
    collection, _, element = kind.rstrip(")").partition("(")
    return json.dumps([collection, element] if element else kind).encode()


def _dynamic(value: Any) -> bytes:
    return _field(1, msgpack.packb(value))


def _value(dynamic: bytes) -> Any:
    return msgpack.unpackb(_fields(dynamic)[1], strict_map_key=False)


def _field(number: int, value: bytes | int) -> bytes:
    """One field of a protocol buffer: a message or text as bytes, a number as a varint."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _fields(message: bytes) -> dict[int, Any]:
    """The fields of a protocol buffer by number; of a repeated field, the last value."""
    fields: dict[int, Any] = {}
    rest = iter(message)
    for tag in iter(lambda: _read_varint(rest), None):
        length = _read_varint(rest)
        assert length is not None
        fields[tag >> 3] = length if tag & 7 == 0 else bytes(next(rest) for _ in range(length))
    return fields


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _read_varint(rest: Iterator[int]) -> int | None:
    value = shift = 0
    for byte in rest:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value
    return None
