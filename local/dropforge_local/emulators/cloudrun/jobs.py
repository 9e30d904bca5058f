"""Jobs: create, update (a full replace), run, delete. Their executions are next door."""

from __future__ import annotations

import random
import sqlite3
import string
from typing import Any

from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from . import rules
from .capacity import gpu_kind
from .context import Context
from .executions import Executions
from .messages import condition, duration, has, timestamp
from .operations import immediate, render_operation
from .store import check_etag, new_uid, place_of, short
from .workloads import Unready

GENERALLY_AVAILABLE = 4  # google.api.LaunchStage.GA
DEFAULT_TIMEOUT_SECONDS = 600
DEFAULT_RETRIES = 3
DEFAULT_LIMITS = {"cpu": "1000m", "memory": "512Mi"}
SUFFIX = string.ascii_lowercase + string.digits


class Jobs:
    """The Jobs API over the tables."""

    def __init__(self, context: Context, executions: Executions) -> None:
        self._context = context
        self._executions = executions

    def create(self, parent: str, job_id: str, job: Any, *, validate_only: bool) -> dict[str, Any]:
        rules.check_job_id(job_id)
        job.name = f"{parent}/jobs/{job_id}"
        with self._context.store.db.transaction():
            if self._context.store.find(job.name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Resource {job_id!r} already exists.")
            self._prepare(job, None)
            return immediate(job) if validate_only else self._write("create_job", job)

    def update(self, name: str, job: Any, *, validate_only: bool, allow_missing: bool) -> dict[str, Any]:
        """Replace the whole desired state: there is no update mask."""
        store = self._context.store
        with store.db.transaction():
            current = store.find(name) if allow_missing else store.get(name)
            job.name = name
            if current is None:
                rules.check_job_id(short(name))
            else:
                _refuse_deleting(current)
                check_etag(job.etag, current)
            self._prepare(job, current)
            return immediate(job) if validate_only else self._write("update_job", job)

    def run(self, name: str, request: Any) -> dict[str, Any]:
        """Start an execution; every call starts another one, as there is no request id."""
        store = self._context.store
        with store.db.transaction():
            job = store.get(name)
            _refuse_deleting(job)
            check_etag(request.etag, job)
            failed = run_v2.Condition.State.CONDITION_FAILED
            if job.terminal_condition.state == failed:
                raise ApiError(
                    "FAILED_PRECONDITION", f"Job {short(name)!r} is not ready: {job.terminal_condition.message}"
                )
            template = self._executions.overridden(job, request.overrides)
            suffix = "".join(random.choices(SUFFIX, k=5))
            if request.validate_only:
                return immediate(self._executions.make(job, suffix, template))
            execution = self._executions.create(job, suffix, template)
            operation = self._context.operations.begin("run_job", execution, waits_for=execution.name)
            return render_operation(operation)

    def delete(self, name: str, etag: str, *, validate_only: bool) -> dict[str, Any]:
        store = self._context.store
        with store.db.transaction():
            job = store.get(name)
            check_etag(etag, job)
            job.delete_time = job.delete_time or timestamp(self._context.now())
            job.expire_time = timestamp(self._context.now() + 30 * 24 * 3600)
            if validate_only:
                return immediate(job)
            job.reconciling = True
            store.put(job)
            operation = self._context.operations.begin("delete_job", job)
            self.resume(operation)
            return render_operation(operation)

    def resume(self, operation: sqlite3.Row) -> None:
        """Carry out an operation once the transaction has committed; after a restart, at once."""
        work = self._settle if operation["verb"] in ("create_job", "update_job") else self._delete
        self._context.store.db.after_commit(lambda: _ignore(self._context.background.spawn(work(operation))))

    def _prepare(self, job: Any, current: Any | None) -> None:
        """Defaults, checks, and the output fields of a new desired state."""
        _set_defaults(job)
        _, region = place_of(job.name)
        rules.check_job(job, region, self._context.config)
        template = job.template
        at_once = min(template.parallelism or template.task_count, template.task_count)
        kind = gpu_kind(job.name, template.template)
        rules.check_gpu_quota(kind, at_once, self._context.faults, self._context.config)
        now = timestamp(self._context.now())
        job.uid = current.uid if current else new_uid()
        job.generation = current.generation + 1 if current else 1
        job.create_time = current.create_time if current else now
        job.update_time = now
        job.reconciling = True
        job.terminal_condition = condition("Ready", "RECONCILING", self._context.now())
        if current:
            job.observed_generation = current.observed_generation
            job.execution_count = current.execution_count
            job.latest_created_execution = current.latest_created_execution

    def _write(self, verb: str, job: Any) -> dict[str, Any]:
        self._context.store.put(job, self._context.now())
        operation = self._context.operations.begin(verb, job)
        self.resume(operation)
        return render_operation(operation)

    async def _settle(self, operation: sqlite3.Row) -> None:
        """Look for the image and the secrets; ready means that an execution could start (or, by token, has)."""
        await self._context.settle()
        store, operations = self._context.store, self._context.operations
        with store.db.transaction():
            job = store.find(operation["target"])
            if job is None or job.delete_time or job.generation != operation["generation"]:
                gone = f"Job {short(operation['target'])!r} was changed or deleted meanwhile."
                operations.fail(operation["name"], "ABORTED", gone, job or run_v2.Job(name=operation["target"]))
                return
            job.reconciling = False
            try:
                self._context.workloads.check(job.name, job.template.template.containers[0])
            except Unready as error:
                job.terminal_condition = condition(
                    "Ready", "FAILED", self._context.now(), error.message, reason=error.reasons["reason"]
                )
                store.put(job)
                operations.fail(operation["name"], error.status, error.message, job)
                return
            job.terminal_condition = condition("Ready", "SUCCEEDED", self._context.now())
            job.observed_generation = job.generation
            store.put(job)
            self._start_by_token(operation, job)

    def _start_by_token(self, operation: sqlite3.Row, job: Any) -> None:
        """Start <job>-<token> unless this token has already been used; finish the operation now or at its end."""
        operations = self._context.operations
        token = job.start_execution_token or job.run_execution_token
        execution = self._executions.create_once(job, token) if token else None
        job = self._context.store.get(job.name)
        if job.run_execution_token and execution is not None and not execution.completion_time:
            operations.wait_for(operation["name"], execution.name)
        else:
            operations.finish(operation["name"], job)

    async def _delete(self, operation: sqlite3.Row) -> None:
        """End every execution, then forget the job."""
        await self._context.settle()
        store, name = self._context.store, operation["target"]
        for execution in store.children("executions", name):
            await self._executions.remove(execution.name)
        with store.db.transaction() as connection:
            job = store.find(name)
            if job is not None:
                store.delete(name)
                connection.execute("DELETE FROM cloudrun_tokens WHERE job_uid = ?", [job.uid])
            self._context.operations.finish(operation["name"], job or run_v2.Job(name=name))


def _set_defaults(job: Any) -> None:
    template = job.template
    task = template.template
    template.task_count = template.task_count or 1
    if not has(task, "max_retries"):
        task.max_retries = DEFAULT_RETRIES
    if not has(task, "timeout"):
        task.timeout = duration(DEFAULT_TIMEOUT_SECONDS)
    if not task.execution_environment:
        task.execution_environment = run_v2.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN2
    for container in task.containers:
        set_default_limits(container)
    job.launch_stage = job.launch_stage or GENERALLY_AVAILABLE


def set_default_limits(container: Any) -> None:
    for key, value in DEFAULT_LIMITS.items():
        if key not in container.resources.limits:
            container.resources.limits[key] = value


def _refuse_deleting(job: Any) -> None:
    if job.delete_time:
        raise ApiError("FAILED_PRECONDITION", f"Job {short(job.name)!r} is being deleted.")


def _ignore(_: object) -> None:
    return None
