"""REST calls to the Google APIs that only preflight and commands use. A variable overrides the address of each API:

    SERVICE_USAGE_EMULATOR_HOST, RESOURCE_MANAGER_EMULATOR_HOST, ARTIFACT_REGISTRY_EMULATOR_HOST, IAM_EMULATOR_HOST,
    CLOUD_QUOTAS_EMULATOR_HOST, POLICY_TROUBLESHOOTER_EMULATOR_HOST, COMPUTE_EMULATOR_HOST    http://host:port

The local stack emulates only Compute Engine, and of it only disks. For all other requests, NotAsked is raised.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from dropforge.base.errors import DropforgeError
from dropforge.base.redact import cut

from .clients import TIMEOUT_SECONDS

APIS = {
    "artifactregistry": "ARTIFACT_REGISTRY_EMULATOR_HOST",
    "cloudquotas": "CLOUD_QUOTAS_EMULATOR_HOST",
    "cloudresourcemanager": "RESOURCE_MANAGER_EMULATOR_HOST",
    "compute": "COMPUTE_EMULATOR_HOST",
    "iam": "IAM_EMULATOR_HOST",
    "policytroubleshooter": "POLICY_TROUBLESHOOTER_EMULATOR_HOST",
    "serviceusage": "SERVICE_USAGE_EMULATOR_HOST",
}
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"


class NotAsked(DropforgeError):
    """The question cannot be asked here; the message says why."""


class Refused(DropforgeError):
    """Google refused a request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def get(api: str, path: str, **query: str | list[str]) -> dict[str, Any]:
    """Return the JSON of `path` (v1/projects/p/…). Raises NotAsked, Refused, and the errors of requests."""
    host, session = _at(api)
    return _answer(session.get(f"{host}/{path}", params=query, timeout=TIMEOUT_SECONDS))


def post(api: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post `body` and return the JSON answer. Raises the errors of `get`."""
    host, session = _at(api)
    return _answer(session.post(f"{host}/{path}", json=body, timeout=TIMEOUT_SECONDS))


def _answer(response: Any) -> dict[str, Any]:
    if response.status_code == 501:
        raise NotAsked("the local stack does not emulate this API")
    if not response.ok:
        try:
            message = str(response.json()["error"]["message"])
        except (KeyError, TypeError, ValueError):
            message = cut(response.text, 300)
        raise Refused(response.status_code, message)
    answer: dict[str, Any] = response.json()
    return answer


def _at(api: str) -> tuple[str, Any]:
    """Return the address of an API, and a session that may call it."""
    if host := os.environ.get(APIS[api]):
        return host, _emulated()
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        raise NotAsked("the local stack does not emulate this API")
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
