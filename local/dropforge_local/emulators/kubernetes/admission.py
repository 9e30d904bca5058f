"""Refusals by admission, after validation: missing service accounts, Autopilot's constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kinds import CLAIM, DEPLOYMENT, JOB, POD, REPLICA_SET, SERVICE_ACCOUNT, STORAGE_CLASS, Kind
from .quantities import parse_quantity
from .refusals import Refusal, forbidden
from .store import Object, Store

GPU, TPU = "nvidia.com/gpu", "google.com/tpu"
ACCELERATOR = "cloud.google.com/gke-accelerator"
TPU_ACCELERATOR, TPU_TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
COMPUTE_CLASS = "cloud.google.com/compute-class"
# The largest pods without an accelerator, by compute class ("" is general-purpose). From memory, but for 30 vCPUs:
# https://cloud.google.com/kubernetes-engine/docs/concepts/autopilot-resource-requests could not be read on 2026-11-26.
LARGEST_PODS = {
    "": {"cpu": 30, "memory": 110 * 2**30},
    "Balanced": {"cpu": 222, "memory": 851 * 2**30},
}
WARDEN = (
    'admission webhook "warden-validating.common-webhooks.networking.gke.io" denied the request: GKE Warden '
    "rejected the request because it violates one or more constraints. Violations details: "
)


def admit(kind: Kind, item: Object, store: Store, *, autopilot: bool, old: Object | None = None) -> None:
    """Raise the refusal of the first admission plugin that rejects the object."""
    if kind == POD and old is None:
        _check_service_account(item, store)
    if kind == CLAIM and old is None:
        _set_storage_class(item, store)
    if autopilot and kind in (POD, JOB, DEPLOYMENT, REPLICA_SET):
        spec = item["spec"] if kind == POD else item["spec"].get("template", {}).get("spec")
        if spec:
            _check_accelerator(spec)
            _check_size(item["metadata"].get("name", ""), spec)


def devices(spec: Mapping[str, Any], resource: str) -> int:
    """The number of devices that a pod requests: init containers run in order before the other containers."""

    def of(part: str) -> list[int]:
        return [int(item.get("resources", {}).get("limits", {}).get(resource, 0)) for item in spec.get(part, ())]

    return max([sum(of("containers")), *of("initContainers")])


def _check_service_account(pod: Object, store: Store) -> None:
    name, namespace = pod["spec"]["serviceAccountName"], pod["metadata"]["namespace"]
    if store.find(SERVICE_ACCOUNT, namespace, name) is None:
        why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
        raise forbidden(POD, pod["metadata"]["name"], why)


def _set_storage_class(claim: Object, store: Store) -> None:
    """Give a claim without a class the default class, if the cluster has one."""
    for storage_class in store.items(STORAGE_CLASS):
        if storage_class["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true":
            claim["spec"].setdefault("storageClassName", storage_class["metadata"]["name"])


def _check_accelerator(spec: Mapping[str, Any]) -> None:
    """Autopilot's rule for GPUs: https://cloud.google.com/kubernetes-engine/docs/how-to/autopilot-gpus"""
    selector = spec.get("nodeSelector", {})
    if devices(spec, GPU) and ACCELERATOR not in selector and COMPUTE_CLASS not in selector:
        raise Refusal(
            400,
            f'{WARDEN}{{"[denied by autogke-gpu-limitation]":["When requesting \'{GPU}\' resources, you must specify '
            f"either node selector '{ACCELERATOR}' with accelerator type or a compute class\"]}}",
        )


def _check_size(name: str, spec: Mapping[str, Any]) -> None:
    """Autopilot's limits of pods, in the words of https://github.com/argoproj/argo-workflows/issues/13073."""
    if devices(spec, GPU) or devices(spec, TPU):
        return
    requests = [item.get("resources", {}).get("requests", {}) for item in spec.get("containers", ())]
    for resource, most in LARGEST_PODS.get(spec.get("nodeSelector", {}).get(COMPUTE_CLASS, ""), {}).items():
        if sum(parse_quantity(request.get(resource, 0)) for request in requests) > most:
            shown = str(most) if resource == "cpu" else f"{most // 2**30}Gi"
            raise Refusal(
                400,
                f'{WARDEN}{{"[denied by autogke-pod-limit-constraints]":["Total {resource} requested by containers for '
                f"workload '{name}' is higher than the Autopilot maximum of '{shown}'.\"]}}",
            )
