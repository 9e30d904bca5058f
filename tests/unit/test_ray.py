"""What target `ray` asks for, and what it reads from RayJobs, without a cloud."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec
from dropforge.base.settings import Settings
from dropforge.platforms.ray.catalog import TpuSlice, tpu_slice
from dropforge.platforms.ray.requests import ray_job_manifest, requests
from dropforge.platforms.ray.status import status_of_ray_job
from dropforge.platforms.ray.train import RayJobs
from dropforge.platforms.training import Launch, Phase
from dropforge.spec import JobSpec, parse_spec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray-llama3-8b.json"
CRDS = ROOT.parent / "shared" / "data" / "kuberay-crds"
RUN = "text-to-sql-0123456789ab"
SETTINGS = Settings(*["x"] * 12, gke_cluster="standing", train_ray_image="train-ray")


def spec(**target: Any) -> JobSpec:
    document = json.loads(EXAMPLE.read_text())
    document["target"] |= target
    return parse_spec(json.dumps(document).encode())


def launch(found: JobSpec | None = None, settings: Settings = SETTINGS, placement: int = 0) -> Launch:
    return Launch(RUN, 1, placement, found or spec(), settings, datetime(2026, 11, 20, tzinfo=UTC), 3600)


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
def test_a_slice_that_gke_does_not_make_is_refused(target: dict[str, Any], pointer: str, expected: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec(**target)
    problem = next(one for one in refused.value.problems if one.pointer == pointer)
    assert expected in problem.expected


def test_the_tutorial_is_one_slice_of_four_hosts_that_ends_with_its_job() -> None:
    training, dataset = spec().training, spec().dataset
    assert (training.method, dataset.source) == ("pretrain", "synthetic")
    assert (training.max_steps, training.max_length, training.per_device_train_batch_size) == (100, 4096, 1)
    wanted = ray_job_manifest(launch())["spec"]
    assert (wanted["backoffLimit"], wanted["shutdownAfterJobFinishes"], wanted["activeDeadlineSeconds"]) == (
        0,
        True,
        3600,
    )
    cluster = wanted["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")] == [1, 1, 1, 4]
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod["serviceAccountName"] == SETTINGS.kubernetes_trainer_account
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    told = {one["name"]: one["value"] for one in head["env"]}
    assert (told["DROPFORGE_TPU_HOSTS"], told["DROPFORGE_TPU_CHIPS_PER_HOST"]) == ("4", "4")
    assert told["RAY_JOB_STOP_WAIT_TIME_S"] == told["DROPFORGE_GRACE_SECONDS"]  # of Ray, 3: too short to save anything
    assert json.loads(told["DROPFORGE_SECRETS"]) == {"HF_TOKEN": "projects/x/secrets/hf-token/versions/latest"}
    # A token's reference is for the head alone: the workers read nothing that needs one.
    assert not any(one["name"] == "DROPFORGE_SECRETS" for one in pod["containers"][0]["env"])


def test_flex_start_is_asked_of_the_slice_and_not_of_the_head() -> None:
    cluster = ray_job_manifest(launch(placement=1))["spec"]["rayClusterSpec"]
    selector = cluster["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-flex-start"] == "true"
    assert not any("gpu" in key or key.endswith("gke-accelerator") for key in selector)
    assert "nodeSelector" not in cluster["headGroupSpec"]["template"]["spec"]


def test_resources_are_named_as_cloud_asset_inventory_does() -> None:
    (job,) = requests(launch())
    assert job.kind == "ray.io/RayJob"
    name = f"df-{RUN}-a1"
    where = "projects/x/locations/us-east5/clusters/standing/k8s/namespaces/dropforge"
    assert job.name == f"{where}/ray.io/rayjobs/{name}"
    own = requests(launch(spec(cluster={"create": True})))
    assert [one.kind for one in own] == ["container.googleapis.com/Cluster", "ray.io/RayJob"]
    assert own[0].request["cluster"]["addonsConfig"] == {"rayOperatorConfig": {"enabled": True}}
    assert len(name) <= 47  # as KubeRay demands: the cluster's name has a suffix


def test_a_deployment_without_the_image_says_so() -> None:
    with pytest.raises(CloudError, match="no image for target ray"):
        requests(launch(settings=Settings(*["x"] * 12)))


@pytest.mark.parametrize("version", ["v1"])
def test_the_rayjob_is_what_the_kuberay_crd_describes(version: str) -> None:
    if not CRDS.is_dir():
        pytest.skip("KubeRay's CRDs are not here")
    # Not jsonschema.validate, which checks the schema too, again and again: a minute for one of a megabyte.
    validator = jsonschema.Draft202012Validator(strict(crd(version)))
    for target in ({}, {"cluster": {"create": True}}, {"accelerator": "tpu-v5p-slice", "topology": "2x2x2"}):
        validator.validate(ray_job_manifest(launch(spec(**target))))
    wrong = ray_job_manifest(launch())
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["numHosts"] = 4
    with pytest.raises(jsonschema.ValidationError, match="numHosts"):
        validator.validate(wrong)


@cache
def crd(version: str) -> Any:
    document = yaml.load((CRDS / "ray.io_rayjobs.yaml").read_text(), yaml.CSafeLoader)
    return next(one["schema"]["openAPIV3Schema"] for one in document["spec"]["versions"] if one["name"] == version)


def strict(schema: Any) -> Any:
    """Refuse fields that the API server would drop without a word; its own metadata is not described."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    # int-or-string has no type; "properties" here is a keyword, not a field of that name.
    if made.get("type") == "object" and isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


def job(deployment: str, state: str = "", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "j"},
        "status": {"jobDeploymentStatus": deployment, "jobStatus": state, **status},
    }


FAILED = "Job entrypoint command failed with exit code 65, last available logs"


@pytest.mark.parametrize(
    ("found", "phase", "error_class", "code"),
    [
        ({"metadata": {"name": "j"}}, Phase.PENDING, None, None),
        (job(""), Phase.PENDING, None, None),
        (job("Initializing"), Phase.PENDING, None, None),
        (job("Waiting"), Phase.PENDING, None, None),
        (job("Suspended"), Phase.PENDING, None, None),
        (job("Suspending", "RUNNING"), Phase.PENDING, None, None),
        (job("Running"), Phase.RUNNING, None, None),
        (job("Running", "PENDING"), Phase.RUNNING, None, None),
        (job("Running", "SUCCEEDED"), Phase.RUNNING, None, None),  # the operator has the last word
        (job("Retrying", "FAILED"), Phase.RUNNING, None, None),
        (job("SomethingNew"), Phase.RUNNING, None, None),
        (job("Complete", "SUCCEEDED", endTime="2026-11-20T12:00:00Z"), Phase.SUCCEEDED, None, 0),
        (job("Complete", "STOPPED"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Complete", ""), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "FAILED", reason="AppFailed", message=FAILED), Phase.FAILED, ErrorClass.DATA, 65),
        (job("Failed", "FAILED", reason="AppFailed", message="died"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "RUNNING", reason="DeadlineExceeded"), Phase.FAILED, ErrorClass.DEADLINE, None),
        (job("Failed", "", reason="DeadlineExceeded"), Phase.FAILED, ErrorClass.DEADLINE, None),  # before it ran
        (job("Failed", "", reason="PreRunningDeadlineExceeded"), Phase.FAILED, ErrorClass.STOCKOUT, None),
        (job("Failed", "", reason="SubmissionFailed"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "", reason="JobStatusCheckTimeoutExceeded"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed", "", reason="OfAnotherVersion"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("Failed"), Phase.FAILED, ErrorClass.INFRASTRUCTURE, None),
        (job("ValidationFailed", reason="ValidationFailed", message="m"), Phase.FAILED, ErrorClass.CONFIG, None),
    ],
)  # fmt: skip
def test_both_states_are_read_together(
    found: dict[str, Any], phase: Phase, error_class: ErrorClass | None, code: int | None
) -> None:
    status = status_of_ray_job(found)
    assert (status.phase, status.error_class, status.exit_code) == (phase, error_class, code)


def test_a_rayjob_that_is_being_deleted_is_gone() -> None:
    going = job("Running", "RUNNING")
    going["metadata"]["deletionTimestamp"] = "2026-11-20T12:00:00Z"
    assert status_of_ray_job(going).phase is Phase.GONE


def test_an_operator_that_drops_what_it_does_not_know_still_runs_the_job() -> None:
    """Fields of KubeRay's CRD that came late: without them the cluster asks for no token, and all else is as with."""
    wanted = ray_job_manifest(launch())["spec"]
    late = {"authOptions"} & wanted["rayClusterSpec"].keys()
    # preRunningDeadlineSeconds, SidecarMode, deletionStrategy: not even GKE's add-on is known to have them.
    assert wanted["submissionMode"] == "HTTPMode"
    assert not {"preRunningDeadlineSeconds", "deletionStrategy", "submitterConfig"} & wanted.keys()
    assert late == {"authOptions"}
    status = status_of_ray_job(job("Running", "RUNNING"))  # as an operator without `reason` has it
    assert status.phase is Phase.RUNNING
    old = status_of_ray_job(job("Failed", "FAILED", message=FAILED))
    assert (old.error_class, old.exit_code) == (ErrorClass.DATA, 65)


def test_an_unknown_price_is_said_to_be_unknown() -> None:
    price = RayJobs().price(spec(price_usd_per_hour=None), 0)
    assert price.usd_per_hour is None
    assert "tpu-v6e-slice 4x4 in us-east5" in price.source
