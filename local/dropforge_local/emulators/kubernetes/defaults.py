"""Defaults that the API server sets before it validates and stores an object (pkg/apis/*/v1/defaults.go)."""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from .gatewayrules import set_gateway_defaults, set_route_defaults
from .kinds import Kind
from .rayrules import set_cluster_defaults, set_job_defaults

Object = dict[str, Any]
TRACKING = "batch.kubernetes.io/job-tracking"
CONTROLLER_UID = "batch.kubernetes.io/controller-uid"
JOB_NAME = "batch.kubernetes.io/job-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
PROTECTED_CLAIM = "kubernetes.io/pvc-protection"
NEW_STATUS: Mapping[str, Object] = {
    "jobs.batch": {},
    "deployments.apps": {},
    "horizontalpodautoscalers.autoscaling": {},
    "replicasets.apps": {"replicas": 0},
    "services": {"loadBalancer": {}},
}


def set_defaults(kind: Kind, item: Object) -> None:
    """Set the defaults of `item` in place. Idempotent, because it runs at every write."""
    if default := DEFAULTS.get(kind.key):
        default(item)


def set_create_defaults(kind: Kind, item: Object) -> None:
    """Set the defaults of new objects only: initial status, generated labels and selectors."""
    match kind.key:
        case "pods":
            item["status"] = {"phase": "Pending", "qosClass": qos_class(item["spec"])}
        case "namespaces":
            item["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = item["metadata"]["name"]
            item["spec"], item["status"] = {"finalizers": ["kubernetes"]}, {"phase": "Active"}
        case "jobs.batch":
            _label_job(item)
        case "persistentvolumeclaims":
            _hold(item, PROTECTED_CLAIM)
            item["status"] = {"phase": "Pending"}
        case "persistentvolumes":
            item["status"] = {"phase": "Available"}
    if kind.key in NEW_STATUS:
        item["status"] = copy.deepcopy(NEW_STATUS[kind.key])


def qos_class(spec: Mapping[str, Any]) -> str:
    """BestEffort, Burstable or Guaranteed, by cpu and memory alone."""
    resources = [container.get("resources", {}) for container in spec["containers"]]
    wanted = [
        {key: requirements.get(part, {}).get(key) for part in ("limits", "requests") for key in ("cpu", "memory")}
        for requirements in resources
    ]
    if not any(value for requirements in wanted for value in requirements.values()):
        return "BestEffort"
    complete = all(
        requirements.get("limits", {}).get(key)
        and requirements["limits"][key] == requirements.get("requests", {}).get(key)
        for requirements in resources
        for key in ("cpu", "memory")
    )
    return "Guaranteed" if complete else "Burstable"


def _hold(item: Object, finalizer: str) -> None:
    finalizers = item["metadata"].setdefault("finalizers", [])
    if finalizer not in finalizers:
        finalizers.append(finalizer)


def _fill(part: Object, **defaults: Any) -> None:
    """Set the fields that are missing."""
    for field, value in defaults.items():
        part.setdefault(field, value)


def _pod(item: Object) -> None:
    spec = item["spec"]
    _pod_spec(spec)
    spec.setdefault("enableServiceLinks", True)
    account = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    spec["serviceAccountName"] = spec["serviceAccount"] = account


def _pod_spec(spec: Object) -> None:
    _fill(spec, restartPolicy="Always", dnsPolicy="ClusterFirst", terminationGracePeriodSeconds=30)
    _fill(spec, schedulerName="default-scheduler", securityContext={})
    if account := spec.get("serviceAccountName") or spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"] = account
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        _container(container)
    for volume in spec.get("volumes", ()):
        if template := volume.get("ephemeral", {}).get("volumeClaimTemplate"):
            template.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")
        for source in ("secret", "configMap"):
            if source in volume:
                volume[source].setdefault("defaultMode", 0o644)


def _container(container: Object) -> None:
    _fill(container, resources={}, terminationMessagePath="/dev/termination-log", terminationMessagePolicy="File")
    image = container.get("image", "")
    tag = re.search(r":([^/@]+)(?:@.*)?$", image)
    latest = "@" not in image and (tag is None or tag[1] == "latest")
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    resources = container["resources"]
    if limits := resources.get("limits"):
        resources["requests"] = {**limits, **resources.get("requests", {})}
    for port in container.get("ports", ()):
        port.setdefault("protocol", "TCP")
    for variable in container.get("env", ()):
        if reference := variable.get("valueFrom", {}).get("fieldRef"):
            reference.setdefault("apiVersion", "v1")
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe in container:
            _probe(container[probe])


def _probe(probe: Object) -> None:
    for key, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)):
        probe[key] = probe.get(key) or value
    if "httpGet" in probe:
        _fill(probe["httpGet"], path="/", scheme="HTTP")


def _template(item: Object) -> None:
    template = item["spec"].get("template")
    if template and template.get("spec"):
        template.setdefault("metadata", {})
        _pod_spec(template["spec"])


def _job(item: Object) -> None:
    spec = item["spec"]
    _template(item)
    if "parallelism" not in spec and "completions" not in spec:
        spec["completions"] = 1
    _fill(spec, parallelism=1, backoffLimit=6, completionMode="NonIndexed", suspend=False, manualSelector=False)
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        for pattern in rule.get("onPodConditions", ()):
            pattern.setdefault("status", "True")


def _label_job(item: Object) -> None:
    """Label a job's pods with its uid and select them by it, unless the user gives a selector."""
    spec, metadata = item["spec"], item["metadata"]
    if spec.get("manualSelector") or "template" not in spec:
        return
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    labels |= dict.fromkeys((CONTROLLER_UID, "controller-uid"), metadata["uid"])
    labels |= dict.fromkeys((JOB_NAME, "job-name"), metadata["name"])
    spec["selector"] = {"matchLabels": {CONTROLLER_UID: metadata["uid"]}}


def _deployment(item: Object) -> None:
    spec = item["spec"]
    _template(item)
    _fill(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    strategy = spec.setdefault("strategy", {})
    if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
        _fill(strategy.setdefault("rollingUpdate", {}), maxSurge="25%", maxUnavailable="25%")


def _replica_set(item: Object) -> None:
    _template(item)
    item["spec"].setdefault("replicas", 1)


def _service(item: Object) -> None:
    spec = item["spec"]
    _fill(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    _fill(spec, ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    if spec["type"] == "LoadBalancer":
        spec.setdefault("externalTrafficPolicy", "Cluster")
    for port in spec.get("ports", ()):
        _fill(port, protocol="TCP", targetPort=port.get("port"))


def _secret(item: Object) -> None:
    item.setdefault("type", "Opaque")
    for key, value in item.pop("stringData", {}).items():
        item.setdefault("data", {})[key] = base64.b64encode(value.encode()).decode()


def _claim(item: Object) -> None:
    item["spec"].setdefault("volumeMode", "Filesystem")


def _storage_class(item: Object) -> None:
    _fill(item, reclaimPolicy="Delete", volumeBindingMode="Immediate")


def _autoscaler(item: Object) -> None:
    item["spec"].setdefault("minReplicas", 1)


def _network_policy(item: Object) -> None:
    spec = item.setdefault("spec", {})
    spec.setdefault("policyTypes", ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    for rule in [*spec.get("ingress", ()), *spec.get("egress", ())]:
        for port in rule.get("ports", ()):
            port.setdefault("protocol", "TCP")


DEFAULTS: Mapping[str, Callable[[Object], None]] = {
    "pods": _pod,
    "persistentvolumeclaims": _claim,
    "storageclasses.storage.k8s.io": _storage_class,
    "jobs.batch": _job,
    "deployments.apps": _deployment,
    "replicasets.apps": _replica_set,
    "services": _service,
    "secrets": _secret,
    "horizontalpodautoscalers.autoscaling": _autoscaler,
    "networkpolicies.networking.k8s.io": _network_policy,
    "gateways.gateway.networking.k8s.io": set_gateway_defaults,
    "httproutes.gateway.networking.k8s.io": set_route_defaults,
    "rayjobs.ray.io": set_job_defaults,
    "rayclusters.ray.io": set_cluster_defaults,
}
