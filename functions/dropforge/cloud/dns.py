"""Address records in the private zone of named endpoints, over the REST API of Cloud DNS.

API: https://cloud.google.com/dns/docs/reference/rest/v1/changes. A change is atomic, and the records that it deletes
must be exactly those that exist: so the data that was read is the precondition of the change. The method
`resourceRecordSets.patch` has no precondition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dropforge.base import names
from dropforge.base.settings import Settings

from .classify import classify, client_errors
from .context import Cloud
from .listing import Entry, Listed
from .rest import call

RECORD = "dns.googleapis.com/ResourceRecordSet"
TTL_SECONDS = 5  # how long a client may use an address that it has resolved
WAIT_SECONDS = 20.0  # most changes are done within this time
LOOK_SECONDS = 0.5
_LOST = (404, 409, 412)  # another caller has deleted, made or changed the record since it was read


def record_name(settings: Settings, endpoint: str, zone: str) -> str:
    """The full name of the record of an endpoint in a zone of Google Cloud: the host is NAME.ZONE.DOMAIN."""
    managed = f"projects/{settings.project}/managedZones/{settings.endpoint_zone}"
    return f"{managed}/rrsets/{endpoint}.{zone}.{settings.endpoint_domain}./A"


def host_of(record: str) -> str:
    """The host name of a record, without the dot at its end."""
    return record.split("/")[5].rstrip(".")


def find_record(cloud: Cloud, record: str) -> dict[str, Any] | None:
    """The record set; None if it does not exist. Raises CloudError."""
    parent, name, kind = _parts(record)
    try:
        found = call(cloud.clients.dns(), "GET", f"{parent}/rrsets", {"name": name, "type": kind})
    except client_errors() as error:
        raise classify(error) from error
    return next(iter(found.get("rrsets", ())), None)


def change_record(cloud: Cloud, record: str, read: dict[str, Any] | None, address: str) -> bool:
    """Let a record have an address; "" deletes the record. `read` is the record as it was read; None: there was none.

    True once the change is done; False if another caller was first, or if it is not done yet. Raises CloudError.
    """
    parent, name, kind = _parts(record)
    wanted = {"name": name, "type": kind, "ttl": TTL_SECONDS, "rrdatas": [address]}
    body = ({"deletions": [_data(read)]} if read else {}) | ({"additions": [wanted]} if address else {})
    try:
        change = call(cloud.clients.dns(), "POST", f"{parent}/changes", body=body)
        deadline = cloud.clock.monotonic() + WAIT_SECONDS
        while change["status"] != "done" and cloud.clock.monotonic() < deadline:
            cloud.clock.sleep(LOOK_SECONDS)
            change = call(cloud.clients.dns(), "GET", f"{parent}/changes/{change['id']}")
    except client_errors() as error:
        if getattr(error, "code", None) in _LOST:
            cloud.log(f"{record} was changed by another caller: {error}", stage="rollout", severity="WARNING")
            return False
        raise classify(error) from error
    return bool(change["status"] == "done")


def list_records(cloud: Cloud) -> Iterator[Entry]:
    """The address records of the zone. A record has no labels: the zone belongs to the deployment, and its name tells
    the endpoint."""
    settings, query = cloud.settings, {"pageToken": ""}
    parent = _parts(record_name(settings, "", ""))[0]
    while True:
        page = call(cloud.clients.dns(), "GET", f"{parent}/rrsets", query)
        for found in page.get("rrsets", ()):
            if found["type"] == "A":
                labels = {
                    names.MANAGED_BY: "dropforge",
                    names.ENDPOINT_LABEL: found["name"].partition(".")[0],
                    names.DEPLOYMENT_LABEL: settings.deployment,
                }
                yield Listed(RECORD, f"{parent}/rrsets/{found['name']}/A", labels)
        if not (token := page.get("nextPageToken", "")):
            return
        query = {"pageToken": token}


def _parts(record: str) -> tuple[str, str, str]:
    """The zone of a record, its name with the dot at the end, and its type."""
    parent, _, rest = record.partition("/rrsets/")
    name, _, kind = rest.partition("/")
    return parent, name, kind


def _data(read: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record that its deletion must repeat. A user may have set a routing policy, and no addresses."""
    return {key: read[key] for key in ("name", "type", "ttl", "rrdatas", "routingPolicy") if key in read}
