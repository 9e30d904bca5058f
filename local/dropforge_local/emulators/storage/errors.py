"""Refusals in Cloud Storage's own JSON shape, which is older than google.rpc.Status: own codes and reasons."""

from __future__ import annotations

from typing import Any

from dropforge_local.base.errors import ApiError


class StorageError(ApiError):
    """A refusal: an HTTP code, also one without a google.rpc code (304, 412, 416, 499, 507), and a `reason`."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__("UNKNOWN", message)
        self.code = code
        self.reason = reason

    @property
    def http_status(self) -> int:
        return self.code

    def to_json(self) -> dict[str, Any]:
        """{"error": {"code", "message", "errors": [{"message", "domain", "reason"}]}}."""
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.code, "message": self.message, "errors": [detail]}}


def invalid(message: str, reason: str = "invalid") -> StorageError:
    return StorageError(400, reason, message)


def bucket_not_found(name: str) -> StorageError:
    return StorageError(404, "notFound", f"The specified bucket does not exist: {name!r}.")


def object_not_found(bucket: str, name: str, generation: int | None = None) -> StorageError:
    version = f"#{generation}" if generation else ""
    return StorageError(404, "notFound", f"No such object: {bucket}/{name}{version}")


def precondition_failed(message: str) -> StorageError:
    return StorageError(
        412, "conditionNotMet", f"At least one of the pre-conditions you specified did not hold: {message}"
    )


def not_modified(message: str) -> StorageError:
    return StorageError(304, "notModified", message)


def not_emulated(feature: str) -> StorageError:
    return StorageError(501, "notImplemented", f"{feature} is not emulated by the local stack")


def disk_failed(error: OSError) -> StorageError:
    """507, which clients do not retry. They would retry 503 for two minutes without telling of the full disk."""
    return StorageError(507, "insufficientStorage", f"The local stack cannot use its blob directory: {error}")


def database_full(error: Exception) -> StorageError:
    return StorageError(507, "insufficientStorage", f"The local stack cannot write to its database: {error}")
