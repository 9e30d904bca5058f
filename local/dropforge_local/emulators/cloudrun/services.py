"""Services and revisions: create, update, deploy, delete. `traffic` has their ports and instances."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from google.cloud import run_v2
from google.protobuf import field_mask_pb2

from dropforge_local.base.errors import ApiError

from ..kit.operations import Operation, Step
from ..kit.times import timestamp
from . import rules
from .context import Context, validated
from .counts import Counts
from .messages import accept, condition, given, has, made_from, set_condition
from .resources import GENERALLY_AVAILABLE, Resources, set_template_defaults
from .store import check_etag, parent_of, place_of, short
from .traffic import Traffic, routed
from .workloads import Unready

LATEST = run_v2.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST
DEFAULT_TIMEOUT_SECONDS = 300
DEFAULT_CONCURRENCY = 80
DEFAULT_MAX_INSTANCES = 100
DEFAULT_PERIOD_SECONDS = 10
DEFAULT_FAILURE_THRESHOLD = 3
# The fields that a revision copies from the service's template.
REVISION_FIELDS = (
    "scaling",
    "vpc_access",
    "timeout",
    "service_account",
    "containers",
    "volumes",
    "execution_environment",
    "max_instance_request_concurrency",
    "session_affinity",
    "node_selector",
    "gpu_zonal_redundancy_disabled",
)


class Services(Resources):
    """The Services and Revisions APIs."""

    kind = "service"
    message = run_v2.Service
    check_id = staticmethod(rules.check_service_id)
    kept_output = (
        "observed_generation",
        "uri",
        "urls",
        "latest_ready_revision",
        "latest_created_revision",
        "traffic_statuses",
    )

    def __init__(self, context: Context, authorize: Callable[[Mapping[str, str]], bool]) -> None:
        super().__init__(context)
        self._traffic = Traffic(context, authorize)
        self._locks: dict[str, asyncio.Lock] = {}
        self.steps: dict[str, Step] = {
            "create_service": self._deploy,
            "update_service": self._deploy,
            "delete_service": self._finish_delete,
            "delete_revision": self._finish_delete_revision,
        }

    async def start(self) -> None:
        """Raises OSError when a service's port is taken."""
        await self._traffic.start()

    async def stop(self) -> None:
        await self._traffic.stop()

    @property
    def counts(self) -> Counts:
        """The answers of the revisions."""
        return self._traffic.counts

    def ports(self) -> list[int]:
        """The open ports."""
        return self._traffic.ports()

    def create(self, request: Any) -> Any:
        service = accept(run_v2.Service, request.service, "service")
        return self._create(f"{request.parent}/services/{request.service_id}", service, request)

    def update(self, request: Any) -> Any:
        """Replace the masked fields, or all fields without a mask."""
        mask = request.update_mask
        service = accept(run_v2.Service, request.service, "service", partial=bool(mask.paths))
        return self._update(service, request, lambda current, new: _merge(current, new, mask))

    def delete_revision(self, request: Any) -> Any:
        """Refuses a revision that has traffic or a tag, and the latest one, which the service would make again."""
        store = self._context.store
        with store.db.transaction():
            revision = store.get(request.name)
            check_etag(request.etag, revision)
            service = store.get(parent_of(request.name))
            latest = {service.latest_created_revision, service.latest_ready_revision}
            if request.name in latest | routed(service):
                text = f"Revision {short(request.name)!r} has traffic or a tag, or is the latest; it cannot be deleted."
                raise ApiError("FAILED_PRECONDITION", text)
            return validated(revision) if request.validate_only else self._context.begin("delete_revision", revision)

    def _complete(self, resource: Any) -> None:
        _set_defaults(resource)
        rules.check_service(resource, place_of(resource.name)[1], self._context.config)
        template = resource.template
        most = template.scaling.max_instance_count or resource.scaling.max_instance_count or DEFAULT_MAX_INSTANCES
        self._check_quota(resource.name, template, most)
        for target in resource.traffic:
            if target.revision and self._context.store.find(f"{resource.name}/revisions/{target.revision}") is None:
                raise rules.refuse("service.traffic", f"Revision {target.revision!r} does not exist or is deleted.")

    def _write(self, resource: Any, current: Any | None) -> None:
        if self._needs_revision(resource, current):
            revision = self._make_revision(resource)
            self._context.store.put(revision, self._context.now())
            resource.latest_created_revision = revision.name
        super()._write(resource, current)

    def _needs_revision(self, service: Any, current: Any | None) -> bool:
        """A changed template needs a revision; so does an update after a revision that failed.

        An update of the traffic alone needs none: the traffic can move although the latest revision failed.
        """
        if current is None or service.template != current.template:
            return True
        has_failed = current.latest_created_revision != current.latest_ready_revision
        return bool(has_failed and service.traffic == current.traffic)

    def _make_revision(self, service: Any) -> Any:
        now, template = self._context.now(), service.template
        suffix = "".join(random.choices(string.ascii_lowercase, k=3))
        own = template.revision or f"{short(service.name)}-{service.generation:05d}-{suffix}"
        name = f"{service.name}/revisions/{own}"
        if not own.startswith(f"{short(service.name)}-") or len(own) > 63:
            raise rules.refuse("service.template.revision", f"is {own!r}; expected {short(service.name)}-<suffix>")
        if self._context.store.find(name) is not None:
            raise ApiError("ALREADY_EXISTS", f"Revision named {own!r} with different configuration already exists.")
        return run_v2.Revision(
            labels={**service.labels, **template.labels},
            launch_stage=service.launch_stage,
            service=short(service.name),
            log_uri=self._context.log_uri(name),
            **made_from(template, name, now, condition("Ready", "RECONCILING", now)),
            **given(template, REVISION_FIELDS),
        )

    async def _deploy(self, operation: Operation) -> None:
        """Bring the service to its desired state: start one instance of a new revision, then move the traffic."""
        await self._context.settle()
        name = operation.target
        await self._abandon(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            service = self._context.store.find(name)
            if self._is_superseded(operation, service) or service is None:
                return
            await self._traffic.open_ports(service)
            revision = self._context.store.get(service.latest_created_revision)
            has_failed = not revision.reconciling and revision.name != service.latest_ready_revision
            failure = None if has_failed else await self._try_revision(service, revision)
            if self._is_superseded(operation, self._context.store.find(name)):
                return
            if has_failed:
                self._move_traffic(operation, revision)
            elif failure is None:
                self._succeed(operation, revision)
            else:
                self._fail(operation, revision, failure)
            self._traffic.keep_minimum(name)
            self._traffic.retire(name)

    async def _try_revision(self, service: Any, revision: Any) -> Unready | None:
        """Start an instance of the revision; return the failure, or None if the instance becomes ready."""
        if service.latest_ready_revision == revision.name:
            return None
        try:
            self._context.workloads.check(revision.name, revision.containers[0])
            await self._traffic.pool(service, revision).ready()
        except Unready as error:
            return error
        except OSError as error:
            return Unready("INTERNAL", str(error), reason="INTERNAL")
        return None

    async def _abandon(self, name: str) -> None:
        """Stop the deployment of superseded revisions, so that a newer state need not wait for them."""
        service, now = self._context.store.find(name), self._context.now()
        wanted = service.latest_created_revision if service is not None and not service.delete_time else ""
        for revision in self._context.store.children("revisions", name):
            if revision.reconciling and revision.name != wanted:
                text = "The service was changed before the revision was ready."
                self._settle_revision(revision, condition("Ready", "FAILED", now, text, revision_reason="RETIRED"))
                await self._traffic.close_pool(revision.name)

    def _succeed(self, operation: Operation, revision: Any) -> None:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            self._settle_revision(revision, condition("Ready", "SUCCEEDED", now))
            service = store.get(operation.target)
            service.latest_ready_revision = revision.name
            service.observed_generation = service.generation
            service.uri = self._traffic.uri(service.name)
            service.urls = [service.uri]
            service.traffic_statuses = [self._traffic_status(service, target) for target in service.traffic]
            self._settle_service(service, condition("Ready", "SUCCEEDED", now))
            self._context.finish(operation, service)

    def _move_traffic(self, operation: Operation, failed: Any) -> None:
        """Move the traffic of a service whose latest revision has failed: the service stays not ready because of it."""
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            service = store.get(operation.target)
            service.observed_generation = service.generation
            service.traffic_statuses = [self._traffic_status(service, target) for target in service.traffic]
            text = f"Revision {short(failed.name)!r} is not ready and cannot serve traffic."
            self._settle_service(service, condition("Ready", "FAILED", now, text, reason="REVISION_FAILED"))
            self._context.finish(operation, service)

    def _fail(self, operation: Operation, revision: Any, error: Unready) -> None:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            self._settle_revision(revision, condition("Ready", "FAILED", now, error.message, **error.reasons))
            service = store.get(operation.target)
            text = f"Revision {short(revision.name)!r} is not ready and cannot serve traffic. {error.message}"
            self._settle_service(service, condition("Ready", "FAILED", now, text, reason="REVISION_FAILED"))
            self._context.fail(operation, error.status, text, service)

    def _settle_revision(self, revision: Any, ready: Any) -> None:
        set_condition(revision.conditions, ready)
        revision.reconciling = False
        revision.observed_generation = revision.generation
        revision.update_time = timestamp(self._context.now())
        self._context.store.put(revision)

    def _settle_service(self, service: Any, ready: Any) -> None:
        service.terminal_condition = ready
        service.reconciling = False
        for kind in ("ConfigurationsReady", "RoutesReady"):
            part = run_v2.Condition(ready)
            part.type_ = kind
            set_condition(service.conditions, part)
        self._context.store.put(service)

    def _traffic_status(self, service: Any, target: Any) -> Any:
        revision = target.revision or short(service.latest_ready_revision)
        return run_v2.TrafficTargetStatus(
            type_=target.type_,
            revision=revision,
            percent=target.percent,
            tag=target.tag,
            uri=self._traffic.uri(service.name, target.tag) if target.tag else "",
        )

    async def _finish_delete(self, operation: Operation) -> None:
        """Close the ports, end the instances, forget the service."""
        await self._context.settle()
        store, name = self._context.store, operation.target
        await self._abandon(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            service = store.find(name)
            await self._traffic.close(service, name)
            with store.db.transaction() as connection:
                store.delete(name)
                connection.execute("DELETE FROM cloudrun_ports WHERE service = ?", [name])
                self._context.finish(operation, service or run_v2.Service(name=name))

    async def _finish_delete_revision(self, operation: Operation) -> None:
        """End the instances of a revision, then forget the revision."""
        await self._context.settle()
        store, name = self._context.store, operation.target
        revision = store.find(name) or run_v2.Revision(name=name)
        await self._traffic.close_pool(name)
        with store.db.transaction():
            store.delete(name)
            self._context.finish(operation, revision)


def _merge(current: Any, new: Any, mask: field_mask_pb2.FieldMask) -> Any:
    """The desired state after an update: the masked fields of `new`, the other fields of `current`."""
    if not mask.paths or "*" in mask.paths:
        return new
    merged = run_v2.Service(current)
    source, target = run_v2.Service.pb(new), run_v2.Service.pb(merged)
    if not mask.IsValidForDescriptor(target.DESCRIPTOR):
        paths = ",".join(mask.paths)
        raise ApiError("INVALID_ARGUMENT", f"update_mask {paths!r} names a field that a Service does not have")
    mask.MergeMessage(source, target, replace_message_field=True, replace_repeated_field=True)
    return merged


def _set_defaults(service: Any) -> None:
    template = service.template
    set_template_defaults(template, DEFAULT_TIMEOUT_SECONDS)
    for container in template.containers:
        for kind in ("startup_probe", "liveness_probe"):
            if has(container, kind):
                _set_probe_defaults(getattr(container, kind))
    if not template.max_instance_request_concurrency:
        limits = [container.resources.limits for container in template.containers]
        whole_cpu = all(rules.parse_cpu(limit["cpu"]) >= 1 for limit in limits)
        template.max_instance_request_concurrency = DEFAULT_CONCURRENCY if whole_cpu else 1
    if not service.traffic:
        service.traffic = [run_v2.TrafficTarget(type_=LATEST, percent=100)]
    service.ingress = service.ingress or run_v2.IngressTraffic.INGRESS_TRAFFIC_ALL
    service.launch_stage = service.launch_stage or GENERALLY_AVAILABLE


def _set_probe_defaults(probe: Any) -> None:
    probe.timeout_seconds = probe.timeout_seconds or 1
    probe.period_seconds = probe.period_seconds or DEFAULT_PERIOD_SECONDS
    probe.failure_threshold = probe.failure_threshold or DEFAULT_FAILURE_THRESHOLD
