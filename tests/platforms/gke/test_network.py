"""Which pods and clients reach which pods, by the namespace's NetworkPolicies and those of attempts.

The rules are Kubernetes': a pod that a policy selects is reached only as some policy allows; policies add up.
https://kubernetes.io/docs/concepts/services-networking/network-policies/
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from dropforge.platforms.gke.named import workload_of
from dropforge.platforms.gke.requests import MAIN_PORT, network_policies, requests
from dropforge.platforms.gke.workload import PORT, Workload, deployment_manifest, own_workload
from dropforge.platforms.named import Candidate
from dropforge.platforms.ray.requests import DASHBOARD_PORT
from dropforge.platforms.ray.requests import requests as ray_requests
from dropforge.platforms.serving import Deployment
from dropforge_local.stack.deployment import NAMESPACE, cluster_objects

from ...schemas import kubernetes as kubernetes_schemas
from ..ray.test_requests import launch as ray_launch
from .test_requests import SETTINGS, launch

GCS_PORT = 6379  # of Ray
OTHER_RUN = "other-0123456789ab"
STANDING = [item for item in cluster_objects() if item["kind"] == "NetworkPolicy"]
TWO_NODES = {"nodes": 2, "node_network": "tcp"}
SERVE = {"type": "gke"}


@dataclass(frozen=True)
class Pod:
    """A pod, or with an address a client outside of the cluster."""

    labels: dict[str, str]
    namespace: str = NAMESPACE
    address: str = ""


def reaches(policies: list[dict[str, Any]], client: Pod, server: Pod, port: int) -> bool:
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == server.namespace
        and is_selected(policy["spec"]["podSelector"], server.labels)
    ]
    rules = [rule for spec in selecting for rule in spec.get("ingress", ())]
    return not selecting or any(is_allowed(rule, client, server, port) for rule in rules)


def is_allowed(rule: dict[str, Any], client: Pod, server: Pod, port: int) -> bool:
    ports = [entry["port"] for entry in rule.get("ports", ())]
    return (not ports or port in ports) and any(is_peer(peer, client, server) for peer in rule["from"])


def is_peer(peer: dict[str, Any], client: Pod, server: Pod) -> bool:
    """An address range stands for clients outside of the cluster: https://docs.cilium.io/en/stable/security/policy/language/"""
    if "ipBlock" in peer:
        return bool(client.address) and ip_address(client.address) in ip_network(peer["ipBlock"]["cidr"])
    if client.address:
        return False
    if "namespaceSelector" in peer:
        named = {"kubernetes.io/metadata.name": client.namespace}
        return is_selected(peer["namespaceSelector"], named) and is_selected(peer.get("podSelector", {}), client.labels)
    return client.namespace == server.namespace and is_selected(peer["podSelector"], client.labels)


def is_selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    checks = {
        "Exists": lambda entry: entry["key"] in labels,
        "NotIn": lambda entry: labels.get(entry["key"]) not in entry["values"],
    }
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(checks[entry["operator"]](entry) for entry in selector.get("matchExpressions", ()))


def gke_attempt(run: str = "", attempt: int = 1) -> tuple[list[dict[str, Any]], Pod]:
    """The policies of an attempt on two nodes, and one of its pods."""
    made = replace(launch(TWO_NODES), attempt=attempt)
    made = replace(made, run=run) if run else made
    manifests = [resource.request for resource in requests(made)]
    policies = [item for item in manifests if item["kind"] == "NetworkPolicy"]
    return policies, Pod(manifests[-1]["spec"]["template"]["metadata"]["labels"])


def ray_attempt() -> tuple[list[dict[str, Any]], Pod, Pod]:
    """The policies of an attempt on Ray, its head and one of its hosts."""
    policy, job = (resource.request for resource in ray_requests(ray_launch()))
    cluster = job["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    return [policy], *(Pod(group["template"]["metadata"]["labels"]) for group in (head, workers))  # type: ignore[return-value]


def endpoint() -> Pod:
    made = launch(serve=SERVE)
    expires = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(hours=1)
    return pod_of(own_workload(Deployment(made.run, made.spec, SETTINGS, expires, made)))


def named_endpoint() -> Pod:
    """A pod of a revision of a named endpoint."""
    made = launch(serve={**SERVE, "endpoint": "text-to-sql"})
    deployment = Deployment(made.run, made.spec, SETTINGS, datetime(2026, 11, 20, tzinfo=UTC), made, "text-to-sql")
    return pod_of(workload_of(Candidate(made.run, 1, deployment)))


def pod_of(workload: Workload) -> Pod:
    manifest = deployment_manifest(workload)
    return Pod(manifest["spec"]["template"]["metadata"]["labels"])


def test_only_the_pods_of_an_attempt_reach_its_rendezvous() -> None:
    policies, pod = gke_attempt()
    others, other = gke_attempt(OTHER_RUN)
    later_policies, later = gke_attempt(attempt=2)
    everything = [*STANDING, *policies, *others, *later_policies]
    assert reaches(everything, pod, pod, MAIN_PORT)
    assert reaches(everything, pod, pod, 43210)  # NCCL chooses its ports
    strangers = [other, later, endpoint(), Pod({}, "default"), Pod(pod.labels, "default"), Pod({}, address="10.1.2.3")]
    assert [stranger for stranger in strangers if reaches(everything, stranger, pod, MAIN_PORT)] == []


def test_without_a_policy_of_its_own_nothing_reaches_a_pod() -> None:
    pod = Pod(gke_attempt()[1].labels)
    clients = [pod, endpoint(), Pod({}, "default"), Pod({}, address="10.1.2.3")]
    assert [client for client in clients if reaches(STANDING, client, pod, MAIN_PORT)] == []
    assert reaches([], endpoint(), pod, MAIN_PORT)  # so it was before


def test_a_ray_cluster_is_reached_by_its_own_pods_and_its_head_by_the_operator() -> None:
    policies, head, host = ray_attempt()
    everything = [*STANDING, *policies, *gke_attempt()[0]]
    operator = Pod({"app": "kuberay-operator"}, "ray-system")
    assert reaches(everything, host, head, GCS_PORT)
    assert reaches(everything, head, host, 10002)
    assert reaches(everything, operator, head, DASHBOARD_PORT)
    assert not reaches(everything, operator, head, GCS_PORT)
    strangers = [gke_attempt(OTHER_RUN)[1], endpoint(), Pod({}, address="10.1.2.3")]
    reached = [
        (s, port) for s in strangers for port in (GCS_PORT, DASHBOARD_PORT) if reaches(everything, s, head, port)
    ]
    assert reached == []


@pytest.mark.parametrize(
    ("client", "port", "is_reached"),
    [
        (Pod({}, address="10.1.2.3"), PORT, True),
        (Pod({}, address="100.64.0.9"), PORT, True),
        (Pod({}, address="8.8.8.8"), PORT, False),
        (Pod({}, address="10.1.2.3"), 22, False),
        (Pod({"app": "web"}, "default"), PORT, True),
        (Pod({"app": "web"}, "default"), MAIN_PORT, False),
        (gke_attempt()[1], PORT, False),
        (gke_attempt(OTHER_RUN)[1], PORT, False),
    ],
    ids=[
        "network",
        "shared-range",
        "internet",
        "other-port",
        "namespace",
        "namespace-port",
        "trainer",
        "other-trainer",
    ],
)
def test_clients_reach_an_endpoint_at_its_port_and_training_pods_do_not(
    client: Pod, port: int, is_reached: bool
) -> None:
    everything = [*STANDING, *gke_attempt()[0], *gke_attempt(OTHER_RUN)[0]]
    assert reaches(everything, client, endpoint(), port) is is_reached
    assert reaches(everything, client, named_endpoint(), port) is is_reached


def test_a_cluster_of_its_own_and_a_single_pod_need_no_policy() -> None:
    assert network_policies(launch({**TWO_NODES, "cluster": {"create": True}})) == []
    assert [resource.request["kind"] for resource in requests(launch())] == ["Job"]


def test_kubernetes_accepts_the_policies() -> None:
    for policy in [*STANDING, *gke_attempt()[0], *ray_attempt()[0]]:
        kubernetes_schemas.check(policy)
