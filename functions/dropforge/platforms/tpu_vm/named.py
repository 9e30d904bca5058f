"""Named endpoints on TPU VMs: an address record in a private zone of Cloud DNS, which points to one machine.

A TPU VM has an address of its own, and is no member of an instance group, so no load balancer has it as a backend. A
new machine is checked at its own address; then the record changes, by a change of which the old data is the
precondition. Clients may use the old address for the record's ttl, so the machine before stays until they cannot, and
until its answers have ended. A revision ends a connection with each answer, so that its clients resolve the name again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import dns, tpu
from dropforge.cloud.classify import classify, client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.platforms.named import (
    Candidate,
    Counted,
    Fence,
    NamedServer,
    Reached,
    RevisionGone,
    Share,
    check_owner,
    no_fence,
    owner_labels,
    revision_labels,
)
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Phase, Waits

from .serve import TpuVmServer, machine, url_of
from .spec import TpuVmServe
from .train import status_of_node

DRAIN_SECONDS = 20  # for unfinished answers of a server that ends early, as on Spot capacity
NEVER = 4102444800  # 2100-01-01: the record says when an endpoint ends, and its expiry moves
LOOK_SECONDS = 1.0
GONE_WAIT_SECONDS = 20.0  # the wait of one call for the end of machines


class NamedTpuVms(NamedServer):
    """See `NamedServer` for the contract of each verb."""

    keeps_instances = False
    keeps_revisions = False

    def __init__(self) -> None:
        self._server = TpuVmServer()

    def drain_seconds(self, cloud: Cloud) -> int:
        return cloud.settings.endpoint_drain_seconds

    def region(self, deployment: Deployment) -> str:
        return self._server.region(deployment)

    def service_name(self, deployment: Deployment, existing: str = "") -> str:
        return dns.record_name(deployment.settings, deployment.endpoint, self.region(deployment))

    def why_whole(self, service: str) -> str:
        return TpuVmServe.no_canary()

    def deploy(
        self, cloud: Cloud, candidate: Candidate, shares: list[Share], fence: Fence = no_fence
    ) -> Reached | Waits:
        # It moves no request, so nobody asks the fence: a revision that is made too late is pruned.
        found = self._start(cloud, candidate)
        if isinstance(found, Waits):
            return found
        service = self.service_name(candidate.deployment)
        return self.find(cloud, service, candidate.number) or Waits("the machine has no address yet")

    def find(self, cloud: Cloud, service: str, number: int) -> Reached | None:
        revision = names.named_revision(_endpoint(service), number)
        node = _node(cloud, _node_name(service, revision))
        if node is None or (url := url_of(node)) is None:
            return None
        authority = cloud.clients.authority_of(dns.host_of(service), tpu.SERVER_PORT)
        return Reached(revision, url, f"http://{authority}")

    def is_lost(self, cloud: Cloud, service: str, revision: str) -> bool:
        node, read = _node(cloud, _node_name(service, revision)), dns.find_record(cloud, service)
        return node is None or read is None or read.get("rrdatas") != [_address(node)]

    def resources(self, service: str, revision: str) -> list[str]:
        return [service, _node_name(service, revision)]

    def shift(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        (wanted,) = (share.revision for share in shares if share.percent)
        node = _node(cloud, _node_name(service, wanted))
        if node is None:
            raise RevisionGone(f"the machine of revision {wanted} does not exist any more")
        if not (address := _address(node)):
            return False
        read = dns.find_record(cloud, service)
        if read is not None and read.get("rrdatas") == [address]:
            return True
        fence()
        return dns.change_record(cloud, service, read, address)

    def counted(self, cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
        raise CloudError(ErrorClass.CONFIG, TpuVmServe.no_canary(), "every request at once: `--canary none`")

    def prune(self, cloud: Cloud, service: str, kept: set[str], last: int) -> None:
        try:
            for part in _parts(cloud, service):
                number = names.revision_number(part.name, _endpoint(service))
                if number is not None and number <= last and part.name.rpartition("/")[2] not in kept:
                    tpu.delete(cloud, part.kind, part.name)
        except CloudError as error:
            message = f"revisions of {service} are not pruned: {error.message}"
            cloud.log(message, stage="rollout", severity="WARNING")

    def suspend(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        return self._end(cloud, service, fence)  # the name stays in the endpoint's record; only machines cost money

    def resume(self, cloud: Cloud, service: str, candidates: list[Candidate], fence: Fence = no_fence) -> bool:
        (serving, *_) = candidates
        if self._clears(cloud, service, serving, fence):
            return False
        fence()
        return not isinstance(self._start(cloud, serving), Waits)

    def _clears(self, cloud: Cloud, service: str, serving: Candidate, fence: Fence) -> bool:
        """Delete what is left of the machine of the revision, if it has ended; False once nothing is left.

        What the rollout itself has requested stays, however it ended.
        """
        revision = names.named_revision(serving.endpoint, serving.number)
        if _node(cloud, _node_name(service, revision)) is not None:
            return False
        left = [part for part in _parts(cloud, service) if part.name.rpartition("/")[2] == revision]
        old = [part for part in left if part.labels.get(names.ROLLOUT_LABEL) != serving.rollout]
        for part in old:
            fence()
            tpu.delete(cloud, part.kind, part.name)
        return bool(old)

    def delete(self, cloud: Cloud, service: str) -> bool:
        return self._end(cloud, service, no_fence)

    def _end(self, cloud: Cloud, service: str, fence: Fence) -> bool:
        """Delete the record and the machines. The next rollout may make others: the fence comes before each change."""
        # The record goes first: another machine of the network may get the address.
        read = dns.find_record(cloud, service)
        fence()
        if read is not None and not dns.change_record(cloud, service, read, ""):
            return False
        deadline = cloud.clock.monotonic() + GONE_WAIT_SECONDS
        while remaining := list(_parts(cloud, service)):
            for part in remaining:
                fence()
                tpu.delete(cloud, part.kind, part.name)
            if cloud.clock.monotonic() > deadline:
                return False
            cloud.clock.sleep(LOOK_SECONDS)
        return True

    def _start(self, cloud: Cloud, candidate: Candidate) -> str | Waits:
        """The URL of a revision's machine once it answers at its own address. Raises CloudError if it never will."""
        wanted = machine_of(candidate)
        _check_owner(cloud, wanted, candidate)
        return self._server.advance(cloud, candidate.deployment, wanted)


def machine_of(candidate: Candidate) -> tpu.Machine:
    """The machine of a revision. A rollout that resumes the endpoint requests it anew: its request has an own id."""
    deployment, name = candidate.deployment, names.named_revision(candidate.endpoint, candidate.number)
    own = machine(deployment)
    variables = {"DROPFORGE_DRAIN_SECONDS": DRAIN_SECONDS, "K_REVISION": name}  # the second as on Cloud Run
    lines = [own.metadata["dropforge-env"], *(f"{key}={value}" for key, value in variables.items())]
    return replace(
        own,
        node=f"{own.node.rpartition('/')[0]}/{name}",
        queued=own.queued and f"{own.queued.rpartition('/')[0]}/{name}",
        labels=revision_labels(candidate),
        metadata={**own.metadata, "dropforge-env": "\n".join(lines), "dropforge-deadline": str(NEVER)},
        request=candidate.rollout,
    )


def _check_owner(cloud: Cloud, wanted: tpu.Machine, candidate: Candidate) -> None:
    """Raise CloudError if a machine of that name is not of this endpoint, or is of a revision that no record knows."""
    try:
        node = _node(cloud, wanted.node)
    except CloudError as error:
        error.did_nothing = True  # nothing was requested before this look
        raise
    if node is not None:
        check_owner(wanted.node, dict(node.labels), candidate.deployment.settings, candidate.endpoint)


def _node(cloud: Cloud, name: str) -> Any:
    """A node that runs or starts; None without one. Raises CloudError.

    A preempted or stopped machine answers nothing, though its node still has an address.
    """
    try:
        node = tpu.find_node(cloud, name)
    except client_errors() as error:
        raise classify(error) from error
    return node if status_of_node(node, name).phase in (Phase.PENDING, Phase.RUNNING) else None


def _address(node: Any) -> str:
    """The address of a node; "" while it has none."""
    return str(node.network_endpoints[0].ip_address) if node.network_endpoints else ""


def _parts(cloud: Cloud, service: str) -> Iterator[Listed]:
    """The queued resources and nodes of an endpoint. Raises CloudError if a zone could not be listed."""
    owner = owner_labels(cloud.settings, _endpoint(service)).items()
    for each in (*_entries(cloud, tpu.list_queued), *_entries(cloud, tpu.list_nodes)):
        if isinstance(each, CloudError):
            if f"/{_zone(service)}" in each.message:
                raise each
        elif owner <= each.labels.items():
            yield each


def _entries(cloud: Cloud, list_zones: Any) -> list[Any]:
    try:
        return list(list_zones(cloud))
    except client_errors() as error:
        raise classify(error) from error


def _endpoint(service: str) -> str:
    return dns.host_of(service).split(".")[0]


def _zone(service: str) -> str:
    return dns.host_of(service).split(".")[1]


def _node_name(service: str, revision: str) -> str:
    return f"projects/{service.split('/')[1]}/locations/{_zone(service)}/nodes/{revision}"
