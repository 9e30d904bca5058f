"""The cluster that every stack has: service accounts, access, logs, and the state after a restart."""

from __future__ import annotations

import shutil
import subprocess
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dropforge_local.stack import control as local
from dropforge_local.stack.deployment import CLUSTER, IMAGES
from dropforge_local.stack.logs import read_log

from .clusters import Clusters
from .conftest import User

VARIABLES = ("STORAGE_EMULATOR_HOST", "PUBSUB_EMULATOR_HOST", "SECRET_MANAGER_EMULATOR_HOST", "DROPFORGE_LOCAL_GPUS")
SCRIPT = f"import os, time; print(*[os.environ[name] for name in {VARIABLES}], flush=True); time.sleep(600)"


def make_job(account: str) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": f"{IMAGES}/train-noop:test",
        "command": ["python", "-S", "-c", SCRIPT],
        "resources": {"limits": {"nvidia.com/gpu": "2"}},
    }
    pod = {
        "serviceAccountName": account,
        "restartPolicy": "Never",
        "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        "containers": [container],
    }
    return {"metadata": {"name": account}, "spec": {"template": {"spec": pod}}}


@pytest.mark.slow
def test_pods_end_with_the_stack_and_their_jobs_and_logs_remain(own_stack: Callable[[], User]) -> None:
    user = own_stack()
    clusters = Clusters(user.info)
    assert [name for name, _ in clusters.names()] == [CLUSTER]
    cluster = clusters.gke.get_cluster(name=CLUSTER)
    jobs = f"apis/batch/v1/namespaces/{user.settings.kubernetes_namespace}/jobs"
    for account in (user.settings.kubernetes_trainer_account, "unknown"):
        clusters.call(cluster, "POST", jobs, make_job(account))
    name = f"{CLUSTER}/k8s/namespaces/dropforge/batch/jobs/dropforge-trainer"
    user.until(lambda: read_log(user.info.http, name))
    http, environment = user.info.http, user.info.environment
    log = read_log(http, name)
    assert log
    storage, pubsub, secrets, last = log.split()
    assert (storage, last) == (secrets, "2")
    assert http != storage, "the trainer has addresses of its own"
    assert pubsub != environment["PUBSUB_EMULATOR_HOST"]
    events = clusters.call(
        cluster, "GET", "api/v1/namespaces/dropforge/events?fieldSelector=involvedObject.name%3Dunknown"
    )
    message = 'error looking up service account dropforge/unknown: serviceaccount "unknown" not found'
    assert any(message in event["message"] for event in events["items"])

    left = local.leftovers(user.state)
    assert len(left.processes) > 1
    assert [name.partition("/jobs.batch/")[2] for name in left.resources if "jobs.batch" in name] == [
        "dropforge/dropforge-trainer", "dropforge/unknown",
    ]  # fmt: skip
    assert any("dropforge-trainer" in line for line in local.down(user.state))
    left = local.leftovers(user.state)
    assert (left.processes, left.ports) == ([], [])

    restarted = own_stack()
    clusters = Clusters(restarted.info)
    assert clusters.gke.get_cluster(name=CLUSTER).endpoint == cluster.endpoint
    for account in ("dropforge-trainer", "unknown"):
        clusters.delete(f"{CLUSTER}/k8s/namespaces/dropforge/batch/jobs/{account}")
    restarted.until(lambda: not local.leftovers(restarted.state).resources)
    assert (read_log(restarted.info.http, name) or "").startswith(storage)
    assert read_log(restarted.info.http, name.replace("batch/jobs", "core/services")) is None


def test_the_cluster_refuses_another_token(user: User) -> None:
    environment = {**user.info.environment, "DROPFORGE_EMULATOR_TOKEN": "wrong"}
    clusters = Clusters(replace(user.info, environment=environment))
    cluster = clusters.gke.get_cluster(name=CLUSTER)
    with pytest.raises(urllib.error.HTTPError) as refused:
        clusters.call(cluster, "GET", "api/v1/namespaces")
    with refused.value as error:
        assert error.code == 401


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_has_a_configuration(user: User) -> None:
    command = ["kubectl", "--kubeconfig", str(user.state / "kubeconfig"), "get", "serviceaccounts", "-o", "name"]
    accounts = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "serviceaccount/dropforge-trainer" in accounts.splitlines()
    assert (user.state / "kubeconfig").stat().st_mode & 0o77 == 0
