"""Pods: phases and states, images, environment, volumes, restarts, endings, and their output."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import exceptions

from dropforge_local import shims

from .conftest import CONFIG, Kube, make_container


def state(pod: Any) -> Any:
    return pod.status.container_statuses[0].state


def reason_of(pod: Any) -> str:
    if not pod.status.container_statuses:
        return ""
    current = state(pod).waiting or state(pod).terminated
    return current.reason if current else "Running"


def wait_reason(kube: Kube, name: str, reason: str) -> Any:
    return kube.until(lambda: kube.pod(name), lambda pod: reason_of(pod) == reason)


def test_pod_passes_through_its_phases(kube: Kube) -> None:
    seen = []
    watcher = watch.Watch()

    def follow() -> None:
        for event in watcher.stream(kube.core.list_namespaced_pod, kube.namespace, timeout_seconds=200):
            seen.append(event["object"].status.phase)
            if seen[-1] == "Succeeded":
                watcher.stop()

    follower = threading.Thread(target=follow)
    follower.start()
    kube.create_pod("a", "sleep", "0.2")
    follower.join(60)
    assert list(dict.fromkeys(seen)) == ["Pending", "Running", "Succeeded"]
    pod = kube.pod("a")
    assert (reason_of(pod), state(pod).terminated.exit_code) == ("Completed", 0)
    assert pod.status.container_statuses[0].image_id.startswith(
        "us-central1-docker.pkg.dev/p1/dropforge/train-job:v1@sha256:"
    )
    reasons = [reason for reason, _ in kube.events("a")]
    assert {"Scheduled", "Pulled", "Created", "Started"} <= set(reasons)


def test_failed_pods_report_the_reason(kube: Kube) -> None:
    kube.create_pod("a", "exit", "7", container={"terminationMessagePolicy": "FallbackToLogsOnError"})
    pod = kube.wait_pod("a", "Failed")
    assert (reason_of(pod), state(pod).terminated.exit_code) == ("Error", 7)
    assert state(pod).terminated.message == "index - exit\n"


def test_unknown_images_back_off(kube: Kube) -> None:
    kube.create_pod("a", container={"image": "nowhere/absent:v1"})
    pod = wait_reason(kube, "a", "ImagePullBackOff")
    assert pod.status.phase == "Pending"
    messages = [text for reason, text in kube.events("a") if reason == "Failed"]
    assert any("there is no containers/absent/Dockerfile" in text for text in messages)
    assert "Error: ErrImagePull" in messages
    with pytest.raises(exceptions.ApiException, match="is waiting to start"):
        kube.log("a")


def test_memory_above_the_limit_kills(kube: Kube) -> None:
    kube.create_pod("a", "hog", container={"resources": {"limits": {"memory": "100Mi"}}})
    pod = kube.wait_pod("a", "Failed")
    assert (reason_of(pod), state(pod).terminated.exit_code) == ("OOMKilled", 137)


def test_restarts_follow_the_policy(kube: Kube) -> None:
    kube.create_pod("a", "exit", "1", restartPolicy="Always")
    pod = kube.until(
        lambda: kube.pod("a"),
        lambda pod: pod.status.container_statuses and pod.status.container_statuses[0].restart_count >= 2,
    )
    assert pod.status.phase == "Running"
    assert pod.status.container_statuses[0].last_state.terminated.exit_code == 1
    wait_reason(kube, "a", "CrashLoopBackOff")
    assert kube.log("a", previous=True) == "index - exit\n"
    assert "BackOff" in dict(kube.events("a"))


def test_environment_combines_its_sources(kube: Kube) -> None:
    kube.core.create_namespaced_secret(kube.namespace, {"metadata": {"name": "hf"}, "stringData": {"token": "s3cret"}})
    kube.core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "conf"}, "data": {"LR": "1e-4"}})
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "RATE", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "LR"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "X", "optional": True}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "BOTH", "value": "$(POD)/$(RATE) $$(POD) $(UNKNOWN)"},
        {"name": "MASTER", "value": "job-0.mesh:29500"},
    ]
    container = {
        "env": env,
        "envFrom": [{"prefix": "C_", "configMapRef": {"name": "conf"}}],
        "ports": [{"containerPort": 8000}],
        "resources": {"limits": {"cpu": "1500m", "nvidia.com/gpu": "2"}},
    }
    selector = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    kube.create_pod(
        "a", "env", "$(POD)", container=container, labels={"team": "x"}, subdomain="mesh", nodeSelector=selector
    )
    kube.wait_pod("a", "Succeeded")
    _, variables, words = kube.log("a").splitlines()
    environment = json.loads(variables)
    assert (environment["HF_TOKEN"], environment["RATE"], environment["C_LR"], environment["POD"]) == (
        "s3cret",
        "1e-4",
        "1e-4",
        "a",
    )
    assert (environment["BOTH"], environment["LABEL"], environment["CPUS"]) == ("a/1e-4 $(POD) $(UNKNOWN)", "x", "2")
    assert (environment["HOSTNAME"], environment["DROPFORGE_LOCAL_GPUS"]) == ("a", "2")
    host, _, port = environment["MASTER"].partition(
        ":"
    )  # a port reserved for the service, because other jobs use this machine too
    assert (host, int(port) in CONFIG.pod_ports) == ("127.0.0.1", True)
    assert environment["PYTHONPATH"] == str(shims.DIRECTORY)  # GPUs are CPUs here
    assert environment["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:1"
    assert (
        environment["HOST"] == "127.0.0.1"
    )  # the address where a server should listen; PORT is its port of this machine
    assert "NONE" not in environment
    assert json.loads(words) == ["a"]


def test_missing_configuration_holds_a_container(kube: Kube) -> None:
    reference = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "late", "key": "k"}}}
    kube.create_pod("a", container={"env": [reference]})
    pod = wait_reason(kube, "a", "CreateContainerConfigError")
    assert state(pod).waiting.message == 'secret "late" not found'
    kube.core.create_namespaced_secret(kube.namespace, {"metadata": {"name": "late"}, "stringData": {"k": "v"}})
    kube.wait_pod("a", "Succeeded")


def test_containers_share_volumes(kube: Kube) -> None:
    kube.core.create_namespaced_secret(kube.namespace, {"metadata": {"name": "s"}, "stringData": {"key": "hidden"}})
    mounts = [{"name": "scratch", "mountPath": "/scratch"}, {"name": "secret", "mountPath": "/var/run/s"}]
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "secret", "secret": {"secretName": "s"}},
    ]
    kube.create_pod(
        "a",
        "read",
        "/scratch/file",
        initContainers=[make_container("write", "/scratch/file", "from init", name="init", volumeMounts=mounts)],
        container={"volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}]},
        volumes=volumes,
    )
    kube.create_pod("b", "read", "/var/run/s/key", container={"volumeMounts": mounts}, volumes=volumes)
    pod = kube.wait_pod("a", "Succeeded")
    assert kube.log("a", container="main").splitlines()[-1] == "from init"
    assert pod.status.init_container_statuses[0].state.terminated.exit_code == 0
    kube.wait_pod("b", "Succeeded")
    assert kube.log("b").splitlines()[-1] == "hidden"


def test_failing_init_containers_fail_the_pod(kube: Kube) -> None:
    kube.create_pod("a", initContainers=[make_container("exit", "4", name="init")])
    pod = kube.wait_pod("a", "Failed")
    assert reason_of(pod) == "PodInitializing"
    with pytest.raises(exceptions.ApiException, match="is waiting to start"):
        kube.log("a")
    assert kube.log("a", container="init") == "index - exit\n"


def test_volumes_that_cannot_be_mounted_keep_a_pod_waiting(kube: Kube) -> None:
    csi = {"name": "v", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}}
    kube.create_pod("a", volumes=[csi])
    text = kube.until(lambda: dict(kube.events("a")).get("FailedMount", ""), bool)
    assert "csi of gcsfuse.csi.storage.gke.io volumes are not emulated" in text
    assert kube.pod("a").status.phase == "Pending"
    kube.create_pod("b", volumes=[{"name": "v", "secret": {"secretName": "late"}}])
    kube.until(lambda: dict(kube.events("b")).get("FailedMount", ""), lambda text: 'secret "late" not found' in text)
    kube.core.create_namespaced_secret(kube.namespace, {"metadata": {"name": "late"}})
    kube.wait_pod("b", "Succeeded")


def test_deleted_pods_get_sigterm_then_sigkill(kube: Kube) -> None:
    kube.create_pod("polite", "polite", "0")
    kube.create_pod("stubborn", "stubborn", terminationGracePeriodSeconds=1)
    for name, line in (("polite", "waiting"), ("stubborn", "ignoring")):
        kube.until(
            lambda name=name: kube.pod(name).status.phase == "Running" and kube.log(name),  # type: ignore[misc]
            lambda log, line=line: log and line in log,  # type: ignore[misc]
        )
    started = time.monotonic()
    for name in ("polite", "stubborn"):
        kube.core.delete_namespaced_pod(name, kube.namespace)
    assert kube.pod("stubborn").metadata.deletion_grace_period_seconds == 1
    kube.until(kube.pods, lambda pods: not pods)
    assert time.monotonic() - started > 0.9


def test_grace_time_can_be_shortened(kube: Kube) -> None:
    kube.create_pod("a", "stubborn", terminationGracePeriodSeconds=60)
    kube.until(lambda: kube.pod("a").status.phase == "Running" and kube.log("a"), lambda log: log and "ignoring" in log)
    kube.core.delete_namespaced_pod("a", kube.namespace)
    assert kube.pod("a").metadata.deletion_timestamp
    kube.core.delete_namespaced_pod("a", kube.namespace, grace_period_seconds=0)
    kube.until(kube.pods, lambda pods: not pods)
    kube.until(kube.live, lambda live: not [name for name in live if name.startswith("container/a-")])


def test_pods_have_separate_deadlines(kube: Kube) -> None:
    kube.create_pod("a", "polite", "0", activeDeadlineSeconds=1)
    pod = kube.wait_pod("a", "Failed")
    assert pod.status.reason == "DeadlineExceeded"


def test_output_is_cut_and_followed(kube: Kube, tmp_path: Path) -> None:
    kube.create_pod("a", "count", "8", "0.3", str(tmp_path / "seen"))
    kube.wait_pod("a", "Running")
    (tmp_path / "seen").touch()
    followed = kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods/a/log?follow=true")[1]
    assert followed.splitlines() == ["index - count", *(f"line {number}" for number in range(8))]
    assert kube.log("a", tail_lines=2) == "line 6\nline 7\n"
    assert kube.log("a", limit_bytes=5) == "index"
    stamped = [line.split(" ", 1) for line in kube.log("a", timestamps=True).splitlines()]
    assert stamped[-1][1] == "line 7"
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", stamp) for stamp, _ in stamped)
    assert not all(stamp.endswith(".000000000Z") for stamp, _ in stamped)  # not whole seconds
    since = stamped[5][0]
    recent = kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods/a/log?sinceTime={since}")[1].splitlines()
    assert recent == [line for stamp, line in stamped if stamp >= since]
    assert kube.log("a", since_seconds=3600).splitlines() == followed.splitlines()
    with pytest.raises(exceptions.ApiException, match="is not valid for pod a"):
        kube.log("a", container="other")
    with pytest.raises(exceptions.ApiException, match="previous terminated container"):
        kube.log("a", previous=True)


def test_a_container_starts_after_its_pod_was_created(kube: Kube) -> None:
    """Many pods, because a kernel's time of a start is at most some hundredths of a second before the clock's."""
    for number in range(8):
        kube.create_pod(f"p{number}")
    for number in range(8):
        pod = kube.wait_pod(f"p{number}", "Succeeded")
        assert pod.metadata.creation_timestamp <= pod.status.container_statuses[0].state.terminated.started_at


def test_image_without_a_command_is_reported(kube: Kube) -> None:
    kube.create_pod("a", container={"command": ["/no/such/program"]})
    pod = kube.wait_pod("a", "Failed")
    assert state(pod).terminated.exit_code == 127
