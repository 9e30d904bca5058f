"""Named endpoints on GKE: an object with one address (front.py), and a workload for each revision.

With a Gateway in the cluster the object is a route, which splits requests by weights (gateway.py). Otherwise it is a
Service, which has no weights: its selector moves every new connection at once, and connections that exist stay where
they are. So a revision ends a connection with each answer, and keeps its pods until no rollback can promote it.
Service: https://kubernetes.io/docs/concepts/services-networking/service/
End of pods: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import kubernetes
from dropforge.cloud.classify import something_may_exist
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes, Object
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
from dropforge.platforms.training import Waits

from .front import Front, SelectingService, sibling
from .gateway import ROUTES, WeightedRoute
from .workload import (
    READY_WAIT_SECONDS,
    SPOT_DRAIN_SECONDS,
    Workload,
    cluster_of,
    connect,
    region_of,
    serve_of,
    url_once_ready,
)

DEPLOYMENT, POD = ("apps/v1", "Deployment"), ("v1", "Pod")
DRAIN_SECONDS = 285  # for unfinished answers of an ending server: its pod ends within 300 s


class NamedDeployments(NamedServer):
    """See `NamedServer` for the contract of each verb."""

    keeps_instances = True
    keeps_revisions = True

    def drain_seconds(self, cloud: Cloud) -> int:
        return 0

    def region(self, deployment: Deployment) -> str:
        return region_of(deployment.spec)

    def service_name(self, deployment: Deployment, existing: str = "") -> str:
        namespace = f"{cluster_of(deployment)}/k8s/namespaces/{deployment.settings.kubernetes_namespace}"
        has_gateway = deployment.settings.has_gateway(region_of(deployment.spec))
        possible = [f"{namespace}/{each}/{names.named_endpoint(deployment.endpoint)}" for each in (ROUTES, "services")]
        return existing if existing in possible else possible[0 if has_gateway else 1]

    def why_whole(self, service: str) -> str:
        return _front(service).whole

    def deploy(
        self, cloud: Cloud, candidate: Candidate, shares: list[Share], fence: Fence = no_fence
    ) -> Reached | Waits:
        # It moves no request, so nobody asks the fence: a revision that is made too late is pruned.
        deployment, cluster = candidate.deployment, cluster_of(candidate.deployment)
        api = connect(cloud, deployment)
        if api is None:
            return Waits(f"{cluster} is being created")
        service, workload = self.service_name(deployment, candidate.service), workload_of(candidate)
        front, existing = _front(service), api.get(service)
        front.check(api, service)
        if existing is not None:
            check_owner(service, existing["metadata"].get("labels", {}), deployment.settings, candidate.endpoint)
        first, *others = front.parts(workload)
        _ensure(api, cluster, first, candidate)
        with something_may_exist():
            for manifest in others:
                _ensure(api, cluster, manifest, candidate)
            name = workload.name
            url = url_once_ready(cloud, api, workload, lambda: name if front.is_reached(api, service, name) else None)
            if isinstance(url, Waits):
                return url
            if existing is None:  # the first revision; or somebody has deleted the object
                selected = _serving(api, service, shares) or workload.name
                _ensure(api, cluster, front.manifest(deployment, selected), candidate)
            found = _reached(api, service, workload.name)
            return found or Waits("the load balancer of the endpoint has no address yet")

    def find(self, cloud: Cloud, service: str, number: int) -> Reached | None:
        api = _api(cloud, service)
        return None if api is None else _reached(api, service, names.named_revision(_endpoint(service), number))

    def is_lost(self, cloud: Cloud, service: str, revision: str) -> bool:
        return False

    def resources(self, service: str, revision: str) -> list[str]:
        return [service, _deployment_name(service, revision)]

    def shift(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        front, api = _front(service), _api(cloud, service)
        if api is None or (found := api.get(service)) is None:
            hint = "the next rollout creates it again"
            raise RevisionGone(f"{service} does not exist any more", hint, left=frozenset())
        wanted = front.wanted(api, service, shares)
        if front.shares(found) != wanted:
            if not all(_is_available(api, service, revision) for revision, percent in wanted.items() if percent):
                return False  # its pods were lost after the check, and Kubernetes replaces them
            fence()
            if not _patch(api, service, found, front.change(found, wanted)):
                return False
        deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
        while not front.has_moved(cloud, api, service, found := api.get(service) or found):
            if cloud.clock.monotonic() > deadline:
                return False
            cloud.clock.sleep(kubernetes.LOOK_SECONDS)
        return front.shares(found) == wanted

    def counted(self, cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
        front, api = _front(service), _api(cloud, service)
        owned = [] if api is None else _parts(cloud, api, service, [("v1", "Service")])
        return front.counted(cloud, (item for _, item in owned), since)

    def prune(self, cloud: Cloud, service: str, kept: set[str], last: int) -> None:
        try:
            if (api := _api(cloud, service)) is not None:
                _prune(cloud, api, service, kept, last)
        except CloudError as error:
            message = f"revisions of {service} are not pruned: {error.message}"
            cloud.log(message, stage="rollout", severity="WARNING")

    def suspend(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        # The autoscaler of a Deployment without replicas does nothing:
        # https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#implicit-maintenance-mode-deactivation
        if (api := _api(cloud, service)) is None:
            return True
        deadline = cloud.clock.monotonic() + kubernetes.GONE_WAIT_SECONDS
        while running := _running(cloud, api, service):
            for name, item in running:
                if item["kind"] == "Deployment" and item["spec"]["replicas"]:
                    fence()
                    _patch(api, name, item, {"spec": {"replicas": 0}})
            if cloud.clock.monotonic() > deadline:
                return False
            cloud.clock.sleep(kubernetes.LOOK_SECONDS)
        return True

    def resume(self, cloud: Cloud, service: str, candidates: list[Candidate], fence: Fence = no_fence) -> bool:
        api, is_done = _api(cloud, service), True
        for candidate in candidates:
            name = _deployment_name(service, names.named_revision(candidate.endpoint, candidate.number))
            found = None if api is None else api.get(name)
            if api is None or found is None:
                if candidate is candidates[0]:
                    raise CloudError(ErrorClass.CONFIG, f"{name} does not exist any more")
                continue  # a user has deleted the revision for a rollback
            if not found["spec"]["replicas"]:
                fence()
                wanted = {"spec": {"replicas": serve_of(candidate.deployment.spec).min_instances}}
                is_done = _patch(api, name, found, wanted) and is_done
        return is_done

    def delete(self, cloud: Cloud, service: str) -> bool:
        api = _api(cloud, service)
        if api is None:
            return True
        deadline = cloud.clock.monotonic() + kubernetes.GONE_WAIT_SECONDS
        while remaining := list(_parts(cloud, api, service, [*_front(service).kinds, POD])):
            for name, item in remaining:
                if "deletionTimestamp" not in item["metadata"]:
                    api.delete(name, item["metadata"]["uid"])
            if cloud.clock.monotonic() > deadline:
                return False
            cloud.clock.sleep(kubernetes.LOOK_SECONDS)
        return True


def workload_of(candidate: Candidate) -> Workload:
    """The workload of a revision."""
    is_spot = serve_of(candidate.deployment.spec).capacity == "spot"
    name = names.named_revision(candidate.endpoint, candidate.number)
    return Workload(
        name, revision_labels(candidate), candidate.deployment, SPOT_DRAIN_SECONDS if is_spot else DRAIN_SECONDS
    )


def _front(service: str) -> Front:
    """The kind of object that has the address of an endpoint, by the name of its service."""
    return WeightedRoute() if f"/{ROUTES}/" in service else SelectingService()


def _ensure(api: Kubernetes, cluster: str, manifest: Object, candidate: Candidate) -> None:
    """Create an object, unless an earlier call has created it. Raises CloudError if the object has another owner."""
    if api.create(manifest):
        return
    name, wanted = kubernetes.resource_of(cluster, manifest).name, manifest["metadata"]["labels"]
    if (existing := api.get(name)) is None:
        return
    labels = existing["metadata"].get("labels", {})
    check_owner(name, labels, candidate.deployment.settings, candidate.endpoint)
    if labels.get(names.ROLLOUT_LABEL) != wanted.get(names.ROLLOUT_LABEL):
        message = f"{name} is of rollout {labels.get(names.ROLLOUT_LABEL)}"
        raise CloudError(ErrorClass.CONFIG, message, "delete it: no record knows that revision")


def _prune(cloud: Cloud, api: Kubernetes, service: str, kept: set[str], last: int) -> None:
    """Delete the parts of the revisions up to `last` that are neither kept nor selected: the selected ones answer."""
    found, front = api.get(service), _front(service)
    selected = front.shares(found).keys() if found else set()
    for name, item in _parts(cloud, api, service, front.kinds):
        number = names.revision_number(name, _endpoint(service))
        is_old = number is not None and number <= last
        if is_old and item["metadata"]["name"] not in {*selected, *kept}:
            api.delete(name, item["metadata"]["uid"])


def _is_available(api: Kubernetes, service: str, revision: str) -> bool:
    """Whether a revision has ready pods. Raises RevisionGone."""
    server = api.get(_deployment_name(service, revision))
    if server is None:
        raise RevisionGone(f"revision {revision} does not exist any more")
    return bool(server.get("status", {}).get("availableReplicas"))


def _patch(api: Kubernetes, name: str, read: Object, change: Object) -> bool:
    """Change an object that was read; False if another caller has changed the object since."""
    version = {"resourceVersion": read["metadata"]["resourceVersion"]}
    return api.patch(name, {**change, "metadata": {**change.get("metadata", {}), **version}})


def _running(cloud: Cloud, api: Kubernetes, service: str) -> list[tuple[str, Object]]:
    """The Deployments with replicas, and the pods, of an endpoint."""
    parts = _parts(cloud, api, service, [DEPLOYMENT, POD])
    return [(name, item) for name, item in parts if item["kind"] == "Pod" or (item.get("spec") or {}).get("replicas")]


def _serving(api: Kubernetes, service: str, shares: list[Share]) -> str:
    """The revision with every request, if its Deployment exists; "" otherwise."""
    wanted = next((share.revision for share in shares if share.percent), "")
    return wanted if wanted and api.get(_deployment_name(service, wanted)) else ""


def _reached(api: Kubernetes, service: str, revision: str) -> Reached | None:
    """How to reach a revision and its endpoint; None if one of them does not exist or has no address."""
    if api.get(_deployment_name(service, revision)) is None:
        return None
    urls = _front(service).urls(api, service, revision)
    return Reached(revision, urls.revision, urls.endpoint) if urls else None


def _api(cloud: Cloud, service: str) -> Kubernetes | None:
    """The API of the endpoint's cluster; None if the cluster does not exist."""
    cluster = kubernetes.find_cluster(cloud, service.partition("/k8s/")[0])
    return None if cluster is None else kubernetes.connect(cloud, cluster)


def _parts(
    cloud: Cloud, api: Kubernetes, service: str, kinds: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, Object]]:
    """Every object of these kinds of a named endpoint, with its full name."""
    cluster, _, rest = service.partition("/k8s/namespaces/")
    selector = ",".join(f"{key}={value}" for key, value in owner_labels(cloud.settings, _endpoint(service)).items())
    for kind in kinds:
        for item in api.each(rest.partition("/")[0], *kind, selector):
            yield kubernetes.resource_of(cluster, item).name, item


def _short(service: str) -> str:
    return service.rpartition("/")[2]


def _endpoint(service: str) -> str:
    return _short(service).removeprefix(names.named_endpoint(""))


def _deployment_name(service: str, revision: str) -> str:
    return sibling(service, "apps/deployments", revision)
