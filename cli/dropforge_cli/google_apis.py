"""The Google APIs that only the command line asks, over REST, each at an address that its variable may override:

    SERVICE_USAGE_EMULATOR_HOST, RESOURCE_MANAGER_EMULATOR_HOST, ARTIFACT_REGISTRY_EMULATOR_HOST,
    CLOUD_QUOTAS_EMULATOR_HOST, POLICY_TROUBLESHOOTER_EMULATOR_HOST, COMPUTE_EMULATOR_HOST    http://host:port

The local stack emulates only the last of them, and of that only disks: what it cannot be asked is NotAsked.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from dropforge.base.errors import DropforgeError
from dropforge.cloud.clients import TIMEOUT_SECONDS

APIS = {
    "artifactregistry": "ARTIFACT_REGISTRY_EMULATOR_HOST",
    "cloudquotas": "CLOUD_QUOTAS_EMULATOR_HOST",
    "cloudresourcemanager": "RESOURCE_MANAGER_EMULATOR_HOST",
    "compute": "COMPUTE_EMULATOR_HOST",
    "policytroubleshooter": "POLICY_TROUBLESHOOTER_EMULATOR_HOST",
    "serviceusage": "SERVICE_USAGE_EMULATOR_HOST",
}
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"


class NotAsked(DropforgeError):
    """Nobody here can answer; the message says why."""


class Refused(DropforgeError):
    """Google's answer to a request that it did not do; `status` is of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def get(api: str, path: str, **query: str | list[str]) -> dict[str, Any]:
    """The JSON of `path` (v1/projects/p/…). Raises NotAsked, Refused and requests' own errors."""
    host, session = _at(api)
    return _answer(session.get(f"{host}/{path}", params=query, timeout=TIMEOUT_SECONDS))


def post(api: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Likewise."""
    host, session = _at(api)
    return _answer(session.post(f"{host}/{path}", json=body, timeout=TIMEOUT_SECONDS))


def _answer(response: Any) -> dict[str, Any]:
    if response.status_code == 501:
        raise NotAsked("the local stack does not emulate it")
    if not response.ok:
        try:
            message = str(response.json()["error"]["message"])
        except (KeyError, TypeError, ValueError):
            message = str(response.text)[:300]
        raise Refused(response.status_code, message)
    answer: dict[str, Any] = response.json()
    return answer


def _at(api: str) -> tuple[str, Any]:
    """Where an API is, and a session that may call it."""
    if host := os.environ.get(APIS[api]):
        return host, _emulated()
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        raise NotAsked("the local stack does not emulate it")
    return f"https://{api}.googleapis.com", _authorized()


@cache
def _emulated() -> Any:
    import requests

    return requests.Session()


@cache
def _authorized() -> Any:
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=[CLOUD_PLATFORM])
    return AuthorizedSession(credentials)
