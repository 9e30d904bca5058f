"""RayJobs: create a cluster for the job, run the job in it, delete the cluster afterwards (rayjob_controller.go).

Each RayJob has a worker, because it must wait for Ray's answers. A worker records each step before it acts, so that the
worker of the next stack continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import re
from base64 import b64decode
from typing import Any

import aiohttp
import yaml

from ...kit.background import Background, first
from ..controllers.owned import Tools, owned, owner_reference
from ..kinds import POD, RAY_CLUSTER, RAY_JOB, SECRET
from ..objects import DeleteOptions, random_suffix
from ..ports import Ports
from ..rayrules import job_problem
from ..refusals import Refusal
from ..store import Change, Object
from ..times import seconds, timestamp
from . import pods
from .dashboard import Dashboard, DashboardError

log = logging.getLogger(__name__)

COMPONENT = "rayjob-controller"
FINALIZER = "ray.io/rayjob-finalizer"
JOB_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
ENDED = ("Complete", "Failed")
DEADLINE, UNREACHABLE = "DeadlineExceeded", "JobStatusCheckTimeoutExceeded"
FINAL = (DEADLINE, UNREACHABLE)  # a job that failed for these reasons is not retried
FAILURE_SECONDS = 5.0
# Fields of a status that belong to one attempt.
ATTEMPT_FIELDS = (
    "rayClusterStatus", "rayClusterName", "dashboardURL", "jobId", "message", "reason", "rayJobInfo",
    "jobStatusCheckFailureStartTime",
)  # fmt: skip


class RayJobs:
    """The workers of a cluster's RayJobs."""

    def __init__(self, tools: Tools, ports: Ports, session: aiohttp.ClientSession) -> None:
        self.tools = tools
        self.ports = ports
        self.session = session
        self._workers: dict[str, RayJobWorker] = {}
        self._background = Background("RayJobs")

    def start(self) -> None:
        for job in self.tools.store.items(RAY_JOB):
            self._ensure_worker(job)

    async def stop(self) -> None:
        """Stop watching; the jobs continue."""
        await self._background.stop()

    def on_change(self, change: Change) -> None:
        if change.kind == RAY_JOB:
            if change.body is not None:
                self._ensure_worker(change.body)
            self._poke(change.item["metadata"]["uid"])
        elif change.kind == RAY_CLUSTER:
            for reference in change.item["metadata"].get("ownerReferences", ()):
                self._poke(reference["uid"])

    def _poke(self, uid: str) -> None:
        if worker := self._workers.get(uid):
            worker.poked.set()

    def _ensure_worker(self, job: Object) -> None:
        uid = job["metadata"]["uid"]
        if uid in self._workers:
            return
        worker = self._workers[uid] = RayJobWorker(self, job)
        self._background.spawn(self._work(uid, worker))

    async def _work(self, uid: str, worker: RayJobWorker) -> None:
        try:
            await worker.run()
        finally:
            del self._workers[uid]


class RayJobWorker:
    """Takes a RayJob from state to state until it is deleted."""

    def __init__(self, jobs: RayJobs, job: Object) -> None:
        self._tools = jobs.tools
        self._ports = jobs.ports
        self._session = jobs.session
        self._job = job  # as last read
        self.poked = asyncio.Event()

    async def run(self) -> None:
        while True:
            self.poked.clear()
            job = self._tools.store.latest(RAY_JOB, self._job)
            if job is None:
                return
            self._job = job
            try:
                again = await self._reconcile()
            except Exception:
                log.exception("RayJob %s failed; trying again", job["metadata"]["name"])
                again = self._tools.now() + FAILURE_SECONDS
            timers = [] if again is None else [self._tools.clock.sleep_until(again)]
            await first(self.poked.wait(), *timers)

    async def _reconcile(self) -> float | None:
        """Do the next step; return when to continue even without a change, or None."""
        if "deletionTimestamp" in self._job["metadata"]:
            await self._release_job()
            return None
        status = copy.deepcopy(self._job.get("status", {}))
        state = status.get("jobDeploymentStatus", "")
        if problem := job_problem(self._job):
            self._tell("Warning", "InvalidRayJobSpec", problem)
            if not self._tools.config.ray_operator.validation_failed:
                return None
            status |= {"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed", "message": problem}
            self._write(status)
            return None
        if state == "Suspended" and self._spec.get("suspend"):
            return None
        if state in ENDED:
            return self._shut_down(status)
        if state == "":
            self._begin(status)
        elif state == "Initializing":
            self._initialize(status)
        elif state == "Running":
            await self._follow(status)
        elif state in ("Suspending", "Retrying"):
            self._restart(status)
        elif state == "Suspended":
            status |= {"jobStatus": "", "jobDeploymentStatus": ""}
        self._count(status)
        self._write(status)
        return self._tools.now() + self._tools.config.ray_poll_seconds

    @property
    def _spec(self) -> Object:
        spec: Object = self._job["spec"]
        return spec

    def _begin(self, status: Object) -> None:
        """Record the names first, so that no job is submitted and no cluster created twice."""
        finalizers = self._job["metadata"].get("finalizers", [])
        if FINALIZER not in finalizers:
            metadata = {**self._job["metadata"], "finalizers": [*finalizers, FINALIZER]}
            self._job = self._tools.store.replace(RAY_JOB, {**self._job, "metadata": metadata})
        name = self._job["metadata"]["name"]
        status["jobId"] = status.get("jobId") or self._spec.get("jobId") or f"{name}-{random_suffix()}"
        status["rayClusterName"] = status.get("rayClusterName") or f"{name}-{random_suffix()}"
        status |= {"jobStatus": "", "jobDeploymentStatus": "Initializing", "startTime": self._tools.stamp()}

    def _initialize(self, status: Object) -> None:
        """Create the cluster and wait until all of its pods are ready."""
        if self._suspends(status) or self._is_late(status) or self._is_late_to_run(status):
            return
        cluster = self._cluster(status) or self._make_cluster(status)
        if cluster is None:
            return
        status["rayClusterStatus"] = cluster.get("status", {})
        if cluster.get("status", {}).get("state") == "ready":
            namespace = self._job["metadata"]["namespace"]
            host = pods.service_host(pods.head_service_name(cluster["metadata"]["name"]), namespace)
            status |= {"dashboardURL": f"{host}:{pods.DASHBOARD}", "jobDeploymentStatus": "Running"}

    async def _follow(self, status: Object) -> None:
        """Submit the job unless Ray knows it, and copy its status."""
        if self._suspends(status) or self._is_late(status) or self._is_unreachable(status):
            return
        cluster = self._cluster(status) or self._make_cluster(status)
        if cluster is None:
            return
        status["rayClusterStatus"] = cluster.get("status", {})
        try:
            dashboard = self._dashboard(cluster)
            record = await dashboard.job(status["jobId"])
            if record is None:
                await dashboard.submit(self._request(status))
        except DashboardError as error:
            log.info("RayJob %s: %s", self._job["metadata"]["name"], error)
            status.setdefault("jobStatusCheckFailureStartTime", self._tools.stamp())
            return
        status.pop("jobStatusCheckFailureStartTime", None)
        if record is not None:
            self._copy(status, record)

    def _copy(self, status: Object, record: Object) -> None:
        ended = record["status"] in JOB_ENDED
        failed = record["status"] == "FAILED"
        status |= {
            "jobStatus": record["status"],
            "jobDeploymentStatus": ("Failed" if failed else "Complete") if ended else "Running",
            "reason": "AppFailed" if failed else "",
            "message": record.get("message") or "",
        }
        times = {"startTime": record.get("start_time"), "endTime": record.get("end_time")}
        status["rayJobInfo"] = {name: timestamp(at / 1000) for name, at in times.items() if at}

    def _restart(self, status: Object) -> None:
        """Delete the cluster, then start again or stay suspended."""
        if self._delete_cluster(status):
            suspended = status["jobDeploymentStatus"] == "Suspending"
            for field in ATTEMPT_FIELDS:
                status.pop(field, None)
            status |= {"jobStatus": "", "jobDeploymentStatus": "Suspended" if suspended else ""}

    def _shut_down(self, status: Object) -> float | None:
        """Delete the cluster when its time to live has passed; the RayJob stays."""
        if not self._spec["shutdownAfterJobFinishes"]:
            return None
        due = seconds(status["endTime"]) + float(self._spec["ttlSecondsAfterFinished"])
        if due > self._tools.now():
            return due
        self._delete_cluster(status)
        return None

    def _suspends(self, status: Object) -> bool:
        if self._spec.get("suspend"):
            status["jobDeploymentStatus"] = "Suspending"
        return bool(self._spec.get("suspend"))

    def _is_late(self, status: Object) -> bool:
        return self._is_over(status, "activeDeadlineSeconds", DEADLINE)

    def _is_late_to_run(self, status: Object) -> bool:
        return self._is_over(status, "preRunningDeadlineSeconds", "PreRunningDeadlineExceeded")

    def _is_over(self, status: Object, field: str, reason: str) -> bool:
        allowed = self._spec.get(field)
        if allowed is None or self._tools.now() < seconds(status["startTime"]) + allowed:
            return False
        message = f"The RayJob has passed the {field}. StartTime: {status['startTime']}. {_capital(field)}: {allowed}"
        status |= {"jobDeploymentStatus": "Failed", "reason": reason, "message": message}
        return True

    def _is_unreachable(self, status: Object) -> bool:
        since, allowed = status.get("jobStatusCheckFailureStartTime"), self._tools.config.ray_status_seconds
        if since is None or not self._tools.config.ray_operator.status_timeout:
            return False
        if self._tools.now() < seconds(since) + allowed:
            return False
        message = f"Job status checks have been failing since {since}; exceeded timeout of {allowed:g}s"
        status |= {"jobDeploymentStatus": "Failed", "reason": UNREACHABLE, "message": message}
        return True

    def _count(self, status: Object) -> None:
        """Count failures and successes; a failure that may be retried starts again with a new cluster."""
        state = status["jobDeploymentStatus"]
        status["failed"] = status.get("failed", 0) + (state == "Failed")
        status["succeeded"] = status.get("succeeded", 0) + (state == "Complete" and status["jobStatus"] == "SUCCEEDED")
        if state == "Failed" and status["failed"] <= self._spec["backoffLimit"] and status["reason"] not in FINAL:
            status["jobDeploymentStatus"] = "Retrying"

    def _cluster(self, status: Object) -> Object | None:
        return self._tools.store.find(RAY_CLUSTER, self._job["metadata"]["namespace"], status["rayClusterName"])

    def _make_cluster(self, status: Object) -> Object | None:
        """Create the cluster; if the API server refuses it, record an event and return None."""
        metadata = self._job["metadata"]
        labels = {
            **metadata.get("labels", {}),
            "ray.io/originated-from-cr-name": metadata["name"],
            "ray.io/originated-from-crd": "RayJob",
            "ray.io/job-submission-mode": self._spec["submissionMode"],
        }
        cluster = {
            "apiVersion": RAY_CLUSTER.api_version,
            "kind": RAY_CLUSTER.name,
            "metadata": {
                "name": status["rayClusterName"],
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": metadata.get("annotations", {}),
                "ownerReferences": [owner_reference(RAY_JOB, self._job)],
            },
            "spec": copy.deepcopy(self._spec["rayClusterSpec"]),
        }
        named = f"{metadata['namespace']}/{status['rayClusterName']}"
        try:
            made = self._tools.objects.create(RAY_CLUSTER, metadata["namespace"], cluster)
        except Refusal as refusal:
            text = f"Failed to create RayCluster {named}: {refusal.message}"
            self._tell("Warning", "FailedToCreateRayCluster", text)
            return None
        self._tell("Normal", "CreatedRayCluster", f"Created RayCluster {named}")
        return made

    def _delete_cluster(self, status: Object) -> bool:
        """Whether the cluster no longer exists; delete it otherwise."""
        cluster = self._cluster(status)
        if cluster is None:
            return True
        if "deletionTimestamp" not in cluster["metadata"]:
            metadata = cluster["metadata"]
            # Foreground deletes the pods first: once the cluster no longer exists, no pod runs.
            self._tools.objects.delete_item(RAY_CLUSTER, cluster, DeleteOptions("Foreground"))
            self._tell("Normal", "DeletedRayCluster", f"Deleted cluster {metadata['namespace']}/{metadata['name']}")
        return False

    def _dashboard(self, cluster: Object) -> Dashboard:
        """The API of the cluster's head. Raises DashboardError while the cluster has no head."""
        for pod in owned(self._tools.store, POD, cluster):
            if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.HEAD:
                port = self._ports.find(self._tools.store.cluster, pod["metadata"]["uid"], pods.DASHBOARD)
                if port is not None:
                    return Dashboard(self._session, port, self._token(cluster))
        raise DashboardError("the cluster has no head")

    def _token(self, cluster: Object) -> str:
        if not pods.has_token(cluster):
            return ""
        secret = self._tools.store.find(SECRET, cluster["metadata"]["namespace"], pods.token_secret(cluster))
        return b64decode((secret or {}).get("data", {}).get(pods.TOKEN_KEY, "")).decode()

    def _request(self, status: Object) -> dict[str, Any]:
        """The submission request, as KubeRay's ConvertRayJobToReq creates it."""
        spec = self._spec
        request = {
            "entrypoint": spec.get("entrypoint", ""),
            "submission_id": status["jobId"],
            "metadata": spec.get("metadata"),
            "runtime_env": yaml.safe_load(spec["runtimeEnvYAML"]) if spec.get("runtimeEnvYAML") else None,
            "entrypoint_num_cpus": spec.get("entrypointNumCpus"),
            "entrypoint_num_gpus": spec.get("entrypointNumGpus"),
            "entrypoint_resources": json.loads(spec["entrypointResources"])
            if spec.get("entrypointResources")
            else None,
        }
        return {name: value for name, value in request.items() if value is not None}

    async def _release_job(self) -> None:
        """For a RayJob in deletion: stop the job if it may run, then remove the finalizer."""
        status = self._job.get("status", {})
        if FINALIZER not in self._job["metadata"].get("finalizers", []):
            return
        cluster = self._cluster(status) if "rayClusterName" in status else None
        if cluster and status.get("jobStatus") not in JOB_ENDED:
            with contextlib.suppress(DashboardError):
                await self._dashboard(cluster).stop(status["jobId"])
        with self._tools.store.db.transaction():
            if latest := self._tools.store.latest(RAY_JOB, self._job):
                self._tools.objects.remove_finalizer(RAY_JOB, latest, FINALIZER)

    def _write(self, status: Object) -> None:
        """Write the status if a field that callers use has changed: a state, or the cluster's state."""
        old = self._job.get("status", {})
        watched = ("jobStatus", "jobDeploymentStatus", "jobStatusCheckFailureStartTime")
        changed = any(old.get(field, "") != status.get(field, "") for field in watched)
        if not changed and _state(old) == _state(status):
            return
        if status["jobDeploymentStatus"] in ENDED:
            status["endTime"] = self._tools.stamp()
        status["observedGeneration"] = self._job["metadata"]["generation"]
        with self._tools.store.db.transaction():
            if latest := self._tools.store.latest(RAY_JOB, self._job):
                kept = {name: value for name, value in status.items() if value != "" or name == "jobStatus"}
                self._tools.store.replace(RAY_JOB, {**latest, "status": kept})

    def _tell(self, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(RAY_JOB, self._job, event_type, reason, message, COMPONENT)


def _state(status: Object) -> str:
    return str(status.get("rayClusterStatus", {}).get("state", ""))


def _capital(field: str) -> str:
    return re.sub(r"^.", lambda match: match[0].upper(), field)
