"""Executions and their tasks: the API, and the driver that runs containers, retries, times out and cancels.

Everything that a driver decides is written down before it acts on it, so that the next stack's driver goes on from
there: a task's `retried` names the attempt, the attempt names the container, and the container is found again.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from typing import Any

from google.cloud import run_v2
from google.rpc import status_pb2

from dropforge_local.base.errors import RPC_CODE, ApiError

from ...containers.logs import append_platform_line
from ...containers.processes import LOST, OUT_OF_MEMORY, Container, Exit
from . import rules
from .capacity import gpu_kind
from .context import Context
from .messages import condition, has, seconds, set_condition, timestamp
from .operations import immediate, render_operation
from .store import check_etag, new_uid, parent_of, short
from .workloads import Unready

Status = run_v2.ExecutionReference.CompletionStatus
# What a task takes over from its template as it is, where given.
TASK_FIELDS = (
    "service_account",
    "execution_environment",
    "vpc_access",
    "node_selector",
    "gpu_zonal_redundancy_disabled",
)
TIMED_OUT = "TIMEOUT"
STOPPED = "STOPPED"
PREEMPTED = "PREEMPTED"
CANCELLED = "CANCELLED"
DELETED = "DELETED"


class Executions:
    """The Executions and Tasks APIs, and the drivers of unfinished executions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._drivers: dict[str, Driver] = {}

    def start(self) -> None:
        """Go on with what an earlier stack left unfinished."""
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
        """An execution as it is at the start; not stored."""
        now = self._context.now()
        name = f"{job.name}/executions/{short(job.name)}-{suffix}"
        return run_v2.Execution(
            name=name,
            uid=new_uid(),
            generation=1,
            labels={**job.labels, **template.labels},
            annotations=template.annotations,
            create_time=timestamp(now),
            update_time=timestamp(now),
            launch_stage=job.launch_stage,
            job=short(job.name),
            parallelism=template.parallelism,
            task_count=template.task_count,
            template=template.template,
            reconciling=True,
            conditions=[condition("Completed", "RECONCILING", now, "Waiting for execution to complete.")],
            log_uri=self._context.log_uri(name),
        )

    def create(self, job: Any, suffix: str, template: Any) -> Any:
        """Store an execution with its tasks and drive it once the transaction has committed."""
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

    def cancel(self, name: str, etag: str, *, validate_only: bool) -> dict[str, Any]:
        with self._context.store.db.transaction():
            execution = self._context.store.get(name)
            check_etag(etag, execution)
            if execution.completion_time:
                raise ApiError(
                    "FAILED_PRECONDITION", f"Execution {short(name)!r} has completed; it cannot be cancelled."
                )
            if validate_only:
                return immediate(execution)
            self._request_stop(name, CANCELLED)
            operation = self._context.operations.begin("cancel_execution", execution, waits_for=name)
            return render_operation(operation)

    def delete(self, name: str, etag: str, *, validate_only: bool) -> dict[str, Any]:
        with self._context.store.db.transaction():
            execution = self._context.store.get(name)
            check_etag(etag, execution)
            if validate_only:
                return immediate(execution)
            operation = self._context.operations.begin("delete_execution", execution)
            self.resume(operation)
            return render_operation(operation)

    def resume(self, operation: sqlite3.Row) -> None:
        """Carry out the deletion that an operation stands for."""
        spawn = self._context.background.spawn
        self._context.store.db.after_commit(lambda: (spawn(self._delete(operation)), None)[1])

    async def remove(self, name: str) -> None:
        """End an execution if it runs, then forget it and its tasks."""
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
        """Take the machines away from a running execution, as maintenance does from GPU tasks, or fill their memory."""
        names = [one for one in self._drivers if name in (one, short(one))]
        if not names:
            raise ApiError("NOT_FOUND", f"execution {name!r} is not running")
        for one in names:
            self._drivers[one].terminate(fault)

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

    async def _delete(self, operation: sqlite3.Row) -> None:
        await self._context.settle()
        store, name = self._context.store, operation["target"]
        execution = store.find(name)
        await self.remove(name)
        deleted = execution or run_v2.Execution(name=name)
        deleted.delete_time = timestamp(self._context.now())
        self._context.operations.finish(operation["name"], deleted)


class Driver:
    """Runs one execution's tasks to the end."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self.name = name
        self.stop = asyncio.Event()
        self.finished = asyncio.Event()
        self._stop_siblings = asyncio.Event()
        self._containers: dict[str, Container] = {}

    async def run(self) -> None:
        store = self._context.store
        execution = store.get(self.name)
        if self._stop_reason():
            self.stop.set()
        slots = asyncio.Semaphore(execution.parallelism or execution.task_count)
        tasks = store.children("tasks", self.name)
        if any(_state_of(task) == "failed" for task in tasks):
            self._stop_siblings.set()
        unfinished = [task.name for task in tasks if not task.completion_time]
        await asyncio.gather(*(self._run_task(name, execution, slots) for name in unfinished))
        self._complete()
        self.finished.set()

    def terminate(self, fault: str) -> None:
        preempted = self._context.config.grace_seconds, PREEMPTED
        grace, reason = preempted if fault == "preempt" else (0, OUT_OF_MEMORY)
        for container in self._containers.values():
            self._context.background.spawn(container.terminate(grace, reason))

    async def _run_task(self, name: str, execution: Any, slots: asyncio.Semaphore) -> None:
        async with slots:
            while self._was_started(name, execution) or not self._is_stopping():
                attempt = await self._run_attempt(name, execution)
                if attempt is None or self._record(name, attempt):
                    break
        if not self._context.store.get(name).completion_time:
            self._cancel_task(name)

    async def _run_attempt(self, name: str, execution: Any) -> Exit | str | None:
        """One attempt of a task: how its container ended, why it could not start, or None when stopped before."""
        task = self._context.store.get(name)
        container_id = _container_id(task, execution)
        kind = gpu_kind(name, execution.template)
        if self._context.workloads.adopt(container_id) is None and not await self._have_capacity(kind):
            return None
        self._context.capacity.claim(container_id, kind)
        try:
            env = _task_environment(execution, task)
            container = self._context.workloads.launch(container_id, name, execution.template, env)
            self._mark_running(name)
            return await self._supervise(container, seconds(execution.template.timeout))
        except (Unready, OSError) as error:
            return str(error)
        finally:
            self._context.capacity.release(container_id)

    def _was_started(self, name: str, execution: Any) -> bool:
        """Whether the attempt that the task is at has a container: it must be seen to its end, whatever else."""
        task = self._context.store.get(name)
        return self._context.workloads.adopt(_container_id(task, execution)) is not None

    async def _have_capacity(self, kind: Any) -> bool:
        """Wait for a GPU; False when stopped meanwhile."""
        while kind is not None and (obstacle := self._context.capacity.obstacle(kind)):
            self._set_resources("RECONCILING", obstacle)
            waiting = [self._context.capacity.changed(kind), self.stop.wait(), self._stop_siblings.wait()]
            await _first(*waiting)
            if self._is_stopping():
                self._context.capacity.pass_on(kind)
                return False
        return True

    async def _supervise(self, container: Container, timeout_seconds: float) -> Exit:
        """Wait for the container's end; bring it about at its deadline and when the execution is stopped."""
        grace = self._context.config.grace_seconds
        deadline = self._context.workloads.started_at(container.id) + timeout_seconds
        self._containers[container.id] = container
        try:
            sleep = self._context.clock.sleep_until(deadline)
            await _first(container.wait(), sleep, self.stop.wait(), self._stop_siblings.wait())
            if container.exit is not None:
                ended = container.exit
                late = ended.at > deadline + grace  # it went on while no stack was there to end it
                ended = Exit(ended.code, ended.at, TIMED_OUT) if late and not ended.reason else ended
            elif self._is_stopping():
                ended = await container.terminate(grace, STOPPED)
            else:
                append_platform_line(container.directory, _timeout_line(timeout_seconds))
                ended = await container.terminate(grace, TIMED_OUT)
        finally:
            del self._containers[container.id]
        self._context.workloads.ended(container)
        return ended

    def _record(self, name: str, attempt: Exit | str) -> bool:
        """Write down how an attempt ended; True if the task is done, False if it is to be tried again."""
        store = self._context.store
        with store.db.transaction():
            task = store.get(name)
            if isinstance(attempt, Exit) and attempt.reason == STOPPED:
                return True
            task.last_attempt_result = _attempt_result(attempt)
            succeeded = not task.last_attempt_result.status.code
            done = succeeded or task.retried >= task.max_retries
            if done:
                at = attempt.at if isinstance(attempt, Exit) else self._context.now()
                message = task.last_attempt_result.status.message
                self._end_task(task, "SUCCEEDED" if succeeded else "FAILED", message, at)
                if not succeeded:
                    self._stop_siblings.set()
            else:
                task.retried += 1
                store.put(task)
            self._recount()
        return done

    def _cancel_task(self, name: str) -> None:
        store = self._context.store
        with store.db.transaction():
            task = store.get(name)
            self._end_task(task, "FAILED", "The task was cancelled.", self._context.now(), "CANCELLED")
            self._recount()

    def _end_task(self, task: Any, state: str, message: str, at: float, reason: str = "") -> None:
        if state == "FAILED" and not reason:
            reason = "NON_ZERO_EXIT_CODE"
        task.completion_time = timestamp(at)
        task.reconciling = False
        task.observed_generation = 1
        set_condition(task.conditions, condition("Completed", state, at, message, execution_reason=reason))
        self._context.store.put(task)

    def _mark_running(self, name: str) -> None:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            task = store.get(name)
            if not task.start_time:
                task.start_time = timestamp(now)
                set_condition(task.conditions, condition("Started", "SUCCEEDED", now))
                store.put(task)
            execution = store.get(self.name)
            if not execution.start_time:
                execution.start_time = timestamp(now)
                for kind in ("ResourcesAvailable", "ContainerReady", "Started"):
                    set_condition(execution.conditions, condition(kind, "SUCCEEDED", now))
                store.put(execution)
                self._refer(execution, Status.EXECUTION_RUNNING)
            self._recount()

    def _set_resources(self, state: str, message: str) -> None:
        store = self._context.store
        with store.db.transaction():
            execution = store.get(self.name)
            set_condition(execution.conditions, condition("ResourcesAvailable", state, self._context.now(), message))
            store.put(execution)

    def _recount(self) -> None:
        store = self._context.store
        execution = store.get(self.name)
        tasks = store.children("tasks", self.name)
        states = [_state_of(task) for task in tasks]
        execution.running_count = states.count("running")
        execution.succeeded_count = states.count("succeeded")
        execution.failed_count = states.count("failed")
        execution.cancelled_count = states.count("cancelled")
        execution.retried_count = sum(task.retried for task in tasks)
        execution.update_time = timestamp(self._context.now())
        store.put(execution)

    def _complete(self) -> None:
        """Write the terminal state, once, and finish the operations that wait for it."""
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            self._recount()
            execution = store.get(self.name)
            verdict, status = self._verdict(execution)
            set_condition(execution.conditions, verdict)
            execution.completion_time = timestamp(now)
            execution.reconciling = False
            execution.observed_generation = execution.generation
            store.put(execution)
            self._refer(execution, status)
            self._context.operations.finish_waiting(
                self.name, lambda row: store.find(row["target"]) or run_v2.Execution(execution)
            )

    def _verdict(self, execution: Any) -> tuple[Any, Any]:
        now = self._context.now()
        if reason := self._stop_reason():
            text = "This execution was cancelled." if reason == CANCELLED else "This execution was deleted."
            return condition("Completed", "FAILED", now, text, execution_reason=reason), Status.EXECUTION_CANCELLED
        if execution.succeeded_count == execution.task_count:
            text = "Execution completed successfully."
            return condition("Completed", "SUCCEEDED", now, text), Status.EXECUTION_SUCCEEDED
        failed = next(task for task in self._context.store.children("tasks", self.name) if _state_of(task) == "failed")
        result = failed.last_attempt_result
        what = f"failed with exit code: {result.exit_code} and message: {result.status.message}"
        text = f"Task {short(failed.name)} {what}"
        verdict = condition("Completed", "FAILED", now, text, execution_reason="NON_ZERO_EXIT_CODE")
        return verdict, Status.EXECUTION_FAILED

    def _refer(self, execution: Any, status: Any) -> None:
        """Keep the job's reference to its latest execution true."""
        store = self._context.store
        job = store.find(parent_of(execution.name))
        if job is not None and job.latest_created_execution.name == short(execution.name):
            job.latest_created_execution.completion_status = status
            if execution.completion_time:
                job.latest_created_execution.completion_time = execution.completion_time
            store.put(job)

    def _is_stopping(self) -> bool:
        return self.stop.is_set() or self._stop_siblings.is_set()

    def _stop_reason(self) -> str:
        row = self._context.store.db.connection.execute(
            "SELECT reason FROM cloudrun_stops WHERE execution = ?", [self.name]
        ).fetchone()
        return row["reason"] if row else ""


def _timeout_line(timeout_seconds: float) -> str:
    return (
        f"Terminating task because it has reached the maximum timeout of {timeout_seconds:g} seconds. "
        "To change this limit, see https://cloud.google.com/run/docs/configuring/task-timeout"
    )


def _container_id(task: Any, execution: Any) -> str:
    # The uid, because a job of the same name and token may come again after this one was deleted.
    return f"{short(task.name)}-{task.retried}-{execution.uid[:8]}"


async def _first(*waiting: Any) -> None:
    """Return when the first has returned; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _make_task(execution: Any, index: int, now: float) -> Any:
    template = execution.template
    name = f"{execution.name}/tasks/{short(execution.name)}-task{index}"
    return run_v2.Task(
        name=name,
        uid=new_uid(),
        generation=1,
        labels=execution.labels,
        annotations=execution.annotations,
        create_time=timestamp(now),
        scheduled_time=timestamp(now),
        job=execution.job,
        execution=short(execution.name),
        containers=template.containers,
        max_retries=template.max_retries,
        timeout=template.timeout,
        reconciling=True,
        conditions=[condition("Completed", "RECONCILING", now)],
        index=index,
        log_uri=execution.log_uri,
        **{field: getattr(template, field) for field in TASK_FIELDS if has(template, field)},
    )


def _override_container(container: Any, override: Any) -> None:
    if override.name and override.name != container.name:
        raise rules.refuse("overrides.container_overrides.name", f"is {override.name!r}; expected {container.name!r}")
    if override.clear_args and override.args:
        raise rules.refuse("overrides.container_overrides", "has both args and clear_args")
    if override.args or override.clear_args:
        container.args = list(override.args)
    given = {variable.name: variable for variable in override.env}
    container.env = [variable for variable in container.env if variable.name not in given] + list(given.values())


def _task_environment(execution: Any, task: Any) -> dict[str, str]:
    """https://cloud.google.com/run/docs/container-contract#jobs-env-vars"""
    return {
        "CLOUD_RUN_JOB": execution.job,
        "CLOUD_RUN_EXECUTION": short(execution.name),
        "CLOUD_RUN_TASK_INDEX": str(task.index),
        "CLOUD_RUN_TASK_ATTEMPT": str(task.retried),
        "CLOUD_RUN_TASK_COUNT": str(execution.task_count),
    }


def _attempt_result(attempt: Exit | str) -> Any:
    """Code 0 is success; exit_code and term_signal exclude each other.

    The texts about exit codes, timeouts and memory, and the codes of the first two, are those that people report of
    Cloud Run; the others are ours.
    """
    if isinstance(attempt, str):
        return _result("FAILED_PRECONDITION", attempt)
    if attempt.reason == TIMED_OUT:
        return _result("DEADLINE_EXCEEDED", "The configured timeout was reached.", term_signal=_signal_of(attempt))
    if attempt.reason == PREEMPTED:
        text = "The instance was terminated by the system: GPU instances are not migrated at maintenance."
        return _result("UNAVAILABLE", text, term_signal=_signal_of(attempt))
    if attempt.reason == OUT_OF_MEMORY:
        return _result(
            "RESOURCE_EXHAUSTED", "The configured memory limit was reached.", term_signal=_signal_of(attempt)
        )
    if attempt.reason == LOST:
        return _result("UNAVAILABLE", "The container was killed from outside.", exit_code=attempt.code)
    if attempt.code:
        return _result("ABORTED", "The container exited with an error.", exit_code=attempt.code)
    return run_v2.TaskAttemptResult()


def _result(status: str, message: str, exit_code: int = 0, term_signal: int = 0) -> Any:
    return run_v2.TaskAttemptResult(
        status=status_pb2.Status(code=RPC_CODE[status], message=message), exit_code=exit_code, term_signal=term_signal
    )


def _signal_of(attempt: Exit) -> int:
    return int(attempt.code - 128) if attempt.code > 128 else int(signal.SIGTERM)


def _state_of(task: Any) -> str:
    if not task.completion_time:
        return "running" if task.start_time else "pending"
    final = next(one for one in task.conditions if one.type_ == "Completed")
    if final.state == run_v2.Condition.State.CONDITION_SUCCEEDED:
        return "succeeded"
    cancelled = run_v2.Condition.ExecutionReason.CANCELLED
    return "cancelled" if final.execution_reason == cancelled else "failed"
