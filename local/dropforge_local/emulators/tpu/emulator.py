"""The Cloud TPU API v2: nodes, queued resources, operations, locations, accelerator types and runtime versions.

Not emulated: updates, guest attributes, resets, and slices of several machines.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.cloud import tpu_v2
from google.cloud.location import locations_pb2

from dropforge_local.base.errors import ApiError

from ..compute.disks import Disks
from ..kit import rpc
from ..kit.access import Guarded
from ..kit.background import stop_all
from ..kit.emulator import RpcEmulator
from ..kit.faults import Faulty, names_of
from ..kit.host import Host
from ..kit.logs import log_route
from ..kit.messages import Messages
from ..kit.names import Named
from ..kit.operations import EMPTY, Operation, OperationMethods, Operations, Step, longrunning, pack
from ..kit.paging import Paging
from ..kit.routing import Call, Handler, Route
from . import rules
from .config import TpuConfig
from .context import make_context
from .faults import ACTIONS
from .machines import Machines
from .methods import LISTS_V1, LOCATION_METHODS, METHODS, NODE, OPERATION_METHODS, VERSIONS_V1
from .nodes import Nodes, State
from .permissions import FURTHER, NEEDS
from .queued import QueuedResources

PAGES = Paging(default=100, largest=1000)  # Cloud TPU documents neither number


def operation_message(operation: Operation) -> Any:
    """https://cloud.google.com/tpu/docs/reference/rest/v2/OperationMetadata in a google.longrunning.Operation."""
    metadata = tpu_v2.OperationMetadata.pb()(
        target=operation.target, verb=operation.verb.partition("_")[0], api_version="v2"
    )
    metadata.create_time.FromMilliseconds(int(operation.created * 1000))
    if operation.ended is not None:
        metadata.end_time.FromMilliseconds(int(operation.ended * 1000))
    return longrunning(operation, pack(metadata))


class TpuEmulator(RpcEmulator, OperationMethods, Named):
    """Cloud TPU over REST and gRPC. Satisfies server.Emulator. `context.Context` explains the parameters."""

    tables = ("tpu_nodes", "tpu_queued")
    shown = staticmethod(operation_message)

    def __init__(
        self,
        host: Host,
        *,
        disks: Disks,
        token: Callable[[str, str], str],
        identity: Callable[[str, str], str] = lambda audience, account: "",
        config: TpuConfig = TpuConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._context = make_context(host, config, names_of(METHODS), disks, token, identity)
        self._config = config
        self._machines = Machines(self._context)
        self._nodes = Nodes(self._context, self._machines)
        self._queued = QueuedResources(self._context, self._nodes)
        self._operations = Operations(host.db, host.clock, "Cloud TPU", "Resource '{name}' was not found")
        self._operations.carry_out(
            {
                "create_node": self._step(self._nodes.provision, self._context.nodes),
                "delete_node": self._step(self._nodes.remove),
                "stop_node": self._step(self._nodes.halt, self._context.nodes),
                "start_node": self._step(self._nodes.resume, self._context.nodes),
                "create_queued": self._step(self._queued.accept, self._context.queued),
                "delete_queued": self._step(self._queued.remove),
            }
        )
        handlers = Guarded(Faulty(self, self._context.faults), NEEDS, FURTHER)
        self._lists_v1 = rpc.Service("google.cloud.tpu.v1.Tpu", LISTS_V1, handlers)
        self._versions_v1 = rpc.Service("google.cloud.tpu.v1.Tpu", VERSIONS_V1, handlers)
        self._services = (
            rpc.Service("google.cloud.tpu.v2.Tpu", METHODS, handlers),
            rpc.Service("google.longrunning.Operations", OPERATION_METHODS, handlers, shared=True),
            rpc.Service("google.cloud.location.Locations", LOCATION_METHODS, handlers),
        )

    def own_routes(self) -> Sequence[Route]:
        v1 = rpc.rest_routes([self._lists_v1])
        versions = [
            replace(route, handler=_tensorflow(route.handler)) for route in rpc.rest_routes([self._versions_v1])
        ]
        return [
            self._context.faults.route("tpu", self._act), log_route(NODE, self._machines.output), *v1, *versions
        ]  # fmt: skip

    async def start(self) -> None:
        await self._machines.start()
        await self._nodes.start()
        self._queued.start()
        self._operations.start()

    async def stop(self) -> None:
        """Stop the emulator; the machines continue to run."""
        await stop_all(self._operations.stop, self._context.background.stop, self._machines.stop)

    def live(self) -> list[str]:
        """Nodes and queued resources that exist, machines that run and metadata servers that are open."""
        return [*self.names_in(self._context.db), *self._machines.live()]

    def list_nodes(self, request: Any) -> Any:
        nodes, token = self._context.nodes.page(request)
        return tpu_v2.ListNodesResponse.pb()(nodes=nodes, next_page_token=token)

    def get_node(self, request: Any) -> Any:
        return self._context.nodes.get(request.name)

    def create_node(self, request: Any) -> Any:
        parent, node = request.parent, request.node
        _, project, _, zone = parent.split("/")
        rules.check_zone(zone, self._config)
        rules.check_id("node_id", request.node_id)
        rules.check_node(node, project, zone, self._config)
        name = f"{parent}/nodes/{request.node_id}"
        with self._context.db.transaction():
            node.ClearField("queued_resource")
            self._nodes.create(node, name)
            return self._begin("create_node", name)

    def delete_node(self, request: Any) -> Any:
        with self._context.db.transaction():
            self._nodes.begin_removal(request.name)
            return self._begin("delete_node", request.name)

    def stop_node(self, request: Any) -> Any:
        with self._context.db.transaction():
            self._nodes.begin(request.name, State.READY, State.STOPPING)
            return self._begin("stop_node", request.name)

    def start_node(self, request: Any) -> Any:
        with self._context.db.transaction():
            self._nodes.begin(request.name, State.STOPPED, State.STARTING)
            return self._begin("start_node", request.name)

    def list_queued_resources(self, request: Any) -> Any:
        queued, token = self._context.queued.page(request)
        return tpu_v2.ListQueuedResourcesResponse.pb()(queued_resources=queued, next_page_token=token)

    def get_queued_resource(self, request: Any) -> Any:
        return self._context.queued.get(request.name)

    def create_queued_resource(self, request: Any) -> Any:
        parent, queued = request.parent, request.queued_resource
        rules.check_zone(parent.split("/")[3], self._config)
        rules.check_id("queued_resource_id", request.queued_resource_id)
        with self._context.db.transaction():
            if known := self._operations.of_request(parent, request.request_id):
                return operation_message(known)
            rules.check_queued(queued, parent, self._config)
            name = f"{parent}/queuedResources/{request.queued_resource_id}"
            self._queued.create(queued, name)
            return self._begin("create_queued", name, request.request_id)

    def delete_queued_resource(self, request: Any) -> Any:
        parent = request.name.rsplit("/queuedResources/", 1)[0]
        with self._context.db.transaction():
            if known := self._operations.of_request(parent, request.request_id):
                return operation_message(known)
            self._queued.begin_removal(request.name, force=request.force)
            return self._begin("delete_queued", request.name, request.request_id)

    def list_accelerator_types(self, request: Any) -> Any:
        slices, token = PAGES.page(self._slices(request.parent), request.page_size, request.page_token)
        types = [_accelerator_type(request.parent, part) for part in slices]
        return tpu_v2.ListAcceleratorTypesResponse.pb()(accelerator_types=types, next_page_token=token)

    def get_accelerator_type(self, request: Any) -> Any:
        parent, _, kind = request.name.rpartition("/acceleratorTypes/")
        for part in self._slices(parent):
            if part.name == kind:
                return _accelerator_type(parent, part)
        raise ApiError("NOT_FOUND", f"Resource '{request.name}' was not found")

    def list_runtime_versions(self, request: Any) -> Any:
        runtimes, token = PAGES.page(self._runtimes(request.parent), request.page_size, request.page_token)
        versions = [_runtime_version(request.parent, runtime) for runtime in runtimes]
        return tpu_v2.ListRuntimeVersionsResponse.pb()(runtime_versions=versions, next_page_token=token)

    def get_runtime_version(self, request: Any) -> Any:
        parent, _, version = request.name.rpartition("/runtimeVersions/")
        if version not in self._runtimes(parent):
            raise ApiError("NOT_FOUND", f"Resource '{request.name}' was not found")
        return _runtime_version(parent, version)

    def list_locations(self, request: Any) -> Any:
        zones, token = PAGES.page(rules.zones(self._config), request.page_size, request.page_token)
        locations = [_location(request.name, zone) for zone in zones]
        return locations_pb2.ListLocationsResponse(locations=locations, next_page_token=token)

    def get_location(self, request: Any) -> Any:
        project, _, zone = request.name.rpartition("/locations/")
        rules.check_zone(zone, self._config)
        return _location(project, zone)

    def _slices(self, parent: str) -> list[rules.Slice]:
        zone = parent.split("/")[3]
        rules.check_zone(zone, self._config)
        return list(rules.slices(self._config, zone))

    def _runtimes(self, parent: str) -> list[str]:
        zone = parent.split("/")[3]
        rules.check_zone(zone, self._config)
        return rules.runtimes(self._config, zone)

    def _begin(self, verb: str, target: str, request_id: str = "") -> Any:
        """Begin an operation on a resource; its step starts after the caller's transaction."""
        operation_id = f"operation-{uuid.uuid4().hex}"
        return operation_message(self._operations.begin(operation_id, verb, target, request=request_id))

    def _step(self, work: Callable[[str], Awaitable[None]], shown: Messages | None = None) -> Step:
        """The step of an operation that does `work` on its target; its response is the target's message in `shown`."""

        async def step(operation: Operation) -> None:
            await work(operation.target)
            self._operations.finish(operation, EMPTY if shown is None else pack(shown.get(operation.target)))

        return step

    def _act(self, body: Mapping[str, Any]) -> None:
        """Begin the faults that happen at once."""
        for action in ACTIONS:
            if part := body.get(action):
                self._nodes.act(action, self._nodes.find(part))
        self._queued.switches.notify()


def _tensorflow(handler: Handler) -> Handler:
    """The list of runtime versions as version 1 of the API names it."""

    async def serve(call: Call) -> dict[str, Any]:
        body: dict[str, Any] = await handler(call)
        for version in (versions := body.pop("runtimeVersions", [])):
            version["name"] = version["name"].replace("/runtimeVersions/", "/tensorflowVersions/")
        return {**body, "tensorflowVersions": versions}

    return serve


def _accelerator_type(parent: str, part: rules.Slice) -> Any:
    kind = tpu_v2.AcceleratorConfig.Type[part.generation.config_type]
    config = {"type_": kind, "topology": part.topology}
    name = f"{parent}/acceleratorTypes/{part.name}"
    return tpu_v2.AcceleratorType.pb()(name=name, type_=part.name, accelerator_configs=[config])


def _runtime_version(parent: str, version: str) -> Any:
    return tpu_v2.RuntimeVersion.pb()(name=f"{parent}/runtimeVersions/{version}", version=version)


def _location(project: str, zone: str) -> Any:
    labels = {"cloud.googleapis.com/region": zone.rsplit("-", 1)[0]}
    return locations_pb2.Location(name=f"{project}/locations/{zone}", location_id=zone, labels=labels)
