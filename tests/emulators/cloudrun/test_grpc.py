"""Cloud Run over gRPC, the default of google-cloud-run: the same state as over REST."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import run_v2, tpu_v2
from google.longrunning import operations_pb2

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.containers.images import ImageStore
from dropforge_local.emulators.cloudrun import CloudRunConfig
from dropforge_local.emulators.compute import ComputeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.tpu import TpuEmulator

from .conftest import build_emulator

Connect = Callable[[Any], Any]


@pytest.fixture
def connect(cloud: Any) -> Iterator[Connect]:
    """Makes clients with their default transport."""
    with grpc.insecure_channel(cloud.grpc) as channel:
        yield lambda kind: kind(transport=kind.get_transport_class()(channel=channel))


def test_a_job_from_create_to_delete(cloud: Any, make: Any, connect: Connect) -> None:
    jobs, executions, tasks = (connect(k) for k in (run_v2.JobsClient, run_v2.ExecutionsClient, run_v2.TasksClient))
    assert "grpc" in type(jobs.transport).__name__.lower()
    created = cloud.done(jobs.create_job(parent=make.parent, job=make.job(), job_id="j1"))
    assert jobs.get_job(name=created.name) == cloud.jobs.get_job(name=created.name) == created
    assert [job.name for job in jobs.list_jobs(parent=make.parent)] == [created.name]
    changed = make.job("fail")
    changed.name = created.name
    assert cloud.done(jobs.update_job(job=changed)).generation == 2
    overrides = {"container_overrides": [{"args": ["succeed"]}]}
    execution = cloud.done(jobs.run_job({"name": created.name, "overrides": overrides}))
    assert execution.succeeded_count == 1
    assert [item.name for item in executions.list_executions(parent=created.name)] == [execution.name]
    assert [task.index for task in tasks.list_tasks(parent=execution.name)] == [0]
    cloud.done(executions.delete_execution(name=execution.name))
    cloud.done(jobs.delete_job(name=created.name))
    assert cloud.live() == []


def test_a_service_and_its_revision(cloud: Any, make: Any, connect: Connect) -> None:
    services, revisions = connect(run_v2.ServicesClient), connect(run_v2.RevisionsClient)
    created = cloud.done(services.create_service(parent=make.parent, service=make.service(), service_id="s1"))
    [revision] = revisions.list_revisions(parent=created.name)
    assert revision.name.rsplit("/", 1)[1] == created.latest_ready_revision.rsplit("/", 1)[1]
    assert [service.name for service in services.list_services(parent=make.parent)] == [created.name]
    cloud.done(services.delete_service(name=created.name))


def test_refusals_have_the_codes_of_google(make: Any, connect: Connect) -> None:
    jobs = connect(run_v2.JobsClient)
    with pytest.raises(exceptions.NotFound, match="Resource 'j1' of kind 'JOB'"):
        jobs.get_job(name=f"{make.parent}/jobs/j1")
    with pytest.raises(exceptions.PermissionDenied, match="nowhere1"):
        list(jobs.list_jobs(parent="projects/p1/locations/nowhere1"))
    with pytest.raises(exceptions.InvalidArgument, match="parent is 'elsewhere'"):
        list(jobs.list_jobs(parent="elsewhere"))
    with pytest.raises(exceptions.InvalidArgument, match="Required field not provided"):
        jobs.create_job(parent=make.parent, job=run_v2.Job(), job_id="j1")
    with pytest.raises(exceptions.MethodNotImplemented):
        jobs.get_iam_policy(request={"resource": f"{make.parent}/jobs/j1"})


def test_operations_are_read_awaited_listed_and_deleted(cloud: Any, make: Any, connect: Connect) -> None:
    jobs = connect(run_v2.JobsClient)
    name = jobs.create_job(parent=make.parent, job=make.job(), job_id="j1").operation.name
    awaited = jobs.wait_operation(operations_pb2.WaitOperationRequest(name=name, timeout={"seconds": 60}))
    # google-cloud-run 0.16.2 does not parse this answer.
    assert operations_pb2.Operation.FromString(awaited).done
    assert jobs.get_operation({"name": name}).SerializeToString() == awaited
    assert [operation.name for operation in jobs.list_operations({"name": make.parent}).operations] == [name]
    jobs.delete_operation({"name": name})
    with pytest.raises(exceptions.NotFound):
        jobs.get_operation({"name": name})


def test_cloud_tpu_and_cloud_run_share_the_operations_of_one_port(tmp_path: Path, make: Any) -> None:
    def build() -> list[Any]:
        db, clock = Database(tmp_path / "both.db"), SystemClock()
        images = ImageStore(tmp_path / "repo", tmp_path / "images", Path("python"))
        disks = ComputeEmulator(db, clock, directory=tmp_path / "disks").disks
        host = Host(db, clock, images, tmp_path / "vms", lambda account: {})
        run = build_emulator(tmp_path / "run", {}, CloudRunConfig(), clock)
        return [TpuEmulator(host, disks=disks, token=lambda scope, account: "t"), run]

    (tmp_path / "run").mkdir()
    with BackgroundServer(build) as server, grpc.insecure_channel(server.grpc_address) as channel:
        jobs, tpus = (
            kind(transport=kind.get_transport_class()(channel=channel))
            for kind in (run_v2.JobsClient, tpu_v2.TpuClient)
        )
        with pytest.raises(exceptions.NotFound, match="Operation 'projects/p1/locations/us-central1/operations/run-x'"):
            jobs.get_operation({"name": f"{make.parent}/operations/run-x"})
        zone = "projects/p1/locations/us-central1-a"
        with pytest.raises(exceptions.NotFound, match="Resource 'projects/p1/locations/us-central1-a/operations"):
            tpus.get_operation({"name": f"{zone}/operations/operation-x"})
        assert not jobs.list_operations({"name": make.parent}).operations
        assert not tpus.list_operations({"name": zone}).operations
