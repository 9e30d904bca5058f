"""The nodes of a GKE cluster. Autopilot creates a node for a pod, its kubelet runs the container, nodes can be lost.

A pod is paid for from the moment it has a node until its container has ended. Its status:
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/. The status when its node is disrupted:
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/
"""

from __future__ import annotations

from collections.abc import Callable

from .kubernetes import Api, Object, set_condition
from .world import World

LOOK_SECONDS = 60.0  # between two tries of the autoscaler
STOCKOUT, QUOTA = "GCE out of resources", "GCE quota exceeded"
TERMINATED = 143  # exit code of a container that SIGTERM ended


class Nodes:
    """`began` is called for each pod whose container starts, `ended` for each pod that has ended finally."""

    def __init__(self, world: World, api: Api) -> None:
        self.world = world
        self.api = api
        self.began: Callable[[Object], None] = lambda _: None
        self.ended: Callable[[Object], None] = lambda _: None
        self._stopped: set[str] = set()  # pods whose container has ended, or whose node is lost

    def has_stopped(self, pod: Object) -> bool:
        """Whether nothing runs in the pod, whether Kubernetes knows that or not."""
        return is_over(pod) or pod["metadata"]["uid"] in self._stopped

    def schedule(self, pod: Object) -> None:
        """Schedule a pod. For some pods there is no node while faults last."""
        world, faults = self.world, self.world.faults
        region = self.api.cluster.split("/")[3]
        pod["status"] |= {"phase": "Pending"}
        obstacle = ""
        if world.lasts(f"no GPU on GKE in {region}", faults.stockout) or world.happens(faults.stockout * 0.2):
            obstacle = STOCKOUT
        elif world.happens(faults.quota * 0.5):
            obstacle = QUOTA
        world.after(world.random.uniform(0.2, 3), lambda: self._find_node(pod, obstacle))

    def lose(self, pod: Object) -> None:
        """Lose the pod's machine; Kubernetes notices minutes later."""
        if not self._holds_node(pod):
            return
        self._stop_paying(pod, None)
        self.world.after(self.world.random.uniform(40, 400), lambda: self._evict(pod))

    def take(self, pod: Object) -> None:
        """Preempt the pod's machine; its kubelet has time to report that."""
        if self._holds_node(pod):
            self._disrupt(pod, "TerminationByKubelet", "Pod was terminated in response to imminent node shutdown.")
            self.finish(pod, TERMINATED, "Terminated")

    def finish(self, pod: Object, exit_code: int, reason: str = "") -> None:
        """End the pod's container."""
        if is_over(pod) or not self.api.exists(pod):
            return
        self._stop_paying(pod, exit_code)
        self._end(pod, exit_code, reason)

    def remove(self, pod: Object) -> None:
        """Begin the pod's deletion: its container gets SIGTERM and at most its grace period."""
        world, slow = self.world, self.world.happens(self.world.faults.slow_end)
        grace = float(pod["spec"]["terminationGracePeriodSeconds"])
        stop = world.random.uniform(0.5, grace if slow else min(5.0, grace))
        rest = world.random.uniform(5, 300) if slow else world.random.uniform(0.1, 2)
        world.after(stop, lambda: self.finish(pod, TERMINATED))
        world.after(stop + rest, lambda: self.api.release(pod))

    def removed(self, pod: Object) -> None:
        """Remove the pod with everything that ran in it."""
        self._stop_paying(pod, None)
        pod["status"]["phase"] = pod["status"]["phase"] if is_over(pod) else "Failed"

    def _find_node(self, pod: Object, obstacle: str) -> None:
        if not self.api.is_live(pod):
            return
        set_condition(pod, "PodScheduled", "False", "Unschedulable", "0/2 nodes are available: 2 Insufficient GPUs.")
        world = self.world
        if obstacle and world.now < world.calm:
            text = f"Node scale up in zones a, b associated with this pod failed: {obstacle}."
            self.api.tell(pod, "FailedScaleUp", f"{text} Pod is at risk of not being scheduled.")
            return world.after(LOOK_SECONDS, lambda: self._find_node(pod, obstacle))
        world.after(world.duration(world.faults.slow_start, (60, 1800), (5, 90)), lambda: self._bind(pod))

    def _bind(self, pod: Object) -> None:
        if not self.api.is_live(pod):
            return
        pod["spec"]["nodeName"] = f"node-{self.world.id()}"
        set_condition(pod, "PodScheduled", "True")
        self.world.fact("running", name=self.api.name_of(pod))
        self.world.after(self.world.random.uniform(1, 20), lambda: self._start(pod))

    def _start(self, pod: Object) -> None:
        if self._holds_node(pod) and "deletionTimestamp" not in pod["metadata"]:
            pod["status"]["phase"] = "Running"
            self.began(pod)

    def _evict(self, pod: Object) -> None:
        if self.api.exists(pod) and not is_over(pod):
            self._disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            self._end(pod, None, "")
            self.api.delete(pod)

    def _disrupt(self, pod: Object, reason: str, message: str) -> None:
        set_condition(pod, "DisruptionTarget", "True", reason, message)

    def _end(self, pod: Object, exit_code: int | None, reason: str) -> None:
        status, spec = pod["status"], pod["spec"]["containers"][0]
        status["phase"] = "Failed" if exit_code is None or exit_code else "Succeeded"
        if reason:
            status |= {"reason": reason, "message": "Pod was terminated in response to imminent node shutdown."}
        if exit_code is not None and "nodeName" in pod["spec"]:
            why = "Error" if exit_code else "Completed"
            ended = {"exitCode": exit_code, "reason": why, "finishedAt": self.api.stamp()}
            status["containerStatuses"] = [
                {"name": spec["name"], "image": spec["image"], "state": {"terminated": ended}}
            ]
        self.ended(pod)

    def _holds_node(self, pod: Object) -> bool:
        return self.api.exists(pod) and "nodeName" in pod["spec"] and not self.has_stopped(pod)

    def _stop_paying(self, pod: Object, exit_code: int | None) -> None:
        if "nodeName" in pod["spec"] and not self.has_stopped(pod):
            self._stopped.add(pod["metadata"]["uid"])
            self.world.fact("ended", name=self.api.name_of(pod), exit_code=exit_code)


def is_over(pod: Object) -> bool:
    """Whether the pod's container has ended, as far as Kubernetes knows."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")
