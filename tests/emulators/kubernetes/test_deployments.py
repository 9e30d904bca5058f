"""Deployments: rollouts without a gap, probes, and the ways to reach a service."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from kubernetes.client import exceptions

from .conftest import Kube, make_deployment


def create(kube: Kube, name: str = "d", replicas: int = 1, **more: Any) -> Any:
    return kube.apps.create_namespaced_deployment(kube.namespace, make_deployment(name, replicas, **more))


def rolled_out(kube: Kube, name: str = "d") -> Any:
    """The deployment once its rollout is complete, by the rules of `kubectl rollout status`."""

    def done(item: Any) -> bool:
        status, wanted = item.status, item.spec.replicas
        counts = (status.updated_replicas or 0, status.replicas or 0, status.available_replicas or 0)
        return status.observed_generation == item.metadata.generation and counts == (wanted, wanted, wanted)

    return kube.until(lambda: kube.apps.read_namespaced_deployment(name, kube.namespace), done)


def expose(kube: Kube, name: str = "d", **spec: Any) -> str:
    """Create a service for a deployment; return its URL on this machine."""
    body = {
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": "http"}], **spec},
    }
    kube.core.create_namespaced_service(kube.namespace, body)

    def url() -> str:
        annotations = kube.core.read_namespaced_service(name, kube.namespace).metadata.annotations or {}
        return str(json.loads(annotations.get("local.dropforge/urls", "{}")).get("80", ""))

    return str(kube.until(url, bool))


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


def conditions(item: Any) -> dict[str, tuple[str, str]]:
    return {entry.type: (entry.status, entry.reason) for entry in item.status.conditions or []}


def sets(kube: Kube) -> dict[int, int]:
    """The wanted replicas of each revision."""
    items = kube.apps.list_namespaced_replica_set(kube.namespace).items
    return {int(item.metadata.annotations["deployment.kubernetes.io/revision"]): item.spec.replicas for item in items}


def test_a_deployment_keeps_its_pods(kube: Kube) -> None:
    create(kube, replicas=2)
    item = rolled_out(kube)
    assert conditions(item)["Available"] == ("True", "MinimumReplicasAvailable")
    assert conditions(item)["Progressing"] == ("True", "NewReplicaSetAvailable")
    victim = kube.pods()[0].metadata
    kube.core.delete_namespaced_pod(victim.name, kube.namespace)
    kube.until(kube.pods, lambda pods: len(pods) == 2 and victim.uid not in {pod.metadata.uid for pod in pods})
    rolled_out(kube)
    kube.apps.patch_namespaced_deployment("d", kube.namespace, {"spec": {"replicas": 0}})
    kube.until(kube.pods, lambda pods: not pods)


def test_deleting_a_deployment_deletes_its_pods(kube: Kube) -> None:
    create(kube)
    rolled_out(kube)
    kube.apps.delete_namespaced_deployment("d", kube.namespace)
    kube.until(kube.pods, lambda pods: not pods)
    kube.until(lambda: sets(kube), lambda remaining: not remaining)
    assert not [name for name in kube.live() if kube.namespace in name]


def test_rollouts_leave_no_gap(kube: Kube) -> None:
    create(kube, env={"VERSION": "one"})
    rolled_out(kube)
    url = expose(kube)
    stop, answers = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(get(url).split()[0])
            except (OSError, http.client.HTTPException) as error:
                answers.append(f"error: {error}")

    asking = threading.Thread(target=ask)
    asking.start()
    kube.until(lambda: list(answers), bool)
    patch = {
        "spec": {
            "template": {"spec": {"containers": [{"name": "server", "env": [{"name": "VERSION", "value": "two"}]}]}}
        }
    }
    kube.apps.patch_namespaced_deployment("d", kube.namespace, patch)
    rolled_out(kube)
    kube.until(lambda: answers[-1], lambda last: last == "two")
    stop.set()
    asking.join(60)
    # Requests in flight at the SIGTERM of their pod may fail, as in Kubernetes without a preStop hook.
    assert len([answer for answer in answers if answer.startswith("error")]) <= 2
    assert sets(kube) == {1: 0, 2: 1}


def test_a_changed_selector_moves_new_connections_and_leaves_the_others(kube: Kube) -> None:
    """A patch that names an old resourceVersion changes nothing."""
    for name in ("one", "two"):
        create(kube, name, env={"VERSION": name})
        rolled_out(kube, name)
    url = expose(kube, "one")
    kept = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask() -> str:
        kept.request("GET", "/")
        return kept.getresponse().read().decode().split()[0]

    assert (ask(), get(url).split()[0]) == ("one", "one")
    version = kube.core.read_namespaced_service("one", kube.namespace).metadata.resource_version

    def select(app: str) -> None:
        change = {"metadata": {"resourceVersion": version}, "spec": {"selector": {"app": app}}}
        kube.core.patch_namespaced_service("one", kube.namespace, change)

    select("two")
    assert get(url).split()[0] == "two"
    assert ask() == "one", "a connection stays with its pod"
    with pytest.raises(exceptions.ApiException) as refused:
        select("one")
    assert refused.value.status == 409
    assert get(url).split()[0] == "two"
    kept.close()


def test_an_ending_pod_gets_no_requests_and_its_container_runs_until_its_pre_stop_hook_ends(kube: Kube) -> None:
    hook = {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    made = make_deployment("d", container=hook)
    made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30
    kube.apps.create_namespaced_deployment(kube.namespace, made)
    rolled_out(kube)
    url = expose(kube)
    (pod,) = kube.pods()
    began = time.monotonic()
    kube.apps.delete_namespaced_deployment("d", kube.namespace)
    kube.until(lambda: kube.pods()[0].metadata.deletion_timestamp if kube.pods() else "gone", bool)
    with pytest.raises(OSError):
        get(url)
    kube.until(kube.pods, lambda pods: pod.metadata.uid not in {each.metadata.uid for each in pods})
    assert time.monotonic() - began >= 1


def test_bad_rollouts_stop_and_are_undone(kube: Kube) -> None:
    create(kube, replicas=2, progressDeadlineSeconds=1)
    rolled_out(kube)

    def set_image(image: str) -> None:
        patch = {"spec": {"template": {"spec": {"containers": [{"name": "server", "image": image}]}}}}
        kube.apps.patch_namespaced_deployment("d", kube.namespace, patch)

    good = kube.apps.read_namespaced_deployment("d", kube.namespace).spec.template.spec.containers[0].image
    set_image("nowhere/absent:v2")
    item = kube.until(
        lambda: kube.apps.read_namespaced_deployment("d", kube.namespace),
        lambda item: conditions(item)["Progressing"][1] == "ProgressDeadlineExceeded",
    )
    assert (item.status.available_replicas, item.status.updated_replicas) == (2, 1)
    set_image(good)
    rolled_out(kube)
    assert sets(kube) == {2: 0, 3: 2}


def test_recreation_ends_old_pods_first(kube: Kube) -> None:
    create(kube, strategy={"type": "Recreate"})
    old = rolled_out(kube) and kube.pods()[0].metadata.uid
    patch = {"spec": {"template": {"metadata": {"annotations": {"v": "2"}}}}}
    kube.apps.patch_namespaced_deployment("d", kube.namespace, patch)
    most = []

    def new_one() -> bool:
        pods = kube.pods()
        most.append(len(pods))
        return bool(pods) and pods[0].metadata.uid != old and pods[0].status.phase == "Running"

    kube.until(new_one, bool)
    assert max(most) == 1


def test_only_ready_pods_get_requests(kube: Kube) -> None:
    create(kube, env={"WARM_UP": "0.6"})
    url = expose(kube)
    pod = kube.until(kube.pods, lambda pods: pods and pods[0].status.phase == "Running")[0]
    assert pod.status.container_statuses[0].ready is False
    with pytest.raises((OSError, urllib.error.URLError)):
        get(url)
    code, body, _ = kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/services/d:80/proxy/")
    assert (code, body["message"]) == (503, 'no endpoints available for service "d"')
    rolled_out(kube)
    assert get(f"{url}/x").endswith("/x")
    assert any("503" in text for reason, text in kube.events(pod.metadata.name) if reason == "Unhealthy")


def test_sick_containers_are_restarted(kube: Kube) -> None:
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1, "failureThreshold": 1}
    probe["initialDelaySeconds"] = 1  # or it would be killed before it listens
    create(kube, container={"livenessProbe": probe})
    rolled_out(kube)
    get(f"{expose(kube)}/sicken")
    kube.until(lambda: kube.pods()[0].status.container_statuses[0].restart_count, lambda count: count == 1)
    rolled_out(kube)


def test_startup_probe_allows_a_slow_start(kube: Kube) -> None:
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1, "failureThreshold": 3}
    create(
        kube, env={"WARM_UP": "1"}, container={"startupProbe": probe, "livenessProbe": {**probe, "failureThreshold": 1}}
    )
    rolled_out(kube)
    assert kube.pods()[0].status.container_statuses[0].restart_count == 0


def test_api_proxies_requests_to_services(kube: Kube) -> None:
    create(kube, env={"VERSION": "v"})
    rolled_out(kube)
    expose(kube, type="LoadBalancer")
    base = f"/api/v1/namespaces/{kube.namespace}/services"
    for name in ("d", "d:80"):
        code, text, _ = kube.call("GET", f"{base}/{name}/proxy/some/path?q=1")
        assert (code, text.split()[-1]) == (200, "/some/path?q=1")
    assert kube.call("POST", f"{base}/d/proxy/", b"hello", "text/plain")[:2] == (201, "hello")
    pod = kube.pods()[0].metadata.name
    assert kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods/{pod}:8000/proxy/p")[1].endswith("/p")
    ingress = kube.core.read_namespaced_service("d", kube.namespace).status.load_balancer.ingress
    assert ingress[0].ip == "127.0.0.1"
    assert kube.call("GET", f"{base}/absent/proxy/")[0] == 404


def test_replicas_have_separate_ports(kube: Kube) -> None:
    create(kube, replicas=3)
    rolled_out(kube)
    url = expose(kube)
    names = {get(url).split()[0] for _ in range(12)}
    assert names == {pod.metadata.name for pod in kube.pods()}


def test_services_stop_listening_when_deleted(kube: Kube) -> None:
    create(kube)
    rolled_out(kube)
    url = expose(kube)
    kube.core.delete_namespaced_service("d", kube.namespace)

    def refused() -> bool:
        try:
            get(url)
        except OSError:
            return True
        return False

    kube.until(refused, bool)


def test_broken_pod_template_is_reported(kube: Kube) -> None:
    body = make_deployment("d")
    body["spec"]["selector"]["matchLabels"] = {"app": "other"}
    with pytest.raises(exceptions.UnprocessableEntityException, match="does not match template"):
        kube.apps.create_namespaced_deployment(kube.namespace, body)
