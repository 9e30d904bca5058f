"""Serving `gke`: vLLM as a Deployment on a standing Autopilot cluster, behind a load balancer inside the VPC.

With max_instances above min_instances the length of vLLM's queue decides how many instances run:
https://cloud.google.com/kubernetes-engine/docs/how-to/machine-learning/inference/autoscaling
Weights stream from the bucket, by the pod's own identity:
https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes, pods
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes, Object
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import START_HINT, Deployment, endpoint_labels, server_environment
from dropforge.platforms.training import Waits
from dropforge.spec import JobSpec, seconds

from .catalog import gke_price
from .requests import node_labels
from .spec import ClusterTarget, GkeServe

PORT = 8000
USER = 10001  # of containers/serve_vllm/Dockerfile; runAsNonRoot needs the user's number
INSTANCE = "app.kubernetes.io/instance"  # selects the endpoint's pods and not the training pods of the same run
QUEUE_METRIC = "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"
READY_WAIT_SECONDS = 20.0  # the wait of one call; the workflow calls again
LOOK_SECONDS = 0.5
PROBE_PERIOD_SECONDS = 5
DRAIN_SECONDS = 10  # until the load balancer stops sending requests to an ending pod
GRACE_SECONDS = 25  # for the whole end of a pod; Spot capacity gives no more
SHARED_MEMORY_GIB = 2  # of /dev/shm per GPU: tensor parallelism passes tensors through it
_REFUSED = re.compile(r"not found|forbidden|denied|exceeded quota|invalid", re.I)
# The kinds of an endpoint's resources.
_KINDS = (
    ("apps/v1", "Deployment"),
    ("v1", "Service"),
    ("autoscaling/v2", "HorizontalPodAutoscaler"),
    ("monitoring.googleapis.com/v1", "PodMonitoring"),
)


class GkeDeployment:
    """See `Server` for the contract of each verb."""

    def region(self, deployment: Deployment) -> str:
        return _region(deployment.spec)

    def price(self, spec: JobSpec) -> HourlyPrice:
        serve = _serve(spec)
        if serve.price_usd_per_hour is not None:
            return HourlyPrice(serve.price_usd_per_hour, None, "serve.price_usd_per_hour in the spec")
        return gke_price(serve.accelerator, serve.accelerator_count, _region(spec), serve.capacity)

    def resources(self, deployment: Deployment) -> list[Resource]:
        manifests = [deployment_manifest(deployment), service_manifest(deployment), monitoring_manifest(deployment)]
        if _scales(deployment):
            manifests.append(autoscaler_manifest(deployment))
        return [kubernetes.resource_of(cluster_of(deployment), manifest) for manifest in manifests]

    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        api = _connect(cloud, deployment)
        if api is None:
            return Waits(f"{cluster_of(deployment)} is being created")
        resources = self.resources(deployment)
        for resource in resources:
            api.ensure(cluster_of(deployment), resource.request)
        deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
        reason = ""
        while cloud.clock.monotonic() < deadline:
            server, service = api.get(resources[0].name), api.get(resources[1].name)
            is_available = server is not None and _is_available(server, _serve(deployment.spec))
            if is_available and service and (url := url_of(service)):
                return url
            reason = _wait_reason(api, deployment)
            cloud.clock.sleep(LOOK_SECONDS)
        return Waits(reason)

    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        api = _connect(cloud, deployment)
        if api is None:
            return CloudError(
                ErrorClass.CONFIG, f"{cluster_of(deployment)} is still being created", "wait until it runs"
            )
        server_pods = _pods(api, deployment)
        if not server_pods:
            return CloudError(ErrorClass.CODE, _no_pods(api, deployment) or "its Deployment has no pods", START_HINT)
        reasons = []
        for pod in server_pods:
            events = _events(api, deployment, pod["metadata"]["name"])
            if error := pods.unschedulable(pod, events):
                return error
            if not _is_ready(pod):
                reasons.append(f"pod {pod['metadata']['name']}: {pods.waits_for(pod, events)}")
        if reasons:
            return CloudError(ErrorClass.CODE, "; ".join(reasons[:3]), START_HINT)
        events = _events(api, deployment, names.endpoint_name(deployment.run))
        message = pods.last_event(events, "SyncLoadBalancerFailed") or "its load balancer has no address"
        hint = "look at the events of its Service: `kubectl describe service`"
        return CloudError(ErrorClass.INFRASTRUCTURE, message, hint)

    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        return kubernetes.exists(cloud, self.resources(deployment)[0].name)

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        yield from kubernetes.listed(cloud, _listed_in, is_used=bool(cloud.settings.gke_cluster))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        is_deployment = kind == "apps.k8s.io/Deployment"
        return kubernetes.delete(cloud, name, of_it=f"{INSTANCE}={name.rsplit('/', 1)[1]}" if is_deployment else "")


def cluster_of(deployment: Deployment) -> str:
    """The full name of the cluster that serves: the endpoint's, else the target's, else the deployment's."""
    spec, settings = deployment.spec, deployment.settings
    trains_on = spec.target.cluster.name if isinstance(spec.target, ClusterTarget) else None
    cluster = _serve(spec).cluster or trains_on or settings.gke_cluster
    return kubernetes.cluster_name(settings.project, _region(spec), cluster)


def deployment_manifest(deployment: Deployment) -> Object:
    """apps/v1 Deployment: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/deployment-v1/"""
    serve, labels = _serve(deployment.spec), _labels(deployment)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(deployment),
        "spec": {
            "replicas": serve.min_instances,
            "selector": {"matchLabels": _selector(deployment)},
            # A surge would need more GPUs than there are instances, and wait for them.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": seconds(serve.startup_timeout),
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(deployment, serve)},
        },
    }


def service_manifest(deployment: Deployment) -> Object:
    """v1 Service with an internal address, for clients in every region of the VPC.

    https://cloud.google.com/kubernetes-engine/docs/concepts/service-load-balancer-parameters
    """
    metadata = _metadata(deployment)
    metadata["annotations"] = {
        "networking.gke.io/load-balancer-type": "Internal",
        "networking.gke.io/internal-load-balancer-allow-global-access": "true",
    }
    port = {"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}
    spec = {"type": "LoadBalancer", "selector": _selector(deployment), "ports": [port]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def monitoring_manifest(deployment: Deployment) -> Object:
    """monitoring.googleapis.com/v1 PodMonitoring: Managed Service for Prometheus reads vLLM's metrics with it.

    Every Autopilot cluster has the kind. Each sample costs money, so only an autoscaler gets them four times a minute.
    """
    endpoint = {"port": "http", "path": "/metrics", "interval": "15s" if _scales(deployment) else "60s"}
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": _metadata(deployment),
        "spec": {"selector": {"matchLabels": _selector(deployment)}, "endpoints": [endpoint]},
    }


def autoscaler_manifest(deployment: Deployment) -> Object:
    """autoscaling/v2 HorizontalPodAutoscaler: it scales by the number of waiting requests of each instance."""
    serve, metadata = _serve(deployment.spec), _metadata(deployment)
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
    serve = _serve(deployment.spec)
    return serve.max_instances > serve.min_instances


def url_of(service: Object) -> str | None:
    """The URL of a load balancer; None while it has no address. A port beside the address overrides the Service's."""
    for ingress in service.get("status", {}).get("loadBalancer", {}).get("ingress") or ():
        host = ingress.get("ip") or ingress.get("hostname")
        ports = ingress.get("ports") or service["spec"]["ports"]
        if host:
            return f"http://{host}:{ports[0]['port']}"
    return None


def _pod_spec(deployment: Deployment, serve: GkeServe) -> Object:
    shared_memory = {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB * serve.accelerator_count}Gi"}
    return {
        "serviceAccountName": deployment.settings.kubernetes_server_account,
        "automountServiceAccountToken": False,  # the server calls no Kubernetes API
        "enableServiceLinks": False,  # vLLM could read variables that Kubernetes names after Services
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": node_labels(serve.accelerator, serve),
        "containers": [_container(deployment, serve)],
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "shared-memory", "emptyDir": shared_memory}],
    }


def _container(deployment: Deployment, serve: GkeServe) -> Object:
    limits = {"nvidia.com/gpu": str(serve.accelerator_count)}
    if serve.cpu is not None:
        limits["cpu"] = str(serve.cpu)
    if serve.memory_gib is not None:
        limits["memory"] = f"{serve.memory_gib}Gi"
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": PROBE_PERIOD_SECONDS}
    environment = server_environment(deployment, serve.max_model_len, serve.max_num_seqs)
    parallel = {"name": "DROPFORGE_TENSOR_PARALLEL_SIZE", "value": str(serve.accelerator_count)}
    return {
        "name": "server",
        "image": deployment.settings.serve_vllm_image,
        "env": [*environment, parallel],
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
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the end of the log is reported with the exit code
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _metadata(deployment: Deployment) -> Object:
    name, namespace = names.endpoint_name(deployment.run), deployment.settings.kubernetes_namespace
    return {"name": name, "namespace": namespace, "labels": _labels(deployment)}


def _labels(deployment: Deployment) -> dict[str, str]:
    return {**endpoint_labels(deployment), **_selector(deployment)}


def _selector(deployment: Deployment) -> dict[str, str]:
    return {INSTANCE: names.endpoint_name(deployment.run)}


def _region(spec: JobSpec) -> str:
    return _serve(spec).region or spec.target.placements[0].region


def _serve(spec: JobSpec) -> GkeServe:
    assert isinstance(spec.serve, GkeServe), "the registry gives this endpoint only specs of its type"
    return spec.serve


def _connect(cloud: Cloud, deployment: Deployment) -> Kubernetes | None:
    """The API of the cluster that serves; None while the cluster is being created."""
    cluster = kubernetes.standing_cluster(cloud, cluster_of(deployment), "serve.cluster")
    return None if cluster is None else kubernetes.connect(cloud, cluster)


def _pods(api: Kubernetes, deployment: Deployment) -> list[Object]:
    selector = ",".join(f"{key}={value}" for key, value in _selector(deployment).items())
    return api.find(deployment.settings.kubernetes_namespace, "pods", labelSelector=selector)


def _events(api: Kubernetes, deployment: Deployment, name: str) -> list[Object]:
    selector = f"involvedObject.name={name}"
    return api.find(deployment.settings.kubernetes_namespace, "events", fieldSelector=selector)


def _is_available(server: Object, serve: GkeServe) -> bool:
    """Whether the controller has observed the current generation and enough pods are ready."""
    status = server.get("status", {})
    is_observed = status.get("observedGeneration", 0) >= server["metadata"]["generation"]
    return bool(is_observed and status.get("availableReplicas", 0) >= serve.min_instances)


def _is_ready(pod: Object) -> bool:
    return (pods.condition_of(pod, "Ready") or {}).get("status") == "True"


def _wait_reason(api: Kubernetes, deployment: Deployment) -> str:
    """Why the endpoint is not ready yet. Raises CloudError for a problem that does not pass by waiting."""
    server_pods = _pods(api, deployment)
    if not server_pods:
        message = _no_pods(api, deployment)
        error_class = ErrorClass.QUOTA if "exceeded quota" in message else ErrorClass.CONFIG
        hint = "mend what the message names in the cluster's namespace"
        if _REFUSED.search(message):
            raise CloudError(error_class, message, hint)
        return message or "its Deployment has no pods yet"
    reasons = []
    for pod in server_pods:
        if _is_ready(pod):
            continue
        events = _events(api, deployment, pod["metadata"]["name"])
        if error := pods.broken(pod, events):
            raise error
        waiting = pods.unschedulable(pod, events)
        reasons.append(waiting.message if waiting else pods.starts(pod))
    return reasons[0] if reasons else "its load balancer has no address yet"


def _no_pods(api: Kubernetes, deployment: Deployment) -> str:
    """Why Kubernetes creates no pod (a missing service account, a quota of the namespace); "" if it is not known."""
    name, namespace = names.endpoint_name(deployment.run), deployment.settings.kubernetes_namespace
    selector = "involvedObject.kind=ReplicaSet,reason=FailedCreate"
    events = api.find(namespace, "events", fieldSelector=selector)
    own = [event for event in events if event["involvedObject"]["name"].startswith(f"{name}-")]
    message = pods.last_event(own, "FailedCreate")
    return f"{name} gets no pods: {message}" if message else ""


def _listed_in(api: Kubernetes, cluster: str, settings: Settings) -> list[Listed]:
    """Endpoint resources in one cluster."""
    selector = f"{names.MANAGED_BY}=dropforge,{names.EXPIRES_LABEL}"
    return [
        kubernetes.listed_of(cluster, item)
        for kind in _KINDS
        for item in api.each(settings.kubernetes_namespace, *kind, selector)
    ]
