"""The driver of an execution: runs containers, retries, times out and cancels.

A driver stores every decision before it acts on it, so that the driver of the next start continues from there:
`retried` of a task tells the attempt, the attempt tells the container's id, and the runtime finds the container.
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.cloud import run_v2

from ...containers.logs import append_platform_line
from ...containers.processes import OUT_OF_MEMORY, Container, Exit
from ..kit.background import first
from ..kit.times import timestamp
from .attempts import (
    PREEMPTED,
    STOPPED,
    TIMED_OUT,
    attempt_result,
    container_id,
    state_of,
    task_environment,
)
from .capacity import gpu_kind
from .context import Context
from .messages import condition, seconds, set_condition
from .store import parent_of, short
from .workloads import Unready

Status = run_v2.ExecutionReference.CompletionStatus
CANCELLED = "CANCELLED"
DELETED = "DELETED"


class Driver:
    """Runs the tasks of one execution to their end."""

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self.name = name
        self.stop = asyncio.Event()
        self.finished = asyncio.Event()
        self._stop_siblings = asyncio.Event()
        self._containers: dict[str, Container] = {}

    async def run(self) -> None:
        """Run the tasks. `finished` is set also after a failure, because a deletion waits for it."""
        try:
            await self._run_tasks()
            self._complete()
        finally:
            self.finished.set()

    def terminate(self, fault: str) -> None:
        preempted = self._context.config.grace_seconds, PREEMPTED
        grace, reason = preempted if fault == "preempt" else (0, OUT_OF_MEMORY)
        for container in self._containers.values():
            self._context.background.spawn(container.terminate(grace, reason))

    async def _run_tasks(self) -> None:
        store = self._context.store
        execution = store.get(self.name)
        if self._stop_reason():
            self.stop.set()
        slots = asyncio.Semaphore(execution.parallelism or execution.task_count)
        tasks = store.children("tasks", self.name)
        if any(state_of(task) == "failed" for task in tasks):
            self._stop_siblings.set()
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                if not task.completion_time:
                    group.create_task(self._run_task(task.name, execution, slots))

    async def _run_task(self, name: str, execution: Any, slots: asyncio.Semaphore) -> None:
        async with slots:
            while self._was_started(name, execution) or not self._is_stopping():
                attempt = await self._run_attempt(name, execution)
                if attempt is None or self._record(name, attempt):
                    break
        if not self._context.store.get(name).completion_time:
            self._cancel_task(name)

    async def _run_attempt(self, name: str, execution: Any) -> Exit | str | None:
        """Run an attempt: return its container's end, the text of a failed start, or None if stopped before a start."""
        task = self._context.store.get(name)
        own_id = container_id(task, execution)
        kind = gpu_kind(name, execution.template)
        if self._context.workloads.adopt(own_id) is None and not await self._have_capacity(kind):
            return None
        self._context.capacity.claim(own_id, kind)
        try:
            env = task_environment(execution, task)
            container = self._context.workloads.launch(own_id, name, execution.template, env)
            self._mark_running(name)
            return await self._supervise(container, seconds(execution.template.timeout))
        except (Unready, OSError) as error:
            return str(error)
        finally:
            self._context.capacity.release(own_id)

    def _was_started(self, name: str, execution: Any) -> bool:
        """Whether the present attempt has a container. The driver must then wait for the container's end."""
        task = self._context.store.get(name)
        return self._context.workloads.adopt(container_id(task, execution)) is not None

    async def _have_capacity(self, kind: Any) -> bool:
        """Wait for a GPU; return False if the execution is stopped first."""
        while kind is not None and (obstacle := self._context.capacity.obstacle(kind)):
            self._set_resources("RECONCILING", obstacle)
            await first(self._context.capacity.changed(kind), self.stop.wait(), self._stop_siblings.wait())
            if self._is_stopping():
                self._context.capacity.pass_on(kind)
                return False
        return True

    async def _supervise(self, container: Container, timeout_seconds: float) -> Exit:
        """Wait for the container's end; end the container at its deadline and when the execution is stopped."""
        grace = self._context.config.grace_seconds
        deadline = self._context.workloads.started_at(container.id) + timeout_seconds
        self._containers[container.id] = container
        try:
            sleep = self._context.clock.sleep_until(deadline)
            await first(container.wait(), sleep, self.stop.wait(), self._stop_siblings.wait())
            if container.exit is not None:
                ended = container.exit
                late = ended.at > deadline + grace  # no stack ran that could end the container in time
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
        """Store an attempt's result; return True if the task is done, False if it needs another attempt."""
        store = self._context.store
        with store.db.transaction():
            task = store.get(name)
            if isinstance(attempt, Exit) and attempt.reason == STOPPED:
                return True
            task.last_attempt_result = attempt_result(attempt)
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
        states = [state_of(task) for task in tasks]
        execution.running_count = states.count("running")
        execution.succeeded_count = states.count("succeeded")
        execution.failed_count = states.count("failed")
        execution.cancelled_count = states.count("cancelled")
        execution.retried_count = sum(task.retried for task in tasks)
        execution.update_time = timestamp(self._context.now())
        store.put(execution)

    def _complete(self) -> None:
        """Store the terminal state, once, and finish the operations that wait for the execution's end."""
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
                self.name,
                lambda operation: self._context.finish(operation, store.find(operation.target) or execution),
            )

    def _verdict(self, execution: Any) -> tuple[Any, Any]:
        now = self._context.now()
        if reason := self._stop_reason():
            text = "This execution was cancelled." if reason == CANCELLED else "This execution was deleted."
            return condition("Completed", "FAILED", now, text, execution_reason=reason), Status.EXECUTION_CANCELLED
        if execution.succeeded_count == execution.task_count:
            text = "Execution completed successfully."
            return condition("Completed", "SUCCEEDED", now, text), Status.EXECUTION_SUCCEEDED
        failed = next(task for task in self._context.store.children("tasks", self.name) if state_of(task) == "failed")
        result = failed.last_attempt_result
        end = f"failed with exit code: {result.exit_code} and message: {result.status.message}"
        text = f"Task {short(failed.name)} {end}"
        verdict = condition("Completed", "FAILED", now, text, execution_reason="NON_ZERO_EXIT_CODE")
        return verdict, Status.EXECUTION_FAILED

    def _refer(self, execution: Any, status: Any) -> None:
        """Update the job's reference to its latest execution."""
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
        row = self._context.store.db.row("SELECT reason FROM cloudrun_stops WHERE execution = ?", [self.name])
        return row["reason"] if row else ""


def _timeout_line(timeout_seconds: float) -> str:
    return (
        f"Terminating task because it has reached the maximum timeout of {timeout_seconds:g} seconds. "
        "To change this limit, see https://cloud.google.com/run/docs/configuring/task-timeout"
    )
