"""Ports of this machine for the ports of pods and services; a restart keeps them."""

from __future__ import annotations

from dropforge_local.base.db import Database
from dropforge_local.base.ports import free_port


class Ports:
    """The owner of each local port; `owner` is a pod's uid or a service's NAMESPACE/NAME."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def take(self, cluster: str, owner: str, port: int, among: range) -> int:
        """The local port for an owner's port, assigned at the first call. Raises OSError if all are taken."""
        if (known := self.find(cluster, owner, port)) is not None:
            return known
        with self._db.transaction() as connection:
            taken = {row["local"] for row in connection.execute("SELECT local FROM kubernetes_ports")}
            local = free_port(among, taken)
            connection.execute("INSERT INTO kubernetes_ports VALUES (?, ?, ?, ?)", [cluster, owner, port, local])
        return local

    def find(self, cluster: str, owner: str, port: int) -> int | None:
        row = self._db.row(
            "SELECT local FROM kubernetes_ports WHERE cluster = ? AND owner = ? AND port = ?", [cluster, owner, port]
        )
        return int(row["local"]) if row else None

    def of(self, cluster: str, owner: str) -> dict[int, int]:
        rows = self._db.rows(
            "SELECT port, local FROM kubernetes_ports WHERE cluster = ? AND owner = ?", [cluster, owner]
        )
        return {row["port"]: row["local"] for row in rows}

    def owners(self, cluster: str) -> set[str]:
        rows = self._db.rows("SELECT DISTINCT owner FROM kubernetes_ports WHERE cluster = ?", [cluster])
        return {row["owner"] for row in rows}

    def release(self, cluster: str, owner: str) -> None:
        self._db.write("DELETE FROM kubernetes_ports WHERE cluster = ? AND owner = ?", [cluster, owner])

    def release_cluster(self, cluster: str) -> None:
        self._db.write("DELETE FROM kubernetes_ports WHERE cluster = ?", [cluster])
