"""Jobs: create, update (a full replacement), run, delete. `executions` has their executions."""

from __future__ import annotations

import random
import string
from typing import Any

from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from ..kit.operations import Operation, Step
from . import rules
from .context import Context, validated
from .executions import Executions
from .messages import accept, condition, has
from .resources import GENERALLY_AVAILABLE, Resources, set_template_defaults
from .store import check_etag, place_of, short
from .workloads import Unready

DEFAULT_TIMEOUT_SECONDS = 600
DEFAULT_RETRIES = 3
SUFFIX = string.ascii_lowercase + string.digits
FAILED = run_v2.Condition.State.CONDITION_FAILED


class Jobs(Resources):
    """The Jobs API."""

    kind = "job"
    message = run_v2.Job
    check_id = staticmethod(rules.check_job_id)
    kept_output = ("observed_generation", "execution_count", "latest_created_execution")

    def __init__(self, context: Context, executions: Executions) -> None:
        super().__init__(context)
        self._executions = executions
        self.steps: dict[str, Step] = {
            "create_job": self._settle,
            "update_job": self._settle,
            "delete_job": self._finish_delete,
        }

    def create(self, request: Any) -> Any:
        job = accept(run_v2.Job, request.job, "job")
        return self._create(f"{request.parent}/jobs/{request.job_id}", job, request)

    def update(self, request: Any) -> Any:
        """Replace the whole desired state: the API has no update mask."""
        return self._update(accept(run_v2.Job, request.job, "job"), request)

    def run(self, request: Any) -> Any:
        """Start an execution. Every call starts another execution, as the API has no request id."""
        request = accept(run_v2.RunJobRequest, request, "request")
        store = self._context.store
        with store.db.transaction():
            job = store.get(request.name)
            self._refuse_deleting(job)
            check_etag(request.etag, job)
            if job.terminal_condition.state == FAILED:
                text = f"Job {short(job.name)!r} is not ready: {job.terminal_condition.message}"
                raise ApiError("FAILED_PRECONDITION", text)
            template = self._executions.overridden(job, request.overrides)
            suffix = "".join(random.choices(SUFFIX, k=5))
            if request.validate_only:
                return validated(self._executions.make(job, suffix, template))
            execution = self._executions.create(job, suffix, template)
            return self._context.begin("run_job", execution, waits_for=execution.name)

    def _complete(self, resource: Any) -> None:
        _set_defaults(resource)
        rules.check_job(resource, place_of(resource.name)[1], self._context.config)
        template = resource.template
        at_once = min(template.parallelism or template.task_count, template.task_count)
        self._check_quota(resource.name, template.template, at_once)

    async def _settle(self, operation: Operation) -> None:
        """Check the image and the secrets. A ready job can start an execution; its token starts the first execution."""
        await self._context.settle()
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            job = store.find(operation.target)
            if self._is_superseded(operation, job) or job is None:
                return
            job.reconciling = False
            try:
                self._context.workloads.check(job.name, job.template.template.containers[0])
            except Unready as error:
                reason = error.reasons["reason"]
                job.terminal_condition = condition("Ready", "FAILED", now, error.message, reason=reason)
                store.put(job)
                self._context.fail(operation, error.status, error.message, job)
                return
            job.terminal_condition = condition("Ready", "SUCCEEDED", now)
            job.observed_generation = job.generation
            store.put(job)
            self._start_by_token(operation, job)

    def _start_by_token(self, operation: Operation, job: Any) -> None:
        """Start <job>-<token> unless the token was used before; finish the operation now or with the execution."""
        token = job.start_execution_token or job.run_execution_token
        execution = self._executions.create_once(job, token) if token else None
        if job.run_execution_token and execution is not None and not execution.completion_time:
            self._context.operations.wait_for(operation, execution.name)
        else:
            self._context.finish(operation, self._context.store.get(job.name))

    async def _finish_delete(self, operation: Operation) -> None:
        """End every execution, then forget the job."""
        await self._context.settle()
        store, name = self._context.store, operation.target
        for execution in store.children("executions", name):
            await self._executions.remove(execution.name)
        with store.db.transaction() as connection:
            job = store.find(name)
            if job is not None:
                store.delete(name)
                connection.execute("DELETE FROM cloudrun_tokens WHERE job_uid = ?", [job.uid])
            self._context.finish(operation, job or run_v2.Job(name=name))


def _set_defaults(job: Any) -> None:
    template = job.template
    task = template.template
    template.task_count = template.task_count or 1
    if not has(task, "max_retries"):
        task.max_retries = DEFAULT_RETRIES
    set_template_defaults(task, DEFAULT_TIMEOUT_SECONDS)
    job.launch_stage = job.launch_stage or GENERALLY_AVAILABLE
