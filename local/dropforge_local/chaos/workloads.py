"""The controllers of a GKE cluster for Jobs, Deployments and Services, on the virtual clock.

Jobs: https://kubernetes.io/docs/concepts/workloads/controllers/job/.
Only the fields of dropforge's manifests are simulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .kubernetes import Api, Object, has_condition, is_selected, set_condition
from .nodes import Nodes, is_over
from .ray import Ray
from .trainer import Container
from .world import World

JOB_NAME = "batch.kubernetes.io/job-name"
JOB_FIELDS = frozenset(
    {
        "activeDeadlineSeconds",
        "backoffLimit",
        "completionMode",
        "completions",
        "parallelism",
        "podFailurePolicy",
        "podReplacementPolicy",
        "template",
        "ttlSecondsAfterFinished",
    }
)
AGAIN_SECONDS = 60.0  # until a controller retries a pod that admission refused
KILLED = 137


class Workloads:
    """The controllers of one cluster. `launched` is called for each training container that starts."""

    def __init__(self, world: World, api: Api, launched: Callable[[Container], None]) -> None:
        self.world = world
        self.api = api
        self.launched = launched
        self.nodes = Nodes(world, api)
        self.ray = Ray(world, api, self.nodes, self._try_pod, self._drive)
        self.nodes.began, self.nodes.ended = self._pod_began, self._pod_ended
        api.made, api.deletion_began, api.removed = self._made, self._deletion_began, self._removed
        self._serving: set[str] = set()  # pods that answer, by uid

    def answers(self, url: str) -> bool:
        """Whether a pod behind the load balancer at a URL would answer."""
        for service in self.api.of_kind("Service"):
            if url == _url(service):
                return any(self._is_ready(pod) for pod in self._behind(service))
        return False

    def _made(self, item: Object) -> None:
        controllers: dict[str, Callable[[Object], None]] = {
            "Pod": self.nodes.schedule,
            "Job": self._begin_job,
            "Deployment": self._begin_deployment,
            "Service": self._begin_service,
            "RayJob": self.ray.begin_job,
            "RayCluster": self.ray.begin_cluster,
        }
        if item["kind"] in controllers:
            controllers[item["kind"]](item)
        self._perhaps_by_hand(item)

    def _deletion_began(self, item: Object) -> None:
        """An object whose deletion has begun is held by its controller for a while."""
        if item["kind"] == "Pod":
            return self.nodes.remove(item)
        wait = self.world.duration(self.world.faults.slow_end, (5, 300), (0.1, 2))
        self.world.after(wait, lambda: self.api.release(item))

    def _removed(self, item: Object) -> None:
        if item["kind"] == "Pod":
            self.nodes.removed(item)
            self._update_owners(item)
        elif item["kind"] == "RayCluster":
            self.ray.cluster_removed(item)

    def _perhaps_by_hand(self, item: Object) -> None:
        """Maybe a user deletes an object, with or without its dependents."""
        world = self.world
        if not world.happens(world.faults.deleted * 0.3):
            return
        orphan = item["kind"] in ("Job", "RayJob", "RayCluster") and world.random.random() < 0.3

        def delete() -> None:
            if self.api.is_live(item) and world.now < world.calm:
                for member in [item] if orphan else self.api.family(item):
                    world.fact("fault", what="deleted", resource=self.api.name_of(member))
                self.api.delete(item, orphan=orphan)

        world.after(world.random.uniform(1, 1200), delete)

    # Pods

    def _pod_began(self, pod: Object) -> None:
        for owner in self._owners(pod):
            if owner["kind"] == "Job":
                self._perhaps_train(owner)
            elif owner["kind"] == "Deployment":
                self._load(pod, owner)
            elif owner["kind"] == "RayCluster":
                self.ray.pod_began(owner)

    def _pod_ended(self, pod: Object) -> None:
        self._update_owners(pod)

    def _update_owners(self, pod: Object) -> None:
        for owner in self._owners(pod):
            if owner["kind"] == "Job":
                self._judge(owner)
            elif owner["kind"] == "Deployment":
                self._scale(owner)
            elif owner["kind"] == "RayCluster":
                self.ray.pod_ended(owner, pod)

    def _owners(self, pod: Object) -> list[Object]:
        if cluster := self.ray.cluster_of(pod):
            return [cluster]
        uids = [owner["uid"] for owner in pod["metadata"].get("ownerReferences", [])]
        return [item for item in self.api.objects.values() if item["metadata"]["uid"] in uids]

    def _add_pod(self, owner: Object, template: Object, name: str, labels: dict[str, str], share: float) -> None:
        template = copy.deepcopy(template)
        metadata = {"name": f"{name}-{self.world.id():05d}", "namespace": owner["metadata"]["namespace"]}
        metadata["labels"] = {**template["metadata"]["labels"], **labels}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        pod = self.api.add(manifest, owner, share)
        for volume in template["spec"].get("volumes", ()):
            if wanted := volume.get("ephemeral", {}).get("volumeClaimTemplate"):
                own = {"name": f"{metadata['name']}-{volume['name']}", "namespace": metadata["namespace"]}
                claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {**wanted["metadata"], **own}}
                self.api.add({**claim, "spec": wanted["spec"]}, pod, 0.0)

    def _try_pod(self, owner: Object, template: Object, name: str, labels: dict[str, str], share: float) -> None:
        """Create a pod as soon as admission allows it."""
        if not self.api.is_live(owner):
            return
        if self._why_refused(owner, template):
            return self.world.after(AGAIN_SECONDS, lambda: self._try_pod(owner, template, name, labels, share))
        self._add_pod(owner, template, name, labels, share)

    def _why_refused(self, owner: Object, template: Object) -> str:
        """Why admission refuses a controller's pod; "" if it does not."""
        namespace, account = owner["metadata"]["namespace"], template["spec"]["serviceAccountName"]
        if account not in self.api.accounts[namespace]:
            return f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
        refused = self.world.happens(self.world.faults.quota * 0.3)
        return "pods is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1" if refused else ""

    # Jobs

    def _begin_job(self, job: Object) -> None:
        spec = job["spec"]
        assert spec.keys() <= JOB_FIELDS, f"of a Job, {spec.keys() - JOB_FIELDS} is not simulated"
        assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (0, "Failed"), "a Job has one try"
        assert spec["parallelism"] == spec["completions"], "and all of its pods at once"
        self.world.after(self.world.random.uniform(0.2, 2), lambda: self._fill(job))
        self.world.after(spec["activeDeadlineSeconds"], lambda: self._overrun(job))

    def _fill(self, job: Object) -> None:
        if not self.api.is_live(job) or has_condition(job, "Failed", "FailureTarget"):
            return
        if refusal := self._why_refused(job, job["spec"]["template"]):
            self.api.tell(job, "FailedCreate", f"Error creating: {refusal}")
            return self.world.after(AGAIN_SECONDS, lambda: self._fill(job))
        count, name = job["spec"]["completions"], job["metadata"]["name"]
        for index in range(count):
            own = f"{name}-{index}" if count > 1 else name
            self._add_pod(job, job["spec"]["template"], own, {JOB_NAME: name}, 1 / count)

    def _perhaps_train(self, job: Object) -> None:
        """Start training once all ranks run; the first rank reports."""
        pods = self.api.owned(job)
        running = [pod for pod in pods if pod["status"]["phase"] == "Running" and not self.nodes.has_stopped(pod)]
        if len(running) == job["spec"]["completions"] and self.api.is_live(job):
            self.launched(self._container(running, partial(self._finish_all, running)))

    def _drive(self, pods: list[Object], end: Callable[[int | None], None]) -> None:
        """A driver's end ends no pod. It ends when one of its hosts has failed (containers/train_ray/train.py)."""
        container = self._container(pods, end)
        self.launched(replace(container, die=partial(end, KILLED), hosts=len(pods) - 1, fail=end))

    def _container(self, pods: list[Object], end: Callable[[int | None], None]) -> Container:
        """The training container of several pods, by the first pod's environment. It ends if any pod ends."""
        environment = {variable["name"]: variable["value"] for variable in pods[0]["spec"]["containers"][0]["env"]}
        victim = self.world.random.choice(pods) if len(pods) > 1 else pods[0]
        return Container(
            environment=environment,
            is_over=lambda: any(self.nodes.has_stopped(pod) for pod in pods),
            end=end,
            die=partial(self.nodes.finish, victim, KILLED),
            take=partial(self.nodes.take, victim),
            lose=partial(self.nodes.lose, victim),
            hosts=len(pods),
            fail=partial(self.nodes.finish, victim),
        )

    def _finish_all(self, pods: list[Object], exit_code: int | None) -> None:
        """On success all ranks end together. After a failure the Job ends the remaining ranks."""
        code = KILLED if exit_code is None else exit_code
        for pod in pods if code == 0 else pods[:1]:
            self.nodes.finish(pod, code)

    def _overrun(self, job: Object) -> None:
        if not has_condition(job, "Complete", "FailureTarget") and self.api.is_live(job):
            self._fail(job, "DeadlineExceeded", "Job was active longer than specified deadline")

    def _judge(self, job: Object) -> None:
        """Update a Job's status from its pods. The Job has failed only when all of them have ended."""
        if not self.api.is_live(job) or has_condition(job, "Complete", "Failed"):
            return
        pods = self.api.owned(job)
        failed = next((pod for pod in pods if pod["status"]["phase"] == "Failed"), None)
        if has_condition(job, "FailureTarget"):
            if all(is_over(pod) for pod in pods):
                target = next(
                    condition for condition in job["status"]["conditions"] if condition["type"] == "FailureTarget"
                )
                self._conclude(job, "Failed", target["reason"], target["message"])
        elif failed is not None:
            self._fail(job, *_reason(job, failed))
        elif len(pods) == job["spec"]["completions"] and all(is_over(pod) for pod in pods):
            self._conclude(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")

    def _fail(self, job: Object, reason: str, message: str) -> None:
        set_condition(job, "FailureTarget", "True", reason, message)
        for pod in self.api.owned(job):
            if not is_over(pod):
                self.api.delete(pod)
        self._judge(job)

    def _conclude(self, job: Object, kind: str, reason: str, message: str) -> None:
        set_condition(job, kind, "True", reason, message)

        def forget() -> None:
            if self.api.is_live(job):
                self.api.delete(job)

        self.world.after(job["spec"]["ttlSecondsAfterFinished"], forget)

    # Deployments and Services

    def _begin_deployment(self, deployment: Object) -> None:
        self.world.after(self.world.random.uniform(0.2, 2), lambda: self._scale(deployment))

    def _scale(self, deployment: Object) -> None:
        """Create the missing pods of a Deployment and replace ended ones."""
        if not self.api.is_live(deployment):
            return
        pods = [pod for pod in self.api.owned(deployment) if not is_over(pod)]
        ready = sum(1 for pod in pods if self._is_ready(pod))
        deployment["status"] = {"observedGeneration": 1, "availableReplicas": ready}
        if len(pods) >= deployment["spec"]["replicas"]:
            return
        name = f"{deployment['metadata']['name']}-5d4f"
        if refusal := self._why_refused(deployment, deployment["spec"]["template"]):
            replica_set = {"kind": "ReplicaSet", "metadata": {"name": name, "uid": ""}}
            self.api.tell(replica_set, "FailedCreate", f"Error creating: {refusal}")
            return self.world.after(AGAIN_SECONDS, lambda: self._scale(deployment))
        self._add_pod(deployment, deployment["spec"]["template"], name, {}, 1.0)
        self.world.after(0.1, lambda: self._scale(deployment))

    def _load(self, pod: Object, deployment: Object) -> None:
        """The server loads the model."""
        world = self.world
        if world.happens(world.faults.unready):
            return
        seconds = world.duration(world.faults.slow_start, (60, 1800), (5, 90))

        def ready() -> None:
            if not self.nodes.has_stopped(pod) and self.api.is_live(pod):
                self._serving.add(pod["metadata"]["uid"])
                set_condition(pod, "Ready", "True")
                self._scale(deployment)

        world.after(seconds, ready)

    def _is_ready(self, pod: Object) -> bool:
        return pod["metadata"]["uid"] in self._serving and not self.nodes.has_stopped(pod)

    def _behind(self, service: Object) -> list[Object]:
        selector = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
        return [pod for pod in self.api.of_kind("Pod") if is_selected(selector, pod["metadata"]["labels"])]

    def _begin_service(self, service: Object) -> None:
        """Give a load balancer its address; other Services have names only."""
        if service["spec"].get("type") != "LoadBalancer":
            assert service["spec"]["clusterIP"] == "None", "no other Service is simulated"
            return

        def listen() -> None:
            address = f"10.1.0.{self.world.id()}"
            service["status"]["loadBalancer"] = {"ingress": [{"ip": address}]}

        self.world.after(self.world.duration(self.world.faults.slow_start, (60, 600), (10, 60)), listen)


def _reason(job: Object, pod: Object) -> tuple[str, str]:
    """Why a Job has failed with a pod: by its podFailurePolicy, or because a Job has only one try."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    ended = [status["state"]["terminated"]["exitCode"] for status in pod["status"].get("containerStatuses", [])]
    for index, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob", f"rule {rule} is not simulated"
        matching = f"matching FailJob rule at index {index}"
        for pattern in rule.get("onPodConditions", []):
            if has_condition(pod, pattern["type"]):
                return "PodFailurePolicy", f"Pod {name} has condition {pattern['type']} {matching}"
        codes = rule.get("onExitCodes")
        if codes and set(ended) & set(codes["values"]):
            text = f"Container {codes['containerName']} for pod {name} failed with exit code {ended[0]}"
            return "PodFailurePolicy", f"{text} {matching}"
    return "BackoffLimitExceeded", "Job has reached the specified backoff limit"


def _url(service: Object) -> str:
    """The URL of a Service's load balancer; "" if it has no address."""
    addresses: list[Any] = service["status"].get("loadBalancer", {}).get("ingress", [])
    return f"http://{addresses[0]['ip']}:{service['spec']['ports'][0]['port']}" if addresses else ""
