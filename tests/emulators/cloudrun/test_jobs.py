"""The Jobs API with google-cloud-run: answers, refusals and stored fields."""

from __future__ import annotations

import json
import re
import urllib.error
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import run_v2

STATE = run_v2.Condition.State


def status_of(error: exceptions.GoogleAPICallError) -> str:
    return str(error.response.json()["error"]["status"])


def create(cloud: Any, make: Any, *args: str, job_id: str = "j1", **task: Any) -> run_v2.Job:
    return cloud.done(cloud.jobs.create_job(parent=make.parent, job=make.job(*args, **task), job_id=job_id))


def test_a_created_job_is_ready_with_defaults_and_a_deleted_job_is_not_found(cloud: Any, make: Any) -> None:
    job = make.job()
    job.template.template = run_v2.TaskTemplate(containers=[{"image": f"{make.registry}/train-job:1"}])
    operation = cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1")
    assert operation.metadata.name == f"{make.parent}/jobs/j1"
    created = cloud.done(operation)
    task = created.template.template
    assert (task.max_retries, task.timeout.total_seconds(), created.template.task_count) == (3, 600, 1)
    assert dict(task.containers[0].resources.limits) == {"cpu": "1000m", "memory": "512Mi"}
    assert (created.terminal_condition.state, created.reconciling) == (STATE.CONDITION_SUCCEEDED, False)
    assert created.observed_generation == created.generation == 1
    deleted = cloud.done(cloud.jobs.delete_job(name=created.name))
    assert deleted.delete_time
    with pytest.raises(exceptions.NotFound, match=r"Resource 'j1' of kind 'JOB' in region 'us-central1'"):
        cloud.jobs.get_job(name=created.name)
    assert cloud.live() == []


def test_a_second_create_is_already_exists(cloud: Any, make: Any) -> None:
    create(cloud, make)
    with pytest.raises(exceptions.Conflict) as refused:
        create(cloud, make)
    assert status_of(refused.value) == "ALREADY_EXISTS"


def test_update_replaces_everything_and_counts_generations(cloud: Any, make: Any) -> None:
    job = make.job()
    job.labels = {"a": "1"}
    first = cloud.done(cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1"))
    replacement = make.job("fail")
    replacement.name = first.name
    second = cloud.done(cloud.jobs.update_job(job=replacement))
    assert (dict(second.labels), second.generation, second.uid) == ({}, 2, first.uid)
    assert list(second.template.template.containers[0].args) == ["fail"]


def test_read_modify_write_ignores_output_fields_and_checks_the_etag(cloud: Any, make: Any) -> None:
    first = create(cloud, make)
    first.labels["b"] = "2"
    second = cloud.done(cloud.jobs.update_job(job=first))
    assert second.labels["b"] == "2"
    with pytest.raises(exceptions.Conflict, match="etag") as refused:
        cloud.jobs.update_job(job=first)
    assert status_of(refused.value) == "ABORTED"
    with pytest.raises(exceptions.Conflict, match="etag"):
        cloud.jobs.delete_job(request=run_v2.DeleteJobRequest(name=first.name, etag=first.etag))


def test_update_with_allow_missing_creates(cloud: Any, make: Any) -> None:
    job = make.job()
    job.name = f"{make.parent}/jobs/new"
    with pytest.raises(exceptions.NotFound):
        cloud.jobs.update_job(job=job)
    made = cloud.done(cloud.jobs.update_job(request=run_v2.UpdateJobRequest(job=job, allow_missing=True)))
    assert made.generation == 1


def test_validate_only_stores_no_job(cloud: Any, make: Any) -> None:
    request = run_v2.CreateJobRequest(parent=make.parent, job=make.job(), job_id="j1", validate_only=True)
    assert cloud.done(cloud.jobs.create_job(request=request)).template.task_count == 1
    assert list(cloud.jobs.list_jobs(parent=make.parent)) == []


def test_list_pages_newest_first(cloud: Any, make: Any) -> None:
    for number in range(3):
        create(cloud, make, job_id=f"j{number}")
    pager = cloud.jobs.list_jobs(request=run_v2.ListJobsRequest(parent=make.parent, page_size=2))
    assert [[job.name[-2:] for job in page.jobs] for page in pager.pages] == [["j2", "j1"], ["j0"]]
    assert list(cloud.jobs.list_jobs(parent="projects/p1/locations/europe-west4")) == []
    with pytest.raises(exceptions.MethodNotImplemented):
        list(cloud.jobs.list_jobs(request=run_v2.ListJobsRequest(parent=make.parent, show_deleted=True)))


@pytest.mark.parametrize("location", ["nowhere-1", "us-central1-a", "-"])
def test_unknown_location_is_permission_denied(cloud: Any, make: Any, location: str) -> None:
    with pytest.raises(exceptions.Forbidden, match="or it may not exist"):
        cloud.jobs.create_job(parent=f"projects/p1/locations/{location}", job=make.job(), job_id="j1")


def test_missing_image_fails_the_operation_and_the_condition(cloud: Any, make: Any) -> None:
    job = make.job(container={"image": f"{make.registry}/no-such:1"})
    operation = cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1")
    with pytest.raises(exceptions.NotFound, match="containers/no_such/Dockerfile"):
        cloud.done(operation)
    condition = cloud.jobs.get_job(name=f"{make.parent}/jobs/j1").terminal_condition
    assert condition.state == STATE.CONDITION_FAILED
    assert condition.reason == run_v2.Condition.CommonReason.CONTAINER_MISSING
    with pytest.raises(exceptions.BadRequest, match="not ready") as refused:
        cloud.jobs.run_job(name=f"{make.parent}/jobs/j1")
    assert status_of(refused.value) == "FAILED_PRECONDITION"


def test_missing_secret_fails_the_check(cloud: Any, make: Any) -> None:
    env = [{"name": "T", "value_source": {"secret_key_ref": {"secret": "nope", "version": "3"}}}]
    operation = cloud.jobs.create_job(parent=make.parent, job=make.job(container={"env": env}), job_id="j1")
    with pytest.raises(exceptions.NotFound, match="projects/p1/secrets/nope/versions/3"):
        cloud.done(operation)
    condition = cloud.jobs.get_job(name=f"{make.parent}/jobs/j1").terminal_condition
    assert condition.reason == run_v2.Condition.CommonReason.SECRETS_ACCESS_CHECK_FAILED


def test_operations_can_be_read_awaited_listed_and_deleted(cloud: Any, make: Any) -> None:
    operation = cloud.jobs.create_job(parent=make.parent, job=make.job(), job_id="j1").operation
    path = f"/v2/{operation.name}"
    done = cloud.call("POST", f"{path}:wait", {"timeout": "10s"})
    assert done["done"]
    assert done["response"]["@type"] == "type.googleapis.com/google.cloud.run.v2.Job"
    listed = cloud.call("GET", f"/v2/{make.parent}/operations")["operations"]
    assert [done["name"] for done in listed] == [operation.name]
    assert cloud.call("DELETE", path) == {}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cloud.call("GET", path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"template": {"template": {"containers": [{"image": "x"}], "maxRetrys": 1}}}, 'no field named "maxRetrys"'),
        ({"template": {"template": {"containers": [{"image": "x"}], "timeout": 600}}}, "timeout"),
        ({"template": {"template": {"containers": [{}]}}}, r"job.template.template.containers\[0\].image: Required"),
        ({}, "job.template: Required field"),
        ([], "Invalid JSON payload"),
        ({"template": {"template": {"containers": [{"image": "x"}], "executionEnvironment": "GEN9"}}}, "GEN9"),
    ],
)
def test_bodies_are_read_strictly(cloud: Any, make: Any, body: Any, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        cloud.call("POST", f"/v2/{make.parent}/jobs?jobId=j1", body)
    answer = json.loads(refused.value.read())["error"]
    assert answer["status"] == "INVALID_ARGUMENT"
    assert re.search(message, answer["message"])


def test_unknown_query_parameters_and_methods_are_refused(cloud: Any, make: Any) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        cloud.call("GET", f"/v2/{make.parent}/jobs?filter=x")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        cloud.call("POST", f"/v2/{make.parent}/jobs/j1:setIamPolicy", {})


def test_a_call_can_fail_after_its_effect(cloud: Any, make: Any) -> None:
    rule = {"method": "create_job", "status": "UNAVAILABLE", "after_effect": True}
    assert cloud.faults(fail_next=rule)["fail_next"] == [{"count": 1, **rule}]
    with pytest.raises(exceptions.ServiceUnavailable, match="on purpose"):
        create(cloud, make)
    assert [job.name for job in cloud.jobs.list_jobs(parent=make.parent)] == [f"{make.parent}/jobs/j1"]
    cloud.faults(fail_next={"method": "delete_job", "status": "INTERNAL"})
    with pytest.raises(exceptions.InternalServerError):
        cloud.jobs.delete_job(name=f"{make.parent}/jobs/j1")
    assert len(list(cloud.jobs.list_jobs(parent=make.parent))) == 1


@pytest.mark.parametrize(
    "switches", [{"stokout": []}, {"fail_next": {"method": "x"}}, {"fail_next": {"method": "get_job", "status": "NO"}}]
)
def test_misspelt_fault_switches_are_refused(cloud: Any, switches: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400"):
        cloud.faults(**switches)
