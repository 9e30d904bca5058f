"""Cloud Run v2 over REST and gRPC: Jobs, Executions, Tasks, Services, Revisions and Operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from aiohttp import web
from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from ...containers.processes import Runtime
from ..kit import rpc
from ..kit.access import Guarded
from ..kit.background import Background, stop_all
from ..kit.emulator import PassiveEmulator
from ..kit.faults import Faulty, names_of
from ..kit.host import Host
from ..kit.logs import log_route
from ..kit.operations import OperationMethods, Operations
from ..kit.routing import Call, Handler, Route, mount
from .admission import Admitted
from .capacity import Capacity
from .config import CloudRunConfig
from .context import Context
from .counts import Counts
from .executions import Executions
from .faults import ACTIONS, Faults
from .jobs import Jobs
from .methods import LOCATION, METHODS, OPERATION_METHODS, SERVICES
from .permissions import FURTHER, NEEDS
from .services import Services
from .store import Store
from .volumes import with_known_media
from .workloads import Unready, Workloads

LONGEST_WAIT_SECONDS = 300.0


class CloudRunEmulator(PassiveEmulator, OperationMethods):
    """Cloud Run with containers as local process groups. Satisfies server.Emulator."""

    def __init__(
        self,
        host: Host,
        *,
        access_secret: Callable[[str, str], bytes],
        authorize: Callable[[Mapping[str, str]], bool],
        config: CloudRunConfig = CloudRunConfig(),  # noqa: B008 - frozen
    ) -> None:
        store, faults = Store(host.db), Faults(host.db, config, names_of(METHODS))
        self._runtime = Runtime(host.directory, host.images.search_path)
        self._operations = Operations(host.db, host.clock, "Cloud Run")
        self._context = Context(
            store=store,
            operations=self._operations,
            faults=faults,
            capacity=Capacity(faults),
            workloads=Workloads(store, host, config, self._runtime, access_secret),
            clock=host.clock,
            config=config,
            background=Background("Cloud Run", answers=(Unready,)),
        )
        self._executions = Executions(self._context)
        self._jobs = Jobs(self._context, self._executions)
        self._services = Services(self._context, authorize)
        self._operations.carry_out({**self._jobs.steps, **self._executions.steps, **self._services.steps})
        self.create_job, self.update_job, self.run_job = self._jobs.create, self._jobs.update, self._jobs.run
        self.delete_job, self.delete_service = self._jobs.delete, self._services.delete
        self.create_service, self.update_service = self._services.create, self._services.update
        self.delete_revision = self._services.delete_revision
        self.cancel_execution, self.delete_execution = self._executions.cancel, self._executions.delete
        handlers = Admitted(Guarded(Faulty(self, faults), NEEDS, FURTHER), config)
        self._services_of_api = [
            *(rpc.Service(name, methods, handlers) for name, methods in SERVICES.items()),
            rpc.Service("google.longrunning.Operations", OPERATION_METHODS, handlers, shared=True),
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers(self._services_of_api)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        rest = rpc.rest_routes(self._services_of_api)
        api = [Route(route.verb, route.path, self._received(route.handler)) for route in rest]
        logs = [log_route(f"{LOCATION}/{kind}/**", self._context.workloads.output) for kind in ("jobs", "services")]
        return mount([*api, self._context.faults.route("cloudrun", self._act), *logs])

    async def start(self) -> None:
        await self._runtime.start()
        await self._services.start()
        self._executions.start()
        self._operations.start()

    async def stop(self) -> None:
        """Stop the emulator; the containers continue to run."""
        context = self._context
        await stop_all(self._operations.stop, context.background.stop, self._services.stop, self._runtime.stop)

    @property
    def counts(self) -> Counts:
        """The answers of the revisions of services."""
        return self._services.counts

    def live(self) -> list[str]:
        """Jobs, executions and services that exist, open service ports, and containers that have a process."""
        ports = [f"port/{port}" for port in self._services.ports()]
        containers = [f"container/{container}" for container in self._context.workloads.live()]
        return [*self._context.store.names(), *ports, *containers]

    def get_job(self, request: Any) -> Any:
        resource = self._context.store.get(request.name)
        return type(resource).pb(resource)

    get_execution = get_task = get_service = get_revision = get_job

    def list_jobs(self, request: Any) -> Any:
        return self._list("jobs", run_v2.ListJobsResponse, request)

    def list_executions(self, request: Any) -> Any:
        return self._list("executions", run_v2.ListExecutionsResponse, request)

    def list_tasks(self, request: Any) -> Any:
        return self._list("tasks", run_v2.ListTasksResponse, request)

    def list_services(self, request: Any) -> Any:
        return self._list("services", run_v2.ListServicesResponse, request)

    def list_revisions(self, request: Any) -> Any:
        return self._list("revisions", run_v2.ListRevisionsResponse, request)

    async def wait_operation(self, request: Any) -> Any:
        """The operation once it is done, or as it is after the timeout."""
        wanted = request.timeout.ToMilliseconds() / 1000 if request.HasField("timeout") else LONGEST_WAIT_SECONDS
        return self.shown(await self._operations.wait(request.name, min(wanted, LONGEST_WAIT_SECONDS)))

    def _list(self, kind: str, response: Any, request: Any) -> Any:
        if request.show_deleted:
            raise ApiError("UNIMPLEMENTED", "show_deleted is not emulated: a deleted resource leaves no record here")
        resources, token = self._context.store.page(kind, request.parent, request.page_size, request.page_token)
        return response.pb(response(**{kind: resources}, next_page_token=token))

    def _received(self, handler: Handler) -> Handler:
        """Remember this server's address for log URIs, also after a restart."""

        async def serve(call: Call) -> Any:
            if self._context.store.setting("origin", "") != call.base_url:
                self._context.store.set_setting("origin", call.base_url)
            return await handler(with_known_media(call))

        return serve

    def _act(self, body: Mapping[str, Any]) -> None:
        """Begin the faults that happen at once."""
        for action in ACTIONS:
            if action in body:
                self._executions.terminate(body[action], action)
        self._context.capacity.notify()
