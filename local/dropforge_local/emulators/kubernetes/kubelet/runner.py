"""Pods' containers on this machine: starts them from images as process groups, and finds them after a restart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from dropforge_local.base.ports import HOST

from .... import shims
from ....containers.images import ImageNotFound, Process
from ....containers.processes import Container, ContainerSpec, Runtime, own_environment
from ....containers.programs import link_programs
from ...compute.disks import Disks
from ...kit import outputs
from ...kit.host import Host
from ..admission import GPU
from ..controllers.owned import controller_of
from ..kinds import BY_NAME, POD
from ..quantities import whole
from ..ray import pods as ray
from ..store import Object, Store
from . import volumes
from .environment import ConfigError, Sources, environment, probe_words, words
from .probes import Command, ProbeError


class StartError(Exception):
    """A container cannot start; `reason` is the state that Kubernetes shows."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Runner:
    """Starts containers of all clusters; records the pod of each container and keeps its output."""

    host: Host
    runtime: Runtime
    kept_logs: int
    disks: Disks

    def volume_directory(self, pod: Object) -> Path:
        return self.runtime.directory / ".volumes" / str(pod["metadata"]["uid"])

    def image_digest(self, uri: str) -> str:
        """The digest of an image. Raises StartError if the image does not exist."""
        try:
            return self.host.images.resolve(uri).digest
        except ImageNotFound as error:
            raise StartError("ErrImagePull", f'failed to pull and unpack image "{uri}": {error}') from error

    def start(self, sources: Sources, pod: Object, container: Object, attempt: int) -> Container:
        """Start an attempt, or return it if it was ever started. Raises StartError or ConfigError."""
        container_id = id_of(pod, container["name"], attempt)
        if started := self.runtime.adopt(container_id):
            return started
        env = self._environment(sources, pod, container)
        self._remember(container_id, sources.store, pod, container["name"], attempt)

        def prepare(directory: Path) -> ContainerSpec:
            return self._prepare(directory, sources, pod, container, env)

        try:
            return self.runtime.launch(container_id, prepare)
        except ImageNotFound as error:
            raise StartError("ErrImagePull", str(error)) from error
        except (ValueError, OSError) as error:
            raise StartError("RunContainerError", f"failed to start container: {error}") from error

    def commands(
        self, sources: Sources, pod: Object, container: Object, running: Container
    ) -> Callable[[Sequence[str]], Command]:
        """A function that makes the command of an exec probe or of a client executable in a running container.

        The command sees the container's files and environment, and no program but the image's. The function raises
        ProbeError if the image, a source of the environment or the Ray head no longer exists.
        """
        read_image = cache(partial(self.host.images.resolve, container["image"]))
        rootfs, programs = running.directory / "rootfs", running.directory / "programs"

        def command(given: Sequence[str]) -> Command:
            try:
                image, env = read_image(), self._environment(sources, pod, container)
                points = volumes.mount_points(pod, container, self.volume_directory(pod))
                local = probe_words(given, sources.local_ports(pod))
                process = image.process(rootfs, local, (), env, container.get("workingDir", ""), points)
                variables = self._variables(sources, pod, container, process)
            except (ImageNotFound, ConfigError, StartError) as error:
                raise ProbeError(str(error)) from error
            if not programs.is_dir():
                link_programs(programs, image.programs)
            path = os.pathsep.join(map(str, [*image.program_directories(rootfs, env), programs]))
            argv = archive_words(given, rootfs) or process.argv
            return Command(argv, {**own_environment(running.directory), **variables, "PATH": path}, process.workdir)

        return command

    def _environment(self, sources: Sources, pod: Object, container: Object) -> dict[str, str]:
        """The variables of a container, as the container's paths. Raises ConfigError."""
        account = pod["spec"].get("serviceAccountName", "")
        return {**self.host.environment(account), **environment(sources, pod, container)}

    def adopt(self, pod: Object, name: str, attempt: int) -> Container | None:
        return self.runtime.adopt(id_of(pod, name, attempt))

    def ended(self, container: Container) -> None:
        """Release an ended container; keep its output until `kept_logs` newer containers have ended."""
        outputs.end(self.host.db, "kubernetes_containers", self.runtime, container, self.kept_logs)

    def unended(self) -> list[tuple[str, str, str]]:
        """(id, cluster, pod uid) of the containers whose end is not recorded."""
        rows = self.host.db.rows("SELECT id, cluster, pod_uid FROM kubernetes_containers WHERE NOT ended")
        return [(row["id"], row["cluster"], row["pod_uid"]) for row in rows]

    def unmount(self, pod: Object) -> None:
        shutil.rmtree(self.volume_directory(pod), ignore_errors=True)

    def _prepare(
        self, directory: Path, sources: Sources, pod: Object, container: Object, env: Mapping[str, str]
    ) -> ContainerSpec:
        image = self.host.images.resolve(container["image"])
        points = volumes.mount_points(pod, container, self.volume_directory(pod))
        command, args = (words(sources, pod, container, part, env) for part in ("command", "args"))
        process = image.unpack(directory / "rootfs", command, args, env, container.get("workingDir", ""), points)
        limits = container.get("resources", {}).get("limits", {})
        return ContainerSpec(
            process.argv,
            self._variables(sources, pod, container, process),
            process.workdir,
            whole(limits["memory"]) if "memory" in limits else None,
            search_path=process.search_path,
        )

    def _variables(self, sources: Sources, pod: Object, container: Object, process: Process) -> dict[str, str]:
        """The environment of a process of a container, with what the libraries in it need on this machine."""
        variables = dict(process.env)
        if gpus := whole(container.get("resources", {}).get("limits", {}).get(GPU, "0")):
            variables = shims.fsdp_environment(variables, gpus)
        if ray.CLUSTER in pod["metadata"].get("labels", {}):
            ports, head = sources.local_ports(pod), ray_head(sources, pod)
            gcs_health = "gcs_healthz" in str(container.get("readinessProbe"))
            variables = shims.ray_environment(variables, ports, *head, gcs_health=gcs_health)
        return variables

    def _remember(self, container_id: str, store: Store, pod: Object, name: str, attempt: int) -> None:
        metadata = pod["metadata"]
        self.host.db.write(
            "INSERT OR IGNORE INTO kubernetes_containers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            [
                container_id,
                store.cluster,
                metadata["namespace"],
                metadata["name"],
                metadata["uid"],
                name,
                attempt,
                workload_of(store, pod),
                self.host.clock.now(),
            ],
        )


def archive_words(words: Sequence[str], rootfs: Path) -> Sequence[str] | None:
    """The command by which `kubectl cp` reads a path of the container's files; None for another command.

    The names in the archive begin at the container's root, which is a directory of this machine.
    """
    is_archive = len(words) == 4 and list(words[:3]) == ["tar", "cf", "-"]
    if not is_archive or not (rootfs / words[3].lstrip("/")).exists():
        return None
    return ["tar", "cf", "-", "-C", str(rootfs), words[3].lstrip("/")]


def id_of(pod: Object, name: str, attempt: int) -> str:
    """A container's id. It contains the uid, because a later pod may have the same name."""
    metadata = pod["metadata"]
    return f"{metadata['name'][:40]}-{metadata['uid'][:8]}-{name}-{attempt}"


def ray_head(sources: Sources, pod: Object) -> tuple[str, str]:
    """Addresses of GCS and agent of a Ray node's head. Raises StartError while the cluster has no head."""
    metadata = pod["metadata"]
    cluster = metadata["labels"][ray.CLUSTER]
    for other in sources.store.items(POD, metadata["namespace"]):
        labels = other["metadata"].get("labels", {})
        if (labels.get(ray.CLUSTER), labels.get(ray.NODE_TYPE)) == (cluster, ray.HEAD):
            ports = sources.local_ports(other)
            if ray.GCS in ports and ray.AGENT in ports:
                return f"{HOST}:{ports[ray.GCS]}", f"{HOST}:{ports[ray.AGENT]}"
    raise StartError("ContainerCreating", f"the Ray cluster {cluster!r} has no head")


def workload_of(store: Store, pod: Object) -> str:
    """The top-level owner of a pod, by its Cloud Asset Inventory name below the cluster."""
    kind, name, namespace = POD, pod["metadata"]["name"], pod["metadata"]["namespace"]
    item: Object | None = pod
    while item is not None and (owner := controller_of(item)):
        kind, name = BY_NAME[owner["apiVersion"], owner["kind"]], owner["name"]
        item = store.find(kind, namespace, name)
    return "/".join(filter(None, ["namespaces", namespace, kind.group, kind.plural, name]))
