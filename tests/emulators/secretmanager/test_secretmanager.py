"""Secret Manager with Google's client over REST and gRPC, and with gcloud."""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import grpc
import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import secretmanager_v1 as api
from google.cloud.secretmanager_v1.services.secret_manager_service.transports import SecretManagerServiceGrpcTransport
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from workflows_engine import VirtualClock

PARENT = "projects/test-project"
T = TypeVar("T")


class Stack:
    """The emulator with its server and its clock."""

    def __init__(self, path: Path) -> None:
        self.clock = VirtualClock()
        self.background = BackgroundServer(lambda: self._build(path))

    def _build(self, path: Path) -> list[SecretManagerEmulator]:
        self.emulator = SecretManagerEmulator(Database(path), self.clock, "test-project")
        return [self.emulator]

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the emulator's thread, which owns the database connection."""

        async def run() -> T:
            return work()

        return self.background.call(run())


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path / "state.db")


@pytest.fixture
def server(stack: Stack) -> Iterator[Server]:
    with stack.background as server:
        yield server


@pytest.fixture(params=["rest", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[api.SecretManagerServiceClient]:
    if request.param == "grpc":
        channel = grpc.insecure_channel(server.grpc_address)
        yield api.SecretManagerServiceClient(transport=SecretManagerServiceGrpcTransport(channel=channel))
        channel.close()
    else:
        yield api.SecretManagerServiceClient(
            transport="rest", credentials=AnonymousCredentials(), client_options={"api_endpoint": server.url}
        )


def create(client: api.SecretManagerServiceClient, secret_id: str = "hf-token", **config: Any) -> api.Secret:
    secret = {"replication": {"automatic": {}}, **config}
    return client.create_secret(request={"parent": PARENT, "secret_id": secret_id, "secret": secret}, retry=None)


def add(client: api.SecretManagerServiceClient, secret: api.Secret, value: bytes) -> api.SecretVersion:
    return client.add_secret_version(request={"parent": secret.name, "payload": {"data": value}}, retry=None)


def access(client: api.SecretManagerServiceClient, secret: api.Secret, version: str = "latest") -> bytes:
    request = {"name": f"{secret.name}/versions/{version}"}
    response = client.access_secret_version(request=request, retry=None)
    assert response.payload.data_crc32c == google_crc32c.value(response.payload.data)
    return bytes(response.payload.data)


def test_versions_are_added_and_accessed(client: api.SecretManagerServiceClient) -> None:
    secret = create(client, labels={"team": "search"})
    assert add(client, secret, b"first").name == f"{PARENT}/secrets/hf-token/versions/1"
    assert add(client, secret, b"\x00second\xff").state == api.SecretVersion.State.ENABLED
    assert (access(client, secret), access(client, secret, "1")) == (b"\x00second\xff", b"first")
    versions = client.list_secret_versions(parent=secret.name)
    assert [version.name.rpartition("/")[2] for version in versions] == ["2", "1"]
    assert client.get_secret(name=secret.name).labels == {"team": "search"}


def test_state_decides_access(client: api.SecretManagerServiceClient) -> None:
    secret = create(client)
    version = add(client, secret, b"value")
    client.disable_secret_version(name=version.name)
    with pytest.raises((exceptions.FailedPrecondition, exceptions.BadRequest)):
        access(client, secret)
    assert client.enable_secret_version(name=version.name).state == api.SecretVersion.State.ENABLED
    assert access(client, secret) == b"value"
    assert client.destroy_secret_version(name=version.name).destroy_time is not None
    for call in (client.enable_secret_version, client.access_secret_version):
        with pytest.raises((exceptions.FailedPrecondition, exceptions.BadRequest)):
            call(request={"name": version.name}, retry=None)


def test_missing_secrets_and_versions_are_not_found(client: api.SecretManagerServiceClient) -> None:
    secret = create(client)
    for version in ("latest", "7", "no-alias", "0"):
        with pytest.raises(exceptions.NotFound):
            access(client, secret, version)
    with pytest.raises(exceptions.NotFound):
        client.get_secret(name=f"{PARENT}/secrets/missing", retry=None)
    client.delete_secret(name=secret.name)
    with pytest.raises(exceptions.NotFound):
        client.get_secret(name=secret.name, retry=None)


def test_secret_exists_once(client: api.SecretManagerServiceClient) -> None:
    create(client)
    with pytest.raises((exceptions.AlreadyExists, exceptions.Conflict)):
        create(client)


@pytest.mark.parametrize("size", [0, 65_537])
def test_payload_limits(client: api.SecretManagerServiceClient, size: int) -> None:
    secret = create(client)
    with pytest.raises((exceptions.InvalidArgument, exceptions.BadRequest)):
        add(client, secret, b"x" * size)
    assert add(client, secret, b"x" * 65_536).name.endswith("/1")


def test_corrupted_payload_is_refused(client: api.SecretManagerServiceClient) -> None:
    secret = create(client)
    payload = {"data": b"value", "data_crc32c": 1}
    with pytest.raises((exceptions.InvalidArgument, exceptions.BadRequest), match="crc32c"):
        client.add_secret_version(request={"parent": secret.name, "payload": payload}, retry=None)
    payload["data_crc32c"] = google_crc32c.value(b"value")
    version = client.add_secret_version(request={"parent": secret.name, "payload": payload})
    assert version.client_specified_payload_checksum


def test_etag_guards_an_update(client: api.SecretManagerServiceClient) -> None:
    secret = create(client)
    add(client, secret, b"v")
    change = {"name": secret.name, "etag": secret.etag, "version_aliases": {"prod": 1}}
    request = {"secret": change, "update_mask": {"paths": ["version_aliases"]}}
    assert client.update_secret(request=request).etag != secret.etag
    assert access(client, secret, "prod") == b"v"
    with pytest.raises((exceptions.Aborted, exceptions.Conflict)):
        client.update_secret(request=request, retry=None)


def test_pages_and_filters(client: api.SecretManagerServiceClient) -> None:
    for number in range(5):
        create(client, f"secret-{number}")
    pages = client.list_secrets(request={"parent": PARENT, "page_size": 2}).pages
    assert [len(page.secrets) for page in pages] == [2, 2, 1]
    with pytest.raises(exceptions.GoogleAPICallError) as refused:
        client.list_secrets(request={"parent": PARENT, "filter": "name:x"}, retry=None)
    assert "not emulated" in str(refused.value)


def test_secret_with_a_ttl_expires(client: api.SecretManagerServiceClient, stack: Stack) -> None:
    secret = create(client, ttl={"seconds": 3600})
    assert client.get_secret(name=secret.name).expire_time is not None
    stack.clock.advance(stack.clock.now() + 3601)
    with pytest.raises(exceptions.NotFound):
        client.get_secret(name=secret.name, retry=None)


def test_set_secret_is_idempotent(client: api.SecretManagerServiceClient, stack: Stack) -> None:
    for value in (b"a", b"a", b"b"):
        stack.call(partial(stack.emulator.set_secret, "webhook", value))
    secret = client.get_secret(name=f"{PARENT}/secrets/webhook")
    assert access(client, secret) == b"b"
    assert len(list(client.list_secret_versions(parent=secret.name))) == 2
    assert stack.call(lambda: stack.emulator.access(secret.name, "1")) == b"a"


def test_values_are_never_logged(
    client: api.SecretManagerServiceClient, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.DEBUG):
        secret = create(client)
        add(client, secret, b"hunter2-secret-value")
        access(client, secret)
        with pytest.raises(exceptions.GoogleAPICallError):
            add(client, secret, b"hunter2-secret-value" * 10_000)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("dropforge")]
    assert "hunter2" not in str(ours)


def test_secrets_survive_a_restart(tmp_path: Path) -> None:
    first = Stack(tmp_path / "state.db")
    with first.background:
        first.call(lambda: first.emulator.set_secret("token", b"kept"))
    second = Stack(tmp_path / "state.db")
    with second.background as server:
        url = f"{server.url}/v1/{PARENT}/secrets/token/versions/latest:access"
        assert base64.b64decode(requests.get(url, timeout=60).json()["payload"]["data"]) == b"kept"


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("POST", "secrets?secretId=a", {"replication": {"automatic": {}}, "typo": 1}, 400),
        ("POST", "secrets?secretId=a", {}, 400),
        ("POST", "secrets?secretId=a/b", {"replication": {"automatic": {}}}, 400),
        ("POST", "secrets?secretId=a", {"replication": {"automatic": {}}, "topics": [{"name": "t"}]}, 501),
        ("POST", "secrets?secretId=a", {"replication": {"automatic": {}}, "ttl": "-5s"}, 400),
        ("GET", "secrets?pageToken=x", None, 400),
        ("GET", "secrets/a:getIamPolicy", None, 404),
        ("POST", "secrets/a:anyPolicy", {}, 501),
        ("GET", "locations/us-central1/secrets", None, 501),
    ],
)
def test_refusals(server: Server, verb: str, path: str, body: Any, status: int) -> None:
    answer = requests.request(verb, f"{server.url}/v1/{PARENT}/{path}", json=body, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


FIELDS = st.sampled_from(
    [
        "replication",
        "automatic",
        "labels",
        "ttl",
        "expireTime",
        "payload",
        "data",
        "dataCrc32c",
        "versionAliases",
        "etag",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)
CALLS = st.sampled_from(
    [
        ("POST", "secrets?secretId=abc"), ("POST", "secrets/abc:addVersion"), ("PATCH", "secrets/abc?updateMask=ttl"),
        ("PATCH", "secrets/abc?updateMask=labels.x.y,%00"), ("POST", "secrets/abc/versions/latest:disable"),
        ("POST", "secrets/abc/versions/99999999999999999999:enable"), ("GET", "secrets/%ff/versions/1:access"),
        ("DELETE", "secrets/abc?etag=%22x%22"),
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CALLS, st.dictionaries(FIELDS, JSON, max_size=4).map(json.dumps) | st.binary(max_size=30))
def test_malformed_requests_are_refused_not_failed(server: Server, call: tuple[str, str], body: str | bytes) -> None:
    answer = requests.request(call[0], f"{server.url}/v1/{PARENT}/{call[1]}", data=body, timeout=60)
    assert answer.status_code < 500, answer.text


@pytest.mark.slow
def test_gcloud_secrets(server: Server, tmp_path: Path) -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    environment = os.environ | {
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"{server.url}/",
        "CLOUDSDK_CORE_PROJECT": "test-project",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }

    def gcloud(*arguments: str) -> str:
        command = ["gcloud", "secrets", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    value = tmp_path / "value"
    value.write_text("from gcloud")
    gcloud("create", "token", f"--data-file={value}", "--labels=team=search")
    assert gcloud("versions", "access", "latest", "--secret=token") == "from gcloud"
    gcloud("versions", "disable", "1", "--secret=token")
    assert gcloud("versions", "list", "token", "--format=value(state)").strip() == "disabled"
    gcloud("delete", "token")
    assert gcloud("list", "--format=value(name)").strip() == ""


def test_policies_are_kept_with_an_etag(client: api.SecretManagerServiceClient) -> None:
    secret = create(client)
    empty = client.get_iam_policy(request={"resource": secret.name})
    assert (list(empty.bindings), bool(empty.etag)) == ([], True)
    binding = {"role": "roles/secretmanager.secretAccessor", "members": ["user:a@example.com"]}
    policy = {"bindings": [binding], "etag": empty.etag}
    written = client.set_iam_policy(request={"resource": secret.name, "policy": policy})
    assert written == client.get_iam_policy(request={"resource": secret.name})
    assert written.bindings[0].members == ["user:a@example.com"]
    with pytest.raises(exceptions.Conflict, match="concurrent policy changes"):
        client.set_iam_policy(request={"resource": secret.name, "policy": policy})
    with pytest.raises(exceptions.BadRequest, match="role 'owner'"):  # over gRPC InvalidArgument, which is one
        client.set_iam_policy(request={"resource": secret.name, "policy": {"bindings": [{"role": "owner"}]}})
    permissions = ["secretmanager.versions.access"]
    answer = client.test_iam_permissions(request={"resource": secret.name, "permissions": permissions})
    assert answer.permissions == permissions
    client.delete_secret(name=secret.name)
    with pytest.raises(exceptions.NotFound):
        client.get_iam_policy(request={"resource": secret.name})
    again = create(client)
    assert not client.get_iam_policy(request={"resource": again.name}).bindings
