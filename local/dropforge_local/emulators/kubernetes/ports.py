"""Ports of this machine that stand for ports of pods and services; the same ones after a restart."""

from __future__ import annotations

from dropforge_local.base.db import Database
from dropforge_local.base.ports import free_port


class Ports:
    """Who has which port; `owner` is a pod's uid or a service's name."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def take(self, cluster: str, owner: str, port: int, among: range) -> int:
        """The local port for an owner's port, found once. Raises OSError when all are taken."""
        if (known := self.find(cluster, owner, port)) is not None:
            return known
        with self._db.transaction() as connection:
            taken = {row["local"] for row in connection.execute("SELECT local FROM kubernetes_ports")}
            local = free_port(among, taken)
            connection.execute("INSERT INTO kubernetes_ports VALUES (?, ?, ?, ?)", [cluster, owner, port, local])
        return local

    def find(self, cluster: str, owner: str, port: int) -> int | None:
        row = self._db.connection.execute(
            "SELECT local FROM kubernetes_ports WHERE cluster = ? AND owner = ? AND port = ?", [cluster, owner, port]
        ).fetchone()
        return int(row["local"]) if row else None

    def of(self, cluster: str, owner: str) -> dict[int, int]:
        rows = self._db.connection.execute(
            "SELECT port, local FROM kubernetes_ports WHERE cluster = ? AND owner = ?", [cluster, owner]
        )
        return {row["port"]: row["local"] for row in rows}

    def owners(self, cluster: str) -> set[str]:
        rows = self._db.connection.execute("SELECT DISTINCT owner FROM kubernetes_ports WHERE cluster = ?", [cluster])
        return {row["owner"] for row in rows}

    def release(self, cluster: str, owner: str) -> None:
        with self._db.transaction() as connection:
            connection.execute("DELETE FROM kubernetes_ports WHERE cluster = ? AND owner = ?", [cluster, owner])

    def release_cluster(self, cluster: str) -> None:
        with self._db.transaction() as connection:
            connection.execute("DELETE FROM kubernetes_ports WHERE cluster = ?", [cluster])
