"""Refusals in the shape of the Kubernetes API: a Status object with a code, a reason and the causes.

Wording: k8s.io/apimachinery/pkg/api/errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .kinds import Kind

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Refusal(Exception):
    """A request that the API server refuses."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason or REASONS[code]
        self.details = dict(details or {})
        self.headers = dict(headers or {})

    def status(self) -> dict[str, Any]:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        return {**status, "details": self.details} if self.details else status


@dataclass(frozen=True)
class Cause:
    """A problem of an object; `reason` is a FieldValue… value, as in the functions below."""

    field: str
    reason: str
    message: str

    def render(self) -> dict[str, str]:
        return {"reason": self.reason, "message": self.message, "field": self.field}


def required(field: str, message: str = "") -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value{': ' if message else ''}{message}")


def wrong(field: str, value: object, message: str) -> Cause:
    return Cause(field, "FieldValueInvalid", f"Invalid value: {_shown(value)}: {message}")


def unsupported(field: str, value: object, supported: Sequence[str]) -> Cause:
    values = ", ".join(f'"{name}"' for name in supported)
    return Cause(field, "FieldValueNotSupported", f"Unsupported value: {_shown(value)}: supported values: {values}")


def forbidden_field(field: str, message: str) -> Cause:
    return Cause(field, "FieldValueForbidden", f"Forbidden: {message}")


def duplicate(field: str, value: object) -> Cause:
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {_shown(value)}")


def invalid(kind: Kind, name: str, causes: Sequence[Cause]) -> Refusal:
    texts = [f"{cause.field}: {cause.message}" for cause in causes]
    listed = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    qualified = f"{kind.name}.{kind.group}" if kind.group else kind.name
    details = {"name": name, "group": kind.group, "kind": kind.name, "causes": [cause.render() for cause in causes]}
    return Refusal(422, f'{qualified} "{name}" is invalid: {listed}', details=details)


def not_found(kind: Kind, name: str) -> Refusal:
    return Refusal(404, f'{kind.key} "{name}" not found', details=_details(kind, name))


def already_exists(kind: Kind, name: str) -> Refusal:
    message = f'{kind.key} "{name}" already exists'
    return Refusal(409, message, reason="AlreadyExists", details=_details(kind, name))


def conflict(kind: Kind, name: str, why: str = "") -> Refusal:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {kind.key} "{name}": {why}'
    return Refusal(409, message, details=_details(kind, name))


def forbidden(kind: Kind, name: str, why: str) -> Refusal:
    return Refusal(403, f'{kind.key} "{name}" is forbidden: {why}', details=_details(kind, name))


def bad_request(message: str) -> Refusal:
    return Refusal(400, message)


def not_emulated(feature: str) -> Refusal:
    return Refusal(501, f"{feature} is not emulated by the local stack")


def _details(kind: Kind, name: str) -> dict[str, str]:
    details = {"name": name, "kind": kind.plural}
    return {**details, "group": kind.group} if kind.group else details


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"
