"""Cloud Run behind the clients of run_v2: jobs with one execution each, and services.

The history records when each resource begins and ceases to exist, whoever created it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

from google.api_core.exceptions import AlreadyExists, NotFound, ResourceExhausted
from google.cloud import run_v2

from .trainer import Container, Serving
from .world import PROJECT, World

JOB = "run.googleapis.com/Job"
SERVICE = "run.googleapis.com/Service"
KILLED = 137  # exit code of a killed container, which the platform reports


@dataclass
class Resource:
    """A job or a service. Times are seconds since the epoch; None: not yet."""

    name: str
    labels: dict[str, str]
    created: float
    request: Any
    ready: float | None = None
    failure: str = ""
    deleted: float | None = None
    running: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cancelled: bool = False


class CloudRun:
    """The service. `launched` is called for each task that starts to run. Tasks have no machine that could be lost.

    `serving` is called for each service that starts: with the environment of its container, with whether it is deleted,
    and with what to call once it answers. None: it answers at once.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.jobs: dict[str, Resource] = {}
        self.services: dict[str, Resource] = {}
        self.launched: Callable[[Container], None] = lambda _: None
        self.serving: Serving | None = None

    def clients(self) -> dict[str, Callable[..., Any]]:
        return dict.fromkeys(("run_jobs", "run_executions", "run_tasks", "run_services"), lambda: self)

    # Jobs

    def create_job(self, parent: str, job: Any, job_id: str, timeout: float) -> Any:
        name = f"{parent}/jobs/{job_id}"
        return self.world.effect(f"run.create_job {job_id}", lambda: self._create_job(name, job), changes=True)

    def get_job(self, name: str, timeout: float) -> Any:
        return self.world.effect("run.get_job", lambda: self._shown_job(self._find(self.jobs, name)))

    def list_jobs(self, parent: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Iterator[Any]:
        where = parent or request["parent"]
        jobs = self.world.effect(
            "run.list_jobs", lambda: [self._shown_job(job) for job in _within(self.jobs, f"{where}/jobs/")]
        )
        return iter(jobs)

    def delete_job(self, name: str, timeout: float) -> Any:
        return self.world.effect("run.delete_job", lambda: self._delete(self.jobs, name), changes=True)

    def _create_job(self, name: str, job: Any) -> Any:
        world, region = self.world, name.split("/")[3]
        if name in self.jobs:
            raise AlreadyExists(f"Resource '{name.rsplit('/', 1)[1]}' already exists.")
        if world.happens(world.faults.quota):
            raise ResourceExhausted("Quota exceeded for total allowable GPUs per project per region.")
        made = Resource(name, dict(job.labels), world.now, job)
        self.jobs[name] = made
        world.fact("created", type=JOB, name=name, labels=made.labels)
        wait = world.random.uniform(0.1, 3)
        if world.lasts(f"no GPU on Cloud Run in {region}", world.faults.stockout):
            made.failure = "Insufficient capacity to run the job: no more capacity in the region"
        elif world.happens(world.faults.slow_start):
            wait = world.random.uniform(5, 900)
        world.after(wait, lambda: self._ready_job(made))
        self._perhaps_by_hand(self.jobs, made)
        return _Operation(lambda: made.ready is not None or made.deleted is not None, lambda: self._shown_job(made))

    def _ready_job(self, job: Resource) -> None:
        if job.deleted is not None:
            return
        job.ready = self.world.now
        if not job.failure:
            wait = self.world.random.uniform(1, 20)
            if self.world.happens(self.world.faults.slow_start):
                wait = self.world.random.uniform(60, 2400)
            self.world.after(wait, lambda: self._run(job))

    def _run(self, job: Resource) -> None:
        if job.deleted is not None or job.ended is not None:
            return
        job.running = self.world.now
        self.world.fact("running", name=job.name)
        seconds = job.request.template.template.timeout.total_seconds()
        self.world.after(seconds, lambda: self.end(job, None))
        self.launched(self._container(job))

    def _container(self, job: Resource) -> Container:
        environment = {variable.name: variable.value for variable in job.request.template.template.containers[0].env}
        lose = partial(self.end, job, None)
        die = partial(self.end, job, KILLED)
        return Container(environment, lambda: job.ended is not None, partial(self.end, job), die, lambda: None, lose)

    def end(self, job: Resource, exit_code: int | None) -> None:
        """End the task, once: with an exit code, or with None if the platform ends it."""
        if job.ended is not None:
            return
        job.ended, job.exit_code = self.world.now, exit_code
        self.world.fact("ended", name=job.name, exit_code=exit_code)

    def _shown_job(self, job: Resource) -> Any:
        states = run_v2.Condition.State
        state = states.CONDITION_SUCCEEDED if job.ready is not None else states.CONDITION_RECONCILING
        if job.failure and job.ready is not None:
            state = states.CONDITION_FAILED
        condition = SimpleNamespace(type_="Ready", state=state, reason=0, message=job.failure)
        return SimpleNamespace(
            name=job.name,
            labels=job.labels,
            delete_time=_time(job.deleted),
            create_time=_time(job.created),
            terminal_condition=condition,
            template=job.request.template,
            latest_created_execution=SimpleNamespace(completion_time=_time(job.ended)),
        )

    # Executions of jobs

    def get_execution(self, name: str, timeout: float) -> Any:
        return self.world.effect("run.get_execution", lambda: self._shown_execution(self._execution(name)))

    def list_executions(self, parent: str, timeout: float) -> Iterator[Any]:
        def read() -> list[Any]:
            job = self._find(self.jobs, parent)
            return [self._shown_execution(job)] if _has_execution(job) else []

        return iter(self.world.effect("run.list_executions", read))

    def cancel_execution(self, name: str, timeout: float) -> None:
        def cancel() -> None:
            job = self._execution(name)
            if job.ended is None:
                job.cancelled = True
                self.end(job, None)

        self.world.effect("run.cancel_execution", cancel, changes=True)

    def list_tasks(self, parent: str, timeout: float) -> list[Any]:
        def read() -> list[Any]:
            job = self._execution(parent)
            if job.ended is None or job.exit_code == 0:
                return [SimpleNamespace(last_attempt_result=None)]
            code = 4 if job.exit_code is None and self._timed_out(job) else 10
            signal = 0 if job.exit_code else 9
            result = SimpleNamespace(
                exit_code=job.exit_code or 0, term_signal=signal, status=SimpleNamespace(code=code)
            )
            return [SimpleNamespace(last_attempt_result=result)]

        return self.world.effect("run.list_tasks", read)

    def _timed_out(self, job: Resource) -> bool:
        assert job.running is not None, "only a job that has run has a time-out"
        allowed: float = job.request.template.template.timeout.total_seconds()
        return (job.ended or self.world.now) - job.running >= allowed - 0.001

    def _execution(self, name: str) -> Resource:
        job = self._find(self.jobs, name.rsplit("/executions/", 1)[0])
        token = job.request.start_execution_token
        if not _has_execution(job) or not name.endswith(f"-{token}"):
            raise NotFound(f"Resource '{name}' of kind 'EXECUTION' does not exist.")
        return job

    def _shown_execution(self, job: Resource) -> Any:
        states = run_v2.Condition.State
        state = states.CONDITION_RECONCILING
        if job.ended is not None:
            state = states.CONDITION_SUCCEEDED if job.exit_code == 0 else states.CONDITION_FAILED
        message = f"Task t failed with exit code: {job.exit_code or 0} and message: ..." if job.exit_code != 0 else ""
        condition = SimpleNamespace(type_="Completed", state=state, reason=0, message=message)
        has_gpu = states.CONDITION_RECONCILING if job.running is None else states.CONDITION_SUCCEEDED
        text = "Waiting for nvidia-l4 quota." if job.running is None else ""
        resources = SimpleNamespace(type_="ResourcesAvailable", state=has_gpu, reason=0, message=text)
        return SimpleNamespace(
            name=f"{job.name}/executions/{job.name.rsplit('/', 1)[1]}-{job.request.start_execution_token}",
            conditions=[condition, resources],
            running_count=int(job.running is not None and job.ended is None),
            cancelled_count=int(job.cancelled),
            completion_time=_time(job.ended),
            labels=job.labels,
        )

    # Services

    def create_service(self, parent: str, service: Any, service_id: str, timeout: float) -> Any:
        name = f"{parent}/services/{service_id}"
        return self.world.effect(
            f"run.create_service {service_id}", lambda: self._create_service(name, service), changes=True
        )

    def get_service(self, name: str, timeout: float) -> Any:
        return self.world.effect("run.get_service", lambda: self._shown_service(self._find(self.services, name)))

    def list_services(self, parent: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Iterator[Any]:
        where = parent or request["parent"]
        services = self.world.effect(
            "run.list_services",
            lambda: [self._shown_service(service) for service in _within(self.services, f"{where}/services/")],
        )
        return iter(services)

    def delete_service(self, name: str, timeout: float) -> Any:
        return self.world.effect("run.delete_service", lambda: self._delete(self.services, name), changes=True)

    def _create_service(self, name: str, service: Any) -> Any:
        world = self.world
        if name in self.services:
            raise AlreadyExists(f"Resource '{name.rsplit('/', 1)[1]}' already exists.")
        made = Resource(name, dict(service.labels), world.now, service)
        self.services[name] = made
        world.fact("created", type=SERVICE, name=name, labels=made.labels)
        if world.happens(world.faults.stockout * 0.3):
            made.failure = "Quota exceeded for total allowable GPUs per project per region."
        wait = world.random.uniform(5, 90)
        if world.happens(world.faults.slow_start):
            wait = world.random.uniform(60, 1800)

        def become_ready() -> None:
            made.ready = world.now

        def start() -> None:
            if self.serving is None:
                return become_ready()
            environment = {variable.name: variable.value for variable in service.template.containers[0].env}
            return self.serving(environment, lambda: self.services.get(name) is not made, become_ready)

        if not world.happens(world.faults.unready):
            world.after(wait, start)
        self._perhaps_by_hand(self.services, made)
        return _Operation(lambda: made.ready is not None, lambda: self._shown_service(made))

    def answers(self, url: str) -> bool:
        """Whether the service at a URL would answer a completion."""
        return any(_url(service) == url and service.ready is not None for service in self.services.values())

    def _shown_service(self, service: Resource) -> Any:
        states = run_v2.Condition.State
        ready = service.ready is not None
        state = states.CONDITION_SUCCEEDED if ready else states.CONDITION_RECONCILING
        if ready and service.failure:
            state = states.CONDITION_FAILED
        return SimpleNamespace(
            name=service.name,
            labels=service.labels,
            uri=_url(service),
            reconciling=not ready,
            generation=1,
            observed_generation=int(ready and not service.failure),
            terminal_condition=SimpleNamespace(
                state=state, message=service.failure or ("" if ready else "Starting a container."), reason=0
            ),
            delete_time=_time(service.deleted),
            create_time=_time(service.created),
        )

    # Both

    def living(self) -> list[str]:
        """Every resource that exists."""
        return sorted([*self.jobs, *self.services])

    def _find(self, kind: dict[str, Resource], name: str) -> Resource:
        if name not in kind:
            raise NotFound(f"Resource '{name}' does not exist.")
        return kind[name]

    def _delete(self, kind: dict[str, Resource], name: str) -> Any:
        resource = self._find(kind, name)
        if resource.deleted is None:
            resource.deleted = self.world.now
            self.world.deleting(name=name)
            wait = self.world.random.uniform(0.1, 3)
            if self.world.happens(self.world.faults.slow_end):
                wait = self.world.random.uniform(5, 600)
            self.world.after(wait, lambda: self._gone(kind, resource))
        return _Operation(lambda: kind.get(name) is not resource, lambda: None)

    def _gone(self, kind: dict[str, Resource], resource: Resource) -> None:
        if kind.get(resource.name) is not resource:
            return
        del kind[resource.name]
        if resource.running is not None:
            self.end(resource, None)
        resource.ended = resource.ended or self.world.now
        self.world.fact("gone", name=resource.name)

    def _perhaps_by_hand(self, kind: dict[str, Resource], made: Resource) -> None:
        """Maybe a user deletes the resource in the console."""
        if not self.world.happens(self.world.faults.deleted):
            return

        def delete() -> None:
            if kind.get(made.name) is made and self.world.now < self.world.calm:
                self.world.fact("fault", what="deleted", resource=made.name)
                made.deleted = made.deleted or self.world.now
                self._gone(kind, made)

        self.world.after(self.world.random.uniform(1, 1200), delete)


class _Operation:
    """A long-running operation."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], Any]) -> None:
        self._done = done
        self._result = result

    def done(self) -> bool:
        return self._done()

    def exception(self) -> Exception | None:
        return None

    def result(self, timeout: float | None = None) -> Any:
        return self._result()


def _has_execution(job: Resource) -> bool:
    return job.ready is not None and not job.failure


def _within(kind: dict[str, Resource], prefix: str) -> list[Resource]:
    return [kind[name] for name in sorted(kind) if name.startswith(prefix)]


def _url(service: Resource) -> str:
    return f"https://{service.name.rsplit('/', 1)[1]}.{PROJECT}.run.app"


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
