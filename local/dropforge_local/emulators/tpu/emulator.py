"""The Cloud TPU API v2: nodes, queued resources, operations, locations, accelerator types and runtime versions.

Operations and locations are services of their own over gRPC. Over REST, Cloud Run has the same paths: what tells them
apart are the operations' names and that TPUs are in zones. Updates, guest attributes, resets and slices of several
machines are not emulated.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2
from google.rpc import status_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ...containers.images import ImageStore
from ...containers.logs import last_lines
from ..compute.disks import Disks
from ..faults import Faulty, parse_faults
from ..kit import rpc
from . import pages, rules
from .config import TpuConfig
from .faults import ACTIONS, Faults
from .machines import Machines
from .nodes import Nodes, State
from .queued import QueuedResources
from .store import Operation, Store

log = logging.getLogger(__name__)

PROJECT = "projects/*"
LOCATION = "projects/*/locations/*"
ZONE = "projects/*/locations/[a-z]+-[a-z]+[0-9]+-[a-z]"
NODE = f"{LOCATION}/nodes/*"
QUEUED = f"{LOCATION}/queuedResources/*"
OPERATION = f"{ZONE}/operations/operation-*"
API_VERSION = "v2"


def _method(name: str, response: Any, *http: str) -> rpc.Method:
    request = getattr(tpu_v2, f"{name}Request").pb()
    return rpc.Method(name, request, response, http)


NODE_MESSAGE, QUEUED_MESSAGE = tpu_v2.Node.pb(), tpu_v2.QueuedResource.pb()
METHODS = (
    _method("ListNodes", tpu_v2.ListNodesResponse.pb(), f"GET /v2/{{parent={LOCATION}}}/nodes"),
    _method("GetNode", NODE_MESSAGE, f"GET /v2/{{name={NODE}}}"),
    _method("CreateNode", Operation, f"POST /v2/{{parent={LOCATION}}}/nodes node"),
    _method("DeleteNode", Operation, f"DELETE /v2/{{name={NODE}}}"),
    _method("StopNode", Operation, f"POST /v2/{{name={NODE}}}:stop *"),
    _method("StartNode", Operation, f"POST /v2/{{name={NODE}}}:start *"),
    _method(
        "ListQueuedResources",
        tpu_v2.ListQueuedResourcesResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/queuedResources",
    ),
    _method("GetQueuedResource", QUEUED_MESSAGE, f"GET /v2/{{name={QUEUED}}}"),
    _method("CreateQueuedResource", Operation, f"POST /v2/{{parent={LOCATION}}}/queuedResources queued_resource"),
    _method("DeleteQueuedResource", Operation, f"DELETE /v2/{{name={QUEUED}}}"),
    _method(
        "ListAcceleratorTypes",
        tpu_v2.ListAcceleratorTypesResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/acceleratorTypes",
    ),
    _method("GetAcceleratorType", tpu_v2.AcceleratorType.pb(), f"GET /v2/{{name={LOCATION}/acceleratorTypes/*}}"),
    _method(
        "ListRuntimeVersions",
        tpu_v2.ListRuntimeVersionsResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/runtimeVersions",
    ),
    _method("GetRuntimeVersion", tpu_v2.RuntimeVersion.pb(), f"GET /v2/{{name={LOCATION}/runtimeVersions/*}}"),
)
OPERATION_METHODS = (
    rpc.Method("GetOperation", operations_pb2.GetOperationRequest, Operation, (f"GET /v2/{{name={OPERATION}}}",)),
    rpc.Method(
        "ListOperations",
        operations_pb2.ListOperationsRequest,
        operations_pb2.ListOperationsResponse,
        (f"GET /v2/{{name={ZONE}}}/operations",),
    ),
    rpc.Method(
        "DeleteOperation",
        operations_pb2.DeleteOperationRequest,
        empty_pb2.Empty,
        (f"DELETE /v2/{{name={OPERATION}}}",),
    ),
)
LOCATION_METHODS = (
    rpc.Method(
        "ListLocations",
        locations_pb2.ListLocationsRequest,
        locations_pb2.ListLocationsResponse,
        (f"GET /v2/{{name={PROJECT}}}/locations",),
    ),
    rpc.Method("GetLocation", locations_pb2.GetLocationRequest, locations_pb2.Location, (f"GET /v2/{{name={ZONE}}}",)),
)


class TpuEmulator:
    """Cloud TPU over REST and gRPC. Satisfies server.Emulator.

    Machines find Google's APIs by `platform_env`; `token` makes the access token of a scope that their metadata server
    gives out. `disks` are Compute Engine's.
    """

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        images: ImageStore,
        directory: Path,
        disks: Disks,
        platform_env: Callable[[str], Mapping[str, str]],
        token: Callable[[str], str],
        config: TpuConfig = TpuConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._clock = clock
        self._config = config
        self._store = Store(db)
        self._faults = Faults(db)
        self._machines = Machines(
            self._store,
            clock,
            images=images,
            directory=directory,
            disks=disks,
            platform_env=platform_env,
            token=token,
            config=config,
        )
        self._nodes = Nodes(self._store, clock, self._machines, disks, self._faults, config)
        self._queued = QueuedResources(self._store, clock, self._nodes, config)
        self._tasks: set[asyncio.Task[None]] = set()
        handlers = Faulty(self, self._faults)
        self._services = (
            rpc.Service("google.cloud.tpu.v2.Tpu", METHODS, handlers),
            rpc.Service("google.longrunning.Operations", OPERATION_METHODS, handlers),
            rpc.Service("google.cloud.location.Locations", LOCATION_METHODS, handlers),
        )

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return [
            *rpc.routes(self._services),
            web.post("/_local/tpu/faults", self._set_faults),
            web.get(f"/_local/logs/{{name:{NODE.replace('*', '[^/]+')}}}", self._read_log),
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers(self._services)

    async def start(self) -> None:
        await self._machines.start()
        await self._nodes.start()
        self._queued.start()
        for row in self._store.unfinished():
            self._spawn(self._carry_out(row["name"]))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._queued.stop()
        await self._nodes.stop()
        await self._machines.stop()

    def live(self) -> list[str]:
        """Nodes and queued resources that exist, machines that run and metadata servers that are open."""
        return [*self.names_in(self._store.db), *self._machines.live()]

    @staticmethod
    def names_in(db: Database) -> list[str]:
        """Nodes and queued resources in a state file; none when it has never had one."""
        if not db.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'tpu_nodes'").fetchone():
            return []
        rows = db.connection.execute("SELECT name FROM tpu_nodes UNION SELECT name FROM tpu_queued ORDER BY name")
        return [row["name"] for row in rows]

    def list_nodes(self, request: Any) -> Any:
        found, token = self._store.page("nodes", request.parent, request)
        return tpu_v2.ListNodesResponse.pb()(nodes=found, next_page_token=token)

    def get_node(self, request: Any) -> Any:
        return self._store.get_node(request.name)

    def create_node(self, request: Any) -> Any:
        parent, node = request.parent, request.node
        _, project, _, zone = parent.split("/")
        rules.check_zone(zone, self._config)
        rules.check_id("node_id", request.node_id)
        rules.check_node(node, project, zone, self._config)
        name = f"{parent}/nodes/{request.node_id}"
        with self._store.db.transaction():
            node.ClearField("queued_resource")
            self._nodes.create(node, name)
            return self._begin("create", name)

    def delete_node(self, request: Any) -> Any:
        with self._store.db.transaction():
            self._nodes.begin_removal(request.name)
            return self._begin("delete", request.name)

    def stop_node(self, request: Any) -> Any:
        with self._store.db.transaction():
            self._nodes.begin(request.name, State.READY, State.STOPPING)
            return self._begin("stop", request.name)

    def start_node(self, request: Any) -> Any:
        with self._store.db.transaction():
            self._nodes.begin(request.name, State.STOPPED, State.STARTING)
            return self._begin("start", request.name)

    def list_queued_resources(self, request: Any) -> Any:
        found, token = self._store.page("queued", request.parent, request)
        return tpu_v2.ListQueuedResourcesResponse.pb()(queued_resources=found, next_page_token=token)

    def get_queued_resource(self, request: Any) -> Any:
        return self._store.get_queued(request.name)

    def create_queued_resource(self, request: Any) -> Any:
        parent, queued = request.parent, request.queued_resource
        rules.check_zone(parent.split("/")[3], self._config)
        rules.check_id("queued_resource_id", request.queued_resource_id)
        with self._store.db.transaction():
            if known := self._store.operation_of_request(parent, request.request_id):
                return known
            rules.check_queued(queued, parent, self._config)
            name = f"{parent}/queuedResources/{request.queued_resource_id}"
            self._queued.create(queued, name)
            return self._begin("create", name, request.request_id)

    def delete_queued_resource(self, request: Any) -> Any:
        parent = request.name.rsplit("/queuedResources/", 1)[0]
        with self._store.db.transaction():
            if known := self._store.operation_of_request(parent, request.request_id):
                return known
            self._queued.begin_removal(request.name, force=request.force)
            return self._begin("delete", request.name, request.request_id)

    def list_accelerator_types(self, request: Any) -> Any:
        slices, token = pages.page_of(self._slices(request.parent), request)
        found = [self._accelerator_type(request.parent, one) for one in slices]
        return tpu_v2.ListAcceleratorTypesResponse.pb()(accelerator_types=found, next_page_token=token)

    def get_accelerator_type(self, request: Any) -> Any:
        parent, _, kind = request.name.rpartition("/acceleratorTypes/")
        for one in self._slices(parent):
            if one.name == kind:
                return self._accelerator_type(parent, one)
        raise ApiError("NOT_FOUND", f"Resource '{request.name}' was not found")

    def list_runtime_versions(self, request: Any) -> Any:
        runtimes, token = pages.page_of(self._runtimes(request.parent), request)
        versions = [self._runtime_version(request.parent, one) for one in runtimes]
        return tpu_v2.ListRuntimeVersionsResponse.pb()(runtime_versions=versions, next_page_token=token)

    def get_runtime_version(self, request: Any) -> Any:
        parent, _, version = request.name.rpartition("/runtimeVersions/")
        if version not in self._runtimes(parent):
            raise ApiError("NOT_FOUND", f"Resource '{request.name}' was not found")
        return self._runtime_version(parent, version)

    def list_locations(self, request: Any) -> Any:
        zones, token = pages.page_of(rules.zones(self._config), request)
        found = [self._location(request.name, zone) for zone in zones]
        return locations_pb2.ListLocationsResponse(locations=found, next_page_token=token)

    def get_location(self, request: Any) -> Any:
        project, _, zone = request.name.rpartition("/locations/")
        rules.check_zone(zone, self._config)
        return self._location(project, zone)

    def get_operation(self, request: Any) -> Any:
        return self._store.get_operation(request.name)

    def list_operations(self, request: Any) -> Any:
        found, token = self._store.page("operations", request.name, request)
        return operations_pb2.ListOperationsResponse(operations=found, next_page_token=token)

    def delete_operation(self, request: Any) -> Any:
        if not self._store.get_operation(request.name).done:
            raise ApiError("FAILED_PRECONDITION", f"{request.name} is still running; it can be deleted once done")
        self._store.delete_operation(request.name)
        return empty_pb2.Empty()

    def _slices(self, parent: str) -> list[rules.Slice]:
        zone = parent.split("/")[3]
        rules.check_zone(zone, self._config)
        return list(rules.slices(self._config, zone))

    def _runtimes(self, parent: str) -> list[str]:
        zone = parent.split("/")[3]
        rules.check_zone(zone, self._config)
        return rules.runtimes(self._config, zone)

    def _accelerator_type(self, parent: str, found: rules.Slice) -> Any:
        kind = tpu_v2.AcceleratorConfig.Type[found.generation.config_type]
        config = {"type_": kind, "topology": found.topology}
        name = f"{parent}/acceleratorTypes/{found.name}"
        return tpu_v2.AcceleratorType.pb()(name=name, type_=found.name, accelerator_configs=[config])

    def _runtime_version(self, parent: str, version: str) -> Any:
        return tpu_v2.RuntimeVersion.pb()(name=f"{parent}/runtimeVersions/{version}", version=version)

    def _location(self, project: str, zone: str) -> Any:
        labels = {"cloud.googleapis.com/region": zone.rsplit("-", 1)[0]}
        return locations_pb2.Location(name=f"{project}/locations/{zone}", location_id=zone, labels=labels)

    def _begin(self, verb: str, target: str, request_id: str = "") -> Any:
        """An operation on a resource, carried out once the transaction has committed."""
        now = self._clock.now()
        name = f"{'/'.join(target.split('/')[:4])}/operations/operation-{uuid.uuid4().hex}"
        operation = Operation(name=name)
        metadata = tpu_v2.OperationMetadata.pb()(target=target, verb=verb, api_version=API_VERSION)
        metadata.create_time.FromMilliseconds(int(now * 1000))
        operation.metadata.Pack(metadata)
        self._store.add_operation(operation, verb, target, request_id, now)
        self._store.db.after_commit(lambda: self._spawn(self._carry_out(name)))
        return operation

    async def _carry_out(self, name: str) -> None:
        """What an operation stands for; every step may be done again after a restart."""
        row = self._store.operation_row(name)
        verb, target = row["verb"], row["target"]
        steps = _QUEUED_STEPS if "/queuedResources/" in target else _NODE_STEPS
        result = await steps[verb](self, target)
        operation = self._store.get_operation(name)
        metadata = tpu_v2.OperationMetadata.pb()()
        operation.metadata.Unpack(metadata)
        metadata.end_time.FromMilliseconds(int(self._clock.now() * 1000))
        operation.metadata.Pack(metadata)
        if isinstance(result, status_pb2.Status):
            operation.error.CopyFrom(result)
        else:
            operation.response.Pack(result)
        operation.done = True
        self._store.put_operation(operation)

    async def _create_node(self, name: str) -> Any:
        reason = await self._nodes.provision(name)
        return reason if reason is not None else self._store.get_node(name)

    async def _delete_node(self, name: str) -> Any:
        await self._nodes.remove(name)
        return empty_pb2.Empty()

    async def _stop_node(self, name: str) -> Any:
        await self._nodes.halt(name)
        return self._store.get_node(name)

    async def _start_node(self, name: str) -> Any:
        await self._nodes.resume(name)
        return self._store.get_node(name)

    async def _create_queued(self, name: str) -> Any:
        return await self._queued.accept(name)

    async def _delete_queued(self, name: str) -> Any:
        await self._queued.remove(name)
        return empty_pb2.Empty()

    async def _read_log(self, request: web.Request) -> web.Response:
        """What a node's machines have written to their serial ports."""
        tail = request.query.get("tail")
        if tail is not None and not tail.isdigit():
            raise ApiError("INVALID_ARGUMENT", f"tail is {tail!r}; expected a number of lines")
        text = last_lines(self._machines.output(request.match_info["name"]), int(tail) if tail else None)
        return web.Response(text=text)

    async def _set_faults(self, request: web.Request) -> web.Response:
        body = parse_faults(await request.read())
        switches = self._faults.configure(body, {rpc.snake_case(one.name) for one in METHODS})
        for action in ACTIONS:
            if part := body.get(action):
                self._nodes.spawn(action, self._nodes.find(part))
        self._queued.notify()
        return web.json_response(switches)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("an operation of Cloud TPU failed; it is tried again at the next start", exc_info=error)


Step = Callable[[TpuEmulator, str], Coroutine[Any, Any, Any]]
_NODE_STEPS: dict[str, Step] = {
    "create": TpuEmulator._create_node,
    "delete": TpuEmulator._delete_node,
    "stop": TpuEmulator._stop_node,
    "start": TpuEmulator._start_node,
}
_QUEUED_STEPS: dict[str, Step] = {
    "create": TpuEmulator._create_queued,
    "delete": TpuEmulator._delete_queued,
}
