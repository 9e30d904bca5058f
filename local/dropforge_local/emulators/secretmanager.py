"""Secret Manager v1 over REST and gRPC: secrets, their versions, and access with a checksum. Values are never logged.

What needs other services of Google's (CMEK, rotation topics, regional secrets, IAM policies) answers UNIMPLEMENTED.
"""

from __future__ import annotations

import re
import sqlite3
import uuid
from collections.abc import Sequence

import google_crc32c
import grpc
from aiohttp import web
from google.cloud import secretmanager_v1 as api
from google.protobuf import empty_pb2, field_mask_pb2, timestamp_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from .kit import rpc
from .kit.rpc import Message, Method, Service

Secret = api.Secret.pb()
SecretVersion = api.SecretVersion.pb()
Empty = empty_pb2.Empty
ENABLED, DISABLED, DESTROYED = (int(api.SecretVersion.State[name]) for name in ("ENABLED", "DISABLED", "DESTROYED"))
MAX_PAYLOAD_BYTES = 64 * 2**10
MAX_PAGE = 25_000
MUTABLE_FIELDS = frozenset(("labels", "annotations", "expire_time", "ttl", "version_aliases"))
UNSUPPORTED_FIELDS = ("topics", "rotation", "customer_managed_encryption", "version_destroy_ttl", "tags")

SCHEMA = """
CREATE TABLE IF NOT EXISTS secretmanager_secrets (name TEXT PRIMARY KEY, config BLOB NOT NULL, expires REAL);
CREATE TABLE IF NOT EXISTS secretmanager_versions (
    secret TEXT NOT NULL, number INTEGER NOT NULL, config BLOB NOT NULL, payload BLOB,
    PRIMARY KEY (secret, number)) WITHOUT ROWID;
"""


class SecretManagerEmulator:
    """google.cloud.secretmanager.v1.SecretManagerService from one state in SQLite."""

    def __init__(self, db: Database, clock: Clock, project: str) -> None:
        self.project = project
        self._service = SecretManagerService(db, clock)
        self._services = (Service("google.cloud.secretmanager.v1.SecretManagerService", METHODS, self._service),)

    def set_secret(self, secret_id: str, value: bytes) -> None:
        """Make sure that the secret's latest version holds `value`; idempotent."""
        self._service.set_secret(f"projects/{self.project}", secret_id, value)

    def access(self, secret: str, version: str = "latest") -> bytes:
        """The value of projects/P/secrets/S at a version; raises ApiError as the API does."""
        request = api.AccessSecretVersionRequest.pb()(name=f"{secret}/versions/{version}")
        value: bytes = self._service.access_secret_version(request).payload.data
        return value

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return rpc.routes(self._services)

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers(self._services)

    async def start(self) -> None:
        """Nothing runs in the background: a secret's expiry is noticed when it is asked for."""

    async def stop(self) -> None:
        """Nothing to stop."""


class SecretManagerService:
    """One method per RPC, taking and returning the API's own messages."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        db.connection.executescript(SCHEMA)

    def set_secret(self, parent: str, secret_id: str, value: bytes) -> None:
        with self.db.transaction():
            name = f"{parent}/secrets/{secret_id}"
            if self._row(name) is None:
                secret = Secret(replication={"automatic": {}})
                request = api.CreateSecretRequest.pb()(parent=parent, secret_id=secret_id, secret=secret)
                self.create_secret(request)
            newest = self.db.connection.execute(
                "SELECT config, payload FROM secretmanager_versions WHERE secret = ? ORDER BY number DESC LIMIT 1",
                (name,),
            ).fetchone()
            if newest and newest["payload"] == value and SecretVersion.FromString(newest["config"]).state == ENABLED:
                return
            request = api.AddSecretVersionRequest.pb()(parent=name, payload={"data": value})
            self.add_secret_version(request)

    def create_secret(self, request: Message) -> Message:
        _check_parent(request.parent)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,255}", request.secret_id):
            raise _invalid(f"secret_id is {request.secret_id!r}; expected 1 to 255 letters, digits, - and _")
        secret = request.secret
        secret.name = f"{request.parent}/secrets/{request.secret_id}"
        if secret.replication.WhichOneof("replication") is None:
            raise _invalid("secret.replication is required; expected automatic or user_managed")
        with self.db.transaction():
            if self._row(secret.name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Secret [{secret.name}] already exists.")
            secret.create_time.CopyFrom(self._now())
            self._save(secret)
        return secret

    def get_secret(self, request: Message) -> Message:
        return self._secret(request.name)

    def list_secrets(self, request: Message) -> Message:
        _check_parent(request.parent)
        self._expire()
        rows = self.db.connection.execute(
            "SELECT name, config FROM secretmanager_secrets WHERE name GLOB ? ORDER BY name",
            (f"{request.parent}/secrets/*",),
        ).fetchall()
        page, token = _page([Secret.FromString(row["config"]) for row in rows], request)
        return api.ListSecretsResponse.pb()(secrets=page, next_page_token=token, total_size=len(rows))

    def update_secret(self, request: Message) -> Message:
        with self.db.transaction():
            secret = self._secret(request.secret.name)
            _check_etag(request.secret.etag, secret)
            _merge(request.secret, secret, request.update_mask)
            for alias, number in secret.version_aliases.items():
                if alias == "latest" or alias.isdigit() or self._version_row(secret.name, number) is None:
                    raise _invalid(
                        f"version_aliases maps {alias!r} to {number}; expected a name and an existing version"
                    )
            self._save(secret)
        return secret

    def delete_secret(self, request: Message) -> Message:
        with self.db.transaction():
            secret = self._secret(request.name)
            _check_etag(request.etag, secret)
            self._delete(secret.name)
        return Empty()

    def add_secret_version(self, request: Message) -> Message:
        data = request.payload.data
        if not 1 <= len(data) <= MAX_PAYLOAD_BYTES:
            raise _invalid(f"payload.data is {len(data)} bytes; expected 1 to {MAX_PAYLOAD_BYTES}")
        checked = request.payload.HasField("data_crc32c")
        if checked and request.payload.data_crc32c != google_crc32c.value(data):
            raise _invalid("payload.data_crc32c does not match payload.data: it was corrupted on its way")
        with self.db.transaction() as sql:
            secret = self._secret(request.parent)
            number = 1 + int(
                sql.execute(
                    "SELECT COALESCE(MAX(number), 0) FROM secretmanager_versions WHERE secret = ?", (secret.name,)
                ).fetchone()[0]
            )
            version = SecretVersion(name=f"{secret.name}/versions/{number}", state=ENABLED, etag=_etag())
            version.create_time.CopyFrom(self._now())
            version.replication_status.automatic.SetInParent()
            version.client_specified_payload_checksum = checked
            sql.execute(
                "INSERT INTO secretmanager_versions VALUES (?, ?, ?, ?)",
                (secret.name, number, version.SerializeToString(), data),
            )
        return version

    def get_secret_version(self, request: Message) -> Message:
        return SecretVersion.FromString(self._version(request.name)["config"])

    def list_secret_versions(self, request: Message) -> Message:
        self._secret(request.parent)
        rows = self.db.connection.execute(
            "SELECT config FROM secretmanager_versions WHERE secret = ? ORDER BY number DESC", (request.parent,)
        ).fetchall()
        page, token = _page([SecretVersion.FromString(row["config"]) for row in rows], request)
        return api.ListSecretVersionsResponse.pb()(versions=page, next_page_token=token, total_size=len(rows))

    def access_secret_version(self, request: Message) -> Message:
        row = self._version(request.name)
        version = SecretVersion.FromString(row["config"])
        if version.state != ENABLED:
            state = api.SecretVersion.State(version.state).name
            raise ApiError("FAILED_PRECONDITION", f"Secret Version [{version.name}] is in {state} state.")
        response = api.AccessSecretVersionResponse.pb()(name=version.name)
        response.payload.data = row["payload"]
        response.payload.data_crc32c = google_crc32c.value(row["payload"])
        return response

    def enable_secret_version(self, request: Message) -> Message:
        return self._set_state(request, ENABLED)

    def disable_secret_version(self, request: Message) -> Message:
        return self._set_state(request, DISABLED)

    def destroy_secret_version(self, request: Message) -> Message:
        return self._set_state(request, DESTROYED)

    def _set_state(self, request: Message, state: int) -> Message:
        with self.db.transaction() as sql:
            row = self._version(request.name)
            version = SecretVersion.FromString(row["config"])
            _check_etag(request.etag, version)
            if version.state == state != DESTROYED:
                return version
            if version.state == DESTROYED:
                raise ApiError("FAILED_PRECONDITION", f"Secret Version [{version.name}] is in DESTROYED state.")
            version.state = state
            version.etag = _etag()
            if state == DESTROYED:
                version.destroy_time.CopyFrom(self._now())
            sql.execute(
                "UPDATE secretmanager_versions SET config = ?, payload = ? WHERE secret = ? AND number = ?",
                (
                    version.SerializeToString(),
                    None if state == DESTROYED else row["payload"],
                    row["secret"],
                    row["number"],
                ),
            )
        return version

    def _secret(self, name: str) -> Message:
        row = self._row(name)
        if row is None:
            raise ApiError("NOT_FOUND", f"Secret [{name}] not found.")
        return Secret.FromString(row["config"])

    def _row(self, name: str) -> sqlite3.Row | None:
        self._expire()
        row: sqlite3.Row | None = self.db.connection.execute(
            "SELECT * FROM secretmanager_secrets WHERE name = ?", (name,)
        ).fetchone()
        return row

    def _version(self, name: str) -> sqlite3.Row:
        """The version that a name means: a number, `latest` (the newest, whatever its state) or an alias."""
        secret_name, _, wanted = name.rpartition("/versions/")
        secret = self._secret(secret_name)
        if wanted == "latest":
            newest = "SELECT MAX(number) FROM secretmanager_versions WHERE secret = ?"
            number = self.db.connection.execute(newest, (secret_name,)).fetchone()[0]
        elif re.fullmatch(r"[1-9][0-9]{0,17}", wanted):
            number = int(wanted)
        else:
            number = dict(secret.version_aliases).get(wanted)
        row = None if number is None else self._version_row(secret_name, number)
        if row is None:
            raise ApiError("NOT_FOUND", f"Secret Version [{name}] not found or has no versions.")
        return row

    def _version_row(self, secret: str, number: int) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.db.connection.execute(
            "SELECT * FROM secretmanager_versions WHERE secret = ? AND number = ?", (secret, number)
        ).fetchone()
        return row

    def _save(self, secret: Message) -> None:
        """Check a secret and write it with a new etag; a ttl becomes the time at which it ends."""
        present = {field.name for field, _ in secret.ListFields()}
        for name in UNSUPPORTED_FIELDS:
            if name in present:
                raise ApiError("UNIMPLEMENTED", f"secret.{name} is not emulated by the local stack")
        if secret.WhichOneof("expiration") == "ttl":
            expires = self.clock.now() + secret.ttl.seconds + secret.ttl.nanos / 1e9
            secret.expire_time.CopyFrom(_timestamp(expires))
        expires_at = (
            secret.expire_time.seconds + secret.expire_time.nanos / 1e9 if secret.HasField("expire_time") else None
        )
        if expires_at is not None and expires_at <= self.clock.now():
            raise _invalid("the secret's expiration is not in the future")
        secret.etag = _etag()
        with self.db.transaction() as sql:
            sql.execute(
                "INSERT INTO secretmanager_secrets VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "config = excluded.config, expires = excluded.expires",
                (secret.name, secret.SerializeToString(), expires_at),
            )

    def _expire(self) -> None:
        rows = self.db.connection.execute(
            "SELECT name FROM secretmanager_secrets WHERE expires <= ?", (self.clock.now(),)
        ).fetchall()
        for row in rows:
            self._delete(row["name"])

    def _delete(self, name: str) -> None:
        with self.db.transaction() as sql:
            sql.execute("DELETE FROM secretmanager_versions WHERE secret = ?", (name,))
            sql.execute("DELETE FROM secretmanager_secrets WHERE name = ?", (name,))

    def _now(self) -> timestamp_pb2.Timestamp:
        return _timestamp(self.clock.now())


def _invalid(message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", message)


def _check_parent(parent: str) -> None:
    if not re.fullmatch(r"projects/[a-z0-9.:\-]+", parent):
        raise _invalid(f"invalid parent {parent!r}; expected projects/PROJECT")


def _check_etag(etag: str, resource: Message) -> None:
    if etag and etag != resource.etag:
        raise ApiError("ABORTED", f"etag {etag!r} is not that of [{resource.name}]: it was changed meanwhile")


def _etag() -> str:
    return f'"{uuid.uuid4().hex[:14]}"'


def _timestamp(when: float) -> timestamp_pb2.Timestamp:
    result = timestamp_pb2.Timestamp()
    try:
        result.FromMicroseconds(round(when * 1e6))
    except (ValueError, OverflowError) as error:
        raise _invalid(f"the secret's expiration is out of range: {error}") from error
    return result


def _page(resources: list[Message], request: Message) -> tuple[list[Message], str]:
    """A page of what was listed; the token is the offset of the next one."""
    if request.filter:
        raise ApiError("UNIMPLEMENTED", "filter is not emulated by the local stack's Secret Manager")
    if request.page_size < 0 or not re.fullmatch(r"[0-9]{0,9}", request.page_token):
        raise _invalid(f"invalid page_size {request.page_size} or page_token {request.page_token!r}")
    start = int(request.page_token or 0)
    end = start + min(request.page_size or MAX_PAGE, MAX_PAGE)
    return resources[start:end], str(end) if end < len(resources) else ""


def _merge(source: Message, target: Message, mask: field_mask_pb2.FieldMask) -> None:
    if not mask.paths:
        raise _invalid("update_mask is empty; expected the fields to change")
    for path in mask.paths:
        if path.partition(".")[0] not in MUTABLE_FIELDS:
            raise _invalid(f"update_mask names {path!r}; expected one of {sorted(MUTABLE_FIELDS)}")
    try:
        mask.MergeMessage(source, target, replace_message_field=True, replace_repeated_field=True)
    except ValueError as error:
        raise _invalid(f"invalid update_mask: {error}") from error


def _method(name: str, response: str, rule: str) -> Method:
    answer = Empty if response == "Empty" else getattr(api, response).pb()
    return Method(name, getattr(api, f"{name}Request").pb(), answer, (rule,))


_SECRETS = "/v1/{parent=projects/*}/secrets"
_SECRET = "/v1/{name=projects/*/secrets/*}"
_VERSION = "/v1/{name=projects/*/secrets/*/versions/*}"
METHODS = (
    _method("ListSecrets", "ListSecretsResponse", f"GET {_SECRETS}"),
    _method("CreateSecret", "Secret", f"POST {_SECRETS} secret"),
    _method("GetSecret", "Secret", f"GET {_SECRET}"),
    _method("UpdateSecret", "Secret", "PATCH /v1/{secret.name=projects/*/secrets/*} secret"),
    _method("DeleteSecret", "Empty", f"DELETE {_SECRET}"),
    _method("AddSecretVersion", "SecretVersion", "POST /v1/{parent=projects/*/secrets/*}:addVersion *"),
    _method("ListSecretVersions", "ListSecretVersionsResponse", "GET /v1/{parent=projects/*/secrets/*}/versions"),
    _method("GetSecretVersion", "SecretVersion", f"GET {_VERSION}"),
    _method("AccessSecretVersion", "AccessSecretVersionResponse", f"GET {_VERSION}:access"),
    _method("EnableSecretVersion", "SecretVersion", f"POST {_VERSION}:enable *"),
    _method("DisableSecretVersion", "SecretVersion", f"POST {_VERSION}:disable *"),
    _method("DestroySecretVersion", "SecretVersion", f"POST {_VERSION}:destroy *"),
)
