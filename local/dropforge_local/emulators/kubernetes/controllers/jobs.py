"""Jobs: pods until enough pods have succeeded or too many have failed.

Pods carry a finalizer until they are counted. Counting a pod and removing its finalizer is a single transaction, so no
pod is lost or counted twice, whoever deletes it and whenever the stack is killed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from ..defaults import COMPLETION_INDEX, TRACKING
from ..kinds import JOB, POD
from ..objects import DeleteOptions
from ..store import Object
from ..times import seconds, timestamp
from .loop import Key
from .owned import (
    OwnerController,
    condition,
    condition_status,
    controller_of,
    delete_pod,
    is_active,
    is_finished,
    is_ready,
    make_pod,
    owned,
    set_condition,
)

LONGEST_BACKOFF_SECONDS = 360.0
COMPONENT = "job-controller"


@dataclass
class JobState:
    """The state of a job during a reconciliation: its pods, the status to write, and when to reconcile again."""

    job: Object
    pods: list[Object]
    status: Object
    due: list[float] = field(default_factory=list)

    @property
    def spec(self) -> Object:
        spec: Object = self.job["spec"]
        return spec

    @property
    def active(self) -> list[Object]:
        return [pod for pod in self.pods if is_active(pod)]

    @property
    def terminating(self) -> list[Object]:
        return [pod for pod in self.pods if "deletionTimestamp" in pod["metadata"] and not is_finished(pod)]

    def holds(self, condition: str) -> bool:
        return condition_status({"status": self.status}, condition) == "True"


class JobController(OwnerController):
    """Reconciles a cluster's jobs."""

    kind = JOB

    def all_keys(self) -> list[Key]:
        return super().all_keys() + [
            (pod["metadata"]["namespace"], owner["name"])
            for pod in self._tools.store.items(POD)
            if (owner := controller_of(pod)) and owner["kind"] == "Job"
        ]

    def reconcile(self, key: Key) -> float | None:
        job = self._tools.store.find(JOB, *key)
        self._release_strays(key, job)
        if job is None or "deletionTimestamp" in job["metadata"]:
            return None
        state = JobState(job, owned(self._tools.store, POD, job), copy.deepcopy(job.get("status", {})))
        if state.holds("Complete") or state.holds("Failed"):
            return self._finished(state)
        self._start(state)
        self._count(state)
        self._judge(state)
        self._act(state)
        self._write(state)
        return min(state.due, default=None)

    def _release_strays(self, key: Key, job: Object | None) -> None:
        """Remove the finalizer from pods of a deleted job, or a job in deletion: no controller will count them."""
        for pod in self._tools.store.items(POD, key[0]):
            owner = controller_of(pod)
            if not owner or (owner["kind"], owner["name"]) != ("Job", key[1]):
                continue
            if job is None or owner["uid"] != job["metadata"]["uid"] or "deletionTimestamp" in job["metadata"]:
                self._release(pod)

    def _finished(self, state: JobState) -> float | None:
        """Release the remaining pods, and delete the job itself when its time to live has passed."""
        for pod in state.pods:
            self._release(pod)
        status = {**state.status, "active": 0, "ready": 0, "terminating": len(state.terminating)}
        state.status = {key: value for key, value in status.items() if key != "active" or value}
        self._write(state)
        if (ttl := state.spec.get("ttlSecondsAfterFinished")) is None:
            return None
        ended = next(entry for entry in state.status["conditions"] if entry["type"] in ("Complete", "Failed"))
        due = seconds(ended["lastTransitionTime"]) + float(ttl)
        if due > self._tools.now():
            return due
        self._tools.objects.delete_item(JOB, state.job, DeleteOptions("Foreground"))
        return None

    def _start(self, state: JobState) -> None:
        if not state.spec["suspend"]:
            state.status.setdefault("startTime", self._tools.stamp())
        state.status.setdefault("uncountedTerminatedPods", {})

    def _count(self, state: JobState) -> None:
        """Count every ended pod once."""
        completed = parse_indexes(state.status.get("completedIndexes", ""))
        for pod in state.pods:
            if TRACKING not in pod["metadata"].get("finalizers", ()):
                continue
            if pod["status"]["phase"] == "Succeeded":
                self._count_success(state, pod, completed)
            elif self._has_failed(state, pod):
                self._count_failure(state, pod)
            else:
                continue
            self._release(pod)
        if state.spec["completionMode"] == "Indexed":
            completed = {index for index in completed if index < state.spec["completions"]}
            state.status["completedIndexes"] = format_indexes(completed)
            state.status["succeeded"] = len(completed)
        state.pods = owned(self._tools.store, POD, state.job)

    def _has_failed(self, state: JobState, pod: Object) -> bool:
        if pod["status"]["phase"] == "Failed":
            return True
        # Under the policy Failed, a pod counts when it has ended; otherwise as soon as it is being deleted.
        return state.spec["podReplacementPolicy"] != "Failed" and "deletionTimestamp" in pod["metadata"]

    def _count_success(self, state: JobState, pod: Object, completed: set[int]) -> None:
        if state.spec["completionMode"] == "Indexed":
            completed.add(index_of(pod))
        else:
            state.status["succeeded"] = state.status.get("succeeded", 0) + 1

    def _count_failure(self, state: JobState, pod: Object) -> None:
        number, rule, message = match_rule(state.spec.get("podFailurePolicy", {}).get("rules", []), pod)
        if rule is not None and rule["action"] == "Ignore":
            return
        state.status["failed"] = state.status.get("failed", 0) + 1
        if rule is not None and rule["action"] == "FailJob" and not state.holds("FailureTarget"):
            self._set(state, "FailureTarget", "PodFailurePolicy", f"{message} matching FailJob rule at index {number}")

    def _judge(self, state: JobState) -> None:
        """Decide whether the job has failed or succeeded; its final condition follows once its pods have ended."""
        if state.holds("FailureTarget") or state.holds("SuccessCriteriaMet"):
            return
        limit = state.spec["backoffLimit"]
        restarts = sum(container["restartCount"] for pod in state.active for container in _statuses(pod))
        on_failure = state.spec["template"]["spec"]["restartPolicy"] == "OnFailure"
        if state.status.get("failed", 0) > limit or (on_failure and restarts and restarts >= limit):
            self._set(state, "FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif self._is_late(state):
            self._set(state, "FailureTarget", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif self._is_complete(state):
            text = "Reached expected number of succeeded pods"
            self._set(state, "SuccessCriteriaMet", "CompletionsReached", text)

    def _is_late(self, state: JobState) -> bool:
        allowed = state.spec.get("activeDeadlineSeconds")
        if allowed is None or state.spec["suspend"]:
            return False
        due = seconds(state.status["startTime"]) + allowed
        state.due.append(due)
        return bool(self._tools.now() >= due)

    def _is_complete(self, state: JobState) -> bool:
        succeeded, wanted = state.status.get("succeeded", 0), state.spec.get("completions")
        if wanted is None:
            return succeeded > 0 and not state.active
        return bool(succeeded >= wanted)

    def _act(self, state: JobState) -> None:
        if state.holds("FailureTarget") or state.holds("SuccessCriteriaMet"):
            self._delete(state, state.active)
            if not state.terminating:
                self._conclude(state)
        elif state.spec["suspend"]:
            self._suspend(state)
        else:
            self._resume(state)
            self._fill(state)

    def _conclude(self, state: JobState) -> None:
        target = "FailureTarget" if state.holds("FailureTarget") else "SuccessCriteriaMet"
        why = condition({"status": state.status}, target) or {}
        kind = "Failed" if target == "FailureTarget" else "Complete"
        self._set(state, kind, why["reason"], why["message"])
        state.due = [self._tools.now()] if "ttlSecondsAfterFinished" in state.spec else []
        if kind == "Complete":
            state.status["completionTime"] = self._tools.stamp()
            self._tell(state, "Normal", "Completed", "Job completed")
        else:
            self._tell(state, "Warning", why["reason"], why["message"])

    def _suspend(self, state: JobState) -> None:
        self._delete(state, state.active)
        state.status.pop("startTime", None)
        if not state.holds("Suspended"):
            self._set(state, "Suspended", "JobSuspended", "Job suspended")
            self._tell(state, "Normal", "Suspended", "Job suspended")

    def _resume(self, state: JobState) -> None:
        if state.holds("Suspended"):
            self._set(state, "Suspended", "JobResumed", "Job resumed", "False")
            state.status["startTime"] = self._tools.stamp()
            self._tell(state, "Normal", "Resumed", "Job resumed")

    def _fill(self, state: JobState) -> None:
        """Create missing pods and delete surplus pods."""
        wanted = self._wanted(state)
        active = state.active
        if len(active) > wanted:
            surplus = sorted(active, key=lambda pod: (is_ready(pod), pod["status"]["phase"] == "Running"))
            self._delete(state, surplus[: len(active) - wanted])
            return
        missing = wanted - len(active)
        if state.spec["podReplacementPolicy"] == "Failed":
            missing -= len(state.terminating)
        if missing <= 0:
            return
        if (due := self._next_start(state)) > self._tools.now():
            state.due.append(due)
            return
        for index in self._free_indexes(state, missing):
            if self._create(state, index) is None:
                state.due.append(self._tools.now() + self._tools.config.job_backoff_seconds)
                return

    def _wanted(self, state: JobState) -> int:
        parallelism, completions = state.spec["parallelism"], state.spec.get("completions")
        succeeded = state.status.get("succeeded", 0)
        if completions is None:
            return len(state.active) if succeeded else int(parallelism)
        return int(min(parallelism, completions - succeeded))

    def _next_start(self, state: JobState) -> float:
        """When the next pod may start: after a delay that doubles with each failure since the last success."""
        ends = [(_ended_at(pod), pod["status"]["phase"] == "Failed") for pod in state.pods if is_finished(pod)]
        last_success = max((at for at, failed in ends if not failed), default=0.0)
        failures = [at for at, failed in ends if failed and at >= last_success]
        if not failures:
            return 0.0
        delay = self._tools.config.job_backoff_seconds * 2.0 ** min(len(failures) - 1, 20)
        return max(failures) + min(delay, LONGEST_BACKOFF_SECONDS)

    def _free_indexes(self, state: JobState, count: int) -> list[int | None]:
        if state.spec["completionMode"] != "Indexed":
            return [None] * count
        taken = parse_indexes(state.status.get("completedIndexes", ""))
        busy = state.active + (state.terminating if state.spec["podReplacementPolicy"] == "Failed" else [])
        taken |= {index_of(pod) for pod in busy}
        free: list[int | None] = [index for index in range(state.spec["completions"]) if index not in taken]
        return free[:count]

    def _create(self, state: JobState, index: int | None) -> Object | None:
        name = state.job["metadata"]["name"]
        template = state.spec["template"]
        metadata: dict[str, Any] = {"generateName": f"{name}-", "finalizers": [TRACKING]}
        if index is not None:
            metadata["generateName"] = f"{name}-{index}-"
            metadata["labels"] = metadata["annotations"] = {COMPLETION_INDEX: str(index)}
            template = _indexed(template, f"{name}-{index}")
        pod = make_pod(self._tools, JOB, state.job, template, metadata)
        if pod is not None:
            state.pods.append(pod)
        return pod

    def _delete(self, state: JobState, pods: list[Object]) -> None:
        """Delete pods. Their finalizer is removed first, because a pod that the job itself ends is not a failure."""
        for pod in pods:
            self._release(pod)
            delete_pod(self._tools, JOB, state.job, pod)
        if pods:
            state.pods = owned(self._tools.store, POD, state.job)

    def _release(self, pod: Object) -> None:
        self._tools.objects.remove_finalizer(POD, pod, TRACKING)

    def _set(self, state: JobState, kind: str, reason: str, message: str, value: str = "True") -> None:
        now = self._tools.stamp()
        set_condition(state.status, kind, value, reason, message, now, lastProbeTime=now)

    def _tell(self, state: JobState, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(JOB, state.job, event_type, reason, message, COMPONENT)

    def _write(self, state: JobState) -> None:
        active = state.active
        state.status["ready"] = sum(1 for pod in active if is_ready(pod))
        state.status["terminating"] = len(state.terminating)
        state.status.pop("active", None)
        if active:
            state.status["active"] = len(active)
        self._tools.store.replace(JOB, {**state.job, "status": state.status})


def match_rule(rules: list[Object], pod: Object) -> tuple[int, Object | None, str]:
    """(index, rule, reason) of the first rule of a pod failure policy that a failed pod matches, or (-1, None, "")."""
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(rules):
        for pattern in rule.get("onPodConditions", ()):
            if condition_status(pod, pattern["type"]) == pattern["status"]:
                return number, rule, f"Pod {name} has condition {pattern['type']}"
        codes = rule.get("onExitCodes", {})
        for status in _statuses(pod) if codes else ():
            code = status.get("state", {}).get("terminated", {}).get("exitCode", 0)
            named = codes.get("containerName", status["name"]) == status["name"]
            if code and named and (code in codes["values"]) is (codes["operator"] == "In"):
                return number, rule, f"Container {status['name']} for pod {name} failed with exit code {code}"
    return -1, None, ""


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][COMPLETION_INDEX])


def parse_indexes(text: str) -> set[int]:
    """ "0-2,4" as a set."""
    indexes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes


def format_indexes(indexes: set[int]) -> str:
    """The inverse of `parse_indexes`: three or more consecutive indexes become a range."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    joint = {0: "", 1: ","}
    return ",".join(
        str(first) if first == last else f"{first}{joint.get(last - first, '-')}{last}" for first, last in parts
    )


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _ended_at(pod: Object) -> float:
    ends = [container.get("state", {}).get("terminated", {}).get("finishedAt") for container in _statuses(pod)]
    times = [seconds(end) for end in ends if end]
    return max(times, default=seconds(pod["metadata"].get("creationTimestamp") or timestamp(0)))


def _indexed(template: Object, hostname: str) -> Object:
    """The template for an index: its containers get JOB_COMPLETION_INDEX, its pod a separate hostname."""
    template = copy.deepcopy(template)
    template["spec"].setdefault("hostname", hostname)
    variable = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}},
    }
    for container in [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]:
        env = container.setdefault("env", [])
        if all(entry["name"] != variable["name"] for entry in env):
            env.append(variable)
    return template
