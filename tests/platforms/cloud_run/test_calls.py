"""How target and endpoint `cloud_run` read the answers of Cloud Run. No server: each test states a call's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import Conflict, NotFound, ResourceExhausted, ServiceUnavailable
from google.cloud import run_v2
from requests import ReadTimeout

from dropforge.base import names
from dropforge.base.clock import Clock
from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.cloud.context import Cloud
from dropforge.platforms.cloud_run.serve import CloudRunService, service_name
from dropforge.platforms.cloud_run.train import CloudRunJobs, execution_name, job_name, job_request
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Phase, Status, Waits

from ...deployments import settings_with
from .test_preview import NOW, launch, spec_of

State = run_v2.Condition.State
Reason = run_v2.Condition.CommonReason
RUN = "demo-0123456789ab"
LAUNCH = replace(launch(), run=RUN)
JOB, EXECUTION = job_name(LAUNCH), execution_name(LAUNCH)
DEPLOYMENT = Deployment(LAUNCH.run, spec_of(), settings_with(), NOW)
SERVICE = service_name(DEPLOYMENT)
CREATED = Waits("Cloud Run creates the service and starts its container")
RATE = "Quota exceeded for quota metric 'Write requests' and limit 'Write requests per minute per region'"
QUOTA = "Waiting for nvidia-l4 quota in us-central1: 3 of 3 in use."


class Time(Clock):
    """A clock whose time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class CloudRun:
    """Every client of Cloud Run: resources by name, and the calls that change one. `dies` deletions have an effect."""

    def __init__(self, *resources: Any, dies: bool = True) -> None:
        self.known = {resource.name: resource for resource in resources}
        self.calls: list[str] = []
        self.dies = dies
        self.tasks: list[Any] = []

    def cloud(self) -> Cloud:
        clients = SimpleNamespace(
            run_jobs=lambda: self, run_executions=lambda: self, run_tasks=lambda: self, run_services=lambda: self
        )
        return Cloud(settings_with(), clients, clock=Time())  # type: ignore[arg-type]

    def get(self, name: str, timeout: float) -> Any:
        if name not in self.known:
            raise NotFound(name)
        return self.known[name]

    get_job = get_execution = get_service = get

    def create_job(self, **request: Any) -> None:
        self.calls.append("create")
        if f"{request['parent']}/jobs/{request['job_id']}" in self.known:
            raise Conflict("it exists")

    def create_service(self, **_: Any) -> None:
        self.calls.append("create")
        raise Conflict("it exists")

    def cancel_execution(self, name: str, timeout: float) -> None:
        self.calls.append(f"cancel {name}")

    def delete(self, name: str, timeout: float) -> None:
        self.calls.append(f"delete {name}")
        if name not in self.known:
            raise NotFound(name)
        if self.dies:
            del self.known[name]

    delete_job = delete_service = delete

    def list_tasks(self, parent: str, timeout: float) -> list[Any]:
        return self.tasks

    def list_jobs(self, parent: str, timeout: float) -> list[Any]:
        return [resource for name, resource in self.known.items() if name.startswith(f"{parent}/jobs/")]

    def list_services(self, parent: str, timeout: float) -> list[Any]:
        return [resource for name, resource in self.known.items() if name.startswith(f"{parent}/services/")]


def labels(run: str = LAUNCH.run) -> dict[str, str]:
    return names.labels(run, {})


def job(state: Any = State.CONDITION_SUCCEEDED, run: str = LAUNCH.run, **condition: Any) -> Any:
    return run_v2.Job(name=JOB, labels=labels(run), terminal_condition=run_v2.Condition(state=state, **condition))


def execution(
    state: Any = State.CONDITION_RECONCILING, running: int = 0, others: list[Any] | None = None, **condition: Any
) -> Any:
    completed = run_v2.Condition(type_="Completed", state=state, **condition)
    return run_v2.Execution(name=EXECUTION, conditions=[completed, *(others or [])], running_count=running)


def service(run: str = LAUNCH.run, state: Any = State.CONDITION_SUCCEEDED, **fields: Any) -> Any:
    condition = run_v2.Condition(state=state, message="the container failed to start")
    values = {"generation": 2, "observed_generation": 2, "uri": "https://endpoint", **fields}
    return run_v2.Service(name=SERVICE, labels=labels(run), terminal_condition=condition, **values)


def status_of(api: CloudRun) -> Status:
    return CloudRunJobs().inspect(api.cloud(), LAUNCH)


def test_a_create_whose_answer_was_lost_is_not_made_twice() -> None:
    api = CloudRun(job())
    assert CloudRunJobs().provision(api.cloud(), LAUNCH) is None
    assert api.calls == ["create"]
    endpoint = CloudRun()
    cloud = endpoint.cloud()
    assert CloudRunService().deploy(cloud, DEPLOYMENT) == CREATED  # and is not visible yet
    assert endpoint.calls == ["create"]


def test_the_resource_of_another_run_is_not_taken() -> None:
    with pytest.raises(CloudError, match="someone-else-0123456789ab"):
        CloudRunJobs().provision(CloudRun(job(run="someone-else-0123456789ab")).cloud(), LAUNCH)
    with pytest.raises(CloudError, match="someone-else-0123456789ab"):
        CloudRunService().deploy(CloudRun(service("someone-else-0123456789ab")).cloud(), DEPLOYMENT)


@pytest.mark.parametrize(
    ("resources", "phase", "error_class"),
    [
        ([], Phase.GONE, None),
        ([job()], Phase.GONE, None),
        ([job(State.CONDITION_RECONCILING)], Phase.PENDING, None),
        (
            [job(State.CONDITION_FAILED, reason=Reason.CONTAINER_MISSING, message="no image")],
            Phase.FAILED,
            ErrorClass.CONFIG,
        ),
        ([job(), execution()], Phase.PENDING, None),
        ([job(), execution(running=1)], Phase.RUNNING, None),
        ([job(), execution(State.CONDITION_SUCCEEDED)], Phase.SUCCEEDED, None),
        (
            [job(), execution(State.CONDITION_FAILED, message="configured memory limit was reached")],
            Phase.FAILED,
            ErrorClass.OUT_OF_MEMORY,
        ),
        (
            [job(), execution(State.CONDITION_FAILED, message="lost")],
            Phase.FAILED,
            ErrorClass.INFRASTRUCTURE,
        ),
    ],
)
def test_the_status_of_an_attempt(resources: list[Any], phase: Phase, error_class: ErrorClass | None) -> None:
    status = status_of(CloudRun(*resources))
    assert (status.phase, status.error_class) == (phase, error_class)


@pytest.mark.parametrize(
    ("result", "error_class"),
    [
        (SimpleNamespace(exit_code=0, term_signal=0, status=SimpleNamespace(code=4)), ErrorClass.DEADLINE),
        (SimpleNamespace(exit_code=65, term_signal=0, status=SimpleNamespace(code=0)), ErrorClass.DATA),
        (SimpleNamespace(exit_code=0, term_signal=9, status=SimpleNamespace(code=0)), ErrorClass.INFRASTRUCTURE),
    ],
)
def test_the_class_of_a_failed_task(result: Any, error_class: ErrorClass) -> None:
    api = CloudRun(job(), execution(State.CONDITION_FAILED, message="failed"))
    api.tasks = [SimpleNamespace(last_attempt_result=result)]
    assert status_of(api).error_class is error_class


def test_an_execution_that_starts_between_two_reads_is_not_gone() -> None:
    api = CloudRun(job())

    def get_job(name: str, timeout: float) -> Any:
        api.known[EXECUTION] = execution(running=1)
        return job()

    api.get_job = get_job  # type: ignore[method-assign]
    assert status_of(api).phase is Phase.RUNNING


@pytest.mark.parametrize("dies", [True, False])
def test_a_job_is_deleted_with_its_execution_and_gone_once_a_read_shows_that(dies: bool) -> None:
    api = CloudRun(job(), dies=dies)
    assert CloudRunJobs().teardown(api.cloud(), "run.googleapis.com/Job", JOB) is dies
    assert api.calls == [f"cancel {EXECUTION}", f"delete {JOB}"]
    assert CloudRunJobs().teardown(CloudRun().cloud(), "run.googleapis.com/Job", JOB) is True


def test_an_execution_that_has_ended_is_not_cancelled() -> None:
    """Cloud Run takes few changes a minute: a teardown that needed two of them could starve."""
    ended = job()
    ended.latest_created_execution.completion_time = NOW
    api = CloudRun(ended)
    assert CloudRunJobs().teardown(api.cloud(), "run.googleapis.com/Job", JOB) is True
    assert api.calls == [f"delete {JOB}"]


@pytest.mark.parametrize("message", ["Quota exceeded for total jobs per project per region.", RATE])
def test_a_create_that_is_refused_for_a_quota_did_nothing_unless_an_earlier_one_did(message: str) -> None:
    def refuse(**_: Any) -> None:
        raise ResourceExhausted(message)

    api, had_effect = CloudRun(), CloudRun(job())
    api.create_job = had_effect.create_job = refuse  # type: ignore[method-assign]
    with pytest.raises(OverQuota) as refused:
        CloudRunJobs().provision(api.cloud(), LAUNCH)
    assert refused.value.is_sure
    assert CloudRunJobs().provision(had_effect.cloud(), LAUNCH) is None
    api.get_job = _too_often  # type: ignore[method-assign, assignment]
    with pytest.raises(OverQuota) as unsure:
        CloudRunJobs().provision(api.cloud(), LAUNCH)
    assert not unsure.value.is_sure


@pytest.mark.parametrize(("failure", "did_nothing"), [(ServiceUnavailable("no"), True), (ReadTimeout("lost"), False)])
def test_only_an_answer_proves_that_a_create_did_nothing(failure: Exception, did_nothing: bool) -> None:
    def refuse(**_: Any) -> None:
        raise failure

    api = CloudRun()
    api.create_job = api.create_service = refuse  # type: ignore[method-assign]
    for create in (
        lambda: CloudRunJobs().provision(api.cloud(), LAUNCH),
        lambda: CloudRunService().deploy(api.cloud(), DEPLOYMENT),
    ):
        with pytest.raises(CloudError) as raised:
            create()
        assert raised.value.did_nothing is did_nothing


def _too_often(**_: Any) -> None:
    raise ResourceExhausted(RATE)


def test_a_deletion_that_is_refused_for_a_rate_did_nothing() -> None:
    api = CloudRun(job())
    api.delete_job = _too_often  # type: ignore[method-assign, assignment]
    with pytest.raises(OverQuota, match="per minute"):
        CloudRunJobs().teardown(api.cloud(), "run.googleapis.com/Job", JOB)


@pytest.mark.parametrize("dies", [True, False])
def test_a_service_is_deleted_and_gone_once_a_read_shows_that(dies: bool) -> None:
    api = CloudRun(service(), dies=dies)
    cloud = api.cloud()
    assert CloudRunService().exists(cloud, DEPLOYMENT)
    assert CloudRunService().teardown(cloud, "run.googleapis.com/Service", SERVICE) is dies
    assert api.calls == [f"delete {SERVICE}"]
    assert CloudRunService().exists(cloud, DEPLOYMENT) is not dies


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ([job(State.CONDITION_RECONCILING, message="Imported container image.")], "Imported container image."),
        ([job(), execution(message="Waiting for execution to complete.")], "Waiting for execution to complete."),
        (
            [
                job(),
                execution(
                    others=[
                        run_v2.Condition(type_="ContainerReady", state=State.CONDITION_SUCCEEDED, message="ready"),
                        run_v2.Condition(type_="ResourcesAvailable", state=State.CONDITION_RECONCILING, message=QUOTA),
                    ],
                    message="Waiting for execution to complete.",
                ),
            ],
            QUOTA,
        ),
        ([job(), execution(running=1, message="Waiting for execution to complete.")], ""),
    ],
)
def test_a_waiting_execution_gives_cloud_runs_own_reason(resources: list[Any], reason: str) -> None:
    assert status_of(CloudRun(*resources)).wait_reason == reason


@pytest.mark.parametrize(
    ("made", "url"),
    [
        (service(), "https://endpoint"),
        (service(observed_generation=1), Waits("the container failed to start")),
        (service(reconciling=True), Waits("the container failed to start")),
    ],
)
def test_a_service_is_asked_only_once_cloud_run_reports_it_as_ready(made: Any, url: str | Waits) -> None:
    assert CloudRunService().deploy(CloudRun(made).cloud(), DEPLOYMENT) == url


def test_a_service_whose_container_fails_ends_the_run_with_the_reason() -> None:
    failed = service(state=State.CONDITION_FAILED, observed_generation=1)
    with pytest.raises(CloudError, match="the container failed to start"):
        CloudRunService().deploy(CloudRun(failed).cloud(), DEPLOYMENT)


@pytest.mark.parametrize(("list_all", "made"), [(CloudRunJobs().listed, job()), (CloudRunService().listed, service())])
def test_the_sweep_sees_every_resource(list_all: Callable[[Cloud], Any], made: Any) -> None:
    [listed] = list_all(CloudRun(made).cloud())
    assert (listed.name, listed.labels) == (made.name, labels())


def test_dropforge_alone_makes_the_retries_and_the_labels_name_the_owner() -> None:
    request = job_request(LAUNCH)["job"]
    assert request["template"]["template"]["maxRetries"] == 0
    for own in (request["labels"], request["template"]["labels"]):
        assert {names.RUN_LABEL: LAUNCH.run, names.ATTEMPT_LABEL: "1"}.items() <= own.items()
