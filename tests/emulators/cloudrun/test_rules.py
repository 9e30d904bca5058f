"""The refusals of Cloud Run, and the emulator's own refusals (UNIMPLEMENTED)."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import run_v2

from dropforge_local.emulators.cloudrun import CloudRunConfig
from dropforge_local.emulators.cloudrun.messages import OUTPUT_ONLY, REQUIRED

L4 = {"limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}, "node_selector": {"accelerator": "nvidia-l4"}}
PRO = {
    "limits": {"cpu": "20", "memory": "80Gi", "nvidia.com/gpu": "1"},
    "node_selector": {"accelerator": "nvidia-rtx-pro-6000"},
}


def create(cloud: Any, make: Any, job: run_v2.Job, job_id: str = "j1", region: str = "us-central1") -> run_v2.Job:
    parent = f"projects/p1/locations/{region}"
    return cloud.done(cloud.jobs.create_job(parent=parent, job=job, job_id=job_id))


@pytest.mark.parametrize("job_id", ["", "J", "1a", "a-", "a_b", "a" * 64])
def test_job_ids(cloud: Any, make: Any, job_id: str) -> None:
    with pytest.raises(exceptions.BadRequest, match="job_id"):
        create(cloud, make, make.job(), job_id)


@pytest.mark.parametrize(("job_id", "token", "accepted"), [("a" * 30, "b" * 32, True), ("a" * 31, "b" * 32, False)])
def test_job_name_and_token_are_bounded_together(
    cloud: Any, make: Any, job_id: str, token: str, accepted: bool
) -> None:
    job = make.job()
    job.start_execution_token = token
    if accepted:
        assert create(cloud, make, job, job_id).execution_count == 1
    else:
        with pytest.raises(exceptions.BadRequest, match="fewer than 63"):
            create(cloud, make, job, job_id)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({**L4, "timeout": "43201s"}, "43200 s for a task with a GPU"),
        ({"timeout": "604801s"}, "expected 1 to 604800"),
        ({"max_retries": 11}, "max_retries"),
        ({"task_count": 10001}, "task_count"),
        ({**L4, "limits": {**L4["limits"], "nvidia.com/gpu": "2"}}, "the only count"),
        ({**L4, "limits": {"cpu": "4", "memory": "16Gi"}}, "expected '1'"),
        ({**L4, "node_selector": None}, "node_selector.accelerator: is required"),
        ({**L4, "node_selector": {"accelerator": "nvidia-h100"}}, "expected one of"),
        ({**L4, "limits": {**L4["limits"], "memory": "8Gi"}}, "needs at least 4 CPU and 16Gi"),
        ({**L4, "limits": {**L4["limits"], "cpu": "2"}}, "need at least 4 CPU"),
        ({**PRO, "limits": {**PRO["limits"], "memory": "40Gi"}}, "needs at least 20 CPU and 80Gi"),
        ({**L4, "limits": {**L4["limits"], "cpu": "5"}}, "or one of 2, 4, 6, 8"),
        ({**L4, "limits": {**L4["limits"], "cpu": "16"}}, "or one of 2, 4, 6, 8"),
        ({**L4, "limits": {**L4["limits"], "memory": "24Gi"}}, "need at least 6 CPU"),
        ({**L4, "limits": {**L4["limits"], "cpu": "8", "memory": "33Gi"}}, "at most 32Gi"),
        ({"limits": {"cpu": "1.5", "memory": "512Mi"}}, "whole CPUs"),
        ({"limits": {"cpu": "1", "memory": "lots"}}, "at least 128Mi"),
        ({"limits": {"cpu": "1", "memory": "8Gi"}}, "need at least 2 CPU"),
        ({"limits": {"cpu": "4", "memory": "1Gi"}}, "need at least 2048Mi"),
        ({"limits": {"cpu": "1", "memory": "1Gi", "disk": "1"}}, "keys"),
        ({"service_account": "me"}, "service_account"),
        ({"vpc_access": {"network_interfaces": [{"tags": ["a"]}]}}, "needs a network"),
        ({"vpc_access": {"network_interfaces": [{"network": "Bad Name"}]}}, "Bad Name"),
        ({"container": {"env": [{"name": "PORT", "value": "1"}]}}, "reserved env names"),
        ({"container": {"env": [{"name": "CLOUD_RUN_JOB", "value": "1"}]}}, "reserved env names"),
        ({"container": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "twice"),
        ({"container": {"env": [{"name": "1A", "value": "1"}]}}, "name '1A'"),
        ({"container": {"volume_mounts": [{"name": "v", "mount_path": "/v"}]}}, "names no volume"),
        ({"container": {"startup_probe": {"period_seconds": 5}}}, "exactly one of"),
    ],
)
def test_refused_jobs(cloud: Any, make: Any, task: dict[str, Any], message: str) -> None:
    given = {key: value for key, value in task.items() if value is not None}
    if "startup_probe" in given.get("container", {}):
        given["container"]["startup_probe"]["timeout_seconds"] = 1
    with pytest.raises(exceptions.BadRequest, match=re.escape(message)):
        create(cloud, make, make.job(**given))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"volumes": [{"name": "v", "gcs": {"bucket": "b"}}]}, "gcs is not emulated"),
        ({"volumes": [{"name": "v", "empty_dir": {}}]}, "empty_dir is not emulated in memory"),
        ({"encryption_key": "k"}, "encryption_key is not emulated"),
        ({"container": {"depends_on": ["x"]}}, "depends_on is not emulated"),
    ],
)
def test_fields_that_are_not_emulated_are_refused(cloud: Any, make: Any, task: dict[str, Any], message: str) -> None:
    with pytest.raises(exceptions.MethodNotImplemented, match=message):
        create(cloud, make, make.job(**task))


def test_gpus_are_in_their_regions_only(cloud: Any, make: Any) -> None:
    assert create(cloud, make, make.job(**L4), region="europe-west4").generation == 1
    with pytest.raises(exceptions.BadRequest, match="not available in europe-north1; it is in asia-south1"):
        create(cloud, make, make.job(**L4), region="europe-north1")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"Key": "v"}, "key 'Key'"),
        ({"k": "Value"}, "is 'Value'"),
        ({"run.googleapis.com/x": "v"}, "system namespace"),
        ({"k" * 64: "v"}, "key 'kkk"),
        ({f"k{number}": "v" for number in range(65)}, "at most 64"),
    ],
)
def test_labels(cloud: Any, make: Any, labels: dict[str, str], message: str) -> None:
    job = make.job()
    job.labels = labels
    with pytest.raises(exceptions.BadRequest, match=message):
        create(cloud, make, job)
    job.labels, job.annotations = {}, {"serving.knative.dev/x": "1"}
    with pytest.raises(exceptions.BadRequest, match="system namespace"):
        create(cloud, make, job)


def test_no_gpu_quota_is_a_failed_precondition_with_googles_text(cloud: Any, make: Any) -> None:
    cloud.faults(quota={"us-central1": {"nvidia-l4": 0}})
    with pytest.raises(exceptions.BadRequest) as refused:
        create(cloud, make, make.job(**L4, gpu_zonal_redundancy_disabled=True))
    error = refused.value.response.json()["error"]
    assert error["status"] == "FAILED_PRECONDITION"
    assert "You do not have quota for using GPUs without zonal redundancy." in error["message"]
    assert "NvidiaL4GpuAllocNoZonalRedundancyPerProjectRegion requested: 1 allowed: 0" in error["message"]


def test_service_without_max_instances_exceeds_the_gpu_quota(cloud: Any, make: Any) -> None:
    container = {"resources": {"limits": L4["limits"]}}
    service = make.service(container=container, node_selector=L4["node_selector"])
    with pytest.raises(exceptions.BadRequest, match="Max instances must be set to 3 or fewer"):
        cloud.services.create_service(parent=make.parent, service=service, service_id="s1")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"max_instance_request_concurrency": 1001}, "expected 1 to 1000"),
        ({"timeout": "3601s"}, "expected 1 to 3600"),
        ({"scaling": {"min_instance_count": 3, "max_instance_count": 2}}, "min <= max"),
        ({"traffic": [{"percent": 50, "type": 1}]}, "total 50"),
        ({"traffic": [{"percent": 100, "type": 2, "revision": "s1-00009-abc"}]}, "does not exist"),
        ({"revision": "other-1"}, "expected s1-<suffix>"),
        ({"container": {"startup_probe": {"tcp_socket": {}, "initial_delay_seconds": 241}}}, "expected 0 to 240"),
        ({"container": {"startup_probe": {"tcp_socket": {}, "timeout_seconds": 11}}}, "1 to period_seconds"),
        ({"container": {"startup_probe": {"tcp_socket": {}, "period_seconds": 241}}}, "expected 1 to 240"),
        ({"container": {"startup_probe": {"tcp_socket": {}, "http_get": None}}, "timeout": "0.5s"}, "timeout"),
    ],
)
def test_refused_services(cloud: Any, make: Any, template: dict[str, Any], message: str) -> None:
    with pytest.raises(exceptions.BadRequest, match=re.escape(message)):
        cloud.services.create_service(parent=make.parent, service=make.service(**template), service_id="s1")


LONG_GPU_TASK = {**L4, "timeout": "3660s"}


@pytest.mark.parametrize("task", [LONG_GPU_TASK, PRO], ids=["a GPU task above an hour", "an RTX PRO 6000"])
@pytest.mark.parametrize(("stage", "accepted"), [(0, False), (4, False), (3, True), (2, True)])
def test_a_job_with_a_preview_value_needs_its_launch_stage(
    cloud: Any, make: Any, task: dict[str, Any], stage: int, accepted: bool
) -> None:
    job = make.job(**copy.deepcopy(task))
    job.launch_stage = stage
    if accepted:
        assert create(cloud, make, job).launch_stage == stage
        return
    with pytest.raises(exceptions.BadRequest, match="Precondition check failed") as refused:
        create(cloud, make, job)
    assert refused.value.response.json()["error"]["status"] == "FAILED_PRECONDITION"


DISK = {"name": "work", "empty_dir": {"medium": 2, "size_limit": "10Gi"}}


def test_an_ephemeral_disk_needs_its_launch_stage(cloud: Any, make: Any) -> None:
    job = make.job(volumes=[DISK], container={"volume_mounts": [{"name": "work", "mount_path": "/work"}]})
    with pytest.raises(exceptions.BadRequest, match="which an ephemeral disk needs"):
        create(cloud, make, job)
    job.launch_stage = 3
    assert create(cloud, make, job).template.template.volumes[0].empty_dir.size_limit == "10Gi"


@pytest.mark.parametrize(
    ("volumes", "mount", "message"),
    [
        ([{**DISK, "empty_dir": {"medium": 2, "size_limit": "9Gi"}}], "/work", "expected at least 10Gi"),
        ([{**DISK, "empty_dir": {"medium": 2}}], "/work", "size_limit"),
        ([DISK], "work", "expected an absolute path"),
        ([{**DISK, "name": "other"}], "/work", "'work' names no volume"),
        ([{**DISK, "name": f"work{number}"} for number in range(11)], "/work", "expected at most 10"),
    ],
)
def test_refused_disks(cloud: Any, make: Any, volumes: list[Any], mount: str, message: str) -> None:
    job = make.job(volumes=volumes, container={"volume_mounts": [{"name": "work", "mount_path": mount}]})
    job.launch_stage = 3
    with pytest.raises(exceptions.BadRequest, match=re.escape(message)):
        create(cloud, make, job)


def test_a_gpu_task_of_an_hour_and_a_long_task_without_a_gpu_need_no_launch_stage(cloud: Any, make: Any) -> None:
    assert create(cloud, make, make.job(**L4, timeout="3600s")).launch_stage == 4
    assert create(cloud, make, make.job(timeout="7200s"), "j2").launch_stage == 4


def test_a_service_with_a_preview_value_needs_its_launch_stage(cloud: Any, make: Any) -> None:
    container = {"resources": {"limits": PRO["limits"]}}
    service = make.service(container=container, node_selector=PRO["node_selector"], scaling={"max_instance_count": 1})
    with pytest.raises(exceptions.BadRequest, match="Precondition check failed"):
        cloud.services.create_service(parent=make.parent, service=service, service_id="s1")


@pytest.mark.parametrize(
    ("gpu", "failures", "longest"), [(True, 181, 1800), (False, 61, 600)], ids=["with a GPU", "without a GPU"]
)
def test_a_startup_probe_may_take_only_so_long(cloud: Any, make: Any, gpu: bool, failures: int, longest: int) -> None:
    probe = {"tcp_socket": {}, "period_seconds": 10, "timeout_seconds": 9, "failure_threshold": failures}
    container: dict[str, Any] = {"startup_probe": probe}
    template: dict[str, Any] = {"scaling": {"max_instance_count": 1}}
    if gpu:
        container["resources"] = {"limits": L4["limits"]}
        template["node_selector"] = L4["node_selector"]
    service = make.service(container=container, **template)
    with pytest.raises(exceptions.BadRequest, match=f"is {failures * 10} s; expected at most {longest} s"):
        cloud.services.create_service(parent=make.parent, service=service, service_id="s1")


def test_grpc_probes_are_not_emulated(cloud: Any, make: Any) -> None:
    service = make.service(container={"startup_probe": {"grpc": {}}})
    with pytest.raises(exceptions.MethodNotImplemented, match=r"startup_probe\.grpc"):
        cloud.services.create_service(parent=make.parent, service=service, service_id="s1")


def _messages(cls: Any, seen: set[Any]) -> Iterator[Any]:
    if cls in seen or not hasattr(cls, "meta"):
        return
    seen.add(cls)
    yield cls
    for field in cls.meta.fields.values():
        if inspect.isclass(field.message):
            yield from _messages(field.message, seen)


def _prose(cls: Any, start: str) -> set[str]:
    fields = re.findall(rf"^ +(\w+) \([^\n]*\):\n +(?:Optional\. )?{start}", cls.__doc__ or "", re.M)
    return set(fields) & set(cls.meta.fields)


def test_field_tables_agree_with_the_prose_of_the_client() -> None:
    seen: set[Any] = set()
    for root in (run_v2.Job, run_v2.Service):
        for cls in _messages(root, seen):
            assert set(REQUIRED.get(cls.__name__, ())) == _prose(cls, r"Required\."), cls
    for cls in (run_v2.Job, run_v2.Service):
        assert set(OUTPUT_ONLY[cls.__name__]) == _prose(cls, "Output only"), cls


def test_gpus_are_in_regions_of_cloud_run() -> None:
    assert all(gpu.regions <= CloudRunConfig().regions for gpu in CloudRunConfig().gpus.values())
