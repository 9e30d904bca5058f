"""Exec probes: the program runs in the container's own files, and only if the image has the program."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import psutil
import pytest

from .conftest import REGISTRY, Kube, Running, make_pod

BARE = "FROM python:3.11-slim\n"
FILES = 'WORKDIR /app\nCOPY containers/train_job/main.py /app/main.py\nENTRYPOINT ["python", "-S", "/app/main.py"]\n'
WGET = "RUN apt-get update \\\n && apt-get install --yes --no-install-recommends wget=1.21.3-1 \\\n && apt-get clean\n"
needs_wget = pytest.mark.skipif(shutil.which("wget") is None, reason="this machine has no wget")


@pytest.fixture(scope="module", autouse=True)
def images(running: Running) -> None:
    """Two images that differ in one program."""
    for role, text in {"probe_bare": BARE + FILES, "probe_wget": BARE + WGET + FILES}.items():
        folder = running.home / "repo" / "containers" / role
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(text)


def start(kube: Kube, command: list[str], image: str = "probe-bare", probe: str = "readinessProbe", **more: Any) -> str:
    """A pod whose container sleeps and has one exec probe."""
    values = {"exec": {"command": command}, "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 20, **more}
    container = {"image": f"{REGISTRY}/{image}:v1", probe: values, "env": [{"name": "WHO", "value": "me"}]}
    manifest = make_pod(f"p-{kube.namespace}", "sleep", "600", container=container)
    return str(kube.core.create_namespaced_pod(kube.namespace, manifest).metadata.name)


def is_ready(kube: Kube, name: str) -> bool:
    status = kube.pod(name).status.container_statuses
    return bool(status and status[0].ready)


def events_of(kube: Kube, reason: str) -> str:
    return "\n".join(message for found, message in kube.events() if found == reason)


def times(kube: Kube, reason: str) -> int:
    items = kube.core.list_namespaced_event(kube.namespace).items
    return sum(event.count for event in items if event.reason == reason)


def sleeping(kube: Kube) -> list[str]:
    """The command lines of the container's processes that belong to a probe."""
    lines = []
    for pid in kube.processes():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(psutil.Process(pid).cmdline()))
    return [line for line in lines if "4242" in line]


def test_a_probe_runs_in_the_containers_own_files_and_environment(kube: Kube) -> None:
    command = ["bash", "-c", "test -f /app/main.py && test -f main.py && test $WHO = me && python -c 'import os'"]
    name = start(kube, command)
    kube.until(lambda: is_ready(kube, name), bool)


def test_a_probe_decides_readiness_both_ways(kube: Kube) -> None:
    name = start(kube, ["cat", "/app/healthy"])
    text = kube.until(lambda: events_of(kube, "Unhealthy"), bool)
    assert "Readiness probe failed: " in text
    assert "healthy: No such file or directory" in text
    assert not is_ready(kube, name)
    (rootfs,) = kube.directory.glob(f"{name}-*/rootfs")
    (rootfs / "app" / "healthy").touch()
    kube.until(lambda: is_ready(kube, name), bool)
    (rootfs / "app" / "healthy").unlink()
    kube.until(lambda: not is_ready(kube, name), bool)


@needs_wget
def test_a_program_of_this_machine_that_the_image_lacks_is_not_found(kube: Kube) -> None:
    name = start(kube, ["bash", "-c", "wget --version | grep Wget"])
    text = kube.until(lambda: events_of(kube, "Unhealthy"), bool)
    assert "wget: command not found" in text
    assert not is_ready(kube, name)


@needs_wget
def test_a_program_that_the_dockerfile_installs_is_found(kube: Kube) -> None:
    name = start(kube, ["bash", "-c", "wget --version | grep Wget"], "probe-wget")
    kube.until(lambda: is_ready(kube, name), bool)


def test_a_program_that_cannot_be_started_never_kills_the_container(kube: Kube) -> None:
    name = start(kube, ["none-such"], probe="livenessProbe")
    text = kube.until(lambda: events_of(kube, "Unhealthy"), bool)
    assert "Liveness probe failed: failed to exec in container: 'none-such': No such file" in text
    kube.until(lambda: times(kube, "Unhealthy"), lambda count: count > 2)
    assert kube.pod(name).status.container_statuses[0].restart_count == 0
    assert "Killing" not in {reason for reason, _ in kube.events()}


def test_a_liveness_probe_that_fails_ends_the_container(kube: Kube) -> None:
    name = start(kube, ["false"], probe="livenessProbe")
    kube.until(lambda: events_of(kube, "Killing"), bool)
    # SIGTERM (143) ends a program that does not ignore it yet, and SIGKILL (137) one that does.
    assert kube.wait_pod(name, "Failed").status.container_statuses[0].state.terminated.exit_code in (137, 143)


def test_a_probe_that_takes_too_long_is_killed_with_its_children(kube: Kube) -> None:
    start(kube, ["bash", "-c", "sleep 4242 & wait"], timeoutSeconds=1)
    text = kube.until(lambda: events_of(kube, "Unhealthy"), bool)
    assert "timed out after 1 s" in text

    kube.until(lambda: times(kube, "Unhealthy"), lambda count: count > 2)
    assert len(sleeping(kube)) <= 2, "at most the running probe: its shell and the sleep"


@pytest.mark.parametrize("probe", [{"exec": {}}, {"exec": {"command": []}}])
def test_a_probe_without_a_command_is_refused(kube: Kube, probe: dict[str, Any]) -> None:
    manifest = make_pod("p", container={"livenessProbe": probe})
    code, answer, _ = kube.call("POST", f"/api/v1/namespaces/{kube.namespace}/pods", manifest)
    assert code == 422
    assert "livenessProbe.exec.command" in answer["message"]
