"""Rules for RayJobs and RayClusters: KubeRay's (utils/validation.go), and refusals of features not emulated here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import names
from .kuberay import auth_problem
from .refusals import Cause, not_emulated

Object = Mapping[str, Any]
LONGEST_CLUSTER_NAME = 53
LONGEST_JOB_NAME = LONGEST_CLUSTER_NAME - 6  # the cluster's name adds a suffix
INVALID = "The RayJob spec is invalid: "
# Fields of RayJobs and RayClusters that the operator supports and this emulator does not.
JOB_FIELDS = ("clusterSelector", "deletionStrategy", "managedBy", "submitterPodTemplate", "submitterConfig")
CLUSTER_FIELDS = (
    "enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions", "managedBy", "headServiceAnnotations",
    "tlsOptions", "historyServerOptions", "networkPolicy", "upgradeStrategy",
)  # fmt: skip
HEAD_FIELDS = ("headService", "enableIngress", "serviceType")


def ray_job(item: Object) -> Iterator[Cause]:
    """Refusals of the API server: only of features not emulated; the operator reports all other problems."""
    spec = item.get("spec", {})
    for field in JOB_FIELDS:
        if spec.get(field):
            raise not_emulated(f"spec.{field} of a RayJob")
    if (mode := spec.get("submissionMode")) not in ("HTTPMode", None):
        raise not_emulated(f"spec.submissionMode {mode} of a RayJob")
    if "rayClusterSpec" in spec:
        check_emulated(spec["rayClusterSpec"], "spec.rayClusterSpec")
    yield from ()


def ray_cluster(item: Object) -> Iterator[Cause]:
    check_emulated(item.get("spec", {}), "spec")
    yield from ()


def check_emulated(spec: Object, at: str) -> None:
    """Raise the refusal of a feature that is not emulated."""
    for field in CLUSTER_FIELDS:
        if spec.get(field):
            raise not_emulated(f"{at}.{field}")
    for field in HEAD_FIELDS:
        if spec.get("headGroupSpec", {}).get(field):
            raise not_emulated(f"{at}.headGroupSpec.{field}")
    groups = [spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", ())]
    for group in groups:
        for field in ("resources", "labels", "scaleStrategy"):
            if group.get(field):
                raise not_emulated(f"{field} of a group of {at}")
    if spec.get("authOptions", {}).get("enableK8sTokenAuth"):
        raise not_emulated(f"{at}.authOptions.enableK8sTokenAuth")


def job_problem(item: Object) -> str:
    """Why the operator fails a RayJob with ValidationFailed; "" if the RayJob is valid."""
    name, spec = item["metadata"]["name"], item["spec"]
    if len(name) > LONGEST_JOB_NAME:
        return f"The RayJob metadata is invalid: RayJob name should be no more than {LONGEST_JOB_NAME} characters"
    if problem := names.service_problem(name):
        return f"The RayJob metadata is invalid: RayJob name should be a valid DNS1035 label: [{problem}]"
    shutdown = spec["shutdownAfterJobFinishes"]
    if spec.get("suspend") and not shutdown:
        return f"{INVALID}a RayJob with shutdownAfterJobFinishes set to false is not allowed to be suspended"
    if spec["ttlSecondsAfterFinished"] < 0:
        return f"{INVALID}TTLSecondsAfterFinished must be a non-negative integer"
    if not shutdown and spec["ttlSecondsAfterFinished"] > 0:
        return f"{INVALID}a RayJob with shutdownAfterJobFinishes set to false cannot have TTLSecondsAfterFinished"
    if "rayClusterSpec" not in spec:
        return f"{INVALID}one of RayClusterSpec or ClusterSelector must be set"
    if problem := cluster_problem(spec["rayClusterSpec"]):
        return f"{INVALID}{problem}"
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field, 1) <= 0:
            return f"{INVALID}{field} must be a positive integer"
    if spec["backoffLimit"] < 0:
        return f"{INVALID}backoffLimit must be a positive integer"
    return ""


def cluster_problem(spec: Object) -> str:
    """Why the operator refuses a RayClusterSpec; "" if the spec is valid."""
    if not spec["headGroupSpec"]["template"]["spec"]["containers"]:
        return "headGroupSpec should have at least one container"
    for group in spec.get("workerGroupSpecs", ()):
        name, low, high = group["groupName"], group["minReplicas"], group["maxReplicas"]
        if not group["template"]["spec"]["containers"]:
            return "workerGroupSpec should have at least one container"
        if low < 0:
            return f"worker group {name} has negative minReplicas {low}"
        if high < 0:
            return f"worker group {name} has negative maxReplicas {high}"
        if low > high:
            return f"worker group {name} has minReplicas {low} greater than maxReplicas {high}"
    return auth_problem(spec)


def set_job_defaults(item: dict[str, Any]) -> None:
    """Set the defaults that the CRD defines."""
    spec = item["spec"]
    defaults: dict[str, Any] = {
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": False,
        "ttlSecondsAfterFinished": 0,
        "backoffLimit": 0,
    }
    for field, value in defaults.items():
        spec.setdefault(field, value)
    if "rayClusterSpec" in spec:
        _set_group_defaults(spec["rayClusterSpec"])


def set_cluster_defaults(item: dict[str, Any]) -> None:
    _set_group_defaults(item["spec"])


def _set_group_defaults(spec: dict[str, Any]) -> None:
    for group in spec.get("workerGroupSpecs", ()):
        for field, value in (("minReplicas", 0), ("maxReplicas", 2**31 - 1), ("replicas", 0), ("numOfHosts", 1)):
            group.setdefault(field, value)
