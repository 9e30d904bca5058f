"""Compare every ledger with the cloud's list: `dropforge audit`, and the page Health of the console."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.endpoints.record import EndpointState
from dropforge.endpoints.store import EndpointStore
from dropforge.run.record import Ledger, Record, ResourceState
from dropforge.run.store import RunStore

from .orphans import list_all, serves

READERS = 16  # parallel requests; each record or ledger is one request
UNOWNED, MISSING, REMAINING = "unowned", "missing", "remaining"
MEANING = {
    UNOWNED: "the cloud lists the resource, and no ledger or endpoint's record says that it exists",
    MISSING: "the ledger or the endpoint's record says that the resource exists, and the cloud does not list it",
    REMAINING: "the run is over and does not serve the resource, and the ledger does not say that it is gone",
}


class Difference(NamedTuple):
    """One difference between a ledger and the cloud. `difference` is a key of MEANING.

    `run` is the run, or the named endpoint, that the resource belongs to.
    """

    difference: str
    run: str
    kind: str
    name: str


class Audit(NamedTuple):
    """The differences, the problems of incomplete lists, and how many resources and ledgers were compared."""

    differences: list[Difference]
    problems: list[str]
    resources: int
    ledgers: int


def audit(context: Context) -> Audit:
    """Compare every ledger and every endpoint's record with the cloud's list. It changes nothing."""
    store = context.store
    before, serving = _ledgers(store, store.runs()), _serving(context.endpoints)
    resources, problems = list_all(context.cloud)
    differences = compare(store, before, [resource for resource in resources if not resource.endpoint])
    services = [resource for resource in resources if resource.endpoint]
    differences += compare_endpoints(serving, _serving(context.endpoints), services)
    return Audit(differences, problems, len(resources), len(before))


def compare(store: RunStore, before: dict[str, Ledger], resources: Iterable[Listed]) -> list[Difference]:
    """Return the differences between the ledgers, read `before` the cloud was listed, and the cloud's resources.

    A ledger that differs is read again: a resource that was created or deleted in between is no difference.
    """
    listed: dict[str, list[Listed]] = defaultdict(list)
    for resource in resources:
        listed[resource.run].append(resource)
    runs = {run for run, ledger in before.items() if ledger.remaining()} | set(listed)
    with ThreadPoolExecutor(READERS) as pool:
        records = dict(zip(runs, pool.map(store.find, runs), strict=True))
    first = _differences(before, listed, records)
    now = _ledgers(store, {difference.run for difference in first})
    second = _differences(now, {run: listed[run] for run in now}, records)
    return sorted(first & second)


def compare_endpoints(before: dict[str, str], after: dict[str, str], services: Iterable[Listed]) -> list[Difference]:
    """Return the differences between the records of named endpoints and their services in the cloud.

    `before` and `after` the listing: the service of each endpoint that serves, "" for a rollout that has not ended. An
    endpoint that changed in between is no difference.
    """
    listed = {service.name: service for service in services}
    missing = [
        Difference(MISSING, endpoint, "", name)
        for endpoint, name in before.items()
        if name and name not in listed and after.get(endpoint) == name
    ]
    unowned = [
        Difference(UNOWNED, service.endpoint, service.kind, service.name)
        for service in listed.values()
        if service.endpoint not in before and service.endpoint not in after
    ]
    return sorted([*missing, *unowned])


def _serving(endpoints: EndpointStore) -> dict[str, str]:
    """The service of each endpoint that serves; "" for each endpoint with a rollout that has not ended."""
    found = {}
    for name in endpoints.names():
        record = endpoints.record(name)
        if record.current is not None:
            found[name] = ""
        elif record.state is EndpointState.SERVING:
            found[name] = record.service
    return found


def _ledgers(store: RunStore, runs: Iterable[str]) -> dict[str, Ledger]:
    with ThreadPoolExecutor(READERS) as pool:
        return {ledger.run: ledger for ledger in pool.map(store.ledger, runs)}


def _differences(
    ledgers: dict[str, Ledger], listed: dict[str, list[Listed]], records: dict[str, Record | None]
) -> set[Difference]:
    differences = set()
    for run in {*ledgers, *listed}:
        entries = {entry.name: entry for entry in ledgers.get(run, Ledger(run=run)).remaining()}
        kinds = {resource.name: resource.kind for resource in listed.get(run, ())}
        differences |= {Difference(UNOWNED, run, kind, name) for name, kind in kinds.items() if name not in entries}
        record = records.get(run)
        is_over = record is None or record.state.is_terminal
        for name, entry in entries.items():
            # A resource in an attempt's own cluster is not listed separately.
            is_listed = name in kinds or name.partition("/k8s/")[0] in kinds
            # While its run is active, an intended resource may not exist yet.
            if not is_listed and (is_over or entry.state is ResourceState.CREATED):
                differences.add(Difference(MISSING, run, entry.kind, name))
            if is_over and not (record and serves(record, name)):
                differences.add(Difference(REMAINING, run, entry.kind, name))
    return differences
