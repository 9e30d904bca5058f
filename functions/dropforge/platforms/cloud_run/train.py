"""Target `cloud_run`: one Cloud Run job per attempt, with one GPU.

`startExecutionToken` gives the job's only execution a name that is known in advance. `maxRetries` is 0: dropforge makes
the retries, because each retry of Cloud Run may take the full time-out again and sends no event.
API: https://cloud.google.com/run/docs/reference/rest/v2/projects.locations.jobs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.cloud.classify import classify, classify_create, classify_text, client_errors, status_of
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, list_places
from dropforge.cloud.resource import Resource, check_owner
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import (
    Launch,
    Phase,
    Status,
    Target,
    Waits,
    class_of_exit,
    container_variables,
    run_labels,
)
from dropforge.spec import JobSpec

from .catalog import cloud_run_price, cloud_run_regions
from .preview import with_launch_stage
from .spec import CloudRunTarget

KIND = "run.googleapis.com/Job"
DELETE_WAIT_SECONDS = 5.0  # most deletions take less; the next call looks at the rest
LOOK_SECONDS = 0.1  # until the first look at a deletion; each later pause is twice as long
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


class CloudRunJobs(Target):
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

    def provision(self, cloud: Cloud, launch: Launch) -> Waits | None:
        """Create the job. `inspect` sees whether Cloud Run can start its execution."""
        from google.api_core.exceptions import Conflict

        try:
            self._create(cloud, launch)
        except Conflict:  # an earlier create whose answer was lost, or another owner's job
            if not self._is_own(cloud, launch):
                return Waits(f"{job_name(launch)} is being deleted")
        except client_errors() as error:
            problem = _problem(error)
            if not isinstance(problem, OverQuota):
                raise problem from error
            self._check_refused(cloud, launch, problem)
        return None

    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        try:
            return self._status(cloud, launch)
        except client_errors() as error:
            raise classify(error) from error

    def _status(self, cloud: Cloud, launch: Launch) -> Status:
        """The status of the execution or, while the job has none, of the job. Raises client errors."""
        if status := self._status_of_execution(cloud, launch):
            return status
        job = self._job(cloud, launch)
        if job is not None and (status := status_before_execution(job.terminal_condition)):
            return status
        # The execution may have started between the two reads.
        gone = Status(Phase.GONE, f"{execution_name(launch)} does not exist")
        return (self._status_of_execution(cloud, launch) if job is not None else None) or gone

    def _status_of_execution(self, cloud: Cloud, launch: Launch) -> Status | None:
        from google.api_core.exceptions import NotFound

        name = execution_name(launch)
        try:
            execution = cloud.clients.run_executions().get_execution(name=name, timeout=TIMEOUT_SECONDS)
            return status_of_execution(execution, lambda: self._result(cloud, name))
        except NotFound:
            return None

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """List each region with GPUs, because the API cannot list all regions at once."""
        yield from list_places(cloud, cloud_run_regions(), lambda region: _jobs_in(cloud, region))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        try:
            return self._delete(cloud, name)
        except client_errors() as error:
            raise _problem(error) from error

    def _job(self, cloud: Cloud, launch: Launch) -> Any:
        from google.api_core.exceptions import NotFound

        try:
            return cloud.clients.run_jobs().get_job(name=job_name(launch), timeout=TIMEOUT_SECONDS)
        except NotFound:
            return None

    def _is_own(self, cloud: Cloud, launch: Launch) -> bool:
        """Whether the job exists and is the run's. Raises CloudError for the job of another owner."""
        try:
            job = self._job(cloud, launch)
        except client_errors() as error:
            raise classify(error) from error
        if job is not None:
            check_owner(job.name, job.labels, launch.run)
        return job is not None

    def _check_refused(self, cloud: Cloud, launch: Launch, refused: OverQuota) -> None:
        """Raise the refusal of a create, unless an earlier create whose answer was lost has created the job."""
        try:
            is_created = self._is_own(cloud, launch)
        except CloudError as error:
            if error.error_class is not ErrorClass.TRANSIENT:
                raise
            raise OverQuota(refused.error_class, refused.message, refused.hint, is_sure=False) from error
        if not is_created:
            raise refused

    def _create(self, cloud: Cloud, launch: Launch) -> None:
        """Ask Cloud Run to create the job. Raises client errors, such as Conflict if the job exists."""
        from google.cloud import run_v2

        if _target(launch.spec).disk_gib is not None:
            self._create_with_disk(cloud, launch)
            return
        parent, _, job_id = job_name(launch).rpartition("/jobs/")
        job = run_v2.Job.from_json(json.dumps(job_request(launch)["job"]), ignore_unknown_fields=False)
        cloud.clients.run_jobs().create_job(parent=parent, job=job, job_id=job_id, timeout=TIMEOUT_SECONDS)

    def _create_with_disk(self, cloud: Cloud, launch: Launch) -> None:
        """Create the job by plain REST, because run_v2 does not know the medium DISK. Raises client errors."""
        from google.api_core.exceptions import from_http_response

        request = job_request(launch)
        session, root = cloud.clients.run_rest()
        url, query = f"{root}/{request['parent']}/jobs", {"jobId": request["jobId"]}
        response = session.post(url, params=query, json=request["job"], timeout=TIMEOUT_SECONDS)
        if not response.ok:
            raise from_http_response(response)

    def _result(self, cloud: Cloud, execution: str) -> Any:
        """The result of the first failed task: its exit code, or a status if Cloud Run ended the task."""
        tasks = cloud.clients.run_tasks().list_tasks(parent=execution, timeout=TIMEOUT_SECONDS)
        results = [task.last_attempt_result for task in tasks if task.last_attempt_result]
        return next((r for r in results if r.exit_code or r.term_signal or r.status.code), None)

    def _delete(self, cloud: Cloud, name: str) -> bool:
        from google.api_core.exceptions import BadRequest, Conflict, NotFound

        jobs = cloud.clients.run_jobs()
        deadline, pause = cloud.clock.monotonic() + DELETE_WAIT_SECONDS, LOOK_SECONDS
        _cancel_execution(cloud, name)
        try:
            try:
                jobs.delete_job(name=name, timeout=TIMEOUT_SECONDS)
            except (BadRequest, Conflict):  # a refusal, unless the job is being deleted already
                if not jobs.get_job(name=name, timeout=TIMEOUT_SECONDS).delete_time:
                    raise
            while cloud.clock.monotonic() < deadline:
                cloud.clock.sleep(pause)  # a deletion takes longer than a request
                pause *= 2
                jobs.get_job(name=name, timeout=TIMEOUT_SECONDS)
        except NotFound:
            return True
        return False


def _problem(error: Exception) -> CloudError:
    """The error of a change. Cloud Run says RESOURCE_EXHAUSTED for quotas, rates, and also for a lack of machines."""
    problem = classify_create(error)
    if status_of(error) != "RESOURCE_EXHAUSTED" or problem.error_class is ErrorClass.STOCKOUT:
        return problem
    return OverQuota(problem.error_class, problem.message, problem.hint)


def _cancel_execution(cloud: Cloud, job: str) -> None:
    """Cancel the execution of a job: Cloud Run does not document that deleting a job ends it.

    Most executions have ended by then. Cloud Run takes many more reads than changes a minute, so a job is read first.
    """
    from google.api_core.exceptions import BadRequest, NotFound

    attempt = names.training_of(job.rsplit("/", 1)[1])
    if attempt is None:
        return
    try:
        present = cloud.clients.run_jobs().get_job(name=job, timeout=TIMEOUT_SECONDS)
        if not present.latest_created_execution.completion_time:
            execution = _execution_of(job, attempt[1])
            cloud.clients.run_executions().cancel_execution(name=execution, timeout=TIMEOUT_SECONDS)
    except (NotFound, BadRequest):
        pass  # it never started, or it has ended


def job_name(launch: Launch) -> str:
    """The full resource name of the attempt's job."""
    region = launch.spec.target.placements[launch.placement].region
    job = names.training_name(launch.run, launch.attempt)
    return f"projects/{launch.settings.project}/locations/{region}/jobs/{job}"


def execution_name(launch: Launch) -> str:
    """The full resource name of the job's only execution: `<job>-<token>`."""
    return _execution_of(job_name(launch), launch.attempt)


def _execution_of(job: str, attempt: int) -> str:
    return f"{job}/executions/{job.rsplit('/', 1)[1]}-{_token(attempt)}"


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
        "startExecutionToken": _token(launch.attempt),
    }
    parent, _, job_id = job_name(launch).rpartition("/jobs/")
    return {"parent": parent, "jobId": job_id, "job": with_launch_stage(job)}


def status_before_execution(condition: Any) -> Status | None:
    """The status of a job without an execution, from its condition; None for a job that has started its execution.

    A job is ready when its execution has started (startExecutionToken).
    """
    from google.cloud import run_v2

    if condition.state == run_v2.Condition.State.CONDITION_SUCCEEDED:
        return None
    if condition.state != run_v2.Condition.State.CONDITION_FAILED:
        return Status(Phase.PENDING, condition.message)
    reason = run_v2.Condition.CommonReason(condition.reason).name
    error = classify_text("FAILED_PRECONDITION", f"{reason}: {condition.message}")
    # Another look at the same job would see the same.
    error_class = ErrorClass.INFRASTRUCTURE if error.error_class is ErrorClass.TRANSIENT else error.error_class
    return Status(Phase.FAILED, error.message, error_class, hint=error.hint)


def status_of_execution(execution: Any, result_of_task: Callable[[], Any]) -> Status:
    """The status of an Execution. `result_of_task` is called only if the execution failed."""
    from google.cloud import run_v2

    completed = next((c for c in execution.conditions if c.type_ == "Completed"), run_v2.Condition())
    state = completed.state
    if state == run_v2.Condition.State.CONDITION_SUCCEEDED:
        return Status(Phase.SUCCEEDED, exit_code=0)
    if state != run_v2.Condition.State.CONDITION_FAILED:
        if execution.running_count:
            return Status(Phase.RUNNING)
        return Status(Phase.PENDING, _obstacle(execution.conditions))
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


def _obstacle(conditions: Iterable[Any]) -> str:
    """Why an execution has no running task: the text of the first condition that is not met, such as the quota's.

    `Completed` stands for the whole execution and says only that it has not ended.
    """
    from google.cloud import run_v2

    unmet = [c for c in conditions if c.message and c.state != run_v2.Condition.State.CONDITION_SUCCEEDED]
    return str(min(unmet, key=lambda c: c.type_ == "Completed").message) if unmet else ""


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


def _token(attempt: int) -> str:
    return f"t{attempt}"
