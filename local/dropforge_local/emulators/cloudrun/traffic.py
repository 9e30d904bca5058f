"""The traffic of services: a port per service and per tag, and the instances behind the ports."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from dropforge_local.base.ports import HOST, free_port

from ..kit.background import stop_all
from .context import Context
from .counts import Answered, Counts
from .instances import Pool
from .messages import seconds
from .proxy import Listener
from .rules import MANUAL
from .store import parent_of


class Traffic:
    """Listeners by service and tag (the tag of a service's own port is empty), pools of instances by revision."""

    def __init__(self, context: Context, authorize: Callable[[Mapping[str, str]], bool]) -> None:
        self._context = context
        self._authorize = authorize
        self._pools: dict[str, Pool] = {}
        self._listeners: dict[tuple[str, str], Listener] = {}
        self.counts = Counts()
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def start(self) -> None:
        """Open the ports and take over the instances of an earlier stack. Raises OSError when a port is taken."""
        # A connection per request: an instance may close an idle connection while a POST is sent on it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._closers.append(self._session.close)
        for row in self._context.store.db.rows("SELECT * FROM cloudrun_ports"):
            await self._listen(row["service"], row["tag"], row["port"])
        for service in self._context.store.all("services"):
            for revision in self._context.store.children("revisions", service.name):
                if self._context.workloads.running(revision.name):
                    self.pool(service, revision)  # takes the instance over
                elif revision.name in routed(service):
                    self.pool(service, revision).resume()

    async def stop(self) -> None:
        """Close the ports; the instances continue to run."""
        await stop_all(*(listener.stop for listener in self._listeners.values()), *self._closers)

    def ports(self) -> list[int]:
        """The open ports."""
        return sorted(listener.port for listener in self._listeners.values())

    def uri(self, name: str, tag: str = "") -> str:
        return f"http://{HOST}:{self._listeners[name, tag].port}"

    async def open_ports(self, service: Any) -> None:
        """Open a port for the service and for each tag; close the ports of removed tags."""
        tags = {"", *(target.tag for target in service.traffic if target.tag)}
        connection = self._context.store.db.connection
        for key in [key for key in self._listeners if key[0] == service.name and key[1] not in tags]:
            await self._listeners.pop(key).stop()
            connection.execute("DELETE FROM cloudrun_ports WHERE service = ? AND tag = ?", key)
        for tag in sorted(tags):
            if (service.name, tag) not in self._listeners:
                taken = set(self._context.store.ports()) | self._context.workloads.ports()
                port = free_port(self._context.config.service_ports, taken)
                await self._listen(service.name, tag, port)
                connection.execute("INSERT INTO cloudrun_ports VALUES (?, ?, ?)", [service.name, tag, port])

    def pool(self, service: Any, revision: Any) -> Pool:
        """The instances of a revision.

        The first caller takes over an instance of an earlier stack, also if it is a request that comes while this one
        starts: the request would otherwise start another instance, which `resume` would end.
        """
        if revision.name not in self._pools:
            keep = _least(service, revision) > 0
            self._pools[revision.name] = Pool(self._context, self._session, revision, keep)
            if self._context.workloads.running(revision.name):
                self._pools[revision.name].resume()
        return self._pools[revision.name]

    def keep_minimum(self, name: str) -> None:
        """Keep an instance of each revision with a minimum, now that the service's traffic or scaling has changed."""
        service = self._context.store.get(name)
        for revision, pool in self._pools.items():
            if parent_of(revision) == name:
                pool.keep_if(_least(service, pool.revision) > 0)

    def retire(self, name: str) -> None:
        """End the instances of a service's revisions without traffic, once their requests are answered."""
        used = _used(self._context.store.get(name))
        for revision, pool in self._pools.items():
            if parent_of(revision) == name and revision not in used:
                self._context.background.spawn(self._retire(revision, pool))

    async def _retire(self, revision: str, pool: Pool) -> None:
        """End a pool after its requests, unless the revision has got traffic again meanwhile."""
        await pool.drain(seconds(pool.revision.timeout))
        service = self._context.store.find(parent_of(revision))
        if self._pools.get(revision) is pool and (service is None or revision not in _used(service)):
            await self.close_pool(revision)

    async def close_pool(self, revision: str) -> None:
        """End the instances of a revision at once."""
        if (pool := self._pools.pop(revision, None)) is not None:
            await pool.close()

    async def close(self, service: Any | None, name: str) -> None:
        """Close the ports of a service and end all its instances, also those of an earlier stack."""
        for key in [key for key in self._listeners if key[0] == name]:
            await self._listeners.pop(key).stop()
        for revision in self._context.store.children("revisions", name):
            self.pool(service, revision)
            await self.close_pool(revision.name)

    async def _listen(self, name: str, tag: str, port: int) -> None:
        listener = Listener(
            port,
            self._session,
            lambda: self._route(name, tag),
            lambda headers: self._is_allowed(name, headers),
            self._count,
            self._context.faults.take_busy,
        )
        try:
            await listener.start()
        except OSError as error:
            await listener.stop()
            raise OSError(
                f"port {port} of service {name!r} is taken: end the program that uses it, then start again"
            ) from error
        self._listeners[name, tag] = listener

    def _count(self, pool: Pool, status: int, seconds: float) -> None:
        self.counts.add(pool.revision.name, Answered(self._context.now(), status, seconds))

    def _route(self, name: str, tag: str) -> Pool | None:
        """The pool that answers a request: by tag, or by the traffic's percents. None without a ready revision."""
        service = self._context.store.find(name)
        if service is None or service.delete_time:
            return None
        targets = [target for target in service.traffic if (target.tag == tag if tag else target.percent)]
        if not targets:
            return None
        target = targets[0] if tag else random.choices(targets, [target.percent for target in targets])[0]
        name_of = _revision_of(service, target)
        revision = self._context.store.find(name_of) if name_of in _used(service) else None
        return self.pool(service, revision) if revision is not None else None

    def _is_allowed(self, name: str, headers: Mapping[str, str]) -> bool:
        service = self._context.store.find(name)
        return service is not None and (service.invoker_iam_disabled or self._authorize(headers))


def _least(service: Any, revision: Any) -> int:
    """The instances of a revision that run without requests. A service's minimum is for revisions with a share only."""
    has_share, scaling = revision.name in _shared(service), service.scaling
    if has_share and scaling.scaling_mode == MANUAL:
        return int(scaling.manual_instance_count)
    return int(max(scaling.min_instance_count if has_share else 0, revision.scaling.min_instance_count))


def _shared(service: Any) -> set[str]:
    """The names of the revisions with a share of the requests."""
    return {_revision_of(service, target) for target in service.traffic if target.percent}


def _used(service: Any) -> set[str]:
    """The names of the revisions that may have an instance.

    Manual scaling to 0 disables the revisions with a share. A revision with a tag alone still answers at its tag:
    https://cloud.google.com/run/docs/configuring/services/manual-scaling
    """
    is_disabled = service.scaling.scaling_mode == MANUAL and not service.scaling.manual_instance_count
    return routed(service) - (_shared(service) if is_disabled else set())


def routed(service: Any) -> set[str]:
    """The names of the revisions that may get a request."""
    return {_revision_of(service, target) for target in service.traffic if target.percent or target.tag}


def _revision_of(service: Any, target: Any) -> str:
    """The name of a traffic target's revision; empty before the first revision is ready."""
    return f"{service.name}/revisions/{target.revision}" if target.revision else str(service.latest_ready_revision)
