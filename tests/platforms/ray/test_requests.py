"""Target `ray` without a cloud: the RayJob that it requests, and the states that it reads from RayJobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes as api_of_clusters
from dropforge.platforms.ray import train
from dropforge.platforms.ray.catalog import GKE_TPUS, TpuSlice, tpu_slice
from dropforge.platforms.ray.requests import ray_job_manifest, requests, storage_class_manifest
from dropforge.platforms.ray.status import status_of_ray_job
from dropforge.platforms.ray.train import RayJobs
from dropforge.platforms.training import Launch, Phase, run_labels
from dropforge.spec import JobSpec, parse_spec

from ...deployments import cloud_with, settings_with
from ...schemas import kuberay, kubernetes

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray-llama3-8b.json"
RUN = "text-to-sql-0123456789ab"
SETTINGS = settings_with(gke_cluster="standing", train_ray_image="train-ray")


def spec(**target: Any) -> JobSpec:
    document = json.loads(EXAMPLE.read_text())
    document["target"] |= target
    return parse_spec(json.dumps(document).encode())


def launch(job_spec: JobSpec | None = None, settings: Settings = SETTINGS, placement: int = 0) -> Launch:
    return Launch(RUN, 1, placement, job_spec or spec(), settings, datetime(2026, 11, 20, tzinfo=UTC), 3600, key="")


@pytest.mark.parametrize(
    ("accelerator", "topology", "expected"),
    [
        ("tpu-v6e-slice", "4x4", TpuSlice(4, 4)),
        ("tpu-v6e-slice", "2x4", TpuSlice(1, 8)),
        ("tpu-v6e-slice", "1x1", TpuSlice(1, 1)),
        ("tpu-v5-lite-podslice", "16x16", TpuSlice(64, 4)),
        ("tpu-v5p-slice", "2x2x1", TpuSlice(1, 4)),
        ("tpu-v5p-slice", "2x2x2", TpuSlice(2, 4)),
        ("tpu-v4-podslice", "4x4x8", TpuSlice(32, 4)),
        ("tpu-v6e-slice", "3x4", None),
        ("tpu-v6e-slice", "2x2x2", None),
        ("tpu-v6e-slice", "4X4", None),
        ("tpu-v5p-slice", "2x4", None),
        ("tpu-v5p-slice", "2x3x4", None),
        ("tpu-v5p-slice", "4x2x2", None),
        ("tpu-v5p-slice", "1x2x2", None),
        ("nvidia-l4", "2x2", None),
    ],
)
def test_hosts_follow_from_the_topology(accelerator: str, topology: str, expected: TpuSlice | None) -> None:
    assert tpu_slice(accelerator, topology) == expected


@pytest.mark.parametrize(
    ("target", "pointer", "expected"),
    [
        ({"topology": "3x4"}, "/target/topology", "4x4"),
        ({"accelerator": "tpu-v5p-slice"}, "/target/topology", "three numbers"),
        ({"accelerator": "tpu-v9"}, "/target/accelerator", "tpu-v6e-slice"),
        ({"hosts": 4}, "/target/hosts", ""),
    ],
)
def test_a_slice_that_gke_does_not_offer_is_refused(target: dict[str, Any], pointer: str, expected: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec(**target)
    problem = next(problem for problem in refused.value.problems if problem.pointer == pointer)
    assert expected in str(problem.expected)


def test_the_tutorial_requests_a_slice_of_four_hosts_that_ends_with_its_job() -> None:
    training, dataset = spec().training, spec().dataset
    assert (training.method, dataset.source) == ("pretrain", "synthetic")
    assert (training.max_steps, training.max_length, training.per_device_train_batch_size) == (100, 4096, 1)
    rayjob = ray_job_manifest(launch())["spec"]
    assert (rayjob["backoffLimit"], rayjob["shutdownAfterJobFinishes"], rayjob["activeDeadlineSeconds"]) == (
        0,
        True,
        3600,
    )
    cluster = rayjob["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")] == [1, 1, 1, 4]
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    # Nine tenths of the 180 vCPUs and eight tenths of the 720 GB of ct6e-standard-4t.
    amounts = {"google.com/tpu": "4", "cpu": "162", "memory": "536Gi", "ephemeral-storage": "10Gi"}
    assert pod["containers"][0]["resources"] == {"limits": amounts, "requests": amounts}
    assert pod["serviceAccountName"] == SETTINGS.kubernetes_trainer_account
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in head["env"]}
    assert (variables["DROPFORGE_TPU_HOSTS"], variables["DROPFORGE_TPU_CHIPS_PER_HOST"]) == ("4", "4")
    assert (
        variables["RAY_JOB_STOP_WAIT_TIME_S"] == variables["DROPFORGE_GRACE_SECONDS"]
    )  # Ray's default of 3 s is too short for a checkpoint
    assert json.loads(variables["DROPFORGE_SECRETS"]) == {"HF_TOKEN": "projects/x/secrets/hf-token/versions/latest"}
    # Only the head gets the reference of the token: the workers read nothing that needs a token.
    assert not any(variable["name"] == "DROPFORGE_SECRETS" for variable in pod["containers"][0]["env"])


def test_a_pod_leaves_room_for_the_system_on_every_tpu_host() -> None:
    """GKE's reservation (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes), plus 1 GiB and one
    tenth of a vCPU for each of five agents."""
    for tpu in GKE_TPUS.values():
        for chips, host in tpu.hosts.items():
            assert host.machine.endswith(f"-{chips}t")
            gib = host.memory_gb * 10**9 / 2**30
            steps = ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (gib, 0.02))
            left, reserved = gib, 0.1
            for size, share in steps:
                reserved, left = reserved + min(size, left) * share, max(0.0, left - size)
            assert host.pod_memory_gib + reserved + 1 <= gib
            cores = 0.06 + 0.01 + 2 * 0.005 + (host.vcpus - 4) * 0.0025
            assert host.pod_cpu + cores + 0.5 <= host.vcpus


@pytest.mark.parametrize("accelerator", GKE_TPUS)
def test_every_slice_has_hosts_whose_size_is_known(accelerator: str) -> None:
    sides = [1, 2, 4, 8, 16]
    flat = [f"{x}x{y}" for x in sides for y in sides]
    solid = [f"{x}x{y}x{z}" for x in sides for y in sides for z in sides]
    slices = [made for topology in (*flat, *solid) if (made := tpu_slice(accelerator, topology))]
    assert slices
    assert {made.chips for made in slices} <= GKE_TPUS[accelerator].hosts.keys()


def test_the_heads_files_are_on_a_disk_of_its_pod() -> None:
    """Autopilot gives a pod without an accelerator 10 GiB of ephemeral storage, and the default here is 200."""
    for target, storage_class in (({}, "standard-rwo"), ({"cluster": {"create": True}}, "dropforge-attempt")):
        cluster = ray_job_manifest(launch(spec(**target)))["spec"]["rayClusterSpec"]
        pod = cluster["headGroupSpec"]["template"]["spec"]
        (container,), (volume,) = pod["containers"], pod["volumes"]
        assert container["resources"]["requests"]["ephemeral-storage"] == "10Gi"
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/work"}]
        assert {"name": "DROPFORGE_WORK_DIRECTORY", "value": "/work"} in container["env"]
        assert pod["securityContext"] == {"fsGroup": 10001}  # not root's; a new file system belongs to root
        claim = volume["ephemeral"]["volumeClaimTemplate"]
        assert claim["metadata"]["labels"]["dropforge-run"] == RUN
        assert claim["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": "200Gi"}},
        }


def test_the_storage_class_of_an_own_cluster_labels_its_disks_with_the_attempt() -> None:
    attempt = launch(spec(cluster={"create": True}))
    manifest = storage_class_manifest(attempt)
    kubernetes.check(manifest)
    labels = dict(pair.split("=") for pair in manifest["parameters"]["labels"].split(","))
    assert labels == run_labels(attempt)
    assert (labels["dropforge-run"], labels["dropforge-attempt"]) == (RUN, "1")
    assert (manifest["reclaimPolicy"], manifest["volumeBindingMode"]) == ("Delete", "WaitForFirstConsumer")


def test_flex_start_applies_to_the_slice_and_not_to_the_head() -> None:
    cluster = ray_job_manifest(launch(placement=1))["spec"]["rayClusterSpec"]
    selector = cluster["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-flex-start"] == "true"
    assert not any("gpu" in key or key.endswith("gke-accelerator") for key in selector)
    assert "nodeSelector" not in cluster["headGroupSpec"]["template"]["spec"]


def test_the_workers_alone_are_root_to_whom_the_chips_belong() -> None:
    cluster = ray_job_manifest(launch())["spec"]["rayClusterSpec"]
    assert cluster["workerGroupSpecs"][0]["template"]["spec"]["securityContext"] == {"runAsUser": 0}
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert "runAsUser" not in head["securityContext"]


def test_autopilot_moves_no_pod_of_the_cluster_except_on_spot() -> None:
    """A head that moves gets the whole job again. Spot pods may not have the annotation; the head is never on Spot."""
    unmoved = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    on_spot = spec(placements=[{"region": "us-east5", "capacity": "spot"}])
    for attempt, workers in ((launch(), unmoved), (launch(on_spot), None)):
        cluster = ray_job_manifest(attempt)["spec"]["rayClusterSpec"]
        (group,) = cluster["workerGroupSpecs"]
        assert cluster["headGroupSpec"]["template"]["metadata"]["annotations"] == unmoved
        assert group["template"]["metadata"].get("annotations") == workers


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({}, None),
        ({"head_cpu": 30, "head_memory_gib": 110}, None),
        ({"head_cpu": 31}, {"cloud.google.com/compute-class": "Balanced"}),
        ({"head_memory_gib": 111}, {"cloud.google.com/compute-class": "Balanced"}),
    ],
    ids=str,
)
def test_a_head_too_large_for_the_general_class_has_another(size: dict[str, Any], expected: Any) -> None:
    cluster = ray_job_manifest(launch(spec(**size)))["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["template"]["spec"].get("nodeSelector") == expected


def test_resources_are_named_as_cloud_asset_inventory_does() -> None:
    policy, job = requests(launch())
    assert (policy.kind, job.kind) == ("networking.k8s.io/NetworkPolicy", "ray.io/RayJob")
    name = f"df-{RUN}-a1"
    where = "projects/x/locations/us-east5/clusters/standing/k8s/namespaces/dropforge"
    assert job.name == f"{where}/ray.io/rayjobs/{name}"
    assert policy.name == f"{where}/networking.k8s.io/networkpolicies/{name}"
    own = requests(launch(spec(cluster={"create": True})))
    assert [resource.kind for resource in own] == ["container.googleapis.com/Cluster", "ray.io/RayJob"]
    assert own[0].request["cluster"]["addonsConfig"] == {"rayOperatorConfig": {"enabled": True}}
    assert len(name) <= 47  # the limit of KubeRay, which adds a suffix for the cluster's name


def test_a_deployment_without_the_image_refuses_the_run() -> None:
    with pytest.raises(CloudError, match="no image for target ray"):
        requests(launch(settings=settings_with()))


@pytest.mark.parametrize(
    "target", [{}, {"cluster": {"create": True}}, {"accelerator": "tpu-v5p-slice", "topology": "2x2x2"}], ids=str
)
def test_kuberay_accepts_the_rayjob(target: dict[str, Any]) -> None:
    kuberay.check(ray_job_manifest(launch(spec(**target))))


def misspell_a_field(rayjob: Any) -> None:
    rayjob["rayClusterSpec"]["workerGroupSpecs"][0]["numHosts"] = 4


def leave_a_field_out(rayjob: Any) -> None:
    del rayjob["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"]


def write_a_number_as_text(rayjob: Any) -> None:
    rayjob["activeDeadlineSeconds"] = "3600"


def choose_an_unknown_mode(rayjob: Any) -> None:
    rayjob["submissionMode"] = "HttpMode"


def misspell_a_field_of_a_pod(rayjob: Any) -> None:
    rayjob["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["serviceAcountName"] = "trainer"


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (misspell_a_field, "numHosts"),
        (leave_a_field_out, "groupName"),
        (write_a_number_as_text, "3600"),
        (choose_an_unknown_mode, "HttpMode"),
        (misspell_a_field_of_a_pod, "serviceAcountName"),
    ],
)
def test_a_mistake_in_the_rayjob_is_refused(mistake: Callable[[Any], None], named: str) -> None:
    manifest = ray_job_manifest(launch())
    mistake(manifest["spec"])
    with pytest.raises(jsonschema.ValidationError, match=named):
        kuberay.check(manifest)


def job(deployment: str, state: str = "", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "j"},
        "status": {"jobDeploymentStatus": deployment, "jobStatus": state, **status},
    }


FAILED = "Job entrypoint command failed with exit code 65, last available logs"


@pytest.mark.parametrize(
    ("manifest", "phase", "error_class", "code"),
    [
        ({"metadata": {"name": "j"}}, Phase.PENDING, None, None),
        (job(""), Phase.PENDING, None, None),
        (job("Initializing"), Phase.PENDING, None, None),
        (job("Waiting"), Phase.PENDING, None, None),
        (job("Suspended"), Phase.PENDING, None, None),
        (job("Suspending", "RUNNING"), Phase.PENDING, None, None),
        (job("Running"), Phase.RUNNING, None, None),
        (job("Running", "PENDING"), Phase.RUNNING, None, None),
        (job("Running", "SUCCEEDED"), Phase.RUNNING, None, None),  # the deployment status of the operator decides
        (job("Retrying", "FAILED"), Phase.RUNNING, None, None),
        (job("SomethingNew"), Phase.RUNNING, None, None),
        (job("Complete", "SUCCEEDED", endTime="2026-11-20T12:00:00Z"), Phase.SUCCEEDED, None, 0),
        (job("Complete", "STOPPED"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Complete", ""), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "FAILED", reason="AppFailed", message=FAILED), Phase.FAILED, ErrorClass.DATA, 65),
        (job("Failed", "FAILED", reason="AppFailed", message="crashed"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "RUNNING", reason="DeadlineExceeded"), Phase.FAILED, ErrorClass.DEADLINE, None),
        (job("Failed", "", reason="DeadlineExceeded"), Phase.FAILED, ErrorClass.DEADLINE, None),  # before the job ran
        (job("Failed", "", reason="PreRunningDeadlineExceeded"), Phase.FAILED, ErrorClass.STOCKOUT, None),
        (job("Failed", "", reason="SubmissionFailed"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "", reason="JobStatusCheckTimeoutExceeded"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "", reason="OfAnotherVersion"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("ValidationFailed", reason="ValidationFailed", message="m"), Phase.FAILED, ErrorClass.CONFIG, None),
    ],
)  # fmt: skip
def test_both_states_are_read_together(
    manifest: dict[str, Any], phase: Phase, error_class: ErrorClass | None, code: int | None
) -> None:
    status = status_of_ray_job(manifest)
    assert (status.phase, status.error_class, status.exit_code) == (phase, error_class, code)


def test_a_rayjob_that_is_being_deleted_is_gone() -> None:
    deleted = job("Running", "RUNNING")
    deleted["metadata"]["deletionTimestamp"] = "2026-11-20T12:00:00Z"
    assert status_of_ray_job(deleted).phase is Phase.GONE


def test_an_operator_that_drops_unknown_fields_still_runs_the_job() -> None:
    """authOptions is the only recent field of KubeRay in the manifest; tests/emulators/kubernetes/test_ray.py runs jobs
    under operators that drop it."""
    rayjob = ray_job_manifest(launch())["spec"]
    recent_fields = {"authOptions"} & rayjob["rayClusterSpec"].keys()
    # preRunningDeadlineSeconds, SidecarMode, deletionStrategy: GKE's add-on may not have them.
    assert rayjob["submissionMode"] == "HTTPMode"
    assert not {"preRunningDeadlineSeconds", "deletionStrategy", "submitterConfig"} & rayjob.keys()
    assert recent_fields == {"authOptions"}
    status = status_of_ray_job(job("Running", "RUNNING"))  # an old operator sets no `reason`
    assert status.phase is Phase.RUNNING
    old = status_of_ray_job(job("Failed", "FAILED", message=FAILED))
    assert (old.error_class, old.exit_code) == (ErrorClass.DATA, 65)


def test_an_unknown_price_is_none() -> None:
    price = RayJobs().price(spec(price_usd_per_hour=None), 0)
    assert price.usd_per_hour is None
    assert "no price for the head and its disk in the catalog" in price.source
    assert "tpu-v6e-slice 4x4 in us-east5 costs 43.2 USD per hour" in price.source


def test_every_slice_has_a_name_in_the_price_list() -> None:
    for accelerator, known in GKE_TPUS.items():
        topology = known.topologies[0] if known.topologies else "2x2x1"
        target = {"accelerator": accelerator, "topology": topology, "price_usd_per_hour": None}
        assert RayJobs().price(spec(**target), 0).usd_per_hour is None


def pod(node: str, phase: str, waiting: str) -> dict[str, Any]:
    state = {"name": "ray-worker", "image": "i", "state": {"waiting": {"reason": waiting}}}
    return {
        "metadata": {"name": "worker-0", "uid": "u", "labels": {"ray.io/node-type": "worker"}},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "containerStatuses": [state]},
    }


@pytest.mark.parametrize(
    ("pods", "reason", "is_paid"),
    [
        ([], "RayJob j is Initializing", False),
        ([pod("", "Pending", "")], "RayJob j is Initializing", False),
        (
            [pod("n", "Pending", "ContainerCreating")],
            "worker-0 is on a node: container ray-worker waits: Container",
            True,
        ),
    ],
)
def test_a_rayjob_that_waits_says_what_its_pods_do_and_costs_nothing_before_they_have_a_node(
    pods: list[Any], reason: str, is_paid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = job("Initializing", rayClusterName="c")
    api = SimpleNamespace(get=lambda _: manifest, find=lambda _, kind, **__: pods if kind == "pods" else [])
    monkeypatch.setattr(api_of_clusters, "find_cluster", lambda *_: SimpleNamespace(status=None))
    monkeypatch.setattr(api_of_clusters, "connect", lambda *_: api)
    status = RayJobs().inspect(cloud_with(), launch())
    assert reason in status.wait_reason
    assert (status.phase, status.is_paid) == (Phase.PENDING, is_paid)


def test_pods_without_their_ray_cluster_are_listed() -> None:
    """A sweep deletes what is listed: these pods hold the chips, and nothing else ends them."""

    def pod(name: str, owner: str) -> dict[str, Any]:
        owners = [{"kind": "RayCluster", "uid": owner}]
        when = {"creationTimestamp": "2026-11-26T08:00:00Z", "labels": {"dropforge-run": "r"}}
        metadata = {"name": name, "namespace": "ml", "ownerReferences": owners, **when}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}

    labels = {train.ORIGIN: "df-r-0123456789ab-1"}
    live = {"metadata": {"uid": "live", "name": "c", "namespace": "ml", "labels": labels}}
    job = {**pod(labels[train.ORIGIN], ""), "apiVersion": "ray.io/v1", "kind": "RayJob"}
    objects = {"Pod": [pod("kept", "live"), pod("left", "gone")], "RayCluster": [live], "RayJob": [job]}
    api: Any = SimpleNamespace(each=lambda namespace, version, kind, selector: objects[kind])
    listed = [each.name for each in train._listed_in(api, "projects/p/locations/l/clusters/c", SETTINGS)]
    assert [name.rpartition("/")[2] for name in listed] == [labels[train.ORIGIN], "left"]
