"""Compare every ledger with the cloud's list: `dropforge audit`, and the page Health of the console."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dropforge.base import names
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord
from dropforge.endpoints.store import EndpointStore
from dropforge.platforms.lookup import Platforms
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
    differences += compare_endpoints(context.platforms, serving, _serving(context.endpoints), services)
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


def compare_endpoints(
    platforms: Platforms,
    before: dict[str, EndpointRecord],
    after: dict[str, EndpointRecord],
    resources: Iterable[Listed],
) -> list[Difference]:
    """Return the differences between the records of named endpoints and their resources in the cloud.

    `before` and `after` the listing: the endpoints that serve, and those with a rollout that has not ended. An endpoint
    that changed in between is no difference.
    """
    listed = {resource.name: resource for resource in resources}
    settled = [record for name, record in before.items() if record.current is None and after.get(name) == record]
    missing = [
        Difference(MISSING, record.name, "", name)
        for record in settled
        for name in _expected(platforms, record)
        if name not in listed
    ]
    unowned = [
        Difference(UNOWNED, resource.endpoint, resource.kind, resource.name)
        for resource in listed.values()
        if (resource.endpoint not in before and resource.endpoint not in after)
        or any(record.name == resource.endpoint and is_left_over(record, resource) for record in settled)
    ]
    return sorted([*missing, *unowned])


def is_left_over(record: EndpointRecord, resource: Listed) -> bool:
    """Whether a listed resource of an endpoint is part of a revision that no rollback can promote."""
    number = names.revision_number(resource.name, record.name)
    return number is not None and number not in (record.stable, record.previous)


def _expected(platforms: Platforms, record: EndpointRecord) -> list[str]:
    """The names of the resources without which an endpoint does not serve."""
    serving = record.serving
    assert serving is not None, "the caller passes only endpoints that serve"
    if record.suspended and not platforms.named(record.type).keeps_revisions:
        return []
    return platforms.named(record.type).resources(record.service, serving.revision)


def _serving(endpoints: EndpointStore) -> dict[str, EndpointRecord]:
    """Each endpoint that serves or is suspended, or has a rollout that has not ended."""
    records = (endpoints.record(name) for name in endpoints.names())
    return {record.name: record for record in records if record.current is not None or record.stable}


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
