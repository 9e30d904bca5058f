"""Executions and their tasks: the API, and the start of their drivers."""

from __future__ import annotations

from typing import Any

from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from ..kit.operations import Operation, Step
from ..kit.times import timestamp
from . import rules
from .context import Context, validated
from .driver import CANCELLED, DELETED, Driver, Status
from .messages import condition, given, has, made_from, seconds, set_condition
from .store import check_etag, short

# The fields that a task copies from its template.
TASK_FIELDS = (
    "service_account",
    "execution_environment",
    "vpc_access",
    "node_selector",
    "gpu_zonal_redundancy_disabled",
)


class Executions:
    """The Executions and Tasks APIs, and the drivers of unfinished executions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._drivers: dict[str, Driver] = {}
        self.steps: dict[str, Step] = {"delete_execution": self._finish_delete}

    def start(self) -> None:
        """Start the drivers of the executions that an earlier stack left unfinished."""
        for execution in self._context.store.all("executions"):
            if not execution.completion_time:
                self._drive(execution.name)

    def overridden(self, job: Any, overrides: Any) -> Any:
        """The job's execution template with the overrides of one run."""
        template = run_v2.ExecutionTemplate(job.template)
        if overrides.task_count < 0:
            raise rules.refuse("overrides.task_count", f"is {overrides.task_count}; expected 1 or more")
        template.task_count = overrides.task_count or template.task_count
        if has(overrides, "timeout"):
            gpu = bool(template.template.node_selector.accelerator)
            rules.check_task_timeout("overrides.timeout", seconds(overrides.timeout), gpu)
            template.template.timeout = overrides.timeout
        for override in overrides.container_overrides:
            _override_container(template.template.containers[0], override)
        return template

    def make(self, job: Any, suffix: str, template: Any) -> Any:
        """A new execution; not stored."""
        now = self._context.now()
        name = f"{job.name}/executions/{short(job.name)}-{suffix}"
        waiting = condition("Completed", "RECONCILING", now, "Waiting for execution to complete.")
        return run_v2.Execution(
            labels={**job.labels, **template.labels},
            launch_stage=job.launch_stage,
            job=short(job.name),
            parallelism=template.parallelism,
            task_count=template.task_count,
            template=template.template,
            log_uri=self._context.log_uri(name),
            **made_from(template, name, now, waiting),
        )

    def create(self, job: Any, suffix: str, template: Any) -> Any:
        """Store an execution with its tasks; its driver starts after the caller's transaction."""
        store, now = self._context.store, self._context.now()
        execution = self.make(job, suffix, template)
        store.put(execution, now)
        for index in range(execution.task_count):
            store.put(_make_task(execution, index, now), now)
        job = store.get(job.name)
        job.execution_count += 1
        job.latest_created_execution = run_v2.ExecutionReference(
            name=short(execution.name), create_time=execution.create_time, completion_status=Status.EXECUTION_PENDING
        )
        store.put(job)
        store.db.after_commit(lambda: self._drive(execution.name))
        return execution

    def create_once(self, job: Any, token: str) -> Any | None:
        """The execution <job>-<token>; None if the token was used by an execution that has been deleted since."""
        store = self._context.store
        with store.db.transaction() as connection:
            known = connection.execute(
                "SELECT execution FROM cloudrun_tokens WHERE job_uid = ? AND token = ?", [job.uid, token]
            ).fetchone()
            if known:
                return store.find(known["execution"])
            execution = self.create(job, token, job.template)
            connection.execute("INSERT INTO cloudrun_tokens VALUES (?, ?, ?)", [job.uid, token, execution.name])
            return execution

    def cancel(self, request: Any) -> Any:
        with self._context.store.db.transaction():
            execution = self._context.store.get(request.name)
            check_etag(request.etag, execution)
            if execution.completion_time:
                text = f"Execution {short(execution.name)!r} has completed; it cannot be cancelled."
                raise ApiError("FAILED_PRECONDITION", text)
            if request.validate_only:
                return validated(execution)
            self._request_stop(execution.name, CANCELLED)
            return self._context.begin("cancel_execution", execution, waits_for=execution.name)

    def delete(self, request: Any) -> Any:
        with self._context.store.db.transaction():
            execution = self._context.store.get(request.name)
            check_etag(request.etag, execution)
            return validated(execution) if request.validate_only else self._context.begin("delete_execution", execution)

    async def remove(self, name: str) -> None:
        """End an execution if it runs, then delete the execution and its tasks."""
        store = self._context.store
        with store.db.transaction():
            execution = store.find(name)
            if execution is not None and not execution.completion_time:
                self._request_stop(name, DELETED)
        if (driver := self._drivers.get(name)) is not None:
            await driver.finished.wait()
        with store.db.transaction() as connection:
            store.delete(name)
            connection.execute("DELETE FROM cloudrun_stops WHERE execution = ?", [name])

    def terminate(self, name: str, fault: str) -> None:
        """Preempt the machines of a running execution, as maintenance does to GPU tasks, or fill their memory."""
        drivers = [driver for driver in self._drivers.values() if name in (driver.name, short(driver.name))]
        if not drivers:
            raise ApiError("NOT_FOUND", f"execution {name!r} is not running")
        for driver in drivers:
            driver.terminate(fault)

    def _request_stop(self, name: str, reason: str) -> None:
        store = self._context.store
        with store.db.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO cloudrun_stops VALUES (?, ?)", [name, reason])
            execution = store.get(name)
            pending = condition(
                "Completed", "RECONCILING", self._context.now(), "Cancelling.", execution_reason="CANCELLING"
            )
            set_condition(execution.conditions, pending)
            store.put(execution)
            store.db.after_commit(lambda: self._drivers[name].stop.set() if name in self._drivers else None)

    def _drive(self, name: str) -> None:
        driver = self._drivers[name] = Driver(self._context, name)
        task = self._context.background.spawn(driver.run())
        task.add_done_callback(lambda _: self._drivers.pop(name) if self._drivers.get(name) is driver else None)

    async def _finish_delete(self, operation: Operation) -> None:
        await self._context.settle()
        execution = self._context.store.find(operation.target)
        await self.remove(operation.target)
        deleted = execution or run_v2.Execution(name=operation.target)
        deleted.delete_time = timestamp(self._context.now())
        self._context.finish(operation, deleted)


def _make_task(execution: Any, index: int, now: float) -> Any:
    template = execution.template
    name = f"{execution.name}/tasks/{short(execution.name)}-task{index}"
    return run_v2.Task(
        labels=execution.labels,
        scheduled_time=timestamp(now),
        job=execution.job,
        execution=short(execution.name),
        containers=template.containers,
        max_retries=template.max_retries,
        timeout=template.timeout,
        index=index,
        log_uri=execution.log_uri,
        **made_from(execution, name, now, condition("Completed", "RECONCILING", now)),
        **given(template, TASK_FIELDS),
    )


def _override_container(container: Any, override: Any) -> None:
    if override.name and override.name != container.name:
        raise rules.refuse("overrides.container_overrides.name", f"is {override.name!r}; expected {container.name!r}")
    if override.clear_args and override.args:
        raise rules.refuse("overrides.container_overrides", "has both args and clear_args")
    if override.args or override.clear_args:
        container.args = list(override.args)
    overridden = {variable.name: variable for variable in override.env}
    kept = [variable for variable in container.env if variable.name not in overridden]
    container.env = [*kept, *overridden.values()]
