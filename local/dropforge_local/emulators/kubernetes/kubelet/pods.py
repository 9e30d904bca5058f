"""The kubelet: a worker for each pod on a node, from the mount of its volumes to its containers' last exit code.

A worker records each step before it acts, under names derived from the pod's uid, so that the worker of the next stack
continues from there: containers outlive the stack and are found by id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from ....containers.processes import Container, Exit
from ...kit.background import Background, Changes, first
from ..controllers.owned import Tools, condition, condition_status, is_finished, set_condition
from ..kinds import CONFIG_MAP, POD, SECRET
from ..objects import DeleteOptions
from ..ports import Ports
from ..refusals import Refusal
from ..store import Change, Object
from ..times import seconds, timestamp
from . import status, volumes
from .environment import ConfigError, Sources, declared_ports, port_number
from .probes import Command, ProbeError, Prober
from .runner import Runner, StartError

log = logging.getLogger(__name__)

LONGEST_BACKOFF_SECONDS = 300.0
DISRUPTION = "DisruptionTarget"
PRESSURE = "The node was low on resource: memory."
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


@dataclass(frozen=True)
class Stop:
    """Why a pod's containers must end, and their grace time."""

    why: str  # deleted, preempted, evicted, deadline
    grace_seconds: float


class Kubelet:
    """The workers of a cluster's pods."""

    def __init__(self, tools: Tools, runner: Runner, ports: Ports, session: aiohttp.ClientSession) -> None:
        self.tools = tools
        self.runner = runner
        self.ports = ports
        self.session = session
        self.sources = Sources(tools.store, ports, tools.config.pod_ports)
        self._workers: dict[str, PodWorker] = {}
        self._background = Background("pods")

    def start(self) -> None:
        """Take over every pod on a node; end containers whose pod was deleted meanwhile."""
        pods = self.tools.store.items(POD)
        for pod in pods:
            self._ensure_worker(pod)
        known = {pod["metadata"]["uid"] for pod in pods}
        for container_id, cluster, uid in self.runner.unended():
            if cluster == self.tools.store.cluster and uid not in known:
                self._background.spawn(self._end_stray(container_id))

    async def stop(self) -> None:
        """Stop watching; the containers continue."""
        await self._background.stop()

    def on_change(self, change: Change) -> None:
        if change.kind == POD:
            if change.body is not None:
                self._ensure_worker(change.body)
            if worker := self._workers.get(change.item["metadata"]["uid"]):
                worker.pod_changes.notify()
        elif change.kind in (SECRET, CONFIG_MAP):
            for worker in self._workers.values():
                worker.source_changes.notify()

    def preempt(self, pod: Object) -> None:
        """Take away a pod's machine: the pod gets SIGTERM and a grace time, then fails."""
        self._disrupt(pod, SHUTDOWN)

    def evict(self, pod: Object) -> None:
        """End a pod because its node is short of memory."""
        self._disrupt(pod, PRESSURE)
        self.tools.recorder.record(POD, pod, "Warning", "Evicted", PRESSURE, "kubelet")

    def command(self, pod: Object, name: str, words: Sequence[str]) -> Command:
        """A command in a running container of a pod. Refuses with 404 if that container does not run."""
        worker = self._workers.get(pod["metadata"]["uid"])
        if worker is None:
            raise Refusal(404, f'container not found ("{name}"): the pod runs on no node')
        return worker.command(name, words)

    def _disrupt(self, pod: Object, message: str) -> None:
        now, reason = self.tools.stamp(), "TerminationByKubelet"
        set_condition(pod["status"], DISRUPTION, "True", reason, message, now, lastProbeTime=None)
        self.tools.store.replace(POD, pod)

    def _ensure_worker(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        is_over = is_finished(pod) and "deletionTimestamp" not in pod["metadata"]
        if uid in self._workers or not pod["spec"].get("nodeName") or is_over:
            return
        worker = self._workers[uid] = PodWorker(self, pod)
        self._background.spawn(self._work(uid, worker))

    async def _work(self, uid: str, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:
            log.exception("pod %s failed", worker.name)
        finally:
            del self._workers[uid]

    async def _end_stray(self, container_id: str) -> None:
        if container := self.runner.runtime.adopt(container_id):
            await container.terminate(0)
            self.runner.ended(container)


class PodWorker:
    """Runs a pod to its end."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self._kubelet = kubelet
        self._tools = kubelet.tools
        self._runner = kubelet.runner
        self._pod = pod  # as last read: its names are needed after its deletion
        self.pod_changes = Changes()  # of the pod, also by this worker, and its deletion
        self.source_changes = Changes()  # of Secrets and ConfigMaps that the pod may wait for
        self._running: dict[str, Container] = {}

    @property
    def name(self) -> str:
        return f"{self._pod['metadata']['namespace']}/{self._pod['metadata']['name']}"

    def command(self, name: str, words: Sequence[str]) -> Command:
        """A command in a container. Refuses with 404 if the container does not run, with 500 if its image is gone."""
        container = next(item for item in self._all_containers() if item["name"] == name)
        running = self._running.get(name)
        if running is None or running.exit is not None:
            raise Refusal(404, f'container not found ("{name}"): it does not run')
        try:
            return self._runner.commands(self._kubelet.sources, self._pod, container, running)(words)
        except ProbeError as error:
            raise Refusal(500, f"error executing command in container: {error}") from error

    async def run(self) -> None:
        self._adopt_running()
        life = asyncio.ensure_future(self._live())
        stop = asyncio.ensure_future(self._wait_for_stop())
        try:
            await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            else:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
                await self._end(stop.result())
            await self._leave()
        finally:
            life.cancel()
            stop.cancel()
            await asyncio.gather(life, stop, return_exceptions=True)

    def _adopt_running(self) -> None:
        """Adopt the containers that an earlier stack started; a pod in deletion must end them."""
        for container in self._all_containers():
            entry = status.find_entry(self._pod, container["name"])
            attempt = entry["restartCount"] if entry else 0
            for number in (attempt, attempt + 1):  # the next attempt may have started just before a kill
                if (adopted := self._runner.adopt(self._pod, container["name"], number)) and adopted.exit is None:
                    self._running[container["name"]] = adopted

    def _all_containers(self) -> list[Object]:
        return [*self._pod["spec"].get("initContainers", ()), *self._pod["spec"]["containers"]]

    async def _live(self) -> None:
        """Mount volumes, run init containers in order, then all containers; set the phase when the last has ended."""
        if is_finished(self._pod):
            return
        with self._changing() as pod:
            status.begin(pod, self._tools.stamp())
        for port in declared_ports(self._pod):
            self._kubelet.ports.take(
                self._tools.store.cluster, self._pod["metadata"]["uid"], port, self._tools.config.pod_ports
            )
        await self._mount()
        for container in self._pod["spec"].get("initContainers", ()):
            ended = await self._keep(container, init=True)
            if ended:
                self._finish("Failed")
                return
        await asyncio.gather(*(self._keep(container) for container in self._pod["spec"]["containers"]))
        self._finish(status.verdict(self._pod))

    async def _mount(self) -> None:
        """Mount the volumes; wait while a source is missing, with an event for each retry."""
        while True:
            try:
                volumes.mount(
                    self._tools.store, self._pod, self._runner.volume_directory(self._pod), self._runner.disks
                )
                return
            except volumes.MountError as error:
                self._tell("Warning", "FailedMount", str(error))
                self._set_waiting_all("ContainerCreating")
            await self.source_changes.wait()

    async def _keep(self, container: Object, *, init: bool = False) -> int:
        """Run a container as often as the pod's restart policy requires; return the last exit code."""
        name = container["name"]
        while True:
            code = self._known_exit(name)
            if code is None:
                code = await self._attempt(container, init=init)
            policy = self._pod["spec"]["restartPolicy"]
            if policy == "Never" or (code == 0 and (init or policy == "OnFailure")):
                return code
            await self._back_off(name)

    def _known_exit(self, name: str) -> int | None:
        """The exit code of the status's current attempt; None while it has not ended."""
        entry = status.entry(self._pod, name)
        state = entry["state"].get("terminated")
        if entry["state"].get("waiting", {}).get("reason") == status.BACK_OFF:
            state = entry.get("lastState", {}).get("terminated")
        return int(state["exitCode"]) if state else None

    async def _attempt(self, container: Object, *, init: bool) -> int:
        name = container["name"]
        running = await self._start(container)
        self._running[name] = running
        self._mark_running(container, running, init=init)
        probing = asyncio.ensure_future(self._probe(container, running))
        try:
            ended = await running.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        self._mark_ended(name, running, ended)
        return ended.code

    async def _start(self, container: Object) -> Container:
        """Start the current attempt; wait as long as its image or configuration is missing."""
        name, delay = container["name"], self._tools.config.pull_retry_seconds
        while True:
            attempt = status.entry(self._pod, name)["restartCount"]
            try:
                if self._runner.adopt(self._pod, name, attempt) is None:
                    self._pull(container)
                return self._runner.start(self._kubelet.sources, self._pod, container, attempt)
            except ConfigError as error:
                self._set_waiting(name, "CreateContainerConfigError", str(error))
                self._tell("Warning", "Failed", f"Error: {error}", name)
                await self.source_changes.wait()
                continue
            except StartError as error:
                self._tell("Warning", "Failed", error.message, name)
                self._set_waiting(name, error.reason, error.message)
                if error.reason == "ErrImagePull":
                    self._tell("Warning", "Failed", "Error: ErrImagePull", name)
                    self._tell("Normal", "BackOff", f'Back-off pulling image "{container["image"]}"', name)
                    text = f'Back-off pulling image "{container["image"]}": {error.message}'
                    self._set_waiting(name, "ImagePullBackOff", text)
            await self._sleep(delay)
            delay = min(delay * 2, LONGEST_BACKOFF_SECONDS)

    def _pull(self, container: Object) -> None:
        self._set_waiting(container["name"], "ContainerCreating")
        digest = self._runner.image_digest(container["image"])
        text = f'Container image "{container["image"]}" already present on machine'
        self._tell("Normal", "Pulled", text, container["name"])
        self._tell("Normal", "Created", f"Created container: {container['name']}", container["name"])
        with self._changing() as pod:
            status.entry(pod, container["name"])["imageID"] = f"{container['image'].partition('@')[0]}@{digest}"

    async def _back_off(self, name: str) -> None:
        """Wait before the next attempt: 0 s the first time, then with a doubling delay."""
        entry = status.entry(self._pod, name)
        count = entry["restartCount"]
        last = entry["state"].get("terminated") or entry["lastState"]["terminated"]
        delay = min(self._tools.config.restart_seconds * 2.0 ** min(count - 1, 20), LONGEST_BACKOFF_SECONDS)
        if count:
            text = f"back-off {delay:g}s restarting failed container={name} pod={self._pod['metadata']['name']}"
            self._set_waiting(name, status.BACK_OFF, text, last)
            self._tell("Warning", "BackOff", f"Back-off restarting failed container {name} in pod", name)
            await self._sleep(seconds(last["finishedAt"]) + delay - self._tools.now())
        with self._changing() as pod:
            status.entry(pod, name).update(
                restartCount=count + 1,
                lastState={"terminated": last},
                state={"waiting": {"reason": "ContainerCreating"}},
            )

    async def _probe(self, container: Object, running: Container) -> None:
        """Run the container's probes: set readiness, and kill it when its startup or liveness probe fails."""
        name = container["name"]
        prober = Prober(
            self._kubelet.session,
            self._tools.config.probe_seconds,
            lambda port: self._resolve(container, port),
            self._runner.commands(self._kubelet.sources, self._pod, container, running),
        )
        startup, readiness, liveness = (container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness"))
        entry = status.entry(self._pod, name)  # from an earlier stack, if this stack took over the container
        if (
            startup
            and not entry["started"]
            and not await prober.until_success(startup, partial(self._unhealthy, name, "Startup"))
        ):
            await self._kill(name, running, f"Container {name} failed startup probe, will be restarted", startup)
            return
        self._set_ready(name, ready=readiness is None or entry["ready"], started=True)
        watching: list[Coroutine[Any, Any, None]] = []
        dead = asyncio.Event()

        if readiness:
            ready = partial(self._set_ready, name, started=True)
            unready = partial(self._unhealthy, name, "Readiness")
            watching.append(prober.watch(readiness, lambda value: ready(ready=value), unready, first=entry["ready"]))
        if liveness:
            sick = partial(self._unhealthy, name, "Liveness")
            watching.append(prober.watch(liveness, lambda alive: None if alive else dead.set(), sick, first=True))
            watching.append(self._kill_when(dead, name, running, liveness))
        await asyncio.gather(*watching)

    async def _kill_when(self, dead: asyncio.Event, name: str, running: Container, probe: Object) -> None:
        await dead.wait()
        await self._kill(name, running, f"Container {name} failed liveness probe, will be restarted", probe)

    async def _kill(self, name: str, running: Container, message: str, probe: Object) -> None:
        self._tell("Normal", "Killing", message, name)
        grace = probe.get("terminationGracePeriodSeconds", self._pod["spec"]["terminationGracePeriodSeconds"])
        await asyncio.shield(running.terminate(grace))

    def _resolve(self, container: Object, port: int | str) -> int | None:
        number = port_number(container, port)
        if number is None:
            return None
        local = self._kubelet.ports.find(self._tools.store.cluster, self._pod["metadata"]["uid"], number)
        return local if local is not None else number

    async def _wait_for_stop(self) -> Stop:
        """Return when the pod is deleted, preempted, evicted or past its deadline."""
        while True:
            pod = self._read()
            if pod is None:
                return Stop("deleted", 0)
            now = self._tools.now()
            if due := pod["metadata"].get("deletionTimestamp"):
                return Stop("deleted", max(0.0, seconds(due) - now))
            grace = float(pod["spec"]["terminationGracePeriodSeconds"])
            if condition_status(pod, DISRUPTION) == "True":
                evicted = (condition(pod, DISRUPTION) or {}).get("message") == PRESSURE
                return Stop(
                    "evicted" if evicted else "preempted", min(grace, self._tools.config.preemption_grace_seconds)
                )
            allowed, started = pod["spec"].get("activeDeadlineSeconds"), pod["status"].get("startTime")
            due_at = seconds(started) + allowed if allowed is not None and started else None
            if due_at is not None and due_at <= now:
                return Stop("deadline", grace)
            await self._change_until(due_at)

    async def _end(self, stop: Stop) -> None:
        """End every container, and record how each container and the pod ended."""
        for name in self._running:
            self._tell("Normal", "Killing", f"Stopping container {name}", name)
        ending = [asyncio.ensure_future(self._terminate(name, stop.grace_seconds)) for name in self._running]
        if ending:
            hurry = asyncio.ensure_future(self._hurry())
            try:
                await asyncio.gather(*ending)
            finally:
                hurry.cancel()
                await asyncio.gather(hurry, return_exceptions=True)
        if is_finished(self._pod):
            return
        if stop.why == "preempted":
            self._finish("Failed", "Terminated", SHUTDOWN)
        elif stop.why == "evicted":
            self._finish("Failed", "Evicted", PRESSURE)
        elif stop.why == "deadline":
            text = "Pod was active on the node longer than the specified deadline"
            self._tell("Normal", "DeadlineExceeded", text)
            self._finish("Failed", "DeadlineExceeded", text)
        else:
            began = bool(status.all_entries(self._pod))
            self._finish(status.verdict(self._pod) if began else "Failed")

    async def _terminate(self, name: str, grace_seconds: float) -> None:
        container = self._running[name]
        slept = await self._pre_stop(name, container, grace_seconds)
        ended = await container.terminate(max(0.0, grace_seconds - slept))
        if self._known_exit(name) is None:
            self._mark_ended(name, container, ended)

    async def _pre_stop(self, name: str, container: Container, grace_seconds: float) -> float:
        """Carry out the preStop hook `sleep`, while the container runs; return how long it took of the grace time."""
        spec = next(item for item in self._all_containers() if item["name"] == name)
        asked = spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        duration: float = min(asked, grace_seconds, self._tools.config.longest_pre_stop_seconds)
        if duration:
            await first(container.wait(), self._tools.clock.sleep_until(self._tools.now() + duration))
        return duration

    async def _hurry(self) -> None:
        """Kill the containers when a new deletion of the pod shortens the grace time."""
        while True:
            pod = self._read()
            due = pod["metadata"].get("deletionTimestamp") if pod else None
            if pod is None or (due and seconds(due) <= self._tools.now()):
                break
            await self._change_until(seconds(due) if due else None)
        await asyncio.gather(*(container.terminate(0) for container in self._running.values()))

    async def _leave(self) -> None:
        """Release ports and volumes; complete the deletion of a pod in deletion."""
        self._kubelet.ports.release(self._tools.store.cluster, self._pod["metadata"]["uid"])
        self._runner.unmount(self._pod)
        pod = self._read()
        if pod is not None and "deletionTimestamp" in pod["metadata"]:
            with contextlib.suppress(Refusal):
                options = DeleteOptions(grace_seconds=0, uid=pod["metadata"]["uid"])
                self._tools.objects.delete_item(POD, pod, options)

    def _mark_running(self, container: Object, running: Container, *, init: bool) -> None:
        name, now = container["name"], self._tools.stamp()
        is_new = status.entry(self._pod, name)["state"].get("running") is None
        with self._changing() as pod:
            entry = status.entry(pod, name)
            if "running" not in entry["state"]:
                # The kernel's time of a start is a little earlier than the clock's, so never before the pod itself.
                born = seconds(pod["metadata"]["creationTimestamp"])
                entry["state"] = {"running": {"startedAt": timestamp(max(born, running.created or self._tools.now()))}}
            entry["containerID"] = f"dropforge://{running.id}"
            if init:
                entry["started"] = True
            status.settle(pod, now)
        if is_new:
            self._tell("Normal", "Started", f"Started container {name}", name)

    def _mark_ended(self, name: str, container: Container, ended: Exit) -> None:
        self._running.pop(name, None)
        message = self._last_words(name, container, ended)
        with self._changing() as pod:
            entry = status.entry(pod, name)
            started = entry["state"].get("running", {}).get("startedAt")
            state = {"terminated": status.terminated(container.id, ended, started, message)}
            entry.update(state=state, ready=False, started=False)
            status.settle(pod, self._tools.stamp())
        self._runner.ended(container)

    def _last_words(self, name: str, container: Container, ended: Exit) -> str:
        spec = next(item for item in self._all_containers() if item["name"] == name)
        if not ended.code or spec["terminationMessagePolicy"] != "FallbackToLogsOnError":
            return ""
        return self._runner.runtime.output(container.id, 80)[-2048:]

    def _set_ready(self, name: str, *, ready: bool, started: bool) -> None:
        with self._changing() as pod:
            status.entry(pod, name).update(ready=ready, started=started)
            status.settle(pod, self._tools.stamp())

    def _set_waiting(self, name: str, reason: str, message: str = "", last: Object | None = None) -> None:
        waiting = {"reason": reason, **({"message": message} if message else {})}
        with self._changing() as pod:
            entry = status.entry(pod, name)
            entry["state"] = {"waiting": waiting}
            if last is not None:
                entry["lastState"] = {"terminated": last}
            status.settle(pod, self._tools.stamp())

    def _set_waiting_all(self, reason: str) -> None:
        for container in self._pod["spec"]["containers"]:
            self._set_waiting(container["name"], reason)

    def _finish(self, phase: str, reason: str = "", message: str = "") -> None:
        with self._changing() as pod:
            if not is_finished(pod):
                status.settle(pod, self._tools.stamp(), phase=phase, reason=reason, message=message)

    def _unhealthy(self, name: str, probe: str, why: str) -> None:
        self._tell("Warning", "Unhealthy", f"{probe} probe failed: {why}", name)

    def _read(self) -> Object | None:
        return self._tools.store.latest(POD, self._pod)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Object]:
        """Change the pod's status in the block; only in memory after the pod's deletion."""
        with self._tools.store.db.transaction():
            pod = self._read()
            yield pod or self._pod
            if pod is not None:
                self._pod = self._tools.store.replace(POD, pod)

    def _tell(self, event_type: str, reason: str, message: str, container: str = "") -> None:
        if self._read() is not None:
            self._tools.recorder.record(POD, self._pod, event_type, reason, message, "kubelet")

    async def _sleep(self, duration: float) -> None:
        await self._tools.clock.sleep_until(self._tools.now() + max(0.0, duration))

    async def _change_until(self, due: float | None) -> None:
        """Return after the next change of the pod, or at `due`."""
        timers = [] if due is None else [self._tools.clock.sleep_until(due)]
        await first(self.pod_changes.wait(), *timers)
