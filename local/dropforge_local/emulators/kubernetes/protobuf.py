"""Reads the small objects that kubectl sends in protobuf: `kubectl create secret|configmap|…` and `auth can-i`.

The numbers are those of k8s.io/api/*/generated.proto. An object of another kind is answered with 501, because
Kubernetes takes it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from .refusals import Refusal, bad_request

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\x00"
# By message, each field as NUMBER:NAME:TYPE. Types: str, bytes (base64 in JSON), int, bool, map (of strings), data (a
# map of bytes), `-` for what only the server writes, or another message.
MESSAGES = {
    "ObjectMeta": "1:name:str 2:generateName:str 3:namespace:str 4:selfLink:- 5:uid:str 6:resourceVersion:str "
    "7:generation:- 8:creationTimestamp:- 11:labels:map 12:annotations:map",
    "ConfigMap": "1:metadata:ObjectMeta 2:data:map 3:binaryData:data 4:immutable:bool",
    "Secret": "1:metadata:ObjectMeta 2:data:data 3:type:str 4:stringData:map 5:immutable:bool",
    "Namespace": "1:metadata:ObjectMeta 2:spec:- 3:status:-",
    "ServiceAccount": "1:metadata:ObjectMeta 4:automountServiceAccountToken:bool",
    "SelfSubjectAccessReview": "1:metadata:ObjectMeta 2:spec:SelfSubjectAccessReviewSpec 3:status:-",
    "SelfSubjectAccessReviewSpec": "1:resourceAttributes:ResourceAttributes 2:nonResourceAttributes:NonResource",
    "ResourceAttributes": "1:namespace:str 2:verb:str 3:group:str 4:version:str 5:resource:str 6:subresource:str "
    "7:name:str",
    "NonResource": "1:path:str 2:verb:str",
    "SelfSubjectRulesReview": "1:metadata:ObjectMeta 2:spec:SelfSubjectRulesReviewSpec 3:status:-",
    "SelfSubjectRulesReviewSpec": "1:namespace:str",
}
KINDS = ("ConfigMap", "Secret", "Namespace", "ServiceAccount", "SelfSubjectAccessReview", "SelfSubjectRulesReview")
HINT = "for kubectl: `kubectl create … --dry-run=client -o yaml | kubectl apply -f -`"


def decode(data: bytes) -> dict[str, Any]:
    """The object in a body. Refuses a malformed body with 400, a kind or a field that is not in MESSAGES with 501."""
    if not data.startswith(MAGIC):
        raise bad_request("the object provided is unrecognized: a protobuf body begins with k8s and a zero byte")
    try:
        envelope = dict(_fields(data.removeprefix(MAGIC)))
        api_version, kind = (dict(_fields(envelope[1]))[number].decode() for number in (1, 2))
        if kind not in KINDS:
            raise _not_emulated(f"a {kind} in protobuf")
        return {"apiVersion": api_version, "kind": kind, **_message(kind, envelope.get(2, b""))}
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise bad_request(f"the object provided is unrecognized: {error!r}") from error


def _message(name: str, data: bytes) -> dict[str, Any]:
    known = {int(number): (field, kind) for number, field, kind in (each.split(":") for each in MESSAGES[name].split())}
    result: dict[str, Any] = {}
    for number, value in _fields(data):
        if number not in known:
            raise _not_emulated(f"field {number} of {name} in protobuf")
        field, kind = known[number]
        if kind in ("map", "data"):
            key, item = (dict(_fields(value)).get(part, b"") for part in (1, 2))
            result.setdefault(field, {})[key.decode()] = SCALARS["str" if kind == "map" else "bytes"](item)
        elif kind in SCALARS:
            result[field] = SCALARS[kind](value)
        elif kind != "-":
            result[field] = _message(kind, value)
    return result


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message: integers, and bytes of what has a length."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, at = _varint(data, at)
        if tag & 7 == 0:
            yield tag >> 3, number
            continue
        if tag & 7 != 2 or at + number > len(data):
            raise ValueError(f"field {tag >> 3} has wire type {tag & 7} and ends at {at + number} of {len(data)}")
        yield tag >> 3, data[at : at + number]
        at += number


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _not_emulated(what: str) -> Refusal:
    return Refusal(501, f"{what} is not emulated by the local stack: send JSON; {HINT}")


SCALARS: dict[str, Callable[[Any], Any]] = {
    "str": lambda value: value.decode(),
    "bytes": lambda value: base64.b64encode(value).decode(),
    "int": int,
    "bool": bool,
}
