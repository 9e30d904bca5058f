"""Target `cloud_run`: one Cloud Run job per attempt, with one GPU.

`startExecutionToken` gives the job's only execution a name that is known in advance. `maxRetries` is 0: dropforge makes
the retries, because each retry of Cloud Run may take the full time-out again and sends no event.
API: https://cloud.google.com/run/docs/reference/rest/v2/projects.locations.jobs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.classify import classify, classify_text, client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, list_places
from dropforge.cloud.resource import Resource, check_owner
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import Launch, Phase, Status, class_of_exit, container_variables, run_labels
from dropforge.spec import JobSpec

from .catalog import cloud_run_price, cloud_run_regions
from .preview import with_launch_stage
from .spec import CloudRunTarget

KIND = "run.googleapis.com/Job"
LAUNCH_WAIT_SECONDS = 5.0  # most creates and deletes take less; the next call looks at the rest
LOOK_SECONDS = 0.1
WORK = "/work"  # where an ephemeral disk is mounted
_DEADLINE_EXCEEDED = 4  # google.rpc.Code
# The text of the condition: "Task T failed with exit code: 0 and message: ...". Google does not document this text; it
# is in users' logs (https://github.com/search?q=%22configured+memory+limit+was+reached%22&type=code).
_OUT_OF_MEMORY = "configured memory limit was reached"
_MEMORY_HINT = "raise target.memory_gib"
# Reasons of a condition (run_v2 Condition.CommonReason) that no further attempt can mend.
_CONFIG_REASONS = frozenset(
    {
        "CONTAINER_MISSING",
        "CONTAINER_PERMISSION_DENIED",
        "CONTAINER_IMAGE_UNAUTHORIZED",
        "CONTAINER_IMAGE_AUTHORIZATION_CHECK_FAILED",
        "ENCRYPTION_KEY_PERMISSION_DENIED",
        "ENCRYPTION_KEY_CHECK_FAILED",
        "SECRETS_ACCESS_CHECK_FAILED",
        "VPC_NETWORK_NOT_FOUND",
    }
)


class CloudRunJobs:
    """See `Target` for the contract of each verb."""

    def regions(self, spec: JobSpec) -> list[str]:
        return [placement.region for placement in spec.target.placements]

    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        target = _target(spec)
        if target.price_usd_per_hour is not None:
            return HourlyPrice(target.price_usd_per_hour, None, "target.price_usd_per_hour in the spec")
        region = target.placements[placement].region
        machine = (target.accelerator, region, target.cpu, target.memory_gib, target.zonal_redundancy)
        return cloud_run_price(*machine, target.disk_gib or 0)

    def resources(self, launch: Launch) -> list[Resource]:
        return [Resource(KIND, job_name(launch), job_request(launch))]

    def provision(self, cloud: Cloud, launch: Launch) -> bool:
        try:
            job = self._job(cloud, launch) or self._create(cloud, launch)
        except CloudError:
            raise
        except client_errors() as error:
            raise classify(error) from error
        if job is None:
            return False
        check_owner(job.name, job.labels, launch.run)
        _raise_if_failed(job.terminal_condition)
        return self._execution(cloud, launch) is not None

    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        from google.api_core.exceptions import NotFound

        try:
            if (execution := self._execution(cloud, launch)) is not None:
                return status_of_execution(execution, lambda: self._result(cloud, execution.name))
        except NotFound:
            pass  # the execution was deleted between the two reads
        except client_errors() as error:
            raise classify(error) from error
        return Status(Phase.GONE, f"{execution_name(launch)} does not exist")

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """List each region with GPUs, because the API cannot list all regions at once."""
        yield from list_places(cloud, cloud_run_regions(), lambda region: _jobs_in(cloud, region))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        try:
            return self._delete(cloud, name)
        except client_errors() as error:
            raise classify(error) from error

    def _job(self, cloud: Cloud, launch: Launch) -> Any:
        from google.api_core.exceptions import NotFound

        try:
            return cloud.clients.run_jobs().get_job(name=job_name(launch), timeout=TIMEOUT_SECONDS)
        except NotFound:
            return None

    def _create(self, cloud: Cloud, launch: Launch) -> Any:
        """Create the job and wait a moment; None while Cloud Run still creates it."""
        from google.api_core.exceptions import Conflict
        from google.cloud import run_v2

        if _target(launch.spec).disk_gib is not None:
            return self._create_with_disk(cloud, launch)
        parent, _, job_id = job_name(launch).rpartition("/jobs/")
        job = run_v2.Job.from_json(json.dumps(job_request(launch)["job"]), ignore_unknown_fields=False)
        try:
            operation = cloud.clients.run_jobs().create_job(
                parent=parent, job=job, job_id=job_id, timeout=TIMEOUT_SECONDS
            )
        except Conflict:
            return self._job(cloud, launch)  # an earlier create whose reply was lost; the caller checks the owner
        deadline = cloud.clock.monotonic() + LAUNCH_WAIT_SECONDS
        while not operation.done():
            if cloud.clock.monotonic() > deadline:
                return None
            cloud.clock.sleep(LOOK_SECONDS)
        if operation.exception() is not None:
            raise classify(operation.exception())
        return operation.result()

    def _create_with_disk(self, cloud: Cloud, launch: Launch) -> Any:
        """Create the job by plain REST, because run_v2 does not know the medium DISK; None while it is created."""
        from google.api_core.exceptions import Conflict, from_http_response

        request = job_request(launch)
        session, root = cloud.clients.run_rest()
        url, query = f"{root}/{request['parent']}/jobs", {"jobId": request["jobId"]}
        response = session.post(url, params=query, json=request["job"], timeout=TIMEOUT_SECONDS)
        if not response.ok and not isinstance(error := from_http_response(response), Conflict):
            raise error
        # The job may be that of an earlier create whose reply was lost. The caller checks the owner.
        return self._job(cloud, launch)

    def _execution(self, cloud: Cloud, launch: Launch) -> Any:
        from google.api_core.exceptions import NotFound

        try:
            return cloud.clients.run_executions().get_execution(name=execution_name(launch), timeout=TIMEOUT_SECONDS)
        except NotFound:
            return None

    def _result(self, cloud: Cloud, execution: str) -> Any:
        """The result of the first failed task: its exit code, or a status if Cloud Run ended the task."""
        tasks = cloud.clients.run_tasks().list_tasks(parent=execution, timeout=TIMEOUT_SECONDS)
        results = [task.last_attempt_result for task in tasks if task.last_attempt_result]
        return next((r for r in results if r.exit_code or r.term_signal or r.status.code), None)

    def _delete(self, cloud: Cloud, name: str) -> bool:
        from google.api_core.exceptions import NotFound

        jobs = cloud.clients.run_jobs()
        deadline = cloud.clock.monotonic() + LAUNCH_WAIT_SECONDS
        try:
            if not jobs.get_job(name=name, timeout=TIMEOUT_SECONDS).delete_time:
                self._cancel_executions(cloud, name)
                jobs.delete_job(name=name, timeout=TIMEOUT_SECONDS)
            while cloud.clock.monotonic() < deadline:
                jobs.get_job(name=name, timeout=TIMEOUT_SECONDS)
                cloud.clock.sleep(LOOK_SECONDS)
        except NotFound:
            return True
        return False

    def _cancel_executions(self, cloud: Cloud, job: str) -> None:
        """Cancel the running executions: Cloud Run does not document that deleting a job ends them."""
        from google.api_core.exceptions import BadRequest, NotFound

        executions = cloud.clients.run_executions()
        for execution in executions.list_executions(parent=job, timeout=TIMEOUT_SECONDS):
            if not execution.completion_time:
                try:
                    executions.cancel_execution(name=execution.name, timeout=TIMEOUT_SECONDS)
                except (NotFound, BadRequest):
                    continue  # it ended in the meantime


def job_name(launch: Launch) -> str:
    """The full resource name of the attempt's job."""
    region = launch.spec.target.placements[launch.placement].region
    job = names.training_name(launch.run, launch.attempt)
    return f"projects/{launch.settings.project}/locations/{region}/jobs/{job}"


def execution_name(launch: Launch) -> str:
    """The full resource name of the job's only execution: `<job>-<token>`."""
    job = job_name(launch)
    return f"{job}/executions/{job.rsplit('/', 1)[1]}-{_token(launch)}"


def job_request(launch: Launch) -> dict[str, Any]:
    """The createJob request as JSON."""
    target, settings = _target(launch.spec), launch.settings
    labels = run_labels(launch)
    task: dict[str, Any] = {
        "containers": [_container(launch, target)],
        "maxRetries": 0,
        "timeout": f"{launch.timeout_seconds}s",
        "serviceAccount": settings.trainer_service_account,
        "executionEnvironment": "EXECUTION_ENVIRONMENT_GEN2",
        "nodeSelector": {"accelerator": target.accelerator},
        "gpuZonalRedundancyDisabled": not target.zonal_redundancy,
        "vpcAccess": {
            "networkInterfaces": [{"network": settings.network, "subnetwork": settings.subnetwork}],
            "egress": "PRIVATE_RANGES_ONLY",
        },
    }
    if target.disk_gib is not None:
        disk = {"medium": "DISK", "sizeLimit": f"{target.disk_gib}Gi"}
        task["volumes"] = [{"name": "work", "emptyDir": disk}]
    job = {
        "labels": labels,
        "template": {"labels": labels, "taskCount": 1, "parallelism": 1, "template": task},
        "startExecutionToken": _token(launch),
    }
    parent, _, job_id = job_name(launch).rpartition("/jobs/")
    return {"parent": parent, "jobId": job_id, "job": with_launch_stage(job)}


def status_of_execution(execution: Any, result_of_task: Callable[[], Any]) -> Status:
    """The status of an Execution. `result_of_task` is called only if the execution failed."""
    from google.cloud import run_v2

    completed = next((c for c in execution.conditions if c.type_ == "Completed"), run_v2.Condition())
    state = completed.state
    if state == run_v2.Condition.State.CONDITION_SUCCEEDED:
        return Status(Phase.SUCCEEDED, exit_code=0)
    if state != run_v2.Condition.State.CONDITION_FAILED:
        return Status(Phase.RUNNING if execution.running_count else Phase.PENDING)
    if execution.cancelled_count:
        return Status(Phase.FAILED, f"the execution was cancelled: {completed.message}", ErrorClass.INFRASTRUCTURE)
    reason = run_v2.Condition.CommonReason(completed.reason).name
    if reason in _CONFIG_REASONS:
        return Status(Phase.FAILED, f"{reason}: {completed.message}", ErrorClass.CONFIG)
    if _OUT_OF_MEMORY in completed.message:
        return Status(Phase.FAILED, completed.message, ErrorClass.OUT_OF_MEMORY, hint=_MEMORY_HINT)
    result = result_of_task()
    if result is not None and result.exit_code:
        error_class, code = class_of_exit(result.exit_code), result.exit_code
        return Status(Phase.FAILED, completed.message, error_class, code, execution.completion_time)
    timed_out = result is not None and result.status.code == _DEADLINE_EXCEEDED
    error_class = ErrorClass.DEADLINE if timed_out else ErrorClass.INFRASTRUCTURE
    return Status(Phase.FAILED, completed.message, error_class)


def _jobs_in(cloud: Cloud, region: str) -> list[Listed]:
    parent = f"projects/{cloud.settings.project}/locations/{region}"
    jobs = cloud.clients.run_jobs().list_jobs(parent=parent, timeout=TIMEOUT_SECONDS)
    return [Listed(KIND, job.name, dict(job.labels), job.create_time) for job in jobs]


def _container(launch: Launch, target: CloudRunTarget) -> dict[str, Any]:
    values = container_variables(launch)
    if target.disk_gib is not None:
        values |= {"TMPDIR": WORK, "HF_HOME": f"{WORK}/huggingface"}
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    environment += [secret_variable(name, secret) for name, secret in launch.spec.secrets.items()]
    limits = {"cpu": str(target.cpu), "memory": f"{target.memory_gib}Gi", "nvidia.com/gpu": "1"}
    container = {"image": launch.settings.train_trl_image, "env": environment, "resources": {"limits": limits}}
    return container | ({"volumeMounts": [{"name": "work", "mountPath": WORK}]} if target.disk_gib is not None else {})


def secret_variable(name: str, secret: str) -> dict[str, Any]:
    """A container's environment variable whose value Cloud Run reads from Secret Manager."""
    secret, _, version = secret.partition(":")
    return {"name": name, "valueSource": {"secretKeyRef": {"secret": secret, "version": version or "latest"}}}


def _target(spec: JobSpec) -> CloudRunTarget:
    assert isinstance(spec.target, CloudRunTarget), "the registry gives this target only specs of its type"
    return spec.target


def _token(launch: Launch) -> str:
    return f"t{launch.attempt}"


def _raise_if_failed(condition: Any) -> None:
    from google.cloud import run_v2

    if condition and condition.state == run_v2.Condition.State.CONDITION_FAILED:
        reason = run_v2.Condition.CommonReason(condition.reason).name
        raise classify_text("FAILED_PRECONDITION", f"{reason}: {condition.message}")
