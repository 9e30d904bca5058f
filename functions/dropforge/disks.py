"""Zonal persistent disks of Compute Engine, over its REST API.

API: https://cloud.google.com/compute/docs/reference/rest/v1/disks. Errors are those of Google's clients.
"""

from __future__ import annotations

import time
from typing import Any

from . import clients
from .classify import classify, classify_text, client_errors
from .clients import TIMEOUT_SECONDS
from .errors import CloudError

WAIT_SECONDS = 5.0  # most disks are made, or deleted, within this; others are looked at again later
LOOK_SECONDS = 0.2


def ensure_disk(name: str, request: dict[str, Any]) -> bool:
    """Make a disk (projects/P/zones/Z/disks/D) unless it is there; True once it is ready. Raises CloudError.

    `request` has the `disk` and a `requestId`, with which the same request never makes two.
    """
    try:
        operation = None if _find(name) else _call("POST", name.rpartition("/")[0], request["disk"], request)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            disk = _find(name)
            if disk and disk["status"] == "READY":
                return True
            if operation is not None and disk is None:
                _raise_if_failed(_operation(name, operation))
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
    except CloudError:
        raise
    except client_errors() as error:
        raise classify(error) from error


def delete_disk(name: str) -> bool:
    """Delete a disk; True once it does not exist, False while it is in use or on its way. Raises CloudError."""
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        disk = _find(name)
        if disk and disk["status"] != "DELETING":
            if disk.get("users"):
                return False  # the machine goes first
            _call("DELETE", name)
        while disk and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            disk = _find(name)
        return disk is None
    except client_errors() as error:
        raise classify(error) from error


def _find(name: str) -> dict[str, Any] | None:
    from google.api_core.exceptions import NotFound

    try:
        return _call("GET", name)
    except NotFound:
        return None


def _operation(disk: str, operation: dict[str, Any]) -> dict[str, Any]:
    parent = disk.rsplit("/disks/", 1)[0]
    return _call("GET", f"{parent}/operations/{operation['name']}")


def _raise_if_failed(operation: dict[str, Any]) -> None:
    for error in operation.get("error", {}).get("errors", ()):
        status = "RESOURCE_EXHAUSTED" if "EXHAUSTED" in error["code"] else "FAILED_PRECONDITION"
        raise classify_text(status, f"{error['code']}: {error.get('message', '')}")


def _call(verb: str, path: str, body: Any = None, request: dict[str, Any] | None = None) -> dict[str, Any]:
    from google.api_core.exceptions import from_http_response

    session, root = clients.compute()
    query = {"requestId": request["requestId"]} if request else None
    response = session.request(verb, f"{root}/{path}", params=query, json=body, timeout=TIMEOUT_SECONDS)
    if not response.ok:
        raise from_http_response(response)
    answer: dict[str, Any] = response.json()
    return answer
