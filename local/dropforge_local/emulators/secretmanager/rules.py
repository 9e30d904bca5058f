"""The secrets and payloads that Secret Manager refuses."""

from __future__ import annotations

import re

import google_crc32c
from google.cloud import secretmanager_v1 as api

from dropforge_local.base.errors import ApiError

from ..kit.rpc import Message

ENABLED, DISABLED, DESTROYED = (int(api.SecretVersion.State[name]) for name in ("ENABLED", "DISABLED", "DESTROYED"))
MAX_PAYLOAD_BYTES = 64 * 2**10
MUTABLE_FIELDS = frozenset(("labels", "annotations", "expire_time", "ttl", "version_aliases"))
UNSUPPORTED_FIELDS = ("topics", "rotation", "customer_managed_encryption", "version_destroy_ttl", "tags")


def invalid(message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", message)


def check_parent(parent: str) -> None:
    if not re.fullmatch(r"projects/[a-z0-9.:\-]+", parent):
        raise invalid(f"invalid parent {parent!r}; expected projects/PROJECT")


def check_new_secret(secret_id: str, secret: Message) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,255}", secret_id):
        raise invalid(f"secret_id is {secret_id!r}; expected 1 to 255 letters, digits, - and _")
    if secret.replication.WhichOneof("replication") is None:
        raise invalid("secret.replication is required; expected automatic or user_managed")


def check_supported(secret: Message) -> None:
    """Raise UNIMPLEMENTED for a field that the local stack does not act on."""
    present = {field.name for field, _ in secret.ListFields()}
    for name in UNSUPPORTED_FIELDS:
        if name in present:
            raise ApiError("UNIMPLEMENTED", f"secret.{name} is not emulated by the local stack")


def check_payload(payload: Message) -> None:
    if not 1 <= len(payload.data) <= MAX_PAYLOAD_BYTES:
        raise invalid(f"payload.data is {len(payload.data)} bytes; expected 1 to {MAX_PAYLOAD_BYTES}")
    if payload.HasField("data_crc32c") and payload.data_crc32c != google_crc32c.value(payload.data):
        raise invalid("payload.data_crc32c does not match payload.data: the data was corrupted on its way")


def check_etag(etag: str, resource: Message) -> None:
    if etag and etag != resource.etag:
        raise ApiError("ABORTED", f"etag {etag!r} is not the current etag of [{resource.name}]; read it again")


def check_state(version: Message, *allowed: int) -> None:
    if version.state not in allowed:
        state = api.SecretVersion.State(version.state).name
        raise ApiError("FAILED_PRECONDITION", f"Secret Version [{version.name}] is in {state} state.")
