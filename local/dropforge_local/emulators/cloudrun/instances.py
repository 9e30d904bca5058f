"""The instances of a revision: started on demand, probed, restarted after a crash, ended when idle.

Cloud Run scales out; a single machine cannot. A revision therefore has at most one instance here, and requests above
max_instance_request_concurrency wait for it. All containers share the machine's ports. PORT therefore names a free port
instead of the spec's port, and the probes use the free port.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import string
from dataclasses import dataclass
from typing import Any

import aiohttp

from dropforge_local.base.ports import HOST, free_port

from ...containers.processes import Container
from ..kit.background import first
from .capacity import gpu_kind
from .context import Context
from .messages import has
from .store import short
from .workloads import Unready

LAST_LINES = 20
# A container without a startup probe must accept a connection within 240 s.
DEFAULT_STARTUP_SECONDS = 240
LONGEST_RESTART_SECONDS = 60.0


@dataclass
class Instance:
    container: Container
    port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Pool:
    """A revision's instance and the requests in it."""

    def __init__(self, context: Context, session: aiohttp.ClientSession, revision: Any, keep: bool) -> None:
        self._context = context
        self._session = session
        self.revision = revision
        self.keep = keep
        self.in_flight = 0
        self._slots = asyncio.Semaphore(revision.max_instance_request_concurrency)
        self._instance: Instance | None = None
        self._starting: asyncio.Task[Instance] | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._last_used = context.now()
        self._crashes = 0

    async def acquire(self) -> Instance:
        """Wait for a free slot of a ready instance. Raises Unready if none can be started."""
        self.in_flight += 1
        try:
            await self._slots.acquire()
            try:
                return await self.ready()
            except BaseException:
                self._slots.release()
                raise
        except BaseException:
            self._leave()
            raise

    def release(self) -> None:
        self._slots.release()
        self._leave()

    async def suspect(self, instance: Instance) -> None:
        """Stop the use of an instance that refuses connections if its process ends within a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(instance.container.wait(), 1)
            self._forget(instance)

    async def ready(self) -> Instance:
        """The instance, started if necessary. Raises Unready if it cannot start."""
        if self._closed:
            raise self._retired()
        if self._instance is not None:
            return self._instance
        if self._starting is None:
            self._starting = self._context.background.spawn(self._start(None))
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if self._closed and starting.cancelled():
                raise self._retired() from None
            raise

    def resume(self) -> None:
        """Take over the instance of an earlier stack if its process runs."""
        live = self._context.workloads.live()
        for container_id, port in self._context.workloads.running(self.revision.name):
            container = self._context.workloads.adopt(container_id)
            if container is None:
                continue
            if container_id in live and port is not None and self._starting is None:
                self._starting = self._context.background.spawn(self._start((container, port)))
            else:
                self._context.background.spawn(self._end(container))
        if self.keep and self._starting is None:
            self._context.background.spawn(self._keep())

    def keep_if(self, keep: bool) -> None:
        """Keep an instance without requests from now on, or no longer."""
        starts = keep and not self.keep and self._instance is None and self._starting is None
        self.keep = keep
        if starts:
            self._context.background.spawn(self._keep())

    async def drain(self, seconds: float) -> None:
        """Wait until every request is answered, also those that wait for a slot; at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.in_flight:
                    self._idle.clear()
                    await self._idle.wait()

    async def close(self) -> None:
        """End the instance at once."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for container_id, _ in self._context.workloads.running(self.revision.name):
            if container := self._context.workloads.adopt(container_id):
                await self._end(container)
        self._instance = None

    def _retired(self) -> Unready:
        return Unready("ABORTED", f"Revision {short(self.revision.name)!r} is retired.", revision_reason="RETIRED")

    def _leave(self) -> None:
        self.in_flight -= 1
        self._last_used = self._context.now()
        if not self.in_flight:
            self._idle.set()

    async def _start(self, adopted: tuple[Container, int] | None) -> Instance:
        try:
            self._instance = await self._start_healthy(adopted)
        finally:
            self._starting = None
        self._last_used = self._context.now()
        self._context.background.spawn(self._watch(self._instance))
        self._context.background.spawn(self._end_when_idle(self._instance))
        if has(self.revision.containers[0], "liveness_probe"):
            self._context.background.spawn(self._check_liveness(self._instance))
        return self._instance

    async def _start_healthy(self, adopted: tuple[Container, int] | None) -> Instance:
        """Start a container, or take over a running container, and wait until it is healthy."""
        kind = gpu_kind(self.revision.name, self.revision)
        if kind is not None and adopted is None and self._context.faults.is_stocked_out(kind.region):
            message = f"Insufficient capacity: no {kind.accelerator} could be had in {kind.region} for an instance."
            raise Unready("RESOURCE_EXHAUSTED", message, revision_reason="MIN_INSTANCES_NOT_PROVISIONED")
        container, port = adopted or self._launch()
        self._context.capacity.claim(container.id, kind)
        instance = Instance(container, port)
        try:
            await self._wait_until_healthy(instance)
        except BaseException:
            if not self._context.background.stopping:
                await self._end(container)
            raise
        return instance

    def _launch(self) -> tuple[Container, int]:
        revision = self.revision
        port = free_port(self._context.config.service_ports, self._context.workloads.ports())
        container_id = f"{short(revision.name)}-{''.join(random.choices(string.ascii_lowercase, k=8))}"
        env = {
            "PORT": str(port),
            "HOST": "127.0.0.1",  # not Cloud Run's: other computers of the network must not reach a laptop's containers
            "K_SERVICE": revision.service,
            "K_REVISION": short(revision.name),
            "K_CONFIGURATION": revision.service,
        }
        launch = self._context.workloads.launch
        return launch(container_id, revision.name, revision, env, port), port

    async def _wait_until_healthy(self, instance: Instance) -> None:
        """Raise Unready, with the container's last lines, if it ends or its startup probe fails."""
        probe = asyncio.ensure_future(self._probe_startup(instance))
        await first(instance.container.wait(), probe)
        if not probe.cancelled() and probe.result():
            return
        exit_code = instance.container.exit.code if instance.container.exit else None
        why = "within the allocated timeout" if exit_code is None else f"before it ended with exit({exit_code})"
        lines = self._context.workloads.tail(instance.container, LAST_LINES)
        raise Unready(
            "FAILED_PRECONDITION",
            "The user-provided container failed to start and listen on the port defined by the PORT environment "
            f"variable, or its startup probe did not succeed, {why}. Last lines of its log:\n{lines}",
            revision_reason="HEALTH_CHECK_CONTAINER_ERROR",
        )

    async def _probe_startup(self, instance: Instance) -> bool:
        """Whether the startup probe succeeded within initial_delay + period * failure_threshold.

        The probe runs more often than once a period, so that a local demo does not wait.
        """
        container = self.revision.containers[0]
        probe = container.startup_probe if has(container, "startup_probe") else None
        delay = probe.initial_delay_seconds if probe else 0
        window = probe.period_seconds * probe.failure_threshold if probe else DEFAULT_STARTUP_SECONDS
        clock, interval = self._context.clock, self._context.config.probe_seconds
        begun = self._context.workloads.started_at(instance.container.id)
        await clock.sleep_until(begun + delay)
        deadline = max(begun + delay + window, clock.now() + interval)
        while clock.now() < deadline:
            if await self._probe(probe, instance):
                return True
            await clock.sleep_until(clock.now() + interval)
        return False

    async def _probe(self, probe: Any, instance: Instance) -> bool:
        port = instance.port
        seconds = (probe.timeout_seconds or 1) if probe else 1
        try:
            async with asyncio.timeout(seconds):
                if probe is None or not has(probe, "http_get"):
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.close()
                    return True
                headers = {header.name: header.value for header in probe.http_get.http_headers}
                url = f"http://{HOST}:{port}{probe.http_get.path or '/'}"
                async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                    return 200 <= response.status < 400
        except (OSError, TimeoutError, aiohttp.ClientError):
            return False

    async def _watch(self, instance: Instance) -> None:
        """Wait for the end of an instance; restart a kept instance, after a longer delay for every crash."""
        ended = await instance.container.wait()
        self._forget(instance)
        if ended.at - instance.container.created > LONGEST_RESTART_SECONDS:
            self._crashes = 0
        if self.keep and not self._closed:
            await self._keep()

    async def _keep(self) -> None:
        while self.keep and not self._closed and self._instance is None:
            delay = min(self._context.config.restart_seconds * 2**self._crashes, LONGEST_RESTART_SECONDS)
            self._crashes += 1
            await self._context.clock.sleep_until(self._context.now() + delay)
            try:
                await self.ready()
                return
            except Unready:
                continue

    async def _end_when_idle(self, instance: Instance) -> None:
        clock, idle_seconds = self._context.clock, self._context.config.idle_seconds
        while self._instance is instance:
            since = clock.now() if self.in_flight or self.keep else self._last_used
            if since + idle_seconds <= clock.now():
                self._instance = None
                await self._end(instance.container)
                return
            await clock.sleep_until(since + idle_seconds)

    async def _check_liveness(self, instance: Instance) -> None:
        probe = self.revision.containers[0].liveness_probe
        clock, failures = self._context.clock, 0
        await clock.sleep_until(clock.now() + probe.initial_delay_seconds)
        while self._instance is instance and failures < probe.failure_threshold:
            await clock.sleep_until(clock.now() + probe.period_seconds)
            failures = 0 if await self._probe(probe, instance) else failures + 1
        if self._instance is instance:
            await self._end(instance.container)

    async def _end(self, container: Container) -> None:
        await container.terminate(self._context.config.grace_seconds)
        self._context.capacity.release(container.id)
        self._context.workloads.ended(container)

    def _forget(self, instance: Instance) -> None:
        if self._instance is instance:
            self._instance = None
        self._context.capacity.release(instance.container.id)
        self._context.workloads.ended(instance.container)
