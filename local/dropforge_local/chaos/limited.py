"""The simulated services with the quotas of a project: each refuses, or lets wait, as the real service does.

The history has a fact `quota` for each refusal and each wait: the quota's name, and the place or the object.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cloudevents.http import CloudEvent
from google.api_core.exceptions import ResourceExhausted, TooManyRequests

from .cloud import RUNS, SPECS, Cloud, Services
from .cloudrun import CloudRun, Resource
from .events import RETRY_SECONDS, Events
from .functions import Functions
from .quotas import Count, Growing, Quotas, Rate
from .storage import Blob, Bucket, Storage
from .workflows import Execution, Post, Reply, Workflows
from .world import World

PENDING_SECONDS = 10.0  # https://docs.cloud.google.com/run/docs/about-concurrency: then a waiting request gets 429
# google.cloud.storage.retry.DEFAULT_RETRY
FIRST_RETRY, LAST_RETRY, RETRY_FOR = 1.0, 60.0, 120.0
_RATE_OF_RUN = (
    "Quota exceeded for quota metric '{0} requests' and limit '{0} requests per minute per region' of service "
    "'run.googleapis.com' for consumer 'project_number:1'."
)


class LimitedCloud(Cloud):
    """The cloud with quotas. `channels` are the webhooks of Slack by their secrets; each is one channel."""

    def __init__(self, world: World, quotas: Quotas, policy: str, channels: Mapping[str, str]) -> None:
        storage, run = LimitedStorage(quotas, world, (SPECS, RUNS)), LimitedRun(quotas, world)
        storage.trainings = run.running
        make = Services(
            functions=partial(LimitedFunctions, quotas),
            events=partial(LimitedEvents, quotas),
            storage=lambda *_: storage,
            workflows=partial(LimitedWorkflows, quotas),
            run=lambda _: run,
        )
        super().__init__(world, policy=policy, services=make)
        self.secrets |= {secret: url.encode() for secret, url in channels.items()}
        self._channels = {url: Rate(quotas.messages) for url in channels.values()}

    def is_idle(self, runs: int) -> bool:
        """Whether as many executions as there are runs were created, and all have ended, and no resource is left."""
        executions = self.workflows.executions
        is_over = all(execution.state not in ("ACTIVE", "QUEUED") for execution in executions.values())
        return len(executions) >= runs and is_over and not self.living()

    def _slack_status(self, url: str) -> int:
        if url in self._channels and not self._channels[url].take(self.world.now):
            refuse(self.world, "messages", url)
            return 429
        return super()._slack_status(url)


def refuse(world: World, quota: str, place: str, job: str = "") -> None:
    """Note that a quota refused something, or let it wait: in the latter case, which job."""
    world.fact("quota", quota=quota, place=place, **({"job": job} if job else {}))


class LimitedStorage(Storage):
    """An object takes one write a second. Each bucket has a rate, which grows while callers use the bucket."""

    def __init__(self, quotas: Quotas, world: World, buckets: tuple[str, ...]) -> None:
        super().__init__(world, buckets)
        self.quotas = quotas
        self.trainings: Callable[[], int] = lambda: 0  # containers that write points of their series now
        self._rates = {bucket: Growing(quotas.bucket_writes) for bucket in buckets}
        self._objects: dict[tuple[str, str], float] = {}
        self._sorted: dict[str, list[str]] = {bucket: [] for bucket in buckets}  # there are many more than in a seed

    def bucket(self, name: str) -> Bucket:
        return LimitedBucket(self, name)

    def _names(self, bucket: str, prefix: str) -> Sequence[str]:
        names = self._sorted[bucket]
        return names[bisect_left(names, prefix) : bisect_left(names, prefix + "\U0010ffff")]

    def admit(self, bucket: str, name: str) -> None:
        """Count a write. Raises TooManyRequests."""
        load = self.trainings() * self.quotas.points if bucket == RUNS else 0.0
        if not self._rates[bucket].take(self.world.now, load):
            refuse(self.world, "bucket_writes", bucket)
            raise TooManyRequests("The rate of requests to the bucket exceeds the rate limit.")
        is_of_run = len(name.split("/")) > 2
        pause = 1 / (self.quotas.object_writes if is_of_run else self.quotas.shared_writes)
        if self.world.now - self._objects.get((bucket, name), -pause) < pause:
            refuse(self.world, "object_writes" if is_of_run else "shared_writes", name)
            raise TooManyRequests(f"The object {bucket}/{name} exceeded the rate limit for object mutation operations.")

    def put(self, bucket: str, name: str, *arguments: Any, **options: Any) -> int:
        is_new = name not in self.objects[bucket]
        generation = super().put(bucket, name, *arguments, **options)
        if is_new:
            insort(self._sorted[bucket], name)
        self._objects[bucket, name] = self.world.now
        return generation

    def remove(self, bucket: str, name: str) -> None:
        super().remove(bucket, name)
        names = self._sorted[bucket]
        del names[bisect_left(names, name)]


class LimitedBucket(Bucket):
    client: LimitedStorage

    def blob(self, name: str, generation: int | None = None, **_: Any) -> Blob:
        blob = LimitedBlob(self.client, self.name, name)
        blob.generation = generation
        return blob


class LimitedBlob(Blob):
    """The library repeats a conditional write that got 429 for two minutes; with retry=None, it does not."""

    _client: LimitedStorage

    def upload_from_string(self, *arguments: Any, **options: Any) -> None:
        world = self._client.world
        began, pause = world.now, FIRST_RETRY
        while True:
            try:
                return super().upload_from_string(*arguments, **options)
            except TooManyRequests:
                wait = world.random.uniform(0, pause)
                if options.get("retry", self) is None or world.now + wait - began > RETRY_FOR:
                    raise
                world.scheduler.wait(wait)
                pause = min(2 * pause, LAST_RETRY)

    def _again(self, write: Callable[[], None]) -> Callable[[], None]:
        def admitted() -> None:
            self._client.admit(self._bucket, self.name)
            write()

        return super()._again(admitted)


class LimitedRun(CloudRun):
    """Jobs, services, running executions and GPUs of each region, and the rates of the API."""

    def __init__(self, quotas: Quotas, world: World) -> None:
        super().__init__(world)
        self.quotas = quotas
        self.counts = {
            "jobs": Count(quotas.jobs),
            "services": Count(quotas.services),
            "running_jobs": Count(quotas.running_jobs),
            "accelerators": Count(quotas.accelerators),
        }
        self._rates: dict[tuple[str, str], Rate] = {}
        self._waiting: dict[str, deque[Resource]] = {}
        self._started: dict[str, set[str]] = {}  # by region: the jobs whose execution counts

    def running(self) -> int:
        """The containers that train now."""
        return self.counts["accelerators"].present.total()

    # The rates of the API

    def create_job(self, parent: str, job: Any, job_id: str, timeout: float) -> Any:
        self._count("Write", parent)
        return super().create_job(parent, job, job_id, timeout)

    def delete_job(self, name: str, timeout: float) -> Any:
        self._count("Write", name)
        return super().delete_job(name, timeout)

    def cancel_execution(self, name: str, timeout: float) -> None:
        self._count("Write", name)
        super().cancel_execution(name, timeout)

    def get_job(self, name: str, timeout: float) -> Any:
        self._count("Read", name)
        return super().get_job(name, timeout)

    def get_execution(self, name: str, timeout: float) -> Any:
        self._count("Read", name)
        return super().get_execution(name, timeout)

    def _count(self, kind: str, name: str) -> None:
        """Count a request. Raises ResourceExhausted."""
        quota = f"run_{kind.lower()}s"
        most = getattr(self.quotas, quota)
        rate = self._rates.setdefault((quota, _region(name)), Rate(most / 60, most))

        def refused() -> None:
            refuse(self.world, quota, _region(name))
            raise ResourceExhausted(_RATE_OF_RUN.format(kind))

        if not rate.take(self.world.now):
            self.world.effect(f"run.{kind.lower()}", refused)

    # What exists

    def _create_job(self, name: str, job: Any) -> Any:
        region = _region(name)
        if name not in self.jobs:
            self._admit("jobs", region, "jobs")
            if self.quotas.answer == "refused":
                self._admit("running_jobs", region, "running executions of jobs")
        operation = super()._create_job(name, job)
        self.counts["jobs"].present[region] += 1
        if self.quotas.answer == "failed" and self.counts["running_jobs"].is_full(region):
            refuse(self.world, "running_jobs", region)
            self.jobs[name].failure = _exceeded("running executions of jobs")
        else:
            self.counts["running_jobs"].present[region] += 1
            self._started.setdefault(region, set()).add(name)
        return operation

    def _create_service(self, name: str, service: Any) -> Any:
        if name not in self.services:
            self._admit("services", _region(name), "services")
        operation = super()._create_service(name, service)
        self.counts["services"].present[_region(name)] += 1
        return operation

    def _admit(self, quota: str, region: str, what: str) -> None:
        if self.counts[quota].is_full(region):
            refuse(self.world, quota, region)
            raise ResourceExhausted(_exceeded(what))

    # Executions that wait

    def _shown_execution(self, job: Resource) -> Any:
        shown = super()._shown_execution(job)
        if job not in self._waiting.get(_region(job.name), ()):
            shown.conditions[1].message = ""
        return shown

    def _run(self, job: Resource) -> None:
        if job.deleted is not None or job.ended is not None:
            return
        region = _region(job.name)
        if quota := self._obstacle(region):
            refuse(self.world, quota, region, job.name)
            self._waiting.setdefault(region, deque()).append(job)
            return
        self.counts["accelerators"].present[region] += 1
        super()._run(job)

    def _obstacle(self, region: str) -> str:
        """The quota for which an execution that would start now must wait; "" if it may start."""
        if self.counts["accelerators"].is_full(region):
            return "accelerators"
        active = self.counts["accelerators"].present[region]
        return "running_jobs" if self.quotas.answer == "waits" and active >= self.quotas.running_jobs else ""

    def end(self, job: Resource, exit_code: int | None) -> None:
        has_run, was_over = job.running is not None, job.ended is not None
        super().end(job, exit_code)
        region = _region(job.name)
        if was_over:
            return
        self._release(job.name)
        if has_run:
            self.counts["accelerators"].present[region] -= 1
            self._start_next(region)

    def _start_next(self, region: str) -> None:
        """Start the execution that has waited longest and still exists."""
        waiting = self._waiting.get(region, deque())
        while waiting:
            job = waiting.popleft()
            if self.jobs.get(job.name) is job and job.deleted is None and job.ended is None:
                self._run(job)
                return

    def _gone(self, kind: dict[str, Resource], resource: Resource) -> None:
        was_there = kind.get(resource.name) is resource
        super()._gone(kind, resource)
        if was_there:
            quota = "jobs" if kind is self.jobs else "services"
            self.counts[quota].present[_region(resource.name)] -= 1
            self._release(resource.name)

    def _release(self, name: str) -> None:
        """The execution of a job counts no longer."""
        started = self._started.get(_region(name), set())
        if name in started:
            started.remove(name)
            self.counts["running_jobs"].present[_region(name)] -= 1


class LimitedWorkflows(Workflows):
    """Some executions are active at once; more are queued, in order; beyond the backlog they are refused."""

    def __init__(self, quotas: Quotas, world: World, post: Post) -> None:
        super().__init__(world, post)
        self.quotas = quotas
        self.active = 0
        self.queued: deque[Execution] = deque()

    def _create(self, requested: Any) -> Any:
        if self.active < self.quotas.executions:
            self.active += 1
            return super()._create(requested)
        refuse(self.world, "executions", "")
        if len(self.queued) >= self.quotas.backlog:
            refuse(self.world, "backlog", "")
            raise ResourceExhausted("Quota exceeded for concurrent executions and their backlog.")
        super()._create(requested)
        execution = next(reversed(self.executions.values()))
        execution.state = "QUEUED"
        self.queued.append(execution)
        return self._shown(execution)

    def _shown(self, execution: Execution) -> Any:
        shown = super()._shown(execution)
        if execution.state == "QUEUED":
            shown.start_time = None
        return shown

    def cancel(self, id_: str) -> None:
        execution = self.executions[id_]
        if execution.state == "QUEUED":
            self.queued.remove(execution)
            self.active += 1
            execution.state = "ACTIVE"
        super().cancel(id_)

    def _end(self, execution: Execution, state: str, value: Any) -> None:
        super()._end(execution, state, value)
        self.active -= 1
        if self.queued:
            following = self.queued.popleft()
            self.active += 1
            following.state, following.started = "ACTIVE", self.world.now
            self.world.after(0.01, lambda: self._advance(following))


class LimitedFunctions(Functions):
    """Each function has some instances, with one call each. A further call waits ten seconds, and then gets 429."""

    def __init__(self, quotas: Quotas, world: World) -> None:
        super().__init__(world)
        self.most = quotas.calls
        self._calls = Count(quotas.calls)
        self._pending: dict[str, deque[Callable[[], None]]] = {}

    def _start(
        self, name: str, about: dict[str, Any], answer: Callable[[], tuple[int, Any]], done: Callable[[Reply], None]
    ) -> None:
        waiting = self._pending.setdefault(name, deque())

        def ended(reply: Reply) -> None:
            self._calls.present[name] -= 1
            if waiting:
                waiting.popleft()()
            done(reply)

        def begin() -> None:
            self._calls.present[name] += 1
            super(LimitedFunctions, self)._start(name, about, answer, ended)

        def give_up() -> None:
            if begin in waiting:
                waiting.remove(begin)
                refuse(self.world, "calls", name)
                done((429, {"error": "Rate exceeded."}))

        if self._calls.is_full(name):
            waiting.append(begin)
            self.world.after(PENDING_SECONDS, give_up)
        else:
            begin()


class LimitedEvents(Events):
    """An event that was not acknowledged after some deliveries goes to the dead letters: nothing delivers it again."""

    def __init__(self, quotas: Quotas, world: World, functions: Functions, subscribers: Any) -> None:
        super().__init__(world, functions, subscribers)
        self.most = quotas.deliveries

    def _delivery(
        self, entry_point: str, event: CloudEvent, about: dict[str, Any], pause: float, number: int = 1
    ) -> Callable[[], None]:
        def done(acknowledged: bool) -> None:
            if acknowledged:
                return
            self.world.fact("repeated", function=entry_point, number=number, **about)
            if number >= self.most:
                refuse(self.world, "deliveries", entry_point)
                self.world.fact("fault", what="dropped", **about)
                return
            again = self._delivery(entry_point, event, about, min(2 * pause, RETRY_SECONDS[1]), number + 1)
            self.world.after(pause, again)

        return lambda: self.functions.deliver(entry_point, event, about, done)


def _region(name: str) -> str:
    return name.split("/")[3]


def _exceeded(what: str) -> str:
    return f"Quota exceeded for total {what} per project per region."
