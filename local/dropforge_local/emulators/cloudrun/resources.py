"""Jobs and services alike: create, update and delete a desired state, and the status of the state.

An operation reaches the desired state later. Each method begins the operation in the transaction that writes the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from ..kit.operations import Operation, unpack
from ..kit.times import timestamp
from . import rules
from .capacity import gpu_kind
from .context import Context, validated
from .messages import condition, duration, has
from .store import check_etag, new_uid, short

GENERALLY_AVAILABLE = 4  # google.api.LaunchStage.GA
DEFAULT_LIMITS = {"cpu": "1000m", "memory": "512Mi"}
KEPT_DELETED_SECONDS = 30 * 24 * 3600  # from delete_time to expire_time


class Resources(ABC):
    """The resources of one kind, "job" or "service".

    `message` is their class. `check_id` raises INVALID_ARGUMENT for an id that Cloud Run refuses. An update keeps the
    output fields `kept_output`.
    """

    kind: str
    message: Any
    check_id: Callable[[str], None]
    kept_output: tuple[str, ...]

    def __init__(self, context: Context) -> None:
        self._context = context

    def delete(self, request: Any) -> Any:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            resource = store.get(request.name)
            check_etag(request.etag, resource)
            resource.delete_time = resource.delete_time or timestamp(now)
            resource.expire_time = timestamp(now + KEPT_DELETED_SECONDS)
            if request.validate_only:
                return validated(resource)
            resource.reconciling = True
            store.put(resource)
            return self._context.begin(f"delete_{self.kind}", resource)

    def _create(self, name: str, resource: Any, request: Any) -> Any:
        self.check_id(short(name))
        resource.name = name
        with self._context.store.db.transaction():
            if self._context.store.find(name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Resource {short(name)!r} already exists.")
            return self._replace("create", resource, None, request)

    def _update(self, resource: Any, request: Any, merge: Callable[[Any, Any], Any] = lambda current, new: new) -> Any:
        """Replace a desired state by `merge(current, resource)`; create a missing resource if the request allows it."""
        store = self._context.store
        with store.db.transaction():
            current = store.find(resource.name) if request.allow_missing else store.get(resource.name)
            if current is None:
                self.check_id(short(resource.name))
            else:
                self._refuse_deleting(current)
                check_etag(resource.etag, current)
                resource = merge(current, resource)
            return self._replace("update", resource, current, request)

    def _replace(self, verb: str, resource: Any, current: Any | None, request: Any) -> Any:
        self._complete(resource)
        self._set_output(resource, current)
        if request.validate_only:
            return validated(resource)
        self._write(resource, current)
        return self._context.begin(f"{verb}_{self.kind}", resource)

    def _set_output(self, resource: Any, current: Any | None) -> None:
        """The output fields of a new desired state."""
        now = self._context.now()
        resource.uid = current.uid if current else new_uid()
        resource.generation = current.generation + 1 if current else 1
        resource.create_time = current.create_time if current else timestamp(now)
        resource.update_time = timestamp(now)
        resource.reconciling = True
        resource.terminal_condition = condition("Ready", "RECONCILING", now)
        for field in self.kept_output if current else ():
            setattr(resource, field, getattr(current, field))

    def _check_quota(self, name: str, template: Any, instances: int) -> None:
        """Refuse more instances with the template's GPU than the quota allows."""
        kind = gpu_kind(name, template)
        rules.check_gpu_quota(kind, instances, self._context.faults, self._context.config)

    def _is_superseded(self, operation: Operation, resource: Any | None) -> bool:
        """Fail the operation if the resource is deleted or has a newer desired state than the operation."""
        desired = unpack(operation.metadata, self.message.pb()())
        if resource is not None and not resource.delete_time and resource.generation == desired.generation:
            return False
        text = f"{self.kind.capitalize()} {short(operation.target)!r} was changed or deleted meanwhile."
        self._context.fail(operation, "ABORTED", text, resource or self.message(name=operation.target))
        return True

    def _refuse_deleting(self, resource: Any) -> None:
        if resource.delete_time:
            text = f"{self.kind.capitalize()} {short(resource.name)!r} is being deleted."
            raise ApiError("FAILED_PRECONDITION", text)

    def _write(self, resource: Any, current: Any | None) -> None:
        self._context.store.put(resource, self._context.now())

    @abstractmethod
    def _complete(self, resource: Any) -> None:
        """Set the defaults and check the resource. Raises ApiError."""


def set_template_defaults(template: Any, timeout_seconds: int) -> None:
    """The defaults that task and revision templates share."""
    if not has(template, "timeout"):
        template.timeout = duration(timeout_seconds)
    if not template.execution_environment:
        template.execution_environment = run_v2.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN2
    for container in template.containers:
        for key, value in DEFAULT_LIMITS.items():
            if key not in container.resources.limits:
                container.resources.limits[key] = value
