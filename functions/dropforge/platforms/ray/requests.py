"""The requests of target `ray`: a RayJob, and an Autopilot cluster if the spec asks for one.

The RayJob has a Ray cluster of one head and one slice of TPU hosts, which ends with the job. These functions are pure;
what they return is sent unchanged.
RayJob: https://docs.ray.io/en/latest/cluster/kubernetes/getting-started/rayjob-quick-start.html
TPUs: https://cloud.google.com/kubernetes-engine/docs/add-on/ray-on-gke/concepts/overview
The operator is the cluster's, and its version is Google's choice. Before 1.5.1 its CRD has no authOptions: the API
server drops the field, and Ray 2.60 then demands no token (docs/security.md). Before 1.6, and without a rayVersion that
it can read, it asks for the health of Ray with wget in the container, which containers/train_ray/Dockerfile installs.
"""

from __future__ import annotations

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.kubernetes import CLUSTER, Object, resource_of
from dropforge.cloud.resource import Resource
from dropforge.platforms.gke.requests import UNMOVED, cluster_of, cluster_request, network_policies, node_labels
from dropforge.platforms.training import Launch, access_variables, container_variables, run_labels, secret_references
from dropforge.spec import JobSpec

from .catalog import GENERAL_PURPOSE, GKE_TPUS
from .spec import RayTarget

RAY_VERSION = "2.60.0"  # of containers/train_maxtext/requirements.lock.txt
ENTRYPOINT = "python ray_driver.py"
NAMESPACE_NAME = "kubernetes.io/metadata.name"  # the label that Kubernetes gives to every namespace
DASHBOARD_PORT = 8265  # where Ray takes jobs
HEAD, WORKER = "ray-head", "ray-worker"
TPU = "google.com/tpu"
# Ray's logs and JAX's files. Without it Autopilot gives a container 1 GiB. A pod without an accelerator gets at most
# 10 GiB (https://cloud.google.com/kubernetes-engine/docs/concepts/autopilot-resource-requests).
NODE_STORAGE = "10Gi"
# The head's files are larger. They are on a disk of its pod alone: Kubernetes makes the claim with the pod, and deletes
# it with the pod (https://kubernetes.io/docs/concepts/storage/ephemeral-volumes/#generic-ephemeral-volumes).
WORK, WORK_PATH = "work", "/work"
USER = 10001  # of containers/train_ray/Dockerfile; a new file system belongs to root, and fsGroup gives it to the user
# The chips' devices belong to root, as on a TPU VM. KubeRay's samples for v6e run the workers as root, too
# (https://github.com/ray-project/kuberay, ray-operator/config/samples/ray-job.tpu-v6e-16-multihost.yaml, 2026-08-19).
DEVICES_USER = 0
# GKE makes this class in every cluster: pd-balanced, and the disk is deleted with its claim
# (https://cloud.google.com/kubernetes-engine/docs/concepts/persistent-volumes#storageclasses).
STANDING_STORAGE_CLASS = "standard-rwo"
# A cluster that is deleted leaves the disks of its claims behind. So a cluster of an attempt's own gets a class that
# labels them: teardown and sweep find them by these labels.
OWN_STORAGE_CLASS = "dropforge-attempt"
KEPT_SECONDS = 60  # the Ray cluster stays this long after the job, so that its logs can be read
GRACE_SECONDS = 30
VBAR_PORT = (
    8353  # of the agent on each host that v6e's libtpu calls (KubeRay's sample ray-job.tpu-v6e-16-multihost.yaml)
)


def requests(launch: Launch) -> list[Resource]:
    """The resources to create, in order."""
    cluster = cluster_of(launch)
    own = [Resource(CLUSTER, cluster, cluster_request(launch))] if ray_target(launch.spec).cluster.create else []
    # The operator, in a namespace of Google's, submits the job to the head. Ray demands its token there.
    others = {"matchExpressions": [{"key": NAMESPACE_NAME, "operator": "NotIn", "values": [_namespace(launch)]}]}
    operator = {"from": [{"namespaceSelector": others}], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]}
    policies = network_policies(launch, operator)
    return [*own, *(resource_of(cluster, manifest) for manifest in [*policies, ray_job_manifest(launch)])]


def _namespace(launch: Launch) -> str:
    return launch.settings.kubernetes_namespace


def ray_target(spec: JobSpec) -> RayTarget:
    """The spec's target as a RayTarget."""
    assert isinstance(spec.target, RayTarget), "the registry gives this target only specs of its type"
    return spec.target


def ray_job_manifest(launch: Launch) -> Object:
    """The RayJob. It has one try, because dropforge makes the retries."""
    metadata = {
        "name": names.training_name(launch.run, launch.attempt),
        "namespace": launch.settings.kubernetes_namespace,
        "labels": run_labels(launch),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": ENTRYPOINT,
            "submissionMode": "HTTPMode",  # the operator submits the job: no submitter pod that could fail by itself
            "backoffLimit": 0,
            "activeDeadlineSeconds": launch.timeout_seconds,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": _head(launch),
                "workerGroupSpecs": [_workers(launch)],
            },
        },
    }


def _head(launch: Launch) -> Object:
    """The head group: it runs the driver and every stage but training. Ray places no worker there."""
    target = ray_target(launch.spec)
    amounts = {
        "cpu": str(target.head_cpu),
        "memory": f"{target.head_memory_gib}Gi",
        "ephemeral-storage": NODE_STORAGE,
    }
    variables = container_variables(launch) | _slice_variables(launch) | {"DROPFORGE_WORK_DIRECTORY": WORK_PATH}
    variables["DROPFORGE_GRACE_SECONDS"] = variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(
        GRACE_SECONDS
    )  # Ray's default is 3 s
    if launch.spec.secrets:
        variables["DROPFORGE_SECRETS"] = secret_references(launch)
    container = _container(launch, HEAD, variables, {"limits": amounts, "requests": amounts})
    container["volumeMounts"] = [{"name": WORK, "mountPath": WORK_PATH}]
    # KubeRay answers the loss of the head with a new head, and gives it the whole job again.
    more: Object = {"securityContext": {"fsGroup": USER}, "volumes": [_work_volume(launch)]}
    if target.head_cpu > GENERAL_PURPOSE.cpu or target.head_memory_gib > GENERAL_PURPOSE.memory_gib:
        more["nodeSelector"] = {"cloud.google.com/compute-class": "Balanced"}
    return {"rayStartParams": {"num-cpus": "0"}, "template": _template(launch, container, UNMOVED, more)}


def _work_volume(launch: Launch) -> Object:
    """A disk of `head_storage_gib`. Its claim has the attempt's labels, by which teardown finds it."""
    target = ray_target(launch.spec)
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": OWN_STORAGE_CLASS if target.cluster.create else STANDING_STORAGE_CLASS,
        "resources": {"requests": {"storage": f"{target.head_storage_gib}Gi"}},
    }
    template = {"metadata": {"labels": run_labels(launch)}, "spec": claim}
    return {"name": WORK, "ephemeral": {"volumeClaimTemplate": template}}


def storage_class_manifest(launch: Launch) -> Object:
    """The storage class of an attempt's own cluster. Its disks have the labels of the attempt.

    Parameters: https://github.com/kubernetes-sigs/gcp-compute-persistent-disk-csi-driver (README, 2026-11-23).
    """
    labels = ",".join(f"{key}={value}" for key, value in run_labels(launch).items())
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": OWN_STORAGE_CLASS},
        "provisioner": "pd.csi.storage.gke.io",
        "parameters": {"type": "pd-balanced", "labels": labels},
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def _workers(launch: Launch) -> Object:
    """The worker group: one replica with all hosts of the slice, which start and end together.

    rayStartParams name no resource TPU: KubeRay derives it from the limit google.com/tpu
    (https://github.com/ray-project/kuberay/pull/2495, November 2024), and Ray also counts the devices itself.
    """
    target = ray_target(launch.spec)
    host = GKE_TPUS[target.accelerator].hosts[target.slice.chips]
    amounts = {
        "cpu": str(host.pod_cpu),
        "memory": f"{host.pod_memory_gib}Gi",
        "ephemeral-storage": NODE_STORAGE,
        TPU: str(target.slice.chips),
    }
    container = _container(
        launch,
        WORKER,
        access_variables(launch.run, launch.settings, launch.key),
        {"limits": amounts, "requests": amounts},
    )
    container["env"] += [
        {"name": "JAX_PLATFORMS", "value": "tpu,cpu"},
        {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "VBAR_CONTROL_SERVICE_URL", "value": f"$(NODE_IP):{VBAR_PORT}"},
    ]
    is_spot = target.placements[launch.placement].capacity == "spot"
    more = {"nodeSelector": _slice_labels(launch), "securityContext": {"runAsUser": DEVICES_USER}}
    return {
        "groupName": "slice",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "numOfHosts": target.slice.hosts,
        "rayStartParams": {},
        "template": _template(launch, container, {} if is_spot else UNMOVED, more),
    }


def _template(launch: Launch, container: Object, annotations: dict[str, str], more: Object) -> Object:
    """The template of a group's pods; `more` are fields of their spec."""
    metadata: Object = {"labels": run_labels(launch)}
    if annotations:
        metadata["annotations"] = annotations
    spec: Object = {
        "serviceAccountName": launch.settings.kubernetes_trainer_account,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "enableServiceLinks": False,
        "containers": [container],
        **more,
    }
    return {"metadata": metadata, "spec": spec}


def _container(launch: Launch, name: str, variables: dict[str, str], resources: Object) -> Object:
    return {
        "name": name,
        "image": _image(launch),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources,
    }


def _image(launch: Launch) -> str:
    if not launch.settings.train_ray_image:
        raise CloudError(
            ErrorClass.CONFIG,
            "this deployment has no image for target ray",
            "set DROPFORGE_TRAIN_RAY_IMAGE to an image of containers/train_ray",
        )
    return launch.settings.train_ray_image


def _slice_labels(launch: Launch) -> dict[str, str]:
    """The node labels that the slice's pods select; GKE creates the nodes with them."""
    target = ray_target(launch.spec)
    placement = target.placements[launch.placement]
    capacity = {key: value for key, value in node_labels("", placement).items() if "gke-accelerator" not in key}
    capacity.pop("cloud.google.com/gke-gpu-driver-version")
    return {
        "cloud.google.com/gke-tpu-accelerator": target.accelerator,
        "cloud.google.com/gke-tpu-topology": target.topology,
        **capacity,
    }


def _slice_variables(launch: Launch) -> dict[str, str]:
    target = ray_target(launch.spec)
    return {
        "DROPFORGE_TPU_ACCELERATOR": target.accelerator,
        "DROPFORGE_TPU_TOPOLOGY": target.topology,
        "DROPFORGE_TPU_HOSTS": str(target.slice.hosts),
        "DROPFORGE_TPU_CHIPS_PER_HOST": str(target.slice.chips),
    }
