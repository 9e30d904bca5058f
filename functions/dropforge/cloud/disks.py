"""Zonal persistent disks of Compute Engine, over its REST API.

API: https://cloud.google.com/compute/docs/reference/rest/v1/disks. Errors are those of Google's clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError

from .classify import classify, classify_create, classify_first_look, classify_text, client_errors
from .context import Cloud
from .listing import Entry, Listed, unreachable
from .rest import call

DISK = "compute.googleapis.com/Disk"
WAIT_SECONDS = 5.0  # most disks are created, or deleted, within this time; a later call checks slower disks
LOOK_SECONDS = 0.2


def ensure_disk(cloud: Cloud, name: str, request: dict[str, Any]) -> bool:
    """Create a disk (projects/P/zones/Z/disks/D) unless it exists; True once it is ready. Raises CloudError.

    `request` has the `disk` and a `requestId`: the API runs requests with the same id only once.
    """
    try:
        known = _find(cloud, name)
    except client_errors() as error:
        raise classify_first_look(error) from error
    try:
        operation = None if known else _insert(cloud, name, request)
        deadline = cloud.clock.monotonic() + WAIT_SECONDS
        while True:
            disk = _find(cloud, name)
            if disk and disk["status"] == "READY":
                return True
            if operation is not None and disk is None:
                _raise_if_failed(_operation(cloud, name, operation))
            if cloud.clock.monotonic() > deadline:
                return False
            cloud.clock.sleep(LOOK_SECONDS)
    except CloudError:
        raise
    except client_errors() as error:
        raise classify(error) from error


def _insert(cloud: Cloud, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Request the disk. Raises CloudError."""
    try:
        query = {"requestId": request["requestId"]}
        return call(cloud.clients.compute(), "POST", name.rpartition("/")[0], query, request["disk"])
    except client_errors() as error:
        raise classify_create(error) from error


def list_disks(cloud: Cloud) -> Iterator[Entry]:
    """dropforge's disks in every zone of the project, page by page, and an error for each unreachable zone."""
    project = cloud.settings.project
    query = {"filter": f"labels.{names.MANAGED_BY}=dropforge", "returnPartialSuccess": "true"}
    page: dict[str, Any] = {"nextPageToken": ""}
    while "nextPageToken" in page:
        query["pageToken"] = page["nextPageToken"]
        page = call(cloud.clients.compute(), "GET", f"projects/{project}/aggregated/disks", query)
        for zone, scoped in page.get("items", {}).items():  # a zone without disks has a warning instead of `disks`
            for disk in scoped.get("disks", ()):
                created = datetime.fromisoformat(disk["creationTimestamp"])
                labels = disk.get("labels", {})
                yield Listed(DISK, f"projects/{project}/{zone}/disks/{disk['name']}", labels, created)
        yield from unreachable(page.get("unreachables", ()), "disks")


def delete_disk(cloud: Cloud, name: str) -> bool:
    """Delete a disk; True once it does not exist, False while it is in use or being deleted. Raises CloudError."""
    try:
        deadline = cloud.clock.monotonic() + WAIT_SECONDS
        disk = _find(cloud, name)
        if disk and disk["status"] != "DELETING" and not _begin_to_delete(cloud, name, disk):
            return False  # the machine must be deleted first
        while disk and cloud.clock.monotonic() < deadline:
            cloud.clock.sleep(LOOK_SECONDS)
            disk = _find(cloud, name)
        return disk is None
    except client_errors() as error:
        raise classify(error) from error


def _begin_to_delete(cloud: Cloud, name: str, disk: dict[str, Any]) -> bool:
    """Start the deletion; False for a disk in use. A machine may use it although `users` does not name the machine."""
    from google.api_core.exceptions import BadRequest

    if disk.get("users"):
        return False
    try:
        call(cloud.clients.compute(), "DELETE", name)
    except BadRequest as error:  # resourceInUseByAnotherResource
        if "already being used by" not in error.message:
            raise
        return False
    return True


def _find(cloud: Cloud, name: str) -> dict[str, Any] | None:
    from google.api_core.exceptions import NotFound

    try:
        return call(cloud.clients.compute(), "GET", name)
    except NotFound:
        return None


def _operation(cloud: Cloud, disk: str, operation: dict[str, Any]) -> dict[str, Any]:
    parent = disk.rsplit("/disks/", 1)[0]
    return call(cloud.clients.compute(), "GET", f"{parent}/operations/{operation['name']}")


def _raise_if_failed(operation: dict[str, Any]) -> None:
    for error in operation.get("error", {}).get("errors", ()):
        status = "RESOURCE_EXHAUSTED" if "EXHAUSTED" in error["code"] else "FAILED_PRECONDITION"
        raise classify_text(status, f"{error['code']}: {error.get('message', '')}")
