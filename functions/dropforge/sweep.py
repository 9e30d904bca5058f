"""Stage `sweep`: endpoints past their ttl are deleted, from the cloud's own listing of what exists."""

from __future__ import annotations

from typing import Any

from . import clients, names
from .catalog import CLOUD_RUN_MACHINES
from .classify import classify, client_errors
from .clients import TIMEOUT_SECONDS
from .errors import CloudError
from .log import log
from .runs import RunStore, open_store, utc_now
from .serving import get_server
from .settings import settings
from .teardown import end_endpoint

SERVICE_KIND = "run.googleapis.com/Service"


def sweep() -> dict[str, Any]:
    """Delete every endpoint whose time is over. Safe to run twice at once; one sweep is enough."""
    store = open_store()
    deleted = [service.name for service in _services() if _is_over(store, service) and _end(store, service)]
    return {"status": "SWEPT", "deleted": deleted}


def _services() -> list[Any]:
    """Our services in every region that may have some; the API has no listing over all regions."""
    regions = sorted({region for machine in CLOUD_RUN_MACHINES.values() for region in machine.regions})
    found = []
    for region in regions:
        parent = f"projects/{settings().project}/locations/{region}"
        try:
            found += [
                s for s in clients.run_services().list_services(parent=parent, timeout=TIMEOUT_SECONDS) if _is_ours(s)
            ]
        except client_errors() as error:
            log(classify(error).message, stage="sweep", severity="ERROR", region=region)
    return found


def _is_ours(service: Any) -> bool:
    return bool(service.labels.get(names.MANAGED_BY) == "dropforge" and names.EXPIRES_LABEL in service.labels)


def _is_over(store: RunStore, service: Any) -> bool:
    """Past its run's ttl, or past the time on its label, which is the latest at which that can end."""
    expires = service.labels[names.EXPIRES_LABEL]
    if expires.isdecimal() and int(expires) < utc_now().timestamp():  # people can edit labels
        return True
    record = store.find(service.labels.get(names.RUN_LABEL, ""))
    return record is not None and record.endpoint is not None and record.endpoint.expires < utc_now()


def _end(store: RunStore, service: Any) -> bool:
    run = service.labels.get(names.RUN_LABEL, "")
    log("endpoint past its ttl", stage="sweep", run=run, resource=service.name)
    try:
        # By the name that the cloud lists: the ledger may believe it gone.
        if not get_server("cloud_run").teardown(SERVICE_KIND, service.name):
            return False
        record = store.find(run)
        return end_endpoint(store, run) if record and record.state.is_terminal else True
    except CloudError as error:  # the others are deleted all the same
        log(error.message, stage="sweep", run=run, severity="ERROR", resource=service.name)
        return False
