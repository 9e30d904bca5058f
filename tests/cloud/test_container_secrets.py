"""Secrets by reference, read with Google's client from an emulated Secret Manager over a socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.container_secrets import load_secrets
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from workflows_engine import VirtualClock

from ..deployments import clients, forget

PARENT = "projects/test-project/secrets"
VALUE = "hf_" + "v" * 30


class Secrets(SecretManagerEmulator):
    """Secret Manager with a secret that no caller may read."""

    def __init__(self, path: Path) -> None:
        super().__init__(Database(path), VirtualClock(), "test-project")
        self.set_secret("hf-token", VALUE.encode())
        self.set_secret("binary", b"\xff\x00" + VALUE.encode())

    def access_secret_version(self, request: Any) -> Any:
        if "/forbidden/" in request.name:
            raise ApiError("PERMISSION_DENIED", "Permission 'secretmanager.versions.access' denied")
        return super().access_secret_version(request)


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with BackgroundServer(lambda: [Secrets(tmp_path / "state.db")]) as server:
        monkeypatch.setenv("SECRET_MANAGER_EMULATOR_HOST", server.url)
        forget()
        yield
        clients.secrets().transport.close()
        forget()


def environment(**references: object) -> dict[str, str]:
    return {"HOME": "/", "DROPFORGE_SECRETS": json.dumps(references)}


@pytest.mark.usefixtures("emulator")
def test_the_values_of_secrets_are_set_in_the_environment() -> None:
    environ = environment(HF_TOKEN=f"{PARENT}/hf-token/versions/latest", OTHER=f"{PARENT}/hf-token/versions/1")
    load_secrets(clients, environ)
    assert (environ["HF_TOKEN"], environ["OTHER"], environ["HOME"]) == (VALUE, VALUE, "/")


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("secret", "error_class", "message"),
    [
        ("forbidden/versions/latest", ErrorClass.PERMISSION, "may not be read"),
        ("missing/versions/latest", ErrorClass.CONFIG, "does not exist"),
        ("hf-token/versions/7", ErrorClass.CONFIG, "does not exist"),
        ("binary/versions/latest", ErrorClass.CONFIG, "is not UTF-8 text"),
    ],
)
def test_unreadable_secrets_are_named_and_the_environment_is_unchanged(
    secret: str, error_class: ErrorClass, message: str
) -> None:
    environ = environment(FIRST=f"{PARENT}/hf-token/versions/1", HF_TOKEN=f"{PARENT}/{secret}")
    before = dict(environ)
    with pytest.raises(CloudError) as caught:
        load_secrets(clients, environ)
    assert caught.value.error_class == error_class
    assert caught.value.message == f"{PARENT}/{secret}, for HF_TOKEN, {message}"
    assert VALUE not in caught.value.message + caught.value.hint
    assert caught.value.hint
    assert environ == before


@pytest.mark.usefixtures("emulator")
def test_a_disabled_version_is_not_read() -> None:
    reference = f"{PARENT}/hf-token/versions/1"
    clients.secrets().disable_secret_version(name=reference)
    with pytest.raises(CloudError, match=f"{reference}, for HF_TOKEN, cannot be read: .*DISABLED") as caught:
        load_secrets(clients, environment(HF_TOKEN=reference))
    assert caught.value.error_class == ErrorClass.CONFIG


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is a JSON list"),
        ('{"A B": "x"}', "is a map with the variable name 'A B'"),
        (f'{{"HF_TOKEN": "{VALUE}"}}', "is not a reference for HF_TOKEN"),
    ],
)
def test_a_malformed_variable_is_refused_and_its_value_is_not_shown(text: str, problem: str) -> None:
    with pytest.raises(CloudError) as caught:
        load_secrets(clients, {"DROPFORGE_SECRETS": text})
    assert caught.value.error_class == ErrorClass.CONFIG
    assert caught.value.message.startswith(f"DROPFORGE_SECRETS {problem}")
    assert VALUE not in caught.value.message


def test_without_the_variable_nothing_is_imported() -> None:
    code = (
        "import sys; from dropforge.cloud.container_secrets import load_secrets\n"
        "before = set(sys.modules)\n"
        "for environ in ({}, {'DROPFORGE_SECRETS': ''}): load_secrets(None, environ)\n"
        "assert set(sys.modules) == before and 'dropforge.cloud.clients' not in before"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=PATIENCE_SECONDS)
