"""Kubernetes clusters on loopback ports, and the switches for their faults."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.base.ports import HOST, free_port, is_listening

from ...containers.processes import Runtime
from ..cloudrun.counts import Counts
from ..compute.disks import Disks
from ..kit.background import stop_all
from ..kit.emulator import PassiveEmulator
from ..kit.host import Host
from ..kit.logs import log_route
from ..kit.routing import Call, Route, mount
from .certificates import Certificates, make_certificates
from .cluster import OWN_OBJECTS, Cluster, ensure_objects
from .config import KubernetesConfig
from .faults import Faults
from .kinds import (
    BACKEND_POLICY,
    CLAIM,
    DEPLOYMENT,
    HEALTH_POLICY,
    HPA,
    HTTP_ROUTE,
    JOB,
    POD,
    POD_MONITORING,
    RAY_CLUSTER,
    RAY_JOB,
    REPLICA_SET,
    SERVICE,
    VOLUME,
)
from .kubelet.logs import read_workload_log
from .kubelet.runner import Runner
from .ports import Ports
from .shared import Note, Shared
from .store import SCHEMA, Object

# Objects that count as leftovers: workloads and the objects through which clients reach them.
COUNTED = (
    JOB,
    DEPLOYMENT,
    REPLICA_SET,
    POD,
    SERVICE,
    HPA,
    POD_MONITORING,
    RAY_JOB,
    RAY_CLUSTER,
    CLAIM,
    HTTP_ROUTE,
    BACKEND_POLICY,
    HEALTH_POLICY,
)


class KubernetesEmulator(PassiveEmulator):
    """The Kubernetes API of every cluster, each on a separate port. Satisfies server.Emulator."""

    def __init__(
        self,
        host: Host,
        *,
        authorize: Callable[[Mapping[str, str]], bool],
        note: Note = lambda headers, cluster, verb, resource: None,
        enter: Callable[[Mapping[str, str]], None] = lambda headers: None,
        standing: Collection[str] = (),
        config: KubernetesConfig = KubernetesConfig(),  # noqa: B008 - frozen
        disks: Disks | None = None,
    ) -> None:
        """`disks` holds the disks of claims; without it only the clusters see them."""
        self._db = host.db
        self._db.connection.executescript(SCHEMA)
        self._runtime = Runtime(host.directory, host.images.search_path)
        self._disks = disks or Disks(host.db, host.directory / ".disks")
        runner = Runner(host, self._runtime, config.kept_logs, self._disks)
        self.balanced = Counts()
        self._shared = Shared(
            host, config, Faults(host.db), runner, Ports(host.db), authorize, note, enter, standing, self.balanced
        )
        self._clusters: dict[str, Cluster] = {}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        clusters = Route("GET", "/_local/kubernetes/clusters", self._list_clusters)
        faults = self._shared.faults.route("kubernetes", self._act)
        return mount([faults, clusters, log_route("projects/*/locations/*/clusters/*/k8s/**", self._output)])

    async def start(self) -> None:
        await self._runtime.start()
        for row in self._db.rows("SELECT name, port FROM kubernetes_clusters"):
            self._leave_taken_port(row["name"], row["port"])
            await self.open_cluster(row["name"])

    async def stop(self) -> None:
        clusters = [cluster.stop for cluster in self._clusters.values()]
        self._clusters.clear()
        await stop_all(*clusters, self._runtime.stop)

    def add_cluster(self, name: str) -> int:
        """Create a cluster unless it exists; return its API's port, which never changes. `open_cluster` serves it."""
        with self._db.transaction() as connection:
            if (port := self.port_of(name)) is None:
                taken = {row["port"] for row in connection.execute("SELECT port FROM kubernetes_clusters")}
                port = free_port(self._shared.config.api_ports, taken)
                made = make_certificates(name)
                connection.execute(
                    "INSERT INTO kubernetes_clusters (name, port, authority, server) VALUES (?, ?, ?, ?)",
                    [name, port, made.authority, made.server],
                )
                ensure_objects(self._make(name).objects, OWN_OBJECTS)
            return port

    def ensure_objects(self, name: str, manifests: Iterable[Object]) -> None:
        """Create the missing objects of `manifests` in a cluster that is not served yet."""
        with self._db.transaction():
            ensure_objects(self._make(name).objects, manifests)

    async def open_cluster(self, name: str) -> None:
        """Serve an added cluster, unless it is served already. Raises OSError if its port is taken."""
        if name in self._clusters:
            return
        cluster = self._make(name)
        await cluster.start()
        self._clusters[name] = cluster

    async def remove_cluster(self, name: str) -> None:
        """End everything that runs in a cluster and delete it; do nothing if it does not exist."""
        if cluster := self._clusters.pop(name, None):
            await cluster.stop()
        runner = self._shared.runner
        for container_id, owner, _ in runner.unended():
            if owner == name and (container := self._runtime.adopt(container_id)):
                await container.terminate(0)
                runner.ended(container)
        with self._db.transaction() as connection:
            if self.port_of(name) is None:
                return
            store = self._make(name).store
            for pod in store.items(POD):
                runner.unmount(pod)
            for volume in store.items(VOLUME):  # GKE deletes the machines, and leaves the disks
                self._disks.release(volume["spec"]["csi"]["volumeHandle"])
            self._shared.ports.release_cluster(name)
            connection.execute("UPDATE kubernetes_containers SET ended = 1 WHERE cluster = ?", [name])
            connection.execute("DELETE FROM kubernetes_clusters WHERE name = ?", [name])

    def authority_of(self, name: str) -> str:
        """The certificate (PEM) with which clients verify the cluster's API."""
        return str(self._row(name)["authority"])

    def port_of(self, name: str) -> int | None:
        row = self._db.row("SELECT port FROM kubernetes_clusters WHERE name = ?", [name])
        return int(row["port"]) if row else None

    def live(self) -> list[str]:
        """The names of existing workloads, open ports, and containers with a process."""
        ports = [f"port/{cluster.port}" for cluster in self._clusters.values()]
        for cluster in self._clusters.values():
            ports += [f"port/{port}" for port in cluster.services.listening()]
        containers = [f"container/{container}" for container in self._runtime.live()]
        return [*self.names_in(self._db), *ports, *containers]

    @staticmethod
    def names_in(db: Database) -> list[str]:
        """Workloads in a state file: CLUSTER/KIND/NAMESPACE/NAME. Empty if it never had a cluster."""
        if not _has_table(db, "kubernetes_objects"):
            return []
        marks = ", ".join("?" for _ in COUNTED)
        rows = db.rows(
            f"SELECT cluster, kind, namespace, name FROM kubernetes_objects WHERE kind IN ({marks})"
            " ORDER BY cluster, kind, namespace, name",
            [kind.key for kind in COUNTED],
        )
        return ["/".join(row) for row in rows]

    @staticmethod
    def ports_in(db: Database) -> list[int]:
        """Ports that clusters, services and pods in a state file listen on while a stack runs."""
        if not _has_table(db, "kubernetes_ports"):
            return []
        rows = db.rows("SELECT port FROM kubernetes_clusters UNION ALL SELECT local FROM kubernetes_ports")
        return [int(row["port"]) for row in rows]

    def _list_clusters(self, call: Call) -> dict[str, str]:
        return {name: f"https://{HOST}:{cluster.port}" for name, cluster in self._clusters.items()}

    def _output(self, name: str) -> str:
        """The output of a job, deployment or pod, by its name in Cloud Asset Inventory."""
        cluster, _, workload = name.partition("/k8s/")
        text = read_workload_log(self._db, self._runtime.directory, cluster, workload)
        if text is None:
            raise ApiError("NOT_FOUND", f"no container of {workload!r} has run in {cluster!r}")
        return text

    def _act(self, body: Mapping[str, Any]) -> None:
        """Begin the faults that happen at once; retry the pods that wait for capacity."""
        if preempted := body.get("preempt"):
            self._cluster(preempted.get("cluster", "")).preempt(preempted)
        if evicted := body.get("evict"):
            self._cluster(evicted.get("cluster", "")).evict(evicted.get("pod", ""))
        for cluster in self._clusters.values():
            cluster.retry_pending_pods()

    def _leave_taken_port(self, name: str, port: int) -> None:
        """Move a cluster's API to another port if another process took its port while no stack ran."""
        if not is_listening(port):
            return
        with self._db.transaction() as connection:
            taken = {row["port"] for row in connection.execute("SELECT port FROM kubernetes_clusters")}
            moved = free_port(self._shared.config.api_ports, taken)
            connection.execute("UPDATE kubernetes_clusters SET port = ? WHERE name = ?", [moved, name])

    def _make(self, name: str) -> Cluster:
        row = self._row(name)
        return Cluster(self._shared, name, row["port"], Certificates(row["authority"], row["server"]))

    def _row(self, name: str) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM kubernetes_clusters WHERE name = ?", [name])
        if row is None:
            raise LookupError(f"there is no cluster {name!r}; add_cluster makes one")
        return row

    def _cluster(self, part: str) -> Cluster:
        """The only cluster whose name contains `part`. Raises ApiError unless exactly one matches."""
        matches = [cluster for name, cluster in self._clusters.items() if part in name]
        if len(matches) != 1:
            raise ApiError("NOT_FOUND", f"{len(matches)} clusters are called {part!r}; expected one")
        return matches[0]


def _has_table(db: Database, name: str) -> bool:
    return db.row("SELECT 1 FROM sqlite_master WHERE name = ?", [name]) is not None
