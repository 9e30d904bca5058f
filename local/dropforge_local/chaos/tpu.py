"""Cloud TPU behind the client of tpu_v2: queued resources, nodes and their machines.

States: https://cloud.google.com/tpu/docs/queued-resources. The history records when each
resource begins and ceases to exist, whoever created it. A node is paid for from READY until it is lost or deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from google.api_core.exceptions import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted
from google.cloud import tpu_v2

from .disks import Disks
from .events import Events
from .machines import Machine
from .storage import Storage
from .trainer import Container
from .world import World

QUEUED = "tpu.googleapis.com/QueuedResource"
NODE = "tpu.googleapis.com/Node"
LOOK_SECONDS = 60.0  # between two looks for capacity
DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED = 4, 5, 6, 8  # google.rpc.Code
OPERATIONS_PER_PAGE = 2
PORT = 8000


@dataclass
class Node:
    """A node. `queued` is the name of the queued resource that holds it; "" if the node was created directly."""

    name: str
    wanted: Any  # tpu_v2.Node
    created: float
    queued: str
    state: str = "CREATING"
    address: str = ""
    ended: bool = False
    machine: Machine | None = None

    @cached_property
    def labels(self) -> dict[str, str]:
        return dict(self.wanted.labels)


@dataclass
class Queued:
    """A queued resource. `error` is a code and a message after a failure."""

    name: str
    wanted: Any  # tpu_v2.QueuedResource
    created: float
    state: str = "CREATING"
    error: tuple[int, str] = (0, "")

    @cached_property
    def node(self) -> str:
        spec = self.wanted.tpu.node_spec[0]
        return f"{spec.parent}/nodes/{spec.node_id}"

    @cached_property
    def labels(self) -> dict[str, str]:
        return dict(self.wanted.tpu.node_spec[0].node.labels)


class Tpu:
    """The service and its client. `launched` is called for each training container that starts."""

    def __init__(self, world: World, disks: Disks, storage: Storage, events: Events) -> None:
        self.world = world
        self.disks = disks
        self.storage = storage
        self.events = events
        self.queued: dict[str, Queued] = {}
        self.nodes: dict[str, Node] = {}
        self.launched: Callable[[Container], None] = lambda _: None
        self.is_full = self._zone_is_full  # whether there is no capacity for a resource, by its name
        self._operations: list[Any] = []
        self._requests: set[str] = set()

    def clients(self) -> dict[str, Callable[..., Any]]:
        return {"tpu": lambda: self}

    def living(self) -> list[str]:
        return sorted([*self.queued, *self.nodes])

    def answers(self, url: str) -> bool:
        """Whether the server at a URL would answer."""
        nodes = (node for node in self.nodes.values() if f"http://{node.address}:{PORT}" == url)
        return any(node.machine is not None and node.machine.serves for node in nodes)

    def lose(self, name: str, state: str = "") -> None:
        """Google preempts the machine of a node with notice, loses it, or a user stops it: its node may stay."""
        self._lose(self.nodes[name], state)

    def delete_by_hand(self, name: str) -> None:
        """A user deletes a node in the console."""
        self._end_node(self.nodes[name])

    # Queued resources

    def create_queued_resource(self, request: Any, timeout: float) -> Any:
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        return self.world.effect(
            f"tpu.create_queued {request.queued_resource_id}", lambda: self._queue(name, request), changes=True
        )

    def get_queued_resource(self, name: str, timeout: float) -> Any:
        return self.world.effect("tpu.get_queued", lambda: _shown_queued(_find(self.queued, name)))

    def list_queued_resources(self, request: Any, timeout: float) -> Any:
        def read() -> Any:
            resources = [_shown_queued(self.queued[name]) for name in sorted(self.queued)]
            return SimpleNamespace(pages=[SimpleNamespace(queued_resources=resources, unreachable=[])])

        return self.world.effect("tpu.list_queued", read)

    def delete_queued_resource(self, request: Any, timeout: float) -> None:
        self.world.effect("tpu.delete_queued", lambda: self._delete_queued(request.name), changes=True)

    def _queue(self, name: str, request: Any) -> None:
        world = self.world
        if request.request_id in self._requests:
            return  # the operation that it has started
        if name in self.queued:
            raise AlreadyExists(f"Resource '{name}' already exists")
        if world.happens(world.faults.quota * 0.5):
            raise ResourceExhausted(_QUOTA)
        self._requests.add(request.request_id)
        made = self.queued[name] = Queued(name, request.queued_resource, world.now)
        world.fact("created", type=QUEUED, name=name, labels=made.labels)
        world.after(world.random.uniform(0.5, 3), lambda: self._enter(made, "ACCEPTED"))
        world.after(world.random.uniform(3, 6), lambda: self._wait_for_capacity(made))
        self._perhaps_by_hand(self.queued, made, lambda: self._end_queued(made))

    def _enter(self, queued: Queued, state: str) -> None:
        if queued.state not in ("DELETING", "FAILED"):
            queued.state = state

    def _wait_for_capacity(self, queued: Queued) -> None:
        if self.queued.get(queued.name) is not queued or queued.state == "DELETING":
            return
        self._enter(queued, "WAITING_FOR_RESOURCES")
        world, policy = self.world, queued.wanted.queueing_policy
        left = queued.created + policy.valid_until_duration.total_seconds() - world.now
        if not self.is_full(queued.name):
            self._provision(queued)
        elif left <= 0:
            message = f"{queued.name} expired: no resources became available before its valid-until time"
            self._fail(queued, DEADLINE_EXCEEDED, message)
        else:
            world.after(min(left, LOOK_SECONDS), lambda: self._wait_for_capacity(queued))

    def _provision(self, queued: Queued) -> None:
        world, name = self.world, queued.node
        if world.happens(world.faults.stockout * 0.3):
            self._fail(queued, RESOURCE_EXHAUSTED, _stockout(name))
        elif world.happens(world.faults.quota * 0.5):
            self._fail(queued, RESOURCE_EXHAUSTED, _QUOTA)
        elif name in self.nodes:
            self._fail(queued, ALREADY_EXISTS, f"Resource '{name}' already exists")
        elif problem := self._make_node(name, queued.wanted.tpu.node_spec[0].node, queued.name):
            self._fail(queued, NOT_FOUND, problem)
        else:
            self._enter(queued, "PROVISIONING")

    def _fail(self, queued: Queued, code: int, message: str) -> None:
        self._enter(queued, "FAILED")
        queued.error = code, message

    def _delete_queued(self, name: str) -> None:
        queued = _find(self.queued, name)
        if queued.state == "DELETING":
            raise FailedPrecondition(f"{name} is being deleted")
        queued.state = "DELETING"
        self.world.deleting(name=name)
        node = self.nodes.get(queued.node)
        if node is not None and node.queued == name:
            self._begin_end(node)
        self.world.after(self._end_seconds(), lambda: self._end_queued(queued))

    def _end_queued(self, queued: Queued) -> None:
        if self.queued.get(queued.name) is not queued:
            return
        node = self.nodes.get(queued.node)
        if node is not None and node.queued == queued.name:
            self._end_node(node)
        del self.queued[queued.name]
        self.world.fact("gone", name=queued.name)

    # Nodes

    def create_node(self, request: Any, timeout: float) -> None:
        name = f"{request.parent}/nodes/{request.node_id}"
        self.world.effect(f"tpu.create_node {request.node_id}", lambda: self._take(name, request.node), changes=True)

    def get_node(self, name: str, timeout: float) -> Any:
        return self.world.effect("tpu.get_node", lambda: _shown_node(_find(self.nodes, name)))

    def list_nodes(self, request: Any, timeout: float) -> Any:
        def read() -> Any:
            nodes = [_shown_node(self.nodes[name]) for name in sorted(self.nodes)]
            return SimpleNamespace(pages=[SimpleNamespace(nodes=nodes, unreachable=[])])

        return self.world.effect("tpu.list_nodes", read)

    def delete_node(self, name: str, timeout: float) -> None:
        self.world.effect("tpu.delete_node", lambda: self._delete_node(name), changes=True)

    def list_operations(self, request: dict[str, str], timeout: float) -> Any:
        """One page of operations: the client does not page by itself."""
        first = int(request["page_token"] or 0)

        def read() -> Any:
            operations = [operation for zone, operation in self._operations if zone == request["name"]]
            after = first + OPERATIONS_PER_PAGE
            following = str(after) if after < len(operations) else ""
            return SimpleNamespace(operations=operations[first:after], next_page_token=following)

        return self.world.effect("tpu.list_operations", read)

    def _take(self, name: str, wanted: Any) -> None:
        if name in self.nodes:
            raise AlreadyExists(f"Resource '{name}' already exists")
        if self.world.happens(self.world.faults.quota):
            raise ResourceExhausted(_QUOTA)
        if problem := self._make_node(name, wanted, ""):
            raise FailedPrecondition(problem)

    def _make_node(self, name: str, wanted: Any, queued: str) -> str:
        """Create a node. Returns an error message, or "" on success."""
        world = self.world
        for disk in wanted.data_disks:
            if problem := self.disks.attach(disk.source_disk, name):
                return problem
        node = self.nodes[name] = Node(name, wanted, world.now, queued)
        world.fact("created", type=NODE, name=name, labels=dict(wanted.labels), queued=queued)
        wait = world.random.uniform(5, 40)
        if world.happens(world.faults.slow_start):
            wait = world.random.uniform(60, 1200)
        refused = not queued and self.is_full(name)
        world.after(wait, lambda: self._refuse(node) if refused else self._ready(node))
        self._perhaps_by_hand(self.nodes, node, lambda: self._end_node(node))
        return ""

    def _refuse(self, node: Node) -> None:
        """Refuse a direct creation for lack of capacity: the node is deleted and its operation says why."""
        if self.nodes.get(node.name) is node and node.state == "CREATING":
            about = SimpleNamespace(
                value=tpu_v2.OperationMetadata.serialize(tpu_v2.OperationMetadata(target=node.name))
            )
            error = SimpleNamespace(code=RESOURCE_EXHAUSTED, message=_stockout(node.name))
            zone = node.name.rsplit("/nodes/", 1)[0]
            self._operations.append((zone, SimpleNamespace(metadata=about, error=error)))
            self._end_node(node)

    def _ready(self, node: Node) -> None:
        if self.nodes.get(node.name) is not node or node.state != "CREATING":
            return
        number = self.world.id()
        node.state, node.address = "READY", f"10.0.{number // 256}.{number % 256}"
        if node.queued in self.queued:
            self._enter(self.queued[node.queued], "ACTIVE")
        self.world.fact("running", name=node.name, address=node.address)
        node.machine = Machine(self.world, self.storage, self.events, dict(node.wanted.metadata))
        self.world.after(self.world.random.uniform(5, 60), lambda: self._boot(node))

    def _boot(self, node: Node) -> None:
        assert node.machine is not None, "it was made when the node was ready"
        if not node.machine.off:
            node.machine.boot(self.launched, lambda: self._lose(node, "PREEMPTED"), lambda: self._lose(node, ""))

    def _lose(self, node: Node, state: str) -> None:
        """Google preempts a machine: the node stays as PREEMPTED, or is deleted, too."""
        if self.nodes.get(node.name) is not node or node.state != "READY":
            return
        self._stop(node)
        if not state and self.world.random.random() < 0.3:
            self._end_node(node)
        else:
            node.state = state or "TERMINATED"
            self._suspend(node)

    def _suspend(self, node: Node) -> None:
        queued = self.queued.get(node.queued)
        if queued is not None:
            self._enter(queued, "SUSPENDING")
            self.world.after(self.world.random.uniform(1, 20), lambda: self._enter(queued, "SUSPENDED"))

    def _delete_node(self, name: str) -> None:
        node = _find(self.nodes, name)
        if node.state == "DELETING":
            raise FailedPrecondition(f"{name} is being deleted")
        self._begin_end(node)
        self.world.after(self._end_seconds(), lambda: self._end_node(node))

    def _begin_end(self, node: Node) -> None:
        self._stop(node)
        node.state = "DELETING"
        self.world.deleting(name=node.name)

    def _end_node(self, node: Node) -> None:
        if self.nodes.get(node.name) is not node:
            return
        self._stop(node)
        del self.nodes[node.name]
        self.disks.detach(node.name)
        self.world.fact("gone", name=node.name)
        self._suspend(node)

    def _stop(self, node: Node) -> None:
        """End the machine and its cost."""
        if node.machine is not None and not node.ended:
            node.ended = node.machine.off = True
            node.machine.serves = False
            self.world.fact("ended", name=node.name, exit_code=None)

    # Both

    def _zone_is_full(self, name: str) -> bool:
        zone = name.split("/")[3]
        return self.world.lasts(f"no TPU VM in {zone}", self.world.faults.stockout)

    def _end_seconds(self) -> float:
        return self.world.duration(self.world.faults.slow_end, (5, 600), (1, 30))

    def _perhaps_by_hand(self, kind: dict[str, Any], made: Queued | Node, end: Callable[[], None]) -> None:
        """Maybe a user deletes the resource in the console."""
        if not self.world.happens(self.world.faults.deleted * 0.5):
            return

        def delete() -> None:
            if kind.get(made.name) is made and self.world.now < self.world.calm:
                node = self.nodes.get(made.node) if isinstance(made, Queued) else made
                for name in dict.fromkeys([made.name, *([node.name] if node else [])]):
                    self.world.fact("fault", what="deleted", resource=name)
                end()

        self.world.after(self.world.random.uniform(1, 1200), delete)


_QUOTA = "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 8 in this zone."


def _stockout(name: str) -> str:
    return f'There is no more capacity in the zone "{name.split("/")[3]}"; you can try in another zone'


def _find(kind: dict[str, Any], name: str) -> Any:
    if name not in kind:
        raise NotFound(f"Resource '{name}' was not found")
    return kind[name]


def _shown_queued(queued: Queued) -> Any:
    code, message = queued.error
    failed = SimpleNamespace(error=SimpleNamespace(code=code, message=message))
    node = SimpleNamespace(labels=dict(queued.labels))
    return SimpleNamespace(
        name=queued.name,
        state=SimpleNamespace(state=tpu_v2.QueuedResourceState.State[queued.state], failed_data=failed),
        tpu=SimpleNamespace(node_spec=[SimpleNamespace(node=node)]),
        create_time=datetime.fromtimestamp(queued.created, UTC),
    )


def _shown_node(node: Node) -> Any:
    addresses = [SimpleNamespace(ip_address=node.address)] if node.address else []
    return SimpleNamespace(
        name=node.name,
        state=tpu_v2.Node.State[node.state],
        labels=dict(node.labels),
        queued_resource=node.queued,
        health_description="",
        network_endpoints=addresses,
        create_time=datetime.fromtimestamp(node.created, UTC),
    )
