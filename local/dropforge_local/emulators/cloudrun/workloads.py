"""From the API's Container message to a running process: image, command, environment, secrets, memory limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dropforge_local.base.clock import Clock
from dropforge_local.base.errors import ApiError

from ...containers.images import Image, ImageNotFound, ImageStore
from ...containers.logs import last_lines
from ...containers.processes import Container, ContainerSpec, Runtime
from .config import CloudRunConfig
from .rules import parse_memory
from .store import Store, place_of


class Unready(Exception):
    """A resource cannot become ready. `reason` names a CommonReason or RevisionReason, `status` a canonical code."""

    def __init__(self, status: str, message: str, *, reason: str = "", revision_reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reasons = {"reason": reason, "revision_reason": revision_reason}


class Workloads:
    """Starts containers, remembers which resource each belongs to, and keeps their output."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        runtime: Runtime,
        images: ImageStore,
        platform_env: Callable[[str], Mapping[str, str]],
        access_secret: Callable[[str, str], bytes],
        config: CloudRunConfig,
    ) -> None:
        self._store = store
        self._clock = clock
        self._runtime = runtime
        self._images = images
        self._platform_env = platform_env
        self._access_secret = access_secret
        self._config = config

    def check(self, resource: str, container: Any) -> None:
        """Raise Unready if the image or a secret is not there; Cloud Run looks when the resource is written."""
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
        """Start the container of `resource` (a task or revision name), or find it if this id was ever started.

        `template` is what it is made from, a TaskTemplate or a Revision.
        """
        container = template.containers[0]
        with self._store.db.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO cloudrun_containers (id, resource, started, port) VALUES (?, ?, ?, ?)",
                [container_id, resource, self._clock.now(), port],
            )

        def prepare(directory: Path) -> ContainerSpec:
            image = self._resolve(container.image)
            own = {**self._platform_env(template.service_account), **self._environment(resource, container), **env}
            process = image.unpack(directory / "rootfs", container.command, container.args, own, container.working_dir)
            memory = parse_memory(container.resources.limits["memory"])
            return ContainerSpec(process.argv, process.env, process.workdir, memory)

        try:
            return self._runtime.launch(container_id, prepare)
        except ValueError as error:
            self._mark_ended(container_id)
            raise Unready("FAILED_PRECONDITION", str(error), revision_reason="HEALTH_CHECK_CONTAINER_ERROR") from error
        except Unready:
            self._mark_ended(container_id)
            raise

    def adopt(self, container_id: str) -> Container | None:
        return self._runtime.adopt(container_id)

    def started_at(self, container_id: str) -> float:
        row = self._store.db.connection.execute(
            "SELECT started FROM cloudrun_containers WHERE id = ?", [container_id]
        ).fetchone()
        return float(row["started"])

    def ended(self, container: Container) -> None:
        """Forget a container that has no process any more, except for its output."""
        container.release()
        with self._store.db.transaction():
            self._mark_ended(container.id)
            self._drop_old_output()

    def running(self, resource: str) -> list[tuple[str, int | None]]:
        """(container id, port) of a resource's containers that were not seen to end."""
        rows = self._store.db.connection.execute(
            "SELECT id, port FROM cloudrun_containers WHERE resource = ? AND NOT ended ORDER BY started", [resource]
        )
        return [(row["id"], row["port"]) for row in rows]

    def ports(self) -> set[int]:
        rows = self._store.db.connection.execute(
            "SELECT port FROM cloudrun_containers WHERE port NOT NULL AND NOT ended"
        )
        return {row["port"] for row in rows}

    def live(self) -> list[str]:
        """Containers that have a process, by what the machine says."""
        return self._runtime.live()

    def output(self, resource: str, tail: int | None = None) -> str:
        """What all containers of a resource, and of those below it, wrote; also after its deletion.

        NOT_FOUND when there never was one.
        """
        rows = self._store.db.connection.execute(
            "SELECT id FROM cloudrun_containers WHERE resource = ? OR resource >= ? AND resource < ? ORDER BY started",
            [resource, f"{resource}/", f"{resource}0"],
        ).fetchall()
        if not rows:
            raise ApiError("NOT_FOUND", f"nothing of {resource!r} has run here")
        return last_lines("".join(self._runtime.output(row["id"]) for row in rows), tail)

    def tail(self, container: Container, lines: int) -> str:
        return self._runtime.output(container.id, lines)

    def _resolve(self, uri: str) -> Image:
        try:
            return self._images.resolve(uri)
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
            return self._access_secret(name, version).decode("utf-8")
        except (ApiError, LookupError) as error:
            message = f"Secret {name}/versions/{version} was not found, or access to it was denied."
            raise Unready("NOT_FOUND", message, reason="SECRETS_ACCESS_CHECK_FAILED") from error
        except UnicodeDecodeError as error:
            message = f"Secret {name}/versions/{version} is not UTF-8, so no environment variable can hold it."
            raise Unready("FAILED_PRECONDITION", message, reason="SECRETS_ACCESS_CHECK_FAILED") from error

    def _mark_ended(self, container_id: str) -> None:
        with self._store.db.transaction() as connection:
            connection.execute("UPDATE cloudrun_containers SET ended = 1 WHERE id = ?", [container_id])

    def _drop_old_output(self) -> None:
        rows = self._store.db.connection.execute(
            "SELECT id FROM cloudrun_containers WHERE ended ORDER BY started DESC LIMIT -1 OFFSET ?",
            [self._config.kept_logs],
        ).fetchall()
        for row in rows:
            self._runtime.forget(row["id"])
            self._store.db.connection.execute("DELETE FROM cloudrun_containers WHERE id = ?", [row["id"]])
