"""Errors as Google's APIs return them: one class, a canonical code, JSON for REST and a status for gRPC.

Codes and HTTP numbers: google.rpc.Code (https://cloud.google.com/apis/design/errors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.rpc import code_pb2

HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}

RPC_CODE: Mapping[str, int] = dict(code_pb2.Code.items())


class ApiError(Exception):
    """A refusal in Google's shape: an emulator raises it, the server renders it.

    `status` is a key of `HTTP_STATUS`; `details` are google.rpc detail messages as JSON (with "@type").
    """

    def __init__(self, status: str, message: str, details: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.details = details or []

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.status]

    def to_json(self) -> dict[str, Any]:
        """The REST body: {"error": {code, message, status, details}}."""
        error: dict[str, Any] = {
            "code": self.http_status,
            "message": self.message,
            "status": self.status,
        }
        if self.details:
            error["details"] = self.details
        return {"error": error}
