"""A Terraform provider that makes nothing: lets the real `terraform` validate, plan and apply without a network.

It serves schemas (as JSON, in the form of ../shared/data/google-provider-schema.json) over Terraform's plugin protocol
5 (https://developer.hashicorp.com/terraform/plugin/terraform-plugin-protocol), so that Terraform itself checks every
expression, reference, type, validation and condition. Values that the cloud would give are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import msgpack

Schema = dict[str, Any]
UNKNOWN = msgpack.ExtType(0, b"\0")
_TYPES = {"boolean": "bool", "number": "number", "string": "string"}
_LIST = 2  # Schema.NestedBlock.NestingMode


class Provider:
    """`resources` and `data_sources` are schemas by type; `invent(type, attribute, values)` makes up a value."""

    def __init__(
        self, resources: dict[str, Schema], data_sources: dict[str, Schema], invent: Callable[[str, str, Any], Any]
    ) -> None:
        self.resources, self.data_sources, self._invent = resources, data_sources, invent
        self.applied: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def serving(self) -> Iterator[dict[str, Any]]:
        """Serve on a free port; what TF_REATTACH_PROVIDERS says of it."""
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
        types = dict.fromkeys(("billing_project", "project", "region"), "string")
        types |= {"default_labels": "map:stringMap", "user_project_override": "boolean"}
        settings = {name: {"type": kind, "required": False} for name, kind in types.items()}
        answer = _field(1, _schema({"attributes": settings, "blocks": {}}))
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
        return _field(1, _field(2, _fields(request[3])[1]))  # as it is, in JSON

    def ReadResource(self, request: dict[int, Any]) -> bytes:
        return _field(1, request[2])

    def PlanResourceChange(self, request: dict[int, Any]) -> bytes:
        kind, proposed = request[1].decode(), _value(request[3])
        planned = proposed and self._fill(self.resources[kind], proposed, lambda *_: UNKNOWN)
        return _field(1, _dynamic(planned)) + _field(5, 1)

    def ApplyResourceChange(self, request: dict[int, Any]) -> bytes:
        kind, planned = request[1].decode(), _value(request[3])
        if planned:
            planned = self._fill(self.resources[kind], planned, lambda name: self._invent(kind, name, planned))
            self.applied.append((kind, planned))
        return _field(1, _dynamic(planned)) + _field(4, 1)

    def ReadDataSource(self, request: dict[int, Any]) -> bytes:
        kind, config = request[1].decode(), _value(request[2])
        found = self._fill(self.data_sources[kind], config, lambda name: self._invent(kind, name, config))
        return _field(1, _dynamic(found))

    def _handler(self, name: str) -> Callable[[bytes, Any], bytes]:
        method = getattr(self, name)
        return lambda request, context: method(_fields(request))

    def _fill(self, schema: Schema, values: dict[str, Any], invent: Callable[[str], Any]) -> dict[str, Any]:
        """`values` with something for every attribute and block that the cloud decides when nobody else does."""
        filled = dict(values)
        for name, attribute in schema["attributes"].items():
            if filled.get(name) in (None, UNKNOWN) and not attribute["required"]:
                filled[name] = invent(name) if attribute["type"] == "string" else None
        for name in schema.get("exported", ()):
            if name not in schema["attributes"] and name not in schema["blocks"]:
                filled[name] = invent(name) if filled.get(name) in (None, UNKNOWN) else filled[name]
        for name, block in schema["blocks"].items():
            found = filled.get(name) or []
            if block.get("computed") and found in ([], UNKNOWN):
                empty = dict.fromkeys(_keys(block))
                found = UNKNOWN if invent("") is UNKNOWN else [empty]
            if found is not UNKNOWN:
                found = [self._fill(block, element, invent) for element in found]
            filled[name] = found
        return filled


def _keys(schema: Schema) -> list[str]:
    return [*schema["attributes"], *schema["blocks"], *schema.get("exported", ())]


def _schema(schema: Schema) -> bytes:
    return _field(2, _block(schema))


def _block(schema: Schema) -> bytes:
    encoded = b""
    for name, attribute in schema["attributes"].items():
        usage = _field(4, 1) if attribute["required"] else _field(5, 1) + _field(6, 1)
        encoded += _field(2, _field(1, name.encode()) + _field(2, _type(attribute["type"])) + usage)
    for name in schema.get("exported", ()):
        if name not in schema["attributes"] and name not in schema["blocks"]:
            encoded += _field(2, _field(1, name.encode()) + _field(2, _type("string")) + _field(6, 1))
    for name, block in schema["blocks"].items():
        limits = _field(4, int(block["required"])) + _field(5, block["max"] or 0)
        encoded += _field(3, _field(1, name.encode()) + _field(2, _block(block)) + _field(3, _LIST) + limits)
    return encoded


def _type(kind: str) -> bytes:
    """`map:stringMap` as Terraform's JSON notation of types."""
    collection, _, element = kind.partition(":")
    if not element:
        return json.dumps(_TYPES[kind]).encode()
    return json.dumps([collection, "number" if element.startswith("number") else "string"]).encode()


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
    """The fields of a protocol buffer by number; of a repeated one, the last."""
    found: dict[int, Any] = {}
    rest = iter(message)
    for tag in iter(lambda: _read_varint(rest), None):
        length = _read_varint(rest)
        assert length is not None
        found[tag >> 3] = length if tag & 7 == 0 else bytes(next(rest) for _ in range(length))
    return found


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
