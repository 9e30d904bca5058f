"""The Kubernetes objects that serve a model: a Deployment of vLLM, its Service, and their scaling and metrics.

A run's own endpoint has such a set, and so has each revision of a named endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import kubernetes, pods
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes, Object
from dropforge.cloud.resource import Resource
from dropforge.platforms.serving import Deployment, compile_variables, endpoint_labels, server_environment
from dropforge.platforms.training import Waits
from dropforge.spec import JobSpec, seconds

from .requests import DRIVER_LIBRARIES, node_labels
from .spec import ClusterTarget, GkeServe

PORT = 8000
USER = 10001  # of containers/serve_vllm/Dockerfile; runAsNonRoot needs the user's number
INSTANCE = "app.kubernetes.io/instance"  # selects the pods of one workload and not the training pods of the same run
QUEUE_METRIC = "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"
READY_WAIT_SECONDS = 20.0  # the wait of one call; the workflow calls again
LOOK_SECONDS = 0.5
PROBE_PERIOD_SECONDS = 5
STOP_INTAKE_SECONDS = 10  # until the load balancer stops sending requests to an ending pod
END_SECONDS = 5  # for the end of a server without requests
SPOT_DRAIN_SECONDS = 10  # for unfinished answers: Spot capacity gives 25 s for the whole end of a pod
# vLLM's image sets the same value for GKE (https://github.com/vllm-project/vllm/pull/25766). Other images do not have
# the first directory.
LIBRARIES = f"{DRIVER_LIBRARIES}:/usr/local/cuda/lib64"
SHARED_MEMORY_GIB = 2  # of /dev/shm per GPU: tensor parallelism passes tensors through it
# The kinds of a workload's objects, and of a named endpoint's.
KINDS = (
    ("apps/v1", "Deployment"),
    ("v1", "Service"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("monitoring.googleapis.com/v1", "PodMonitoring"),
)
_REFUSED = re.compile(r"not found|forbidden|denied|exceeded quota|invalid", re.I)


@dataclass(frozen=True)
class Workload:
    """The objects that serve a model: the short name that all of them have, their labels, and the model.

    `drain_seconds`: how long an ending server may take to finish its answers; every answer then ends its connection,
    so that the next request reaches the pods that the Service selects by then. 0: the server keeps connections.
    """

    name: str
    labels: dict[str, str]
    deployment: Deployment
    drain_seconds: int = 0

    @property
    def selector(self) -> dict[str, str]:
        return {INSTANCE: self.name}


def own_workload(deployment: Deployment) -> Workload:
    """The workload of a run's own endpoint."""
    return Workload(names.endpoint_name(deployment.run), endpoint_labels(deployment), deployment)


def manifests(workload: Workload, *, has_address: bool = True) -> list[Object]:
    """The objects of a workload. The first two are its Deployment and its Service.

    `has_address`: the Service has an address for clients outside of the cluster.
    """
    service = service_manifest(workload) if has_address else backend_manifest(workload)
    made = [deployment_manifest(workload), service, monitoring_manifest(workload)]
    return [*made, autoscaler_manifest(workload)] if _scales(workload.deployment) else made


def resources(workload: Workload) -> list[Resource]:
    """`manifests` as the ledger names them."""
    cluster = cluster_of(workload.deployment)
    return [kubernetes.resource_of(cluster, manifest) for manifest in manifests(workload)]


def cluster_of(deployment: Deployment) -> str:
    """The full name of the cluster that serves: the endpoint's, else the target's, else the deployment's."""
    spec, settings = deployment.spec, deployment.settings
    trains_on = spec.target.cluster.name if isinstance(spec.target, ClusterTarget) else None
    cluster = serve_of(spec).cluster or trains_on or settings.gke_cluster
    return kubernetes.cluster_name(settings.project, region_of(spec), cluster)


def deployment_manifest(workload: Workload) -> Object:
    """apps/v1 Deployment: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/deployment-v1/"""
    serve = serve_of(workload.deployment.spec)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(workload),
        "spec": {
            "replicas": serve.min_instances,
            "selector": {"matchLabels": workload.selector},
            # A surge would need more GPUs than there are instances, and wait for them.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": seconds(serve.startup_timeout),
            "template": {"metadata": {"labels": _labels(workload)}, "spec": _pod_spec(workload, serve)},
        },
    }


def service_manifest(workload: Workload) -> Object:
    """v1 Service with an internal address, for clients in every region of the VPC.

    https://cloud.google.com/kubernetes-engine/docs/concepts/service-load-balancer-parameters
    """
    metadata = _metadata(workload)
    metadata["annotations"] = {
        "networking.gke.io/load-balancer-type": "Internal",
        "networking.gke.io/internal-load-balancer-allow-global-access": "true",
    }
    return {**backend_manifest(workload), "metadata": metadata, "spec": _service_spec(workload, "LoadBalancer")}


def backend_manifest(workload: Workload) -> Object:
    """v1 Service without an address outside of the cluster: a load balancer of others forwards to its pods."""
    spec = _service_spec(workload, "ClusterIP")
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(workload), "spec": spec}


def _service_spec(workload: Workload, kind: str) -> Object:
    port = {"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}
    return {"type": kind, "selector": workload.selector, "ports": [port]}


def monitoring_manifest(workload: Workload) -> Object:
    """monitoring.googleapis.com/v1 PodMonitoring: Managed Service for Prometheus reads vLLM's metrics with it.

    Every Autopilot cluster has the kind. Each sample costs money, so only an autoscaler gets them four times a minute.
    """
    endpoint = {"port": "http", "path": "/metrics", "interval": "15s" if _scales(workload.deployment) else "60s"}
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": _metadata(workload),
        "spec": {"selector": {"matchLabels": workload.selector}, "endpoints": [endpoint]},
    }


def autoscaler_manifest(workload: Workload) -> Object:
    """autoscaling/v2 HorizontalPodAutoscaler: it scales by the number of waiting requests of each instance."""
    serve, metadata = serve_of(workload.deployment.spec), _metadata(workload)
    target = {"type": "AverageValue", "averageValue": str(serve.target_queue_length)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"]},
            "minReplicas": serve.min_instances,
            "maxReplicas": serve.max_instances,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": QUEUE_METRIC}, "target": target}}],
        },
    }


def _scales(deployment: Deployment) -> bool:
    serve = serve_of(deployment.spec)
    return serve.max_instances > serve.min_instances


def url_of(service: Object) -> str | None:
    """The URL of a load balancer; None while it has no address. A port beside the address overrides the Service's."""
    for ingress in service.get("status", {}).get("loadBalancer", {}).get("ingress") or ():
        host = ingress.get("ip") or ingress.get("hostname")
        ports = ingress.get("ports") or service["spec"]["ports"]
        if host:
            return f"http://{host}:{ports[0]['port']}"
    return None


def _pod_spec(workload: Workload, serve: GkeServe) -> Object:
    drain_seconds = workload.drain_seconds or SPOT_DRAIN_SECONDS
    shared_memory = {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB * serve.accelerator_count}Gi"}
    return {
        "serviceAccountName": workload.deployment.settings.kubernetes_server_account,
        "automountServiceAccountToken": False,  # the server calls no Kubernetes API
        "enableServiceLinks": False,  # vLLM could read variables that Kubernetes names after Services
        "terminationGracePeriodSeconds": STOP_INTAKE_SECONDS + drain_seconds + END_SECONDS,
        "nodeSelector": node_labels(serve.accelerator, serve),
        "containers": [_container(workload, serve)],
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "shared-memory", "emptyDir": shared_memory}],
    }


def _container(workload: Workload, serve: GkeServe) -> Object:
    deployment = workload.deployment
    limits = {"nvidia.com/gpu": str(serve.accelerator_count)}
    if serve.cpu is not None:
        limits["cpu"] = str(serve.cpu)
    if serve.memory_gib is not None:
        limits["memory"] = f"{serve.memory_gib}Gi"
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_PERIOD_SECONDS}
    environment = server_environment(deployment, serve.max_model_len, serve.max_num_seqs)
    environment.append({"name": "DROPFORGE_TENSOR_PARALLEL_SIZE", "value": str(serve.accelerator_count)})
    environment.append({"name": "LD_LIBRARY_PATH", "value": LIBRARIES})
    environment += compile_variables(deployment.settings.serve_vllm_image)
    if workload.drain_seconds:
        environment.append({"name": "DROPFORGE_DRAIN_SECONDS", "value": str(workload.drain_seconds)})
    return {
        "name": "server",
        "image": deployment.settings.serve_vllm_image,
        "env": environment,
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": limits, "requests": {"ephemeral-storage": f"{serve.ephemeral_storage_gib}Gi"}},
        "startupProbe": {
            **health,
            "timeoutSeconds": PROBE_PERIOD_SECONDS - 1,
            "failureThreshold": max(1, seconds(serve.startup_timeout) // PROBE_PERIOD_SECONDS),
        },
        "readinessProbe": {**health, "timeoutSeconds": PROBE_PERIOD_SECONDS - 1},
        # A server under load answers late, so Kubernetes restarts it only after a minute without an answer.
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": STOP_INTAKE_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the end of the log is reported with the exit code
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _metadata(workload: Workload) -> Object:
    namespace = workload.deployment.settings.kubernetes_namespace
    return {"name": workload.name, "namespace": namespace, "labels": _labels(workload)}


def _labels(workload: Workload) -> dict[str, str]:
    return {**workload.labels, **workload.selector}


def region_of(spec: JobSpec) -> str:
    """The region of an endpoint's cluster."""
    return serve_of(spec).region or spec.target.placements[0].region


def serve_of(spec: JobSpec) -> GkeServe:
    """The part `serve` of a spec."""
    assert isinstance(spec.serve, GkeServe), "the registry gives this endpoint only specs of its type"
    return spec.serve


def connect(cloud: Cloud, deployment: Deployment) -> Kubernetes | None:
    """The API of the cluster that serves; None while the cluster is being created."""
    cluster = kubernetes.standing_cluster(cloud, cluster_of(deployment), "serve.cluster")
    return None if cluster is None else kubernetes.connect(cloud, cluster)


def pods_of(api: Kubernetes, workload: Workload) -> list[Object]:
    """The pods of a workload."""
    selector = ",".join(f"{key}={value}" for key, value in workload.selector.items())
    return api.find(workload.deployment.settings.kubernetes_namespace, "pods", labelSelector=selector)


def events_of(api: Kubernetes, workload: Workload, name: str) -> list[Object]:
    """The events about an object."""
    selector = f"involvedObject.name={name}"
    return api.find(workload.deployment.settings.kubernetes_namespace, "events", fieldSelector=selector)


def _is_available(server: Object, serve: GkeServe) -> bool:
    """Whether the controller has observed the current generation and enough pods are ready."""
    status = server.get("status", {})
    is_observed = status.get("observedGeneration", 0) >= server["metadata"]["generation"]
    return bool(is_observed and status.get("availableReplicas", 0) >= serve.min_instances)


def is_ready(pod: Object) -> bool:
    """Whether a pod answers its readiness probe."""
    return (pods.condition_of(pod, "Ready") or {}).get("status") == "True"


def url_once_ready(
    cloud: Cloud, api: Kubernetes, workload: Workload, find_url: Callable[[], str | None] | None = None
) -> str | Waits:
    """Wait for a while. Returns the URL of a workload once its pods are ready, or what Kubernetes waits for.

    `find_url` finds the URL, if it is not that of the workload's Service. Raises CloudError for a problem that does not
    pass by waiting.
    """
    server_name, service_name = (resource.name for resource in resources(workload)[:2])
    find = find_url or (lambda: url_of(service) if (service := api.get(service_name)) else None)
    deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
    reason = ""
    while cloud.clock.monotonic() < deadline:
        server = api.get(server_name)
        is_up = server is not None and _is_available(server, serve_of(workload.deployment.spec))
        if is_up and (url := find()):
            return url
        reason = wait_reason(api, workload)
        cloud.clock.sleep(LOOK_SECONDS)
    return Waits(reason)


def wait_reason(api: Kubernetes, workload: Workload) -> str:
    """Why the endpoint is not ready yet. Raises CloudError for a problem that does not pass by waiting."""
    server_pods = pods_of(api, workload)
    if not server_pods:
        message = no_pods(api, workload)
        error_class = ErrorClass.QUOTA if "exceeded quota" in message else ErrorClass.CONFIG
        hint = "mend what the message names in the cluster's namespace"
        if _REFUSED.search(message):
            raise CloudError(error_class, message, hint)
        return message or "its Deployment has no pods yet"
    reasons = []
    for pod in server_pods:
        if is_ready(pod):
            continue
        events = events_of(api, workload, pod["metadata"]["name"])
        if error := pods.broken(pod, events):
            raise error
        waiting = pods.unschedulable(pod, events)
        reasons.append(waiting.message if waiting else pods.starts(pod))
    return reasons[0] if reasons else "its load balancer does not forward to it yet"


def no_pods(api: Kubernetes, workload: Workload) -> str:
    """Why Kubernetes creates no pod (a missing service account, a quota of the namespace); "" if it is not known."""
    name, namespace = workload.name, workload.deployment.settings.kubernetes_namespace
    selector = "involvedObject.kind=ReplicaSet,reason=FailedCreate"
    events = api.find(namespace, "events", fieldSelector=selector)
    own = [event for event in events if event["involvedObject"]["name"].rpartition("-")[0] == name]
    message = pods.last_event(own, "FailedCreate")
    return f"{name} gets no pods: {message}" if message else ""
