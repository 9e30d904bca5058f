"""Services and revisions: deploy, route traffic, update, delete."""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
import string
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from google.cloud import run_v2
from google.protobuf import field_mask_pb2

from dropforge_local.base.errors import ApiError
from dropforge_local.base.ports import HOST, free_port

from . import rules
from .capacity import gpu_kind
from .context import Context
from .instances import Pool
from .jobs import GENERALLY_AVAILABLE, set_default_limits
from .messages import condition, duration, has, seconds, set_condition, timestamp
from .operations import immediate, render_operation
from .proxy import Listener
from .store import check_etag, new_uid, parent_of, place_of, short
from .workloads import Unready

LATEST = run_v2.TrafficTargetAllocationType.TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST
DEFAULT_TIMEOUT_SECONDS = 300
DEFAULT_CONCURRENCY = 80
DEFAULT_MAX_INSTANCES = 100
DEFAULT_PERIOD_SECONDS = 10
DEFAULT_FAILURE_THRESHOLD = 3
# What a revision takes over from the service's template, where given.
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
# Output that an update leaves as it is until the new state is reached.
KEPT_OUTPUT = (
    "observed_generation",
    "uri",
    "urls",
    "latest_ready_revision",
    "latest_created_revision",
    "traffic_statuses",
)


class Services:
    """The Services and Revisions APIs, and the ports and instances behind them."""

    def __init__(self, context: Context, authorize: Callable[[Mapping[str, str]], bool]) -> None:
        self._context = context
        self._authorize = authorize
        self._pools: dict[str, Pool] = {}
        self._listeners: dict[tuple[str, str], Listener] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def start(self) -> None:
        """Open the ports and take over the instances of an earlier stack. Raises OSError when a port is taken."""
        # One connection per request: an instance may close an idle one just as a POST is sent on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        for row in self._context.store.db.connection.execute("SELECT * FROM cloudrun_ports").fetchall():
            await self._listen(row["service"], row["tag"], row["port"])
        for service in self._context.store.all("services"):
            for revision in self._context.store.children("revisions", service.name):
                if revision.name in self._wanted(service) or self._context.workloads.running(revision.name):
                    self._pool(service, revision).resume()

    async def stop(self) -> None:
        """Close the ports; the instances go on."""
        for listener in self._listeners.values():
            await listener.stop()
        await self._session.close()

    def create(self, parent: str, service_id: str, service: Any, *, validate_only: bool) -> dict[str, Any]:
        rules.check_service_id(service_id)
        service.name = f"{parent}/services/{service_id}"
        with self._context.store.db.transaction():
            if self._context.store.find(service.name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Resource {service_id!r} already exists.")
            self._prepare(service, None)
            return immediate(service) if validate_only else self._write("create_service", service, None)

    def update(self, name: str, service: Any, mask: str, *, validate_only: bool, allow_missing: bool) -> dict[str, Any]:
        """Replace what the mask names, or everything without one."""
        store = self._context.store
        with store.db.transaction():
            current = store.find(name) if allow_missing else store.get(name)
            service.name = name
            if current is None:
                rules.check_service_id(short(name))
            else:
                if current.delete_time:
                    raise ApiError("FAILED_PRECONDITION", f"Service {short(name)!r} is being deleted.")
                check_etag(service.etag, current)
                service = _merge(current, service, mask)
            self._prepare(service, current)
            return immediate(service) if validate_only else self._write("update_service", service, current)

    def delete(self, name: str, etag: str, *, validate_only: bool) -> dict[str, Any]:
        store = self._context.store
        with store.db.transaction():
            service = store.get(name)
            check_etag(etag, service)
            service.delete_time = service.delete_time or timestamp(self._context.now())
            service.expire_time = timestamp(self._context.now() + 30 * 24 * 3600)
            if validate_only:
                return immediate(service)
            service.reconciling = True
            store.put(service)
            operation = self._context.operations.begin("delete_service", service)
            self.resume(operation)
            return render_operation(operation)

    def resume(self, operation: sqlite3.Row) -> None:
        """Carry out an operation once the transaction has committed; after a restart, at once."""
        work = self._delete if operation["verb"] == "delete_service" else self._deploy
        spawn = self._context.background.spawn
        self._context.store.db.after_commit(lambda: (spawn(work(operation)), None)[1])

    def ports(self) -> list[int]:
        """Ports that are open now."""
        return sorted(listener.port for listener in self._listeners.values())

    def _prepare(self, service: Any, current: Any | None) -> None:
        """Defaults, checks, and the output fields of a new desired state."""
        _set_defaults(service)
        project_region = place_of(service.name)
        rules.check_service(service, project_region[1], self._context.config)
        template = service.template
        most = template.scaling.max_instance_count or service.scaling.max_instance_count or DEFAULT_MAX_INSTANCES
        kind = gpu_kind(service.name, template)
        rules.check_gpu_quota(kind, most, self._context.faults, self._context.config)
        now = timestamp(self._context.now())
        service.uid = current.uid if current else new_uid()
        service.generation = current.generation + 1 if current else 1
        service.create_time = current.create_time if current else now
        service.update_time = now
        service.reconciling = True
        service.terminal_condition = condition("Ready", "RECONCILING", self._context.now())
        if current:
            for field in KEPT_OUTPUT:
                setattr(service, field, getattr(current, field))
        self._check_traffic_revisions(service)

    def _check_traffic_revisions(self, service: Any) -> None:
        for target in service.traffic:
            if target.revision and self._context.store.find(f"{service.name}/revisions/{target.revision}") is None:
                raise rules.refuse("service.traffic", f"Revision {target.revision!r} does not exist or is deleted.")

    def _write(self, verb: str, service: Any, current: Any | None) -> dict[str, Any]:
        store = self._context.store
        if self._needs_revision(service, current):
            revision = self._make_revision(service)
            store.put(revision, self._context.now())
            service.latest_created_revision = revision.name
        store.put(service, self._context.now())
        operation = self._context.operations.begin(verb, service)
        self.resume(operation)
        return render_operation(operation)

    def _needs_revision(self, service: Any, current: Any | None) -> bool:
        """A change of the template makes a revision, and so does another try after a failed one."""
        if current is None or current.latest_created_revision != current.latest_ready_revision:
            return True
        return bool(service.template != current.template)

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
            name=name,
            uid=new_uid(),
            generation=1,
            labels={**service.labels, **template.labels},
            annotations=template.annotations,
            create_time=timestamp(now),
            update_time=timestamp(now),
            launch_stage=service.launch_stage,
            service=short(service.name),
            reconciling=True,
            conditions=[condition("Ready", "RECONCILING", now)],
            log_uri=self._context.log_uri(name),
            **{field: getattr(template, field) for field in REVISION_FIELDS if has(template, field)},
        )

    async def _deploy(self, operation: sqlite3.Row) -> None:
        """Bring the service to its desired state: start one instance of a new revision, then move the traffic."""
        await self._context.settle()
        name = operation["target"]
        await self._abandon(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            service = self._context.store.find(name)
            if self._is_superseded(operation, service) or service is None:
                return
            await self._open_ports(service)
            revision = self._context.store.get(service.latest_created_revision)
            failure = await self._try_revision(service, revision)
            if self._is_superseded(operation, self._context.store.find(name)):
                return
            if failure is None:
                self._succeed(operation, revision)
            else:
                self._fail(operation, revision, failure)
            await self._retire(name)

    async def _try_revision(self, service: Any, revision: Any) -> Unready | None:
        """Start one instance to see whether the revision works; None if it does."""
        if service.latest_ready_revision == revision.name:
            return None
        try:
            self._context.workloads.check(revision.name, revision.containers[0])
            await self._pool(service, revision).ready()
        except Unready as error:
            return error
        except OSError as error:
            return Unready("INTERNAL", str(error), reason="INTERNAL")
        return None

    async def _abandon(self, name: str) -> None:
        """Stop trying revisions that nobody wants any more, so that a newer state need not wait for them."""
        service, now = self._context.store.find(name), self._context.now()
        wanted = service.latest_created_revision if service is not None and not service.delete_time else ""
        for revision in self._context.store.children("revisions", name):
            if revision.reconciling and revision.name != wanted:
                text = "The service was changed before the revision was ready."
                self._settle_revision(revision, condition("Ready", "FAILED", now, text, revision_reason="RETIRED"))
                if (pool := self._pools.pop(revision.name, None)) is not None:
                    await pool.close()

    def _is_superseded(self, operation: sqlite3.Row, service: Any | None) -> bool:
        if service is not None and not service.delete_time and service.generation == operation["generation"]:
            return False
        text = f"Service {short(operation['target'])!r} was changed or deleted meanwhile."
        gone = service or run_v2.Service(name=operation["target"])
        self._context.operations.fail(operation["name"], "ABORTED", text, gone)
        return True

    def _succeed(self, operation: sqlite3.Row, revision: Any) -> None:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            self._settle_revision(revision, condition("Ready", "SUCCEEDED", now))
            service = store.get(operation["target"])
            service.latest_ready_revision = revision.name
            service.observed_generation = service.generation
            service.uri = self._uri(service.name, "")
            service.urls = [service.uri]
            service.traffic_statuses = [self._traffic_status(service, target) for target in service.traffic]
            self._settle_service(service, condition("Ready", "SUCCEEDED", now))
            self._context.operations.finish(operation["name"], service)

    def _fail(self, operation: sqlite3.Row, revision: Any, error: Unready) -> None:
        store, now = self._context.store, self._context.now()
        with store.db.transaction():
            self._settle_revision(revision, condition("Ready", "FAILED", now, error.message, **error.reasons))
            service = store.get(operation["target"])
            text = f"Revision {short(revision.name)!r} is not ready and cannot serve traffic. {error.message}"
            self._settle_service(service, condition("Ready", "FAILED", now, text, reason="REVISION_FAILED"))
            self._context.operations.fail(operation["name"], error.status, text, service)

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
            uri=self._uri(service.name, target.tag) if target.tag else "",
        )

    async def _delete(self, operation: sqlite3.Row) -> None:
        """Close the ports, end the instances, forget the service."""
        await self._context.settle()
        store, name = self._context.store, operation["target"]
        await self._abandon(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            service = store.find(name)
            for key in [key for key in self._listeners if key[0] == name]:
                await self._listeners.pop(key).stop()
            for revision in store.children("revisions", name):
                await self._pool(service, revision).close()
                self._pools.pop(revision.name, None)
            with store.db.transaction() as connection:
                store.delete(name)
                connection.execute("DELETE FROM cloudrun_ports WHERE service = ?", [name])
                self._context.operations.finish(operation["name"], service or run_v2.Service(name=name))

    async def _retire(self, name: str) -> None:
        """End the instances of revisions that get no traffic any more, once their requests are answered."""
        service = self._context.store.get(name)
        for revision_name, pool in list(self._pools.items()):
            if parent_of(revision_name) == name and revision_name not in self._wanted(service):
                del self._pools[revision_name]
                self._context.background.spawn(pool.close(seconds(pool.revision.timeout)))

    def _wanted(self, service: Any) -> set[str]:
        """Revisions that a request may be routed to."""
        return {
            f"{service.name}/revisions/{target.revision}" if target.revision else service.latest_ready_revision
            for target in service.traffic
            if target.percent or target.tag
        }

    def _pool(self, service: Any, revision: Any) -> Pool:
        if revision.name not in self._pools:
            least = max(service.scaling.min_instance_count, revision.scaling.min_instance_count)
            self._pools[revision.name] = Pool(self._context, self._session, revision, keep=least > 0)
        return self._pools[revision.name]

    def _route(self, name: str, tag: str) -> Pool | None:
        """The pool that answers a request: by tag, or by the traffic's percents."""
        service = self._context.store.find(name)
        if service is None or service.delete_time:
            return None
        targets = [target for target in service.traffic if (target.tag == tag if tag else target.percent)]
        if not targets:
            return None
        target = targets[0] if tag else random.choices(targets, [one.percent for one in targets])[0]
        wanted = f"{name}/revisions/{target.revision}" if target.revision else service.latest_ready_revision
        revision = self._context.store.find(wanted) if wanted else None
        return self._pool(service, revision) if revision is not None else None

    def _is_allowed(self, name: str, headers: Mapping[str, str]) -> bool:
        service = self._context.store.find(name)
        return service is not None and (service.invoker_iam_disabled or self._authorize(headers))

    async def _open_ports(self, service: Any) -> None:
        """One port for the service and one for every tag; ports of tags that are gone are closed."""
        tags = {"", *(target.tag for target in service.traffic if target.tag)}
        connection = self._context.store.db.connection
        for key in [key for key in self._listeners if key[0] == service.name and key[1] not in tags]:
            await self._listeners.pop(key).stop()
            connection.execute("DELETE FROM cloudrun_ports WHERE service = ? AND tag = ?", key)
        for tag in sorted(tags):
            if (service.name, tag) not in self._listeners:
                taken = {row["port"] for row in connection.execute("SELECT port FROM cloudrun_ports")}
                port = free_port(self._context.config.service_ports, taken | self._context.workloads.ports())
                await self._listen(service.name, tag, port)
                connection.execute("INSERT INTO cloudrun_ports VALUES (?, ?, ?)", [service.name, tag, port])

    async def _listen(self, name: str, tag: str, port: int) -> None:
        listener = Listener(
            port, self._session, lambda: self._route(name, tag), lambda headers: self._is_allowed(name, headers)
        )
        try:
            await listener.start()
        except OSError as error:
            await listener.stop()
            raise OSError(f"service {name!r} was promised port {port}, which is taken now: end what uses it") from error
        self._listeners[name, tag] = listener

    def _uri(self, name: str, tag: str) -> str:
        return f"http://{HOST}:{self._listeners[name, tag].port}"


def _merge(current: Any, given: Any, mask: str) -> Any:
    """The desired state after an update; everything but the masked fields stays."""
    if not mask or mask == "*":
        return given
    # In JSON a mask is in lowerCamelCase; the API takes the fields' own names too.
    snake_case = re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", mask)
    paths = field_mask_pb2.FieldMask(paths=snake_case.split(","))
    if not paths.IsValidForDescriptor(run_v2.Service.pb(current).DESCRIPTOR):
        raise ApiError("INVALID_ARGUMENT", f"update_mask {mask!r} names a field that a Service does not have")
    merged = run_v2.Service(current)
    paths.MergeMessage(
        run_v2.Service.pb(given), run_v2.Service.pb(merged), replace_message_field=True, replace_repeated_field=True
    )
    return merged


def _set_defaults(service: Any) -> None:
    template = service.template
    if not has(template, "timeout"):
        template.timeout = duration(DEFAULT_TIMEOUT_SECONDS)
    if not template.execution_environment:
        template.execution_environment = run_v2.ExecutionEnvironment.EXECUTION_ENVIRONMENT_GEN2
    for container in template.containers:
        set_default_limits(container)
        for kind in ("startup_probe", "liveness_probe"):
            if has(container, kind):
                _set_probe_defaults(getattr(container, kind))
    if not template.max_instance_request_concurrency:
        whole_cpu = all(rules.parse_cpu(one.resources.limits["cpu"]) >= 1 for one in template.containers)
        template.max_instance_request_concurrency = DEFAULT_CONCURRENCY if whole_cpu else 1
    if not service.traffic:
        service.traffic = [run_v2.TrafficTarget(type_=LATEST, percent=100)]
    service.ingress = service.ingress or run_v2.IngressTraffic.INGRESS_TRAFFIC_ALL
    service.launch_stage = service.launch_stage or GENERALLY_AVAILABLE


def _set_probe_defaults(probe: Any) -> None:
    probe.timeout_seconds = probe.timeout_seconds or 1
    probe.period_seconds = probe.period_seconds or DEFAULT_PERIOD_SECONDS
    probe.failure_threshold = probe.failure_threshold or DEFAULT_FAILURE_THRESHOLD
