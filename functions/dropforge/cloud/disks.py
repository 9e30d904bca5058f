"""Zonal persistent disks of Compute Engine, over its REST API.

API: https://cloud.google.com/compute/docs/reference/rest/v1/disks. Errors are those of Google's clients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError

from . import clients
from .classify import classify, classify_text, client_errors
from .clients import TIMEOUT_SECONDS
from .listing import Found, Listed, unreachable

DISK = "compute.googleapis.com/Disk"
WAIT_SECONDS = 5.0  # most disks are made, or deleted, within this; others are looked at again later
LOOK_SECONDS = 0.2


def ensure_disk(name: str, request: dict[str, Any]) -> bool:
    """Make a disk (projects/P/zones/Z/disks/D) unless it is there; True once it is ready. Raises CloudError.

    `request` has the `disk` and a `requestId`, with which the same request never makes two.
    """
    try:
        query = {"requestId": request["requestId"]}
        operation = None if _find(name) else _call("POST", name.rpartition("/")[0], query, request["disk"])
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


def list_disks(project: str) -> Iterator[Found]:
    """Disks of ours in every zone of a project, page by page, and a problem for each zone that was not reached."""
    query = {"filter": f"labels.{names.MANAGED_BY}=dropforge", "returnPartialSuccess": "true"}
    page: dict[str, Any] = {"nextPageToken": ""}
    while "nextPageToken" in page:
        page = _call("GET", f"projects/{project}/aggregated/disks", {**query, "pageToken": page["nextPageToken"]})
        for place, scoped in page.get("items", {}).items():  # of a place without any there is a warning instead
            for disk in scoped.get("disks", ()):
                created = datetime.fromisoformat(disk["creationTimestamp"])
                labels = disk.get("labels", {})
                yield Listed(DISK, f"projects/{project}/{place}/disks/{disk['name']}", labels, created)
        yield from unreachable(page.get("unreachables", ()), "disks")


def delete_disk(name: str) -> bool:
    """Delete a disk; True once it does not exist, False while it is in use or on its way. Raises CloudError."""
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        disk = _find(name)
        if disk and disk["status"] != "DELETING" and not _begin_to_delete(name, disk):
            return False  # the machine goes first
        while disk and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            disk = _find(name)
        return disk is None
    except client_errors() as error:
        raise classify(error) from error


def _begin_to_delete(name: str, disk: dict[str, Any]) -> bool:
    """False for a disk that is in use: since it was looked at, it may be, or by a machine that it does not show."""
    from google.api_core.exceptions import BadRequest

    if disk.get("users"):
        return False
    try:
        _call("DELETE", name)
    except BadRequest as error:  # resourceInUseByAnotherResource
        if "already being used by" not in error.message:
            raise
        return False
    return True


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


def _call(verb: str, path: str, query: dict[str, str] | None = None, body: Any = None) -> dict[str, Any]:
    from google.api_core.exceptions import from_http_response

    session, root = clients.compute()
    response = session.request(verb, f"{root}/{path}", params=query, json=body, timeout=TIMEOUT_SECONDS)
    if not response.ok:
        raise from_http_response(response)
    answer: dict[str, Any] = response.json()
    return answer
