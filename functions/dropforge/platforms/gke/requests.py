"""The requests of target `gke`: an Autopilot cluster if the spec asks for one, a headless Service if there are several
nodes, and the Job. These functions are pure; what they return is sent unchanged.

Node labels: https://cloud.google.com/kubernetes-engine/docs/how-to/autopilot-gpus,
https://cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations
"""

from __future__ import annotations

from typing import Any

from dropforge.base import names
from dropforge.cloud.kubernetes import CLUSTER, Object, cluster_name, resource_of
from dropforge.cloud.resource import Resource
from dropforge.platforms.training import EXIT_CLASSES, Launch, container_variables, run_labels, secret_references
from dropforge.spec import JobSpec

from .catalog import GKE_DRIVER_VERSION
from .spec import ClusterTarget, GkePlacement, GkeServe, GkeTarget

CONTAINER = "trainer"
USER = 10001  # of containers/train_trl/Dockerfile; runAsNonRoot needs the user's number
MAIN_PORT = 29500
# GKE mounts the libraries of the driver here, and CUDA finds them by LD_LIBRARY_PATH alone
# (https://cloud.google.com/kubernetes-engine/docs/how-to/gpus#cuda). The pod's value replaces the image's.
DRIVER_LIBRARIES = "/usr/local/nvidia/lib64"
GRACE_SECONDS = 120  # for the last checkpoint
SPOT_GRACE_SECONDS = 25  # the most that Autopilot gives a Spot pod
# Autopilot may move a pod to save nodes. This annotation prevents that for 7 days; Spot pods may not have it
# (https://cloud.google.com/kubernetes-engine/docs/how-to/extended-duration-pods).
UNMOVED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
KEPT_SECONDS = 24 * 3600  # Kubernetes deletes a finished Job after this if teardown and sweep have not


def requests(launch: Launch) -> list[Resource]:
    """The resources to create, in order."""
    target, cluster = gke_target(launch.spec), cluster_of(launch)
    meeting = [*network_policies(launch), service_manifest(launch)] if target.nodes > 1 else []
    manifests = [*meeting, job_manifest(launch)]
    own = [Resource(CLUSTER, cluster, cluster_request(launch))] if target.cluster.create else []
    return own + [resource_of(cluster, manifest) for manifest in manifests]


def gke_target(spec: JobSpec) -> GkeTarget:
    """The spec's target as a GkeTarget."""
    assert isinstance(spec.target, GkeTarget), "the registry gives this target only specs of its type"
    return spec.target


def cluster_of(launch: Launch) -> str:
    """The full name of the attempt's cluster: its own, the spec's, or the deployment's."""
    target, settings = launch.spec.target, launch.settings
    assert isinstance(target, ClusterTarget), "only these are on clusters"
    own = names.training_name(launch.run, launch.attempt) if target.cluster.create else None
    region = target.placements[launch.placement].region
    return cluster_name(settings.project, region, own or target.cluster.name or settings.gke_cluster)


def cluster_request(launch: Launch) -> dict[str, Any]:
    """The createCluster request as JSON. The nodes have no public address; the DNS endpoint, guarded by IAM, is the
    only way to the control plane."""
    parent, _, name = cluster_of(launch).rpartition("/clusters/")
    target = launch.spec.target
    assert isinstance(target, ClusterTarget), "only these are on clusters"
    cluster = {
        "name": name,
        "autopilot": {"enabled": True},
        "releaseChannel": {"channel": "RAPID"},
        "resourceLabels": run_labels(launch),
        "network": launch.settings.network,
        "subnetwork": launch.settings.subnetwork,
        "ipAllocationPolicy": {"useIpAliases": True},
        "networkConfig": {"defaultEnablePrivateNodes": True},
        "autoscaling": {
            "autoprovisioningNodePoolDefaults": {
                "serviceAccount": launch.settings.nodes_service_account,
                "oauthScopes": ["https://www.googleapis.com/auth/cloud-platform"],
            }
        },
        **target.cluster_addons,
        "controlPlaneEndpointsConfig": {
            "dnsEndpointConfig": {"allowExternalTraffic": True},
            "ipEndpointsConfig": {"enabled": False},
        },
    }
    return {"parent": parent, "cluster": cluster}


def namespace_manifests(launch: Launch) -> list[Object]:
    """The namespace and the service account of training, which a new cluster does not have.

    All clusters of a project share one identity pool. So the account may act as the trainer's account in each of them.
    """
    settings = launch.settings
    namespace = settings.kubernetes_namespace
    account = {
        "name": settings.kubernetes_trainer_account,
        "namespace": namespace,
        "annotations": {"iam.gke.io/gcp-service-account": settings.trainer_service_account},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
    ]


def network_policies(launch: Launch, *more: Object) -> list[Object]:
    """The NetworkPolicy with which the pods of an attempt reach each other, on every port: NCCL and Ray choose ports.

    Terraform's policies for the namespace let nothing else in (terraform/kubernetes.tf). `more` are further rules of
    ingress. A cluster of the attempt's own has no other pods and needs no policy.
    https://kubernetes.io/docs/concepts/services-networking/network-policies/
    """
    target = launch.spec.target
    assert isinstance(target, ClusterTarget), "only these are on clusters"
    if target.cluster.create:
        return []
    own = {"matchLabels": {key: run_labels(launch)[key] for key in (names.RUN_LABEL, names.ATTEMPT_LABEL)}}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}, *more]}
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return [{**kind, "metadata": _metadata(launch), "spec": spec}]


def service_manifest(launch: Launch) -> Object:
    """The headless Service: it gives the pods the DNS names at which the ranks meet, before the pods are ready."""
    ports = [{"name": "rendezvous", "port": MAIN_PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launch),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {key: run_labels(launch)[key] for key in (names.RUN_LABEL, names.ATTEMPT_LABEL)},
            "ports": ports,
        },
    }


def job_manifest(launch: Launch) -> Object:
    """The Job. It has one try, because dropforge makes the retries: the first failed pod fails the Job."""
    target = gke_target(launch.spec)
    indexed = {"completionMode": "Indexed"} if target.nodes > 1 else {}
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(EXIT_CLASSES)},
        },
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(launch),
        "spec": {
            **indexed,
            "completions": target.nodes,
            "parallelism": target.nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",  # the only value that a podFailurePolicy allows
            "podFailurePolicy": {"rules": rules},
            "activeDeadlineSeconds": launch.timeout_seconds,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": _pod_metadata(launch), "spec": _pod(launch)},
        },
    }


def _pod_metadata(launch: Launch) -> Object:
    return {"labels": run_labels(launch), **({} if _is_spot(launch) else {"annotations": UNMOVED})}


def _pod(launch: Launch) -> Object:
    target, settings = gke_target(launch.spec), launch.settings
    shared_memory = {"medium": "Memory", "sizeLimit": f"{target.shared_memory_gib}Gi"}
    return {
        **({"subdomain": _metadata(launch)["name"]} if target.nodes > 1 else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _grace_seconds(launch),
        "serviceAccountName": settings.kubernetes_trainer_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": node_labels(target.accelerator, target.placements[launch.placement]),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(launch)],
        "volumes": [{"name": "shared-memory", "emptyDir": shared_memory}],
    }


def _container(launch: Launch) -> Object:
    target = gke_target(launch.spec)
    limits = {"nvidia.com/gpu": str(target.accelerator_count)}
    if target.cpu is not None:
        limits["cpu"] = str(target.cpu)
    if target.memory_gib is not None:
        limits["memory"] = f"{target.memory_gib}Gi"
    return {
        "name": CONTAINER,
        "image": launch.settings.train_trl_image,
        "env": [{"name": name, "value": value} for name, value in _variables(launch).items()],
        "resources": {"limits": limits, "requests": {"ephemeral-storage": f"{target.ephemeral_storage_gib}Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _variables(launch: Launch) -> dict[str, str]:
    target, name = gke_target(launch.spec), _metadata(launch)["name"]
    variables = {
        **container_variables(launch),
        "LD_LIBRARY_PATH": DRIVER_LIBRARIES,
        "DROPFORGE_GRACE_SECONDS": str(_grace_seconds(launch)),
        "DROPFORGE_NUM_PROCESSES": str(target.accelerator_count),
    }
    if target.nodes > 1:
        variables["DROPFORGE_NUM_MACHINES"] = str(target.nodes)
        variables["DROPFORGE_MAIN_ADDRESS"] = f"{name}-0.{name}:{MAIN_PORT}"
    if launch.spec.secrets:
        variables["DROPFORGE_SECRETS"] = secret_references(launch)
    return variables


def node_labels(accelerator: str, wanted: GkePlacement | GkeServe) -> dict[str, str]:
    """The node labels that a pod selects; Autopilot creates a node with them."""
    labels = {
        "cloud.google.com/gke-accelerator": accelerator,
        "cloud.google.com/gke-gpu-driver-version": GKE_DRIVER_VERSION,
    }
    if wanted.capacity == "spot":
        labels["cloud.google.com/gke-spot"] = "true"
    if wanted.capacity == "flex_start":
        labels["cloud.google.com/gke-flex-start"] = "true"
    if wanted.reservation is not None:
        labels["cloud.google.com/reservation-name"] = wanted.reservation
        labels["cloud.google.com/reservation-affinity"] = "specific"
    return labels


def _metadata(launch: Launch) -> Object:
    name = names.training_name(launch.run, launch.attempt)
    return {"name": name, "namespace": launch.settings.kubernetes_namespace, "labels": run_labels(launch)}


def _grace_seconds(launch: Launch) -> int:
    return SPOT_GRACE_SECONDS if _is_spot(launch) else GRACE_SECONDS


def _is_spot(launch: Launch) -> bool:
    return gke_target(launch.spec).placements[launch.placement].capacity == "spot"
