"""Jobs: pods until enough have succeeded or too many have failed.

Pods carry a finalizer until they are counted; counting a pod and taking its finalizer away is one transaction here,
so no pod is counted twice or lost, whoever deletes it and whenever the stack is killed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..defaults import COMPLETION_INDEX, TRACKING
from ..kinds import JOB, POD
from ..objects import DeleteOptions
from ..store import Change, Object
from ..times import seconds, timestamp
from .loop import Key
from .owned import (
    Tools,
    all_keys,
    condition_status,
    controller_of,
    delete_pod,
    is_active,
    is_finished,
    is_ready,
    make_pod,
    own_keys,
    owned,
    set_condition,
)

LONGEST_BACKOFF_SECONDS = 360.0
COMPONENT = "job-controller"


@dataclass
class Look:
    """One look at a job: its pods, and the status that will be written."""

    job: Object
    pods: list[Object]
    status: Object
    again: list[float] = field(default_factory=list)

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


class JobController:
    """Reconciles one cluster's jobs."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        return own_keys(JOB, change)

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, JOB) + [
            (pod["metadata"]["namespace"], owner["name"])
            for pod in self._tools.store.items(POD)
            if (owner := controller_of(pod)) and owner["kind"] == "Job"
        ]

    def reconcile(self, key: Key) -> float | None:
        job = self._tools.store.find(JOB, *key)
        self._release_strays(key, job)
        if job is None or "deletionTimestamp" in job["metadata"]:
            return None
        look = Look(job, owned(self._tools.store, POD, job), copy.deepcopy(job.get("status", {})))
        if look.holds("Complete") or look.holds("Failed"):
            return self._finished(look)
        self._start(look)
        self._count(look)
        self._judge(look)
        self._act(look)
        self._write(look)
        return min(look.again, default=None)

    def _release_strays(self, key: Key, job: Object | None) -> None:
        """Pods of a job that is gone or going have nobody to be counted by."""
        for pod in self._tools.store.items(POD, key[0]):
            owner = controller_of(pod)
            if not owner or (owner["kind"], owner["name"]) != ("Job", key[1]):
                continue
            if job is None or owner["uid"] != job["metadata"]["uid"] or "deletionTimestamp" in job["metadata"]:
                self._release(pod)

    def _finished(self, look: Look) -> float | None:
        """Release what is left, and delete the job itself when its time to live is over."""
        for pod in look.pods:
            self._release(pod)
        status = {**look.status, "active": 0, "ready": 0, "terminating": len(look.terminating)}
        look.status = {key: value for key, value in status.items() if key != "active" or value}
        self._write(look)
        if (ttl := look.spec.get("ttlSecondsAfterFinished")) is None:
            return None
        ended = next(one for one in look.status["conditions"] if one["type"] in ("Complete", "Failed"))
        due = seconds(ended["lastTransitionTime"]) + float(ttl)
        if due > self._tools.now():
            return due
        metadata = look.job["metadata"]
        self._tools.objects.delete(JOB, metadata["namespace"], metadata["name"], DeleteOptions("Foreground"))
        return None

    def _start(self, look: Look) -> None:
        if not look.spec["suspend"]:
            look.status.setdefault("startTime", self._tools.stamp())
        look.status.setdefault("uncountedTerminatedPods", {})

    def _count(self, look: Look) -> None:
        """Take every pod that has ended into the counts, once."""
        completed = parse_indexes(look.status.get("completedIndexes", ""))
        for pod in look.pods:
            if TRACKING not in pod["metadata"].get("finalizers", ()):
                continue
            if pod["status"]["phase"] == "Succeeded":
                self._count_success(look, pod, completed)
            elif self._has_failed(look, pod):
                self._count_failure(look, pod)
            else:
                continue
            self._release(pod)
        if look.spec["completionMode"] == "Indexed":
            completed = {index for index in completed if index < look.spec["completions"]}
            look.status["completedIndexes"] = format_indexes(completed)
            look.status["succeeded"] = len(completed)
        look.pods = owned(self._tools.store, POD, look.job)

    def _has_failed(self, look: Look, pod: Object) -> bool:
        if pod["status"]["phase"] == "Failed":
            return True
        # Under the policy Failed a pod counts when it has ended; otherwise already when somebody deletes it.
        return look.spec["podReplacementPolicy"] != "Failed" and "deletionTimestamp" in pod["metadata"]

    def _count_success(self, look: Look, pod: Object, completed: set[int]) -> None:
        if look.spec["completionMode"] == "Indexed":
            completed.add(index_of(pod))
        else:
            look.status["succeeded"] = look.status.get("succeeded", 0) + 1

    def _count_failure(self, look: Look, pod: Object) -> None:
        number, rule, message = match_rule(look.spec.get("podFailurePolicy", {}).get("rules", []), pod)
        if rule is not None and rule["action"] == "Ignore":
            return
        look.status["failed"] = look.status.get("failed", 0) + 1
        if rule is not None and rule["action"] == "FailJob" and not look.holds("FailureTarget"):
            self._set_target(look, "PodFailurePolicy", f"{message} matching FailJob rule at index {number}")

    def _judge(self, look: Look) -> None:
        """Decide whether the job has failed or succeeded; its pods are ended first, the last word comes after."""
        if look.holds("FailureTarget") or look.holds("SuccessCriteriaMet"):
            return
        limit = look.spec["backoffLimit"]
        restarts = sum(one["restartCount"] for pod in look.active for one in _statuses(pod))
        on_failure = look.spec["template"]["spec"]["restartPolicy"] == "OnFailure"
        if look.status.get("failed", 0) > limit or (on_failure and restarts and restarts >= limit):
            self._set_target(look, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif self._is_late(look):
            self._set_target(look, "DeadlineExceeded", "Job was active longer than specified deadline")
        elif self._is_complete(look):
            set_condition(
                look.status,
                "SuccessCriteriaMet",
                "True",
                "CompletionsReached",
                "Reached expected number of succeeded pods",
                self._tools.stamp(),
                lastProbeTime=self._tools.stamp(),
            )

    def _is_late(self, look: Look) -> bool:
        allowed = look.spec.get("activeDeadlineSeconds")
        if allowed is None or look.spec["suspend"]:
            return False
        due = seconds(look.status["startTime"]) + allowed
        look.again.append(due)
        return bool(self._tools.now() >= due)

    def _is_complete(self, look: Look) -> bool:
        succeeded, wanted = look.status.get("succeeded", 0), look.spec.get("completions")
        if wanted is None:
            return succeeded > 0 and not look.active
        return bool(succeeded >= wanted)

    def _act(self, look: Look) -> None:
        if look.holds("FailureTarget") or look.holds("SuccessCriteriaMet"):
            self._delete(look, look.active)
            if not look.terminating:
                self._conclude(look)
        elif look.spec["suspend"]:
            self._suspend(look)
        else:
            self._resume(look)
            self._fill(look)

    def _conclude(self, look: Look) -> None:
        now = self._tools.stamp()
        target = "FailureTarget" if look.holds("FailureTarget") else "SuccessCriteriaMet"
        why = next(one for one in look.status["conditions"] if one["type"] == target)
        kind = "Failed" if target == "FailureTarget" else "Complete"
        set_condition(look.status, kind, "True", why["reason"], why["message"], now, lastProbeTime=now)
        look.again = [self._tools.now()] if "ttlSecondsAfterFinished" in look.spec else []
        if kind == "Complete":
            look.status["completionTime"] = now
            self._tell(look, "Normal", "Completed", "Job completed")
        else:
            self._tell(look, "Warning", why["reason"], why["message"])

    def _suspend(self, look: Look) -> None:
        self._delete(look, look.active)
        look.status.pop("startTime", None)
        if not look.holds("Suspended"):
            now = self._tools.stamp()
            set_condition(look.status, "Suspended", "True", "JobSuspended", "Job suspended", now, lastProbeTime=now)
            self._tell(look, "Normal", "Suspended", "Job suspended")

    def _resume(self, look: Look) -> None:
        if look.holds("Suspended"):
            now = self._tools.stamp()
            set_condition(look.status, "Suspended", "False", "JobResumed", "Job resumed", now, lastProbeTime=now)
            look.status["startTime"] = now
            self._tell(look, "Normal", "Resumed", "Job resumed")

    def _fill(self, look: Look) -> None:
        """Create the pods that are missing, delete those that are too many."""
        wanted = self._wanted(look)
        active = look.active
        if len(active) > wanted:
            surplus = sorted(active, key=lambda pod: (is_ready(pod), pod["status"]["phase"] == "Running"))
            self._delete(look, surplus[: len(active) - wanted])
            return
        missing = wanted - len(active)
        if look.spec["podReplacementPolicy"] == "Failed":
            missing -= len(look.terminating)
        if missing <= 0:
            return
        if (due := self._next_start(look)) > self._tools.now():
            look.again.append(due)
            return
        for index in self._free_indexes(look, missing):
            if self._create(look, index) is None:
                look.again.append(self._tools.now() + self._tools.config.job_backoff_seconds)
                return

    def _wanted(self, look: Look) -> int:
        parallelism, completions = look.spec["parallelism"], look.spec.get("completions")
        succeeded = look.status.get("succeeded", 0)
        if completions is None:
            return len(look.active) if succeeded else int(parallelism)
        return int(min(parallelism, completions - succeeded))

    def _next_start(self, look: Look) -> float:
        """Failed pods are replaced after a delay that doubles with each failure since the last success."""
        ends = [(_ended_at(pod), pod["status"]["phase"] == "Failed") for pod in look.pods if is_finished(pod)]
        last_success = max((at for at, failed in ends if not failed), default=0.0)
        failures = [at for at, failed in ends if failed and at >= last_success]
        if not failures:
            return 0.0
        delay = self._tools.config.job_backoff_seconds * 2.0 ** min(len(failures) - 1, 20)
        return max(failures) + min(delay, LONGEST_BACKOFF_SECONDS)

    def _free_indexes(self, look: Look, count: int) -> list[int | None]:
        if look.spec["completionMode"] != "Indexed":
            return [None] * count
        taken = parse_indexes(look.status.get("completedIndexes", ""))
        busy = look.active + (look.terminating if look.spec["podReplacementPolicy"] == "Failed" else [])
        taken |= {index_of(pod) for pod in busy}
        free: list[int | None] = [index for index in range(look.spec["completions"]) if index not in taken]
        return free[:count]

    def _create(self, look: Look, index: int | None) -> Object | None:
        name = look.job["metadata"]["name"]
        template = look.spec["template"]
        metadata: dict[str, Any] = {"generateName": f"{name}-", "finalizers": [TRACKING]}
        if index is not None:
            metadata["generateName"] = f"{name}-{index}-"
            metadata["labels"] = metadata["annotations"] = {COMPLETION_INDEX: str(index)}
            template = _indexed(template, f"{name}-{index}")
        pod = make_pod(self._tools, JOB, look.job, template, metadata)
        if pod is not None:
            look.pods.append(pod)
        return pod

    def _delete(self, look: Look, pods: list[Object]) -> None:
        """Pods that the job itself ends are not failures, so their finalizer goes first."""
        for pod in pods:
            self._release(pod)
            delete_pod(self._tools, JOB, look.job, pod)
        if pods:
            look.pods = owned(self._tools.store, POD, look.job)

    def _release(self, pod: Object) -> None:
        finalizers = pod["metadata"].get("finalizers", [])
        if TRACKING in finalizers:
            pod["metadata"]["finalizers"] = [one for one in finalizers if one != TRACKING]
            self._tools.objects.settle(POD, pod)

    def _set_target(self, look: Look, reason: str, message: str) -> None:
        now = self._tools.stamp()
        set_condition(look.status, "FailureTarget", "True", reason, message, now, lastProbeTime=now)

    def _tell(self, look: Look, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(JOB, look.job, event_type, reason, message, COMPONENT)

    def _write(self, look: Look) -> None:
        active = look.active
        look.status["ready"] = sum(1 for pod in active if is_ready(pod))
        look.status["terminating"] = len(look.terminating)
        look.status.pop("active", None)
        if active:
            look.status["active"] = len(active)
        self._tools.store.replace(JOB, {**look.job, "status": look.status})


def match_rule(rules: list[Object], pod: Object) -> tuple[int, Object | None, str]:
    """The first rule of a pod failure policy that a failed pod matches: its index, itself, and why."""
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
    """The inverse of `parse_indexes`: three and more in a row become a range, two do not."""
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
    ends = [one.get("state", {}).get("terminated", {}).get("finishedAt") for one in _statuses(pod)]
    times = [seconds(end) for end in ends if end]
    return max(times, default=seconds(pod["metadata"].get("creationTimestamp") or timestamp(0)))


def _indexed(template: Object, hostname: str) -> Object:
    """The template of one index: its containers learn which they are, and have a name of their own."""
    template = copy.deepcopy(template)
    template["spec"].setdefault("hostname", hostname)
    variable = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{COMPLETION_INDEX}']"}},
    }
    for container in [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]:
        env = container.setdefault("env", [])
        if all(one["name"] != variable["name"] for one in env):
            env.append(variable)
    return template
