"""The object with the address of a named endpoint: a Service, which selects one revision's pods, or a Gateway's route.

An endpoint keeps its address, so it keeps this object. The name of the endpoint's service says which object it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple, Protocol

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes, Object
from dropforge.platforms.named import Counted, Share, owner_labels
from dropforge.platforms.serving import Deployment

from .workload import INSTANCE, KINDS, Workload, manifests, service_manifest, url_of

ALL_AT_ONCE = (
    "the endpoint is a Service, which gives one revision every request: it was made in a region without a Gateway "
    "(Terraform: endpoint_gateway)"
)
Kinds = tuple[tuple[str, str], ...]  # apiVersion and kind


class Urls(NamedTuple):
    """The URL at which one revision answers, and that of the endpoint."""

    revision: str
    endpoint: str


class Front(Protocol):
    """The part of a named endpoint that differs. `service` is the full name of the object that moves the requests.

    `kinds` are the kinds of all objects of the endpoint. `whole` says why it gives one revision every request; "" if a
    revision may have a share.
    """

    kinds: Kinds
    whole: str

    def check(self, api: Kubernetes, service: str) -> None:
        """Raise CloudError if the cluster lacks what the deployment was told that it has."""

    def parts(self, workload: Workload) -> list[Object]:
        """The objects of a revision; the first one is its Deployment."""

    def manifest(self, deployment: Deployment, selected: str) -> Object:
        """The object that moves the requests, with every request to one revision."""

    def urls(self, api: Kubernetes, service: str, revision: str) -> Urls | None:
        """The URLs of a revision and of its endpoint; None if one of them is not known yet."""

    def is_reached(self, api: Kubernetes, service: str, revision: str) -> bool:
        """Whether requests to the URL of a revision get to its pods, as far as the platform tells."""

    def shares(self, found: Object) -> dict[str, int]:
        """The share of each revision, as the object says."""

    def wanted(self, api: Kubernetes, service: str, shares: list[Share]) -> dict[str, int]:
        """The shares that the object is to have."""

    def change(self, found: Object, wanted: dict[str, int]) -> Object:
        """The change of the object that gives the revisions their shares."""

    def has_moved(self, cloud: Cloud, api: Kubernetes, service: str, found: Object) -> bool:
        """Whether every request goes where the object says."""

    def counted(self, cloud: Cloud, services: Iterable[Object], since: datetime) -> dict[str, Counted]:
        """The requests since a time to the revisions with these Services of Kubernetes, by their names."""


class SelectingService:
    """A Service with an internal load balancer. Its selector moves each new connection at once."""

    kinds: Kinds = KINDS
    whole: str = ALL_AT_ONCE

    def check(self, api: Kubernetes, service: str) -> None:
        return

    def parts(self, workload: Workload) -> list[Object]:
        return manifests(workload)

    def manifest(self, deployment: Deployment, selected: str) -> Object:
        labels = owner_labels(deployment.settings, deployment.endpoint)
        made = service_manifest(Workload(names.named_endpoint(deployment.endpoint), labels, deployment))
        made["metadata"]["labels"] = labels
        made["spec"]["selector"] = {INSTANCE: selected}
        return made

    def urls(self, api: Kubernetes, service: str, revision: str) -> Urls | None:
        own, endpoint = api.get(sibling(service, "services", revision)), api.get(service)
        if own is None or endpoint is None:
            return None
        url, endpoint_url = url_of(own), url_of(endpoint)
        return Urls(url, endpoint_url) if url and endpoint_url else None

    def is_reached(self, api: Kubernetes, service: str, revision: str) -> bool:
        own = api.get(sibling(service, "services", revision))
        return own is not None and url_of(own) is not None

    def shares(self, found: Object) -> dict[str, int]:
        selector = found["spec"]["selector"]
        return {selector[INSTANCE]: 100} if INSTANCE in selector else {}

    def wanted(self, api: Kubernetes, service: str, shares: list[Share]) -> dict[str, int]:
        found = {share.revision: share.percent for share in shares if share.percent}
        if len(found) != 1:
            raise CloudError(ErrorClass.CONFIG, self.whole, "every request at once: `--canary none`")
        return found

    def change(self, found: Object, wanted: dict[str, int]) -> Object:
        (revision,) = wanted
        return {"spec": {"selector": {INSTANCE: revision}}}

    def has_moved(self, cloud: Cloud, api: Kubernetes, service: str, found: Object) -> bool:
        return True

    def counted(self, cloud: Cloud, services: Iterable[Object], since: datetime) -> dict[str, Counted]:
        raise CloudError(ErrorClass.CONFIG, self.whole, "every request at once: `--canary none`")


def sibling(service: str, collection: str, name: str) -> str:
    """The full name of another object in the namespace of an endpoint's service."""
    cluster, _, rest = service.partition("/k8s/namespaces/")
    return f"{cluster}/k8s/namespaces/{rest.partition('/')[0]}/{collection}/{name}"
