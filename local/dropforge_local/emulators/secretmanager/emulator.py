"""Secret Manager v1 over REST and gRPC: secrets, their versions, and access with a checksum. Values are never logged.

Features that need other Google services (CMEK, rotation topics, regional secrets) answer UNIMPLEMENTED.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
from google.cloud import secretmanager_v1 as api
from google.protobuf import empty_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit import masks
from ..kit.access import Guarded
from ..kit.emulator import RpcEmulator
from ..kit.paging import Paging
from ..kit.rpc import Message, Service, methods
from . import rules
from .permissions import NEEDS
from .policies import METHODS as POLICY_METHODS
from .policies import TYPES, Policies, granted
from .rules import DESTROYED, DISABLED, ENABLED
from .store import Secret, SecretVersion, Store

Empty = empty_pb2.Empty
PAGING = Paging(default=25_000, largest=25_000)


class SecretManagerEmulator(RpcEmulator):
    """google.cloud.secretmanager.v1.SecretManagerService from one state in SQLite: one function per RPC.

    No task expires secrets: every read first deletes the expired secrets.
    """

    def __init__(self, db: Database, clock: Clock, project: str) -> None:
        self.project = project
        self._store, self._policies = Store(db, clock), Policies(db)
        served = (*METHODS, *POLICY_METHODS)
        self._services = (Service("google.cloud.secretmanager.v1.SecretManagerService", served, Guarded(self, NEEDS)),)

    def access(self, secret: str, version: str = "latest") -> bytes:
        """The value of projects/P/secrets/S at a version; raises ApiError as the API does."""
        request = api.AccessSecretVersionRequest.pb()(name=f"{secret}/versions/{version}")
        value: bytes = self.access_secret_version(request).payload.data
        return value

    def has_secret(self, secret_id: str) -> bool:
        """Whether the secret exists."""
        return self._store.has_secret(f"projects/{self.project}/secrets/{secret_id}")

    def set_secret(self, secret_id: str, value: bytes) -> None:
        """Make `value` the secret's latest version, unless it already is; create the secret if needed."""
        parent = f"projects/{self.project}"
        name = f"{parent}/secrets/{secret_id}"
        with self._store.transaction():
            if not self._store.has_secret(name):
                secret = Secret(replication={"automatic": {}})
                self.create_secret(api.CreateSecretRequest.pb()(parent=parent, secret_id=secret_id, secret=secret))
            newest = self._store.newest_version(name)
            if newest and newest.payload == value and newest.config.state == ENABLED:
                return
            self.add_secret_version(api.AddSecretVersionRequest.pb()(parent=name, payload={"data": value}))

    def create_secret(self, request: Message) -> Message:
        rules.check_parent(request.parent)
        secret = request.secret
        rules.check_new_secret(request.secret_id, secret)
        rules.check_supported(secret)
        secret.name = f"{request.parent}/secrets/{request.secret_id}"
        with self._store.transaction():
            if self._store.has_secret(secret.name):
                raise ApiError("ALREADY_EXISTS", f"Secret [{secret.name}] already exists.")
            secret.create_time.CopyFrom(self._store.now())
            self._store.save_secret(secret)
        return secret

    def get_secret(self, request: Message) -> Message:
        return self._store.secret(request.name)

    def list_secrets(self, request: Message) -> Message:
        rules.check_parent(request.parent)
        secrets = self._store.secrets(request.parent)
        page, token = _page(secrets, request)
        return api.ListSecretsResponse.pb()(secrets=page, next_page_token=token, total_size=len(secrets))

    def update_secret(self, request: Message) -> Message:
        with self._store.transaction():
            secret = self._store.secret(request.secret.name)
            rules.check_etag(request.secret.etag, secret)
            masks.merge(request.secret, secret, request.update_mask, rules.MUTABLE_FIELDS)
            self._check_aliases(secret)
            self._store.save_secret(secret)
        return secret

    def delete_secret(self, request: Message) -> Message:
        with self._store.transaction():
            secret = self._store.secret(request.name)
            rules.check_etag(request.etag, secret)
            self._store.delete_secret(secret.name)
        return Empty()

    def add_secret_version(self, request: Message) -> Message:
        rules.check_payload(request.payload)
        with self._store.transaction():
            secret = self._store.secret(request.parent)
            version = SecretVersion(state=ENABLED, create_time=self._store.now())
            version.replication_status.automatic.SetInParent()
            version.client_specified_payload_checksum = request.payload.HasField("data_crc32c")
            self._store.add_version(secret.name, version, request.payload.data)
        return version

    def get_secret_version(self, request: Message) -> Message:
        return self._store.version(request.name).config

    def list_secret_versions(self, request: Message) -> Message:
        versions = self._store.versions(self._store.secret(request.parent).name)
        page, token = _page(versions, request)
        return api.ListSecretVersionsResponse.pb()(versions=page, next_page_token=token, total_size=len(versions))

    def access_secret_version(self, request: Message) -> Message:
        version = self._store.version(request.name)
        rules.check_state(version.config, ENABLED)
        response = api.AccessSecretVersionResponse.pb()(name=version.config.name)
        response.payload.data = version.payload
        response.payload.data_crc32c = google_crc32c.value(version.payload)
        return response

    def enable_secret_version(self, request: Message) -> Message:
        return self._set_state(request, ENABLED)

    def disable_secret_version(self, request: Message) -> Message:
        return self._set_state(request, DISABLED)

    def destroy_secret_version(self, request: Message) -> Message:
        return self._set_state(request, DESTROYED)

    def get_iam_policy(self, request: Message) -> Message:
        return self._policies.get(self._store.secret(request.resource).name)

    def set_iam_policy(self, request: Message) -> Message:
        return self._policies.set(self._store.secret(request.resource).name, request.policy)

    def test_iam_permissions(self, request: Message) -> Message:
        secret = self._store.secret(request.resource).name
        return TYPES.TestIamPermissionsResponse(permissions=granted(secret, request.permissions))

    def _set_state(self, request: Message, state: int) -> Message:
        with self._store.transaction():
            stored = self._store.version(request.name)
            version = stored.config
            rules.check_etag(request.etag, version)
            rules.check_state(version, ENABLED, DISABLED)
            if version.state != state:
                version.state = state
                if state == DESTROYED:
                    version.destroy_time.CopyFrom(self._store.now())
                self._store.save_version(version, None if state == DESTROYED else stored.payload)
        return version

    def _check_aliases(self, secret: Message) -> None:
        for alias, number in secret.version_aliases.items():
            if alias == "latest" or alias.isdigit() or self._store.find_version(secret.name, number) is None:
                raise rules.invalid(
                    f"version_aliases maps {alias!r} to {number}; expected a name and an existing version"
                )


def _page(resources: list[Message], request: Message) -> tuple[Sequence[Message], str]:
    if request.filter:
        raise ApiError("UNIMPLEMENTED", "filter is not emulated by the local stack's Secret Manager")
    return PAGING.page(resources, request.page_size, request.page_token)


METHODS = methods(
    api,
    """
    ListSecrets() ListSecretsResponse GET /v1/{parent=projects/*}/secrets
    CreateSecret() Secret POST /v1/{parent=projects/*}/secrets secret
    GetSecret() Secret GET /v1/{name=projects/*/secrets/*}
    UpdateSecret() Secret PATCH /v1/{secret.name=projects/*/secrets/*} secret
    DeleteSecret() Empty DELETE /v1/{name=projects/*/secrets/*}
    AddSecretVersion() SecretVersion POST /v1/{parent=projects/*/secrets/*}:addVersion *
    ListSecretVersions() ListSecretVersionsResponse GET /v1/{parent=projects/*/secrets/*}/versions
    GetSecretVersion() SecretVersion GET /v1/{name=projects/*/secrets/*/versions/*}
    AccessSecretVersion() AccessSecretVersionResponse GET /v1/{name=projects/*/secrets/*/versions/*}:access
    EnableSecretVersion() SecretVersion POST /v1/{name=projects/*/secrets/*/versions/*}:enable *
    DisableSecretVersion() SecretVersion POST /v1/{name=projects/*/secrets/*/versions/*}:disable *
    DestroySecretVersion() SecretVersion POST /v1/{name=projects/*/secrets/*/versions/*}:destroy *
    """,
)
