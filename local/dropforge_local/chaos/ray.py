"""The Ray operator of a GKE cluster: a RayJob creates a RayCluster, its driver trains there, and both end together.

States: https://github.com/ray-project/kuberay/blob/master/ray-operator/apis/ray/v1/rayjob_types.go. The operator asks
Ray for the job's status. A job that is lost with its node has failed without an exit code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .kubernetes import Api, Object
from .nodes import Nodes
from .world import World

ORIGIN, OF_CLUSTER, GROUP = "ray.io/originated-from-cr-name", "ray.io/cluster", "ray.io/group"
NODE_TYPE = "ray.io/node-type"
HEAD = "headgroup"
OVER = ("Complete", "Failed")
FIELDS = frozenset(
    {
        "activeDeadlineSeconds",
        "backoffLimit",
        "entrypoint",
        "rayClusterSpec",
        "shutdownAfterJobFinishes",
        "submissionMode",
        "ttlSecondsAfterFinished",
    }
)


class Ray:
    """The operator. `add_pod` creates a pod from a template, with more labels and a share of the price, if admission
    allows it. `train` runs training in pods and calls back with its exit code."""

    def __init__(
        self,
        world: World,
        api: Api,
        nodes: Nodes,
        add_pod: Callable[[Object, Object, str, dict[str, str], float], None],
        train: Callable[[list[Object], Callable[[int | None], None]], None],
    ) -> None:
        self.world = world
        self.api = api
        self.nodes = nodes
        self.add_pod = add_pod
        self.train = train
        # Not every version copies the RayJob's labels to its cluster.
        self.copies_labels = world.id() % 2 == 0
        self._drivers: dict[str, list[Object]] = {}  # where the driver of each RayJob runs, by uid

    def begin_job(self, job: Object) -> None:
        spec = job["spec"]
        assert spec.keys() == FIELDS, f"of a RayJob, {spec.keys() ^ FIELDS} is not simulated"
        assert (spec["backoffLimit"], spec["submissionMode"]) == (0, "HTTPMode"), "a RayJob has one try"
        assert spec["shutdownAfterJobFinishes"] is True, "and its cluster ends with it"
        self.world.after(self.world.random.uniform(0.5, 3), lambda: self._initialize(job))

    def begin_cluster(self, cluster: Object) -> None:
        """Create a head and all hosts of the slice. A label identifies the pods, whoever owns them."""
        spec = cluster["spec"]
        assert len(spec["workerGroupSpecs"]) == 1, "one slice"
        workers = spec["workerGroupSpecs"][0]
        assert workers["replicas"] == 1, "likewise"
        self._fill(cluster)

    def _fill(self, cluster: Object, lost: Object | None = None) -> None:
        """Add the pods that a cluster lacks, if `lost` is no pod of it any more."""
        spec = cluster["spec"]
        workers = spec["workerGroupSpecs"][0]
        there = [pod for pod in self._pods_of(cluster) if pod is not lost and self.api.is_live(pod)]
        pods = [pod for pod in there if not self.nodes.has_stopped(pod)]
        known = [pod["metadata"]["labels"][GROUP] for pod in pods]
        for _ in range(workers["numOfHosts"] - known.count(workers["groupName"])):
            self._add_pod(cluster, workers["groupName"], workers["template"], 1 / workers["numOfHosts"])
        if HEAD not in known:
            self._add_pod(cluster, HEAD, spec["headGroupSpec"]["template"], 0.0)

    def pod_began(self, cluster: Object) -> None:
        """Start the driver once all pods run."""
        job, pods = self._job_of(cluster), self._pods_of(cluster)
        running = [pod for pod in pods if pod["status"]["phase"] == "Running" and not self.nodes.has_stopped(pod)]
        heads = [pod for pod in running if pod["metadata"]["labels"][GROUP] == HEAD]
        hosts = [pod for pod in running if pod not in heads]
        is_whole = heads and len(hosts) >= cluster["spec"]["workerGroupSpecs"][0]["numOfHosts"]
        if job is None or job["status"]["jobDeploymentStatus"] in OVER or not is_whole:
            return
        before = self._drivers.get(job["metadata"]["uid"], [])
        if before and not any(self.nodes.has_stopped(pod) for pod in before):
            return
        job["status"] |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
        head_first = self._drivers[job["metadata"]["uid"]] = [heads[0], *hosts]
        self.train(head_first, lambda code: self._driver_ended(job, code))

    def pod_ended(self, cluster: Object, pod: Object) -> None:
        """Replace a lost pod. If the job already ran, it is lost, too."""
        job = self._job_of(cluster)
        if job is None or job["status"]["jobDeploymentStatus"] in OVER or not self.api.is_live(cluster):
            return
        if job["status"]["jobDeploymentStatus"] == "Running":
            self._look_later(job, "FAILED", "AppFailed", "The driver was lost with its node")
        else:
            self._fill(cluster, pod)

    def cluster_removed(self, cluster: Object) -> None:
        """A user has deleted the cluster: create it again and submit its job again."""
        job = self._job_of(cluster)
        if job is not None and job["status"]["jobDeploymentStatus"] not in OVER:
            self.world.after(self.world.random.uniform(1, 5), lambda: self._make_cluster(job))

    def _initialize(self, job: Object) -> None:
        if not self.api.is_live(job):
            return
        name = f"{job['metadata']['name']}-{self.world.id():05d}"
        job["status"] = {"jobDeploymentStatus": "Initializing", "jobStatus": "", "rayClusterName": name}
        self.world.after(job["spec"]["activeDeadlineSeconds"], lambda: self._overrun(job))
        self._make_cluster(job)

    def _make_cluster(self, job: Object) -> None:
        if not self.api.is_live(job) or job["status"]["jobDeploymentStatus"] in OVER:
            return
        labels = dict(job["metadata"]["labels"]) if self.copies_labels else {}
        metadata = {
            "name": job["status"]["rayClusterName"],
            "namespace": job["metadata"]["namespace"],
            "labels": {**labels, ORIGIN: job["metadata"]["name"]},
        }
        kind = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
        self.api.add({**kind, "metadata": metadata, "spec": job["spec"]["rayClusterSpec"]}, job)

    def _add_pod(self, cluster: Object, group: str, template: Object, share: float) -> None:
        name = cluster["metadata"]["name"]
        labels = {OF_CLUSTER: name, GROUP: group, NODE_TYPE: "head" if group == HEAD else "worker"}
        self.add_pod(cluster, template, f"{name}-{group}", labels, share)

    def _driver_ended(self, job: Object, exit_code: int | None) -> None:
        if exit_code == 0:
            self._look_later(job, "SUCCEEDED", "", "Job finished successfully.")
        else:
            text = f"Job entrypoint command failed with exit code {137 if exit_code is None else exit_code}"
            self._look_later(job, "FAILED", "AppFailed", f"{text}, last available logs (truncated to 20,000 chars):")

    def _look_later(self, job: Object, state: str, reason: str, message: str) -> None:
        """The operator polls the job's status."""
        self.world.after(self.world.random.uniform(0.5, 5), lambda: self._conclude(job, state, reason, message))

    def _overrun(self, job: Object) -> None:
        state = job["status"]["jobStatus"]
        self._conclude(job, state, "DeadlineExceeded", "The RayJob has passed the activeDeadlineSeconds.")

    def _conclude(self, job: Object, state: str, reason: str, message: str) -> None:
        if not self.api.is_live(job) or job["status"]["jobDeploymentStatus"] in OVER:
            return
        ended = {"jobDeploymentStatus": "Failed" if reason else "Complete", "endTime": self.api.stamp()}
        job["status"] |= {**ended, "jobStatus": state, "reason": reason, "message": message}
        self.world.after(job["spec"]["ttlSecondsAfterFinished"], lambda: self._shut_down(job))

    def _shut_down(self, job: Object) -> None:
        for cluster in self.api.owned(job) if self.api.is_live(job) else []:
            self.api.delete(cluster)

    def cluster_of(self, pod: Object) -> Object | None:
        name = pod["metadata"]["labels"].get(OF_CLUSTER)
        return next(
            (cluster for cluster in self.api.of_kind("RayCluster") if cluster["metadata"]["name"] == name), None
        )

    def _pods_of(self, cluster: Object) -> list[Object]:
        return [pod for pod in self.api.of_kind("Pod") if self.cluster_of(pod) is cluster]

    def _job_of(self, cluster: Object) -> Any:
        """The RayJob of a cluster; None if the RayJob is deleted or its deletion has begun."""
        owners = [owner["uid"] for owner in cluster["metadata"].get("ownerReferences", [])]
        jobs = [job for job in self.api.of_kind("RayJob") if job["metadata"]["uid"] in owners]
        return jobs[0] if jobs and self.api.is_live(jobs[0]) else None
