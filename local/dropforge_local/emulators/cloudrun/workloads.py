"""Containers as processes: image, command, environment, secrets and memory limit of the API's Container message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dropforge_local.base.errors import ApiError

from ...containers.images import Image, ImageNotFound
from ...containers.processes import Container, ContainerSpec, Runtime
from ..kit import outputs
from ..kit.host import Host
from .config import CloudRunConfig
from .rules import parse_memory
from .store import Store, place_of
from .volumes import mount_points


class Unready(Exception):
    """A resource cannot become ready. `reason` names a CommonReason or RevisionReason, `status` a canonical code."""

    def __init__(self, status: str, message: str, *, reason: str = "", revision_reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reasons = {"reason": reason, "revision_reason": revision_reason}


@dataclass(frozen=True)
class Workloads:
    """Starts containers, remembers the resource of each container, and keeps their output."""

    store: Store
    host: Host
    config: CloudRunConfig
    runtime: Runtime
    access_secret: Callable[[str, str], bytes]

    def check(self, resource: str, container: Any) -> None:
        """Raise Unready if the image or a secret is missing; Cloud Run checks both at a write of the resource."""
        self._resolve(container.image)
        self._environment(resource, container)

    def launch(
        self,
        container_id: str,
        resource: str,
        template: Any,
        env: Mapping[str, str],
        port: int | None = None,
    ) -> Container:
        """Start the container of `resource` (a task or revision name), or find a container that had this id before.

        `template` is a TaskTemplate or a Revision. Raises Unready if the container cannot start.
        """
        container = template.containers[0]
        self.store.db.write(
            "INSERT OR IGNORE INTO cloudrun_containers (id, resource, started, port) VALUES (?, ?, ?, ?)",
            [container_id, resource, self.host.clock.now(), port],
        )

        def prepare(directory: Path) -> ContainerSpec:
            image = self._resolve(container.image)
            own = {**self.host.environment(template.service_account), **self._environment(resource, container), **env}
            words = (container.command, container.args)
            points = mount_points(container, directory)
            process = image.unpack(directory / "rootfs", *words, own, container.working_dir, points)
            memory = parse_memory(container.resources.limits["memory"])
            return ContainerSpec(process.argv, process.env, process.workdir, memory, search_path=process.search_path)

        try:
            return self.runtime.launch(container_id, prepare)
        except (ValueError, Unready) as error:
            self.store.db.write("UPDATE cloudrun_containers SET ended = 1 WHERE id = ?", [container_id])
            if isinstance(error, Unready):
                raise
            raise Unready("FAILED_PRECONDITION", str(error), revision_reason="HEALTH_CHECK_CONTAINER_ERROR") from error

    def adopt(self, container_id: str) -> Container | None:
        return self.runtime.adopt(container_id)

    def started_at(self, container_id: str) -> float:
        [row] = self.store.db.rows("SELECT started FROM cloudrun_containers WHERE id = ?", [container_id])
        return float(row["started"])

    def ended(self, container: Container) -> None:
        """Record a container's end; forget the container, except for its output."""
        outputs.end(self.store.db, "cloudrun_containers", self.runtime, container, self.config.kept_logs)

    def running(self, resource: str) -> list[tuple[str, int | None]]:
        """(container id, port) of a resource's containers without a recorded end."""
        rows = self.store.db.rows(
            "SELECT id, port FROM cloudrun_containers WHERE resource = ? AND NOT ended ORDER BY started", [resource]
        )
        return [(row["id"], row["port"]) for row in rows]

    def ports(self) -> set[int]:
        rows = self.store.db.rows("SELECT port FROM cloudrun_containers WHERE port NOT NULL AND NOT ended")
        return {row["port"] for row in rows}

    def live(self) -> list[str]:
        """Containers that have a process according to the machine."""
        return self.runtime.live()

    def output(self, resource: str) -> str:
        """The output of all containers of a resource and of the resources below it, also after its deletion.

        Raises NOT_FOUND for a resource that never had a container.
        """
        rows = self.store.db.rows(
            "SELECT id FROM cloudrun_containers WHERE resource = ? OR resource >= ? AND resource < ? ORDER BY started",
            [resource, f"{resource}/", f"{resource}0"],
        )
        if not rows:
            raise ApiError("NOT_FOUND", f"no container of {resource!r} has run here")
        return "".join(self.runtime.output(row["id"]) for row in rows)

    def tail(self, container: Container, lines: int) -> str:
        return self.runtime.output(container.id, lines)

    def _resolve(self, uri: str) -> Image:
        try:
            return self.host.images.resolve(uri)
        except ImageNotFound as error:
            message = f"Image {uri!r} not found. ({error})"
            raise Unready("NOT_FOUND", message, reason="CONTAINER_MISSING") from error

    def _environment(self, resource: str, container: Any) -> dict[str, str]:
        env = {}
        for variable in container.env:
            reference = variable.value_source.secret_key_ref
            env[variable.name] = self._secret(resource, reference) if reference.secret else variable.value
        return env

    def _secret(self, resource: str, reference: Any) -> str:
        name, version = reference.secret, reference.version or "latest"
        if "/" not in name:
            name = f"projects/{place_of(resource)[0]}/secrets/{name}"
        try:
            return self.access_secret(name, version).decode("utf-8")
        except (ApiError, LookupError) as error:
            message = f"Secret {name}/versions/{version} was not found, or access to it was denied."
            raise Unready("NOT_FOUND", message, reason="SECRETS_ACCESS_CHECK_FAILED") from error
        except UnicodeDecodeError as error:
            message = f"Secret {name}/versions/{version} is not UTF-8, so no environment variable can hold it."
            raise Unready("FAILED_PRECONDITION", message, reason="SECRETS_ACCESS_CHECK_FAILED") from error
