"""Gateways and routes of the emulated clusters: what the API refuses, weights, health checks, timeouts and statuses."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import pytest

from .conftest import Kube, make_deployment

ROUTES, POLICIES = "/apis/gateway.networking.k8s.io/v1", "/apis/networking.gke.io/v1"


def deployment(kube: Kube, name: str, **environment: str) -> None:
    """A server that names its VERSION, and its Service. Its pod is ready once it listens."""
    labels = {"app": name}
    probe = {"tcpSocket": {"port": "http"}, "periodSeconds": 1}
    variables = {"VERSION": name, **environment}
    body = make_deployment(name, env=variables, container={"readinessProbe": probe})
    kube.apps.create_namespaced_deployment(kube.namespace, body)
    service = {"selector": labels, "ports": [{"port": 8000, "targetPort": "http"}]}
    kube.core.create_namespaced_service(kube.namespace, {"metadata": {"name": name}, "spec": service})


def gateway(kube: Kube) -> str:
    """A Gateway in the namespace of the test; return its URL."""
    listeners = [{"name": "http", "protocol": "HTTP", "port": 80}]
    body = {"metadata": {"name": "g"}, "spec": {"gatewayClassName": "gke-l7-rilb", "listeners": listeners}}
    assert kube.call("POST", f"{ROUTES}/namespaces/{kube.namespace}/gateways", body)[0] == 201
    found = kube.until(lambda: get(kube, "gateways", "g"), lambda item: item.get("status", {}).get("addresses"))
    assert {each["type"] for each in found["status"]["conditions"]} == {"Accepted", "Programmed"}
    return f"http://{found['status']['addresses'][0]['value']}"


def get(kube: Kube, plural: str, name: str) -> Any:
    return kube.call("GET", f"{ROUTES}/namespaces/{kube.namespace}/{plural}/{name}")[1]


def rule(weights: dict[str, int], path: str = "/m/v1", replaced: str = "/v1") -> dict[str, Any]:
    rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": replaced}}
    return {
        "matches": [{"path": {"type": "PathPrefix", "value": path}}],
        "filters": [{"type": "URLRewrite", "urlRewrite": rewrite}],
        "backendRefs": [{"name": name, "port": 8000, "weight": weight} for name, weight in weights.items()],
    }


def route(kube: Kube, rules: list[Any], name: str = "r") -> tuple[int, Any]:
    body = {"metadata": {"name": name}, "spec": {"parentRefs": [{"name": "g"}], "rules": rules}}
    code, answer, _ = kube.call("POST", f"{ROUTES}/namespaces/{kube.namespace}/httproutes", body)
    return code, answer


def patch(kube: Kube, rules: list[Any], **metadata: Any) -> int:
    path = f"{ROUTES}/namespaces/{kube.namespace}/httproutes/r"
    body = {"metadata": metadata, "spec": {"rules": rules}}
    return kube.call("PATCH", path, body, "application/merge-patch+json")[0]


def policy(kube: Kube, kind: str, plural: str, service: str, default: dict[str, Any]) -> int:
    target = {"group": "", "kind": "Service", "name": service}
    body = {"kind": kind, "metadata": {"name": service}, "spec": {"targetRef": target, "default": default}}
    return kube.call("POST", f"{POLICIES}/namespaces/{kube.namespace}/{plural}", body)[0]


def check_health(kube: Kube, service: str) -> None:
    config = {"type": "HTTP", "httpHealthCheck": {"requestPath": "/health"}}
    assert policy(kube, "HealthCheckPolicy", "healthcheckpolicies", service, {"config": config}) == 201


def conditions(kube: Kube) -> dict[str, tuple[str, int]]:
    """The status and the observed generation of each condition of the route."""
    parents = get(kube, "httproutes", "r").get("status", {}).get("parents") or [{}]
    return {each["type"]: (each["status"], each["observedGeneration"]) for each in parents[0].get("conditions", ())}


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_requests_are_split_by_weights_that_take_effect_late(kube: Kube) -> None:
    for name in ("one", "two"):
        deployment(kube, name)
        check_health(kube, name)
    url = gateway(kube)
    assert route(kube, [rule({"one": 100, "two": 0})])[0] == 201
    kube.until(lambda: ask(f"{url}/m/v1/a"), lambda answer: answer[0] == 200)
    assert conditions(kube) == dict.fromkeys(("Accepted", "ResolvedRefs", "Reconciled"), ("True", 1))
    _, body = ask(f"{url}/m/v1/a?b=c")
    assert body.split()[0] == "one"
    assert body.split()[2] == "/v1/a?b=c", "the pod does not see the prefix"
    assert ask(f"{url}/other")[0] == 404
    assert ask(f"{url}/m/v1x")[0] == 404, "a prefix matches whole parts of a path"
    annotation = kube.core.read_namespaced_service("two", kube.namespace).metadata.annotations
    assert json.loads(annotation["cloud.google.com/neg-status"])["network_endpoint_groups"]["8000"].startswith("k8s1-")
    version = get(kube, "httproutes", "r")["metadata"]["resourceVersion"]
    assert patch(kube, [rule({"one": 50, "two": 50})]) == 200
    assert conditions(kube)["Reconciled"][1] == 1, "the load balancer takes a change later"
    assert ask(f"{url}/m/v1/a")[1].split()[0] == "one"
    assert patch(kube, [rule({"one": 1})], resourceVersion=version) == 409
    kube.until(lambda: conditions(kube)["Reconciled"], lambda found: found == ("True", 2))

    def shares() -> Counter[str]:
        return Counter(ask(f"{url}/m/v1/a")[1].split()[0] for _ in range(100))

    kube.until(shares, lambda found: 25 <= found["two"] <= 75)


def test_a_route_to_a_service_that_does_not_exist_is_not_taken(kube: Kube) -> None:
    deployment(kube, "one")
    check_health(kube, "one")
    url = gateway(kube)
    route(kube, [rule({"one": 1})])
    kube.until(lambda: ask(f"{url}/m/v1/a"), lambda answer: answer[0] == 200)
    assert patch(kube, [rule({"one": 0, "none": 1})]) == 200
    kube.until(lambda: conditions(kube), lambda found: found["ResolvedRefs"] == ("False", 2))
    assert conditions(kube)["Reconciled"] == ("False", 2)
    assert ask(f"{url}/m/v1/a")[0] == 200, "the load balancer keeps what it had"


def test_only_pods_that_pass_the_health_check_get_requests(kube: Kube) -> None:
    """The default check is of `/`. A Service whose pods are ready may have none that the load balancer takes."""
    deployment(kube, "one", WARM_UP="600")
    deployment(kube, "two", WARM_UP="600")
    check_health(kube, "two")
    url = gateway(kube)
    route(kube, [rule({"one": 1}), rule({"two": 1}, "/two/v1")])
    kube.until(lambda: ask(f"{url}/m/v1/a"), lambda answer: answer[0] == 200)
    assert ask(f"{url}/two/v1/a") == (503, "no healthy upstream\n")


def test_an_answer_is_cut_at_the_timeout_of_the_backend(kube: Kube) -> None:
    deployment(kube, "one")
    deployment(kube, "two")
    assert policy(kube, "GCPBackendPolicy", "gcpbackendpolicies", "one", {"timeoutSec": 1}) == 201
    url = gateway(kube)
    route(kube, [rule({"one": 1}), rule({"two": 1}, "/two/v1")])
    kube.until(lambda: ask(f"{url}/two/v1/slow"), lambda answer: answer[0] == 200)
    kube.until(lambda: ask(f"{url}/m/v1/a"), lambda answer: answer[0] == 200)
    assert ask(f"{url}/m/v1/slow")[0] == 504


@pytest.mark.parametrize(
    ("kind", "plural", "default"),
    [
        ("GCPBackendPolicy", "gcpbackendpolicies", {"timeoutSec": 0}),
        ("GCPBackendPolicy", "gcpbackendpolicies", {"connectionDraining": {"drainingTimeoutSec": 3601}}),
        ("HealthCheckPolicy", "healthcheckpolicies", {"timeoutSec": 9}),
        ("HealthCheckPolicy", "healthcheckpolicies", {"healthyThreshold": 11}),
        ("HealthCheckPolicy", "healthcheckpolicies", {"config": {"type": "HTTP"}}),
    ],
)
def test_policies_have_the_limits_of_the_crds(kube: Kube, kind: str, plural: str, default: dict[str, Any]) -> None:
    assert policy(kube, kind, plural, "one", default) == 422


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"backendRefs": [{"name": "one"}]}, 422, "Must have port for Service reference"),
        ({"backendRefs": [{"name": "one", "port": 1, "weight": 1_000_001}]}, 422, "between 0 and 1000000"),
        ({"backendRefs": [{"name": "one", "port": 1, "wieght": 1}]}, 400, "unknown field"),
        ({"matches": [{"path": {"value": "no-slash"}}], "filters": []}, 422, "must only contain valid characters"),
        ({"matches": [{"path": {"value": "/a//b"}}], "filters": []}, 422, "must not contain '//'"),
        ({"matches": [{}, {}]}, 422, "exactly one PathPrefix match"),
        ({"filters": [{"type": "URLRewrite"}]}, 422, "filter.urlRewrite must be specified"),
        ({"filters": [{"type": "Rewrite"}]}, 422, "Unsupported value"),
        ({"timeouts": {"request": "1s"}}, 501, "is not emulated"),
        ({"matches": [{"path": {"type": "Exact", "value": "/a"}}], "filters": []}, 501, "is not emulated"),
    ],
)
def test_the_api_refuses_what_the_crd_refuses(kube: Kube, change: dict[str, Any], code: int, text: str) -> None:
    found, answer = route(kube, [{**rule({"one": 1}), **change}])
    assert found == code, answer
    assert text in str(answer.get("message", ""))
