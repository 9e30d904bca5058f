"""RayJobs: a cluster for the job, the job in it, and the cluster's end with the job's (KubeRay's rayjob_controller.go).

One worker per RayJob, because it has to wait for Ray's answers; a worker writes down what it will do before it does it,
so that the next stack's worker goes on from there.
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

from ..controllers.owned import Tools, owned, owner_reference
from ..kinds import POD, RAY_CLUSTER, RAY_JOB, SECRET
from ..objects import DeleteOptions, random_suffix
from ..ports import Ports
from ..refusals import Refusal
from ..store import Change, Object
from ..times import seconds, timestamp
from . import pods
from .dashboard import Dashboard, DashboardError
from .rules import job_problem

log = logging.getLogger(__name__)

COMPONENT = "rayjob-controller"
FINALIZER = "ray.io/rayjob-finalizer"
JOB_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
ENDED = ("Complete", "Failed")
DEADLINE, UNREACHABLE = "DeadlineExceeded", "JobStatusCheckTimeoutExceeded"
FINAL = (DEADLINE, UNREACHABLE)  # reasons for which a job is not retried
FAILURE_SECONDS = 5.0


class RayJobs:
    """The workers of one cluster's RayJobs."""

    def __init__(self, tools: Tools, ports: Ports, session: aiohttp.ClientSession) -> None:
        self.tools = tools
        self.ports = ports
        self.session = session
        self._workers: dict[str, RayJobWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for job in self.tools.store.items(RAY_JOB):
            self._look_at(job)

    async def stop(self) -> None:
        """Stop watching; the jobs go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_change(self, change: Change) -> None:
        if change.kind == RAY_JOB:
            if change.body is not None:
                self._look_at(change.body)
            self._poke(change.item["metadata"]["uid"])
        elif change.kind == RAY_CLUSTER:
            for reference in change.item["metadata"].get("ownerReferences", ()):
                self._poke(reference["uid"])

    def _poke(self, uid: str) -> None:
        if worker := self._workers.get(uid):
            worker.poked.set()

    def _look_at(self, job: Object) -> None:
        uid = job["metadata"]["uid"]
        if uid in self._workers:
            return
        worker = self._workers[uid] = RayJobWorker(self, job)
        task = asyncio.get_running_loop().create_task(self._work(uid, worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, uid: str, worker: RayJobWorker) -> None:
        try:
            await worker.run()
        finally:
            del self._workers[uid]


class RayJobWorker:
    """Takes one RayJob from state to state until it is gone."""

    def __init__(self, jobs: RayJobs, job: Object) -> None:
        self._tools = jobs.tools
        self._ports = jobs.ports
        self._session = jobs.session
        self._job = job  # as it was last seen
        self.poked = asyncio.Event()

    async def run(self) -> None:
        while True:
            self.poked.clear()
            metadata = self._job["metadata"]
            job = self._tools.store.find(RAY_JOB, metadata["namespace"], metadata["name"])
            if job is None or job["metadata"]["uid"] != metadata["uid"]:
                return
            self._job = job
            try:
                again = await self._reconcile()
            except Exception:
                # One job that cannot be handled must not stop the others.
                log.exception("RayJob %s failed", metadata["name"])
                again = self._tools.now() + FAILURE_SECONDS
            await self._sleep(again)

    async def _reconcile(self) -> float | None:
        """One step; when to look again whatever happens."""
        if "deletionTimestamp" in self._job["metadata"]:
            await self._let_go()
            return None
        status = copy.deepcopy(self._job.get("status", {}))
        state = status.get("jobDeploymentStatus", "")
        if problem := job_problem(self._job):
            self._tell("Warning", "InvalidRayJobSpec", problem)
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
            self._release(status)
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
        """Names first, so that no job is submitted and no cluster made twice."""
        finalizers = self._job["metadata"].get("finalizers", [])
        if FINALIZER not in finalizers:
            metadata = {**self._job["metadata"], "finalizers": [*finalizers, FINALIZER]}
            self._job = self._tools.store.replace(RAY_JOB, {**self._job, "metadata": metadata})
        name = self._job["metadata"]["name"]
        status["jobId"] = status.get("jobId") or self._spec.get("jobId") or f"{name}-{random_suffix()}"
        status["rayClusterName"] = status.get("rayClusterName") or f"{name}-{random_suffix()}"
        status |= {"jobStatus": "", "jobDeploymentStatus": "Initializing", "startTime": self._tools.stamp()}

    def _initialize(self, status: Object) -> None:
        """Make the cluster, and wait until all of it is ready."""
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
        """Submit the job, unless Ray knows it, and copy its status."""
        if self._suspends(status) or self._is_late(status) or self._is_unreachable(status):
            return
        cluster = self._cluster(status) or self._make_cluster(status)
        if cluster is None:
            return
        status["rayClusterStatus"] = cluster.get("status", {})
        try:
            dashboard = self._dashboard(cluster)
            found = await dashboard.job(status["jobId"])
            if found is None:
                await dashboard.submit(self._request(status))
        except DashboardError as error:
            log.info("RayJob %s: %s", self._job["metadata"]["name"], error)
            status.setdefault("jobStatusCheckFailureStartTime", self._tools.stamp())
            return
        status.pop("jobStatusCheckFailureStartTime", None)
        if found is not None:
            self._copy(status, found)

    def _copy(self, status: Object, found: Object) -> None:
        ended = found["status"] in JOB_ENDED
        failed = found["status"] == "FAILED"
        status |= {
            "jobStatus": found["status"],
            "jobDeploymentStatus": ("Failed" if failed else "Complete") if ended else "Running",
            "reason": "AppFailed" if failed else "",
            "message": found.get("message") or "",
        }
        times = {"startTime": found.get("start_time"), "endTime": found.get("end_time")}
        status["rayJobInfo"] = {name: timestamp(at / 1000) for name, at in times.items() if at}

    def _release(self, status: Object) -> None:
        """Delete the cluster, and only then start anew or stay suspended."""
        if self._delete_cluster(status):
            suspended = status["jobDeploymentStatus"] == "Suspending"
            for field in ("rayClusterStatus", "rayClusterName", "dashboardURL", "jobId", "message", "reason"):
                status.pop(field, None)
            for field in ("rayJobInfo", "jobStatusCheckFailureStartTime"):
                status.pop(field, None)
            status |= {"jobStatus": "", "jobDeploymentStatus": "Suspended" if suspended else ""}

    def _shut_down(self, status: Object) -> float | None:
        """The cluster's end, when its time is over; the RayJob stays."""
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
        if since is None or self._tools.now() < seconds(since) + allowed:
            return False
        message = f"Job status checks have been failing since {since}; exceeded timeout of {allowed:g}s"
        status |= {"jobDeploymentStatus": "Failed", "reason": UNREACHABLE, "message": message}
        return True

    def _count(self, status: Object) -> None:
        """Failures and successes; a failure that may be retried begins anew with another cluster."""
        state = status["jobDeploymentStatus"]
        status["failed"] = status.get("failed", 0) + (state == "Failed")
        status["succeeded"] = status.get("succeeded", 0) + (state == "Complete" and status["jobStatus"] == "SUCCEEDED")
        if state == "Failed" and status["failed"] <= self._spec["backoffLimit"] and status["reason"] not in FINAL:
            status["jobDeploymentStatus"] = "Retrying"

    def _cluster(self, status: Object) -> Object | None:
        return self._tools.store.find(RAY_CLUSTER, self._job["metadata"]["namespace"], status["rayClusterName"])

    def _make_cluster(self, status: Object) -> Object | None:
        """The cluster; None, with an event, when the API server refuses it."""
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
        """True once it is gone."""
        cluster = self._cluster(status)
        if cluster is None:
            return True
        if "deletionTimestamp" not in cluster["metadata"]:
            metadata = cluster["metadata"]
            options = DeleteOptions("Foreground")  # its pods first, so that gone means that nothing runs
            self._tools.objects.delete(RAY_CLUSTER, metadata["namespace"], metadata["name"], options)
            self._tell("Normal", "DeletedRayCluster", f"Deleted cluster {metadata['namespace']}/{metadata['name']}")
        return False

    def _dashboard(self, cluster: Object) -> Dashboard:
        """Raises DashboardError while the cluster has no head."""
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
        """As ConvertRayJobToReq makes it."""
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

    async def _let_go(self) -> None:
        """The RayJob is being deleted: stop the job if it may run, then no longer hold it."""
        status = self._job.get("status", {})
        finalizers = self._job["metadata"].get("finalizers", [])
        if FINALIZER not in finalizers:
            return
        cluster = self._cluster(status) if "rayClusterName" in status else None
        if cluster and status.get("jobStatus") not in JOB_ENDED:
            with contextlib.suppress(DashboardError):
                await self._dashboard(cluster).stop(status["jobId"])
        with self._tools.store.db.transaction():
            metadata = self._job["metadata"]
            latest = self._tools.store.find(RAY_JOB, metadata["namespace"], metadata["name"])
            if latest is not None and latest["metadata"]["uid"] == metadata["uid"]:
                held = latest["metadata"]["finalizers"]
                latest["metadata"]["finalizers"] = [one for one in held if one != FINALIZER]
                self._tools.objects.settle(RAY_JOB, latest)

    def _write(self, status: Object) -> None:
        """Only what somebody acts on makes a write: states, and the cluster's status."""
        old = self._job.get("status", {})
        watched = ("jobStatus", "jobDeploymentStatus", "jobStatusCheckFailureStartTime")
        changed = any(old.get(field, "") != status.get(field, "") for field in watched)
        if not changed and _state(old) == _state(status):
            return
        if status["jobDeploymentStatus"] in ENDED:
            status["endTime"] = self._tools.stamp()
        status["observedGeneration"] = self._job["metadata"]["generation"]
        metadata = self._job["metadata"]
        with self._tools.store.db.transaction():
            latest = self._tools.store.find(RAY_JOB, metadata["namespace"], metadata["name"])
            if latest is not None and latest["metadata"]["uid"] == metadata["uid"]:
                kept = {name: value for name, value in status.items() if value != "" or name == "jobStatus"}
                self._tools.store.replace(RAY_JOB, {**latest, "status": kept})

    def _tell(self, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(RAY_JOB, self._job, event_type, reason, message, COMPONENT)

    async def _sleep(self, until: float | None) -> None:
        """Until something has changed, or the time has come."""
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.poked.wait())]
        if until is not None:
            waiting.append(asyncio.ensure_future(self._tools.clock.sleep_until(until)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _state(status: Object) -> str:
    return str(status.get("rayClusterStatus", {}).get("state", ""))


def _capital(field: str) -> str:
    return re.sub(r"^.", lambda match: match[0].upper(), field)
