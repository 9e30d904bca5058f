"""Cloud Run v2 over REST: the routes of Jobs, Executions, Tasks, Services, Revisions and Operations."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from google.cloud import run_v2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ...containers.images import ImageStore
from ...containers.processes import Runtime
from ..faults import parse_faults
from . import rules
from .capacity import Capacity
from .config import CloudRunConfig
from .context import Background, Context
from .executions import Executions
from .faults import Faults
from .jobs import Jobs
from .messages import parse, render
from .operations import Operations
from .services import Services
from .store import Store
from .workloads import Workloads

LOCATION = "projects/{project:[^/:]+}/locations/{location:[^/:]+}"
# TPU's API has the same operation paths on the same port; our operations are told apart by their prefix, and lists by
# the location: a region ends in a digit, a zone does not.
REGION = "projects/{project:[^/:]+}/locations/{location:[^/:]*[0-9]}"
JOB = LOCATION + "/jobs/{job:[^/:]+}"
EXECUTION = JOB + "/executions/{execution:[^/:]+}"
SERVICE = LOCATION + "/services/{service:[^/:]+}"
OPERATION = LOCATION + "/operations/{operation:run-[^/:]+}"
LOGS = "/_local/logs/{resource:projects/[^/]+/locations/[^/]+/(?:jobs|services)/.+}"
COMMON_PARAMETERS = {"$alt", "alt", "key", "prettyPrint", "quotaUser", "$prettyPrint", "$.xgafv", "access_token"}
LONGEST_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Call:
    """One request, as a method of the API sees it."""

    name: str
    parent: str
    query: Mapping[str, str]
    body: bytes

    def text(self, parameter: str) -> str:
        return self.query.get(parameter, "")

    def flag(self, parameter: str) -> bool:
        value = self.text(parameter).lower()
        if value not in ("", "true", "false"):
            raise ApiError("INVALID_ARGUMENT", f"Invalid value at {parameter!r}: {value!r} is not a boolean")
        return value == "true"

    def number(self, parameter: str) -> int:
        try:
            return int(self.text(parameter) or 0)
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", f"Invalid value at {parameter!r}: {error}") from error


Method = Callable[[Call], Any]


@dataclass(frozen=True)
class Route:
    verb: str
    path: str
    method: str
    handle: Method
    parameters: frozenset[str]


class CloudRunEmulator:
    """Cloud Run with containers as local process groups. Satisfies server.Emulator."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        images: ImageStore,
        directory: Path,
        platform_env: Callable[[str], Mapping[str, str]],
        access_secret: Callable[[str, str], bytes],
        authorize: Callable[[Mapping[str, str]], bool],
        config: CloudRunConfig = CloudRunConfig(),  # noqa: B008 - frozen
    ) -> None:
        store = Store(db)
        faults = Faults(db, config)
        self._runtime = Runtime(directory, images.search_path)
        self._context = Context(
            store=store,
            operations=Operations(db, clock),
            faults=faults,
            capacity=Capacity(faults),
            workloads=Workloads(store, clock, self._runtime, images, platform_env, access_secret, config),
            clock=clock,
            config=config,
            background=Background(),
        )
        self._executions = Executions(self._context)
        self._jobs = Jobs(self._context, self._executions)
        self._services = Services(self._context, authorize)
        self._table = [*self._job_routes(), *self._execution_routes(), *self._service_routes(), *self._other_routes()]

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        routes = [web.route(one.verb, f"/v2/{one.path}", self._handler(one)) for one in self._table]
        routes.append(web.post("/_local/cloudrun/faults", self._set_faults))
        routes.append(web.get(LOGS, self._logs))
        return routes

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        await self._runtime.start()
        await self._services.start()
        self._executions.start()
        for operation in self._context.operations.unfinished():
            self._resume(operation)

    async def stop(self) -> None:
        await self._context.background.stop()
        await self._services.stop()
        await self._runtime.stop()

    def live(self) -> list[str]:
        """Jobs, executions and services that exist, open service ports, and containers that have a process."""
        ports = [f"port/{port}" for port in self._services.ports()]
        containers = [f"container/{container}" for container in self._context.workloads.live()]
        return [*self._context.store.names(), *ports, *containers]

    def _resume(self, operation: Any) -> None:
        verb = operation["verb"]
        if operation["waits_for"]:
            return  # the execution's driver finishes it
        if verb.endswith("_job"):
            self._jobs.resume(operation)
        elif verb.endswith("_service"):
            self._services.resume(operation)
        else:
            self._executions.resume(operation)

    def _job_routes(self) -> list[Route]:
        jobs = self._jobs
        return [
            _route(
                "POST",
                LOCATION + "/jobs",
                "create_job",
                lambda call: jobs.create(
                    call.parent,
                    call.text("jobId"),
                    parse(call.body, run_v2.Job, "job"),
                    validate_only=call.flag("validateOnly"),
                ),
                "jobId validateOnly",
            ),
            _route("GET", LOCATION + "/jobs", "list_jobs", self._list("jobs"), LIST),
            _route("GET", JOB, "get_job", self._get),
            _route(
                "PATCH",
                JOB,
                "update_job",
                lambda call: jobs.update(
                    call.name,
                    parse(call.body, run_v2.Job, "job"),
                    validate_only=call.flag("validateOnly"),
                    allow_missing=call.flag("allowMissing"),
                ),
                "validateOnly allowMissing",
            ),
            _route(
                "POST",
                JOB + ":run",
                "run_job",
                lambda call: jobs.run(call.name, parse(call.body, run_v2.RunJobRequest, "request")),
            ),
            _route(
                "DELETE",
                JOB,
                "delete_job",
                lambda call: jobs.delete(call.name, call.text("etag"), validate_only=call.flag("validateOnly")),
                "etag validateOnly",
            ),
        ]

    def _execution_routes(self) -> list[Route]:
        executions = self._executions
        tasks = EXECUTION + "/tasks"
        return [
            _route("GET", JOB + "/executions", "list_executions", self._list("executions"), LIST),
            _route("GET", EXECUTION, "get_execution", self._get),
            _route("POST", EXECUTION + ":cancel", "cancel_execution", self._cancel),
            _route(
                "DELETE",
                EXECUTION,
                "delete_execution",
                lambda call: executions.delete(call.name, call.text("etag"), validate_only=call.flag("validateOnly")),
                "etag validateOnly",
            ),
            _route("GET", tasks, "list_tasks", self._list("tasks"), LIST),
            _route("GET", tasks + "/{task:[^/:]+}", "get_task", self._get),
        ]

    def _service_routes(self) -> list[Route]:
        services = self._services
        revisions = SERVICE + "/revisions"
        return [
            _route(
                "POST",
                LOCATION + "/services",
                "create_service",
                lambda call: services.create(
                    call.parent,
                    call.text("serviceId"),
                    parse(call.body, run_v2.Service, "service"),
                    validate_only=call.flag("validateOnly"),
                ),
                "serviceId validateOnly",
            ),
            _route("GET", LOCATION + "/services", "list_services", self._list("services"), LIST),
            _route("GET", SERVICE, "get_service", self._get),
            _route(
                "PATCH",
                SERVICE,
                "update_service",
                lambda call: services.update(
                    call.name,
                    parse(call.body, run_v2.Service, "service") if not call.text("updateMask") else _masked(call),
                    call.text("updateMask"),
                    validate_only=call.flag("validateOnly"),
                    allow_missing=call.flag("allowMissing"),
                ),
                "updateMask validateOnly allowMissing",
            ),
            _route(
                "DELETE",
                SERVICE,
                "delete_service",
                lambda call: services.delete(call.name, call.text("etag"), validate_only=call.flag("validateOnly")),
                "etag validateOnly",
            ),
            _route("GET", revisions, "list_revisions", self._list("revisions"), LIST),
            _route("GET", revisions + "/{revision:[^/:]+}", "get_revision", self._get),
        ]

    def _other_routes(self) -> list[Route]:
        operations = self._context.operations
        return [
            _route("GET", OPERATION, "get_operation", lambda call: operations.get(call.name)),
            _route("DELETE", OPERATION, "delete_operation", lambda call: operations.delete(call.name)),
            _route("POST", OPERATION + ":wait", "wait_operation", self._wait),
            _route(
                "GET",
                REGION + "/operations",
                "list_operations",
                lambda call: operations.page(call.parent),
                "filter pageSize pageToken returnPartialSuccess",
            ),
        ]

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            self._remember_origin(request)
            call = _call(request, await request.read())
            if unknown := set(call.query) - route.parameters - COMMON_PARAMETERS:
                raise ApiError("INVALID_ARGUMENT", f"Invalid query parameters {sorted(unknown)!r}: Cannot bind them.")
            rules.check_region(request.match_info["location"], self._context.config)
            answer = await self._context.faults.call(route.method, lambda: route.handle(call))
            return web.json_response(answer)

        return handle

    def _get(self, call: Call) -> dict[str, Any]:
        return render(self._context.store.get(call.name))

    def _list(self, kind: str) -> Method:
        def handle(call: Call) -> dict[str, Any]:
            if call.flag("showDeleted"):
                raise ApiError("UNIMPLEMENTED", "show_deleted is not emulated: what is deleted here is gone")
            resources, token = self._context.store.page(
                kind, call.parent, call.number("pageSize"), call.text("pageToken")
            )
            page: dict[str, Any] = {kind: [render(one) for one in resources]} if resources else {}
            return {**page, "nextPageToken": token} if token else page

        return handle

    def _cancel(self, call: Call) -> dict[str, Any]:
        request = parse(call.body, run_v2.CancelExecutionRequest, "request")
        return self._executions.cancel(call.name, request.etag, validate_only=request.validate_only)

    async def _wait(self, call: Call) -> dict[str, Any]:
        timeout = json.loads(call.body or b"{}").get("timeout", "")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)s", timeout)
        if timeout and match is None:
            raise ApiError("INVALID_ARGUMENT", f"timeout is {timeout!r}; expected seconds, as in '3.5s'")
        wanted = float(match[1]) if match else LONGEST_WAIT_SECONDS
        return await self._context.operations.wait(call.name, min(wanted, LONGEST_WAIT_SECONDS))

    async def _set_faults(self, request: web.Request) -> web.Response:
        body = parse_faults(await request.read())
        switches = self._context.faults.configure(body, {one.method for one in self._table})
        for action in ("preempt", "out_of_memory"):
            if action in body:
                self._executions.terminate(body[action], action)
        self._context.capacity.notify()
        return web.json_response(switches)

    async def _logs(self, request: web.Request) -> web.Response:
        tail = request.query.get("tail")
        if tail is not None and not tail.isdigit():
            raise ApiError("INVALID_ARGUMENT", f"tail is {tail!r}; expected a number of lines")
        resource = request.match_info["resource"]
        return web.Response(text=self._context.workloads.output(resource, int(tail) if tail else None))

    def _remember_origin(self, request: web.Request) -> None:
        """Where this server is, for log URIs; known from the first request on, and after a restart from the last."""
        origin = f"{request.scheme}://{request.host}"
        if self._context.store.setting("origin", "") != origin:
            self._context.store.set_setting("origin", origin)


LIST = "pageSize pageToken showDeleted"


def _route(verb: str, path: str, method: str, handle: Method, parameters: str = "") -> Route:
    return Route(verb, path, method, handle, frozenset(parameters.split()))


def _call(request: web.Request, body: bytes) -> Call:
    name = request.path.removeprefix("/v2/").partition(":")[0]
    return Call(name=name, parent=name.rsplit("/", 1)[0], query=dict(request.query), body=body)


def _masked(call: Call) -> Any:
    """A body under an update mask may leave out what is required otherwise."""
    return parse(call.body, run_v2.Service, "service", partial=True)
