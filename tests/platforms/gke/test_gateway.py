"""Named endpoints behind a Gateway of GKE, verb by verb, with emulated clusters and Google's clients."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import until

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import CloudError
from dropforge.cloud.kubernetes import Kubernetes
from dropforge.platforms.gke.gateway import WeightedRoute
from dropforge.platforms.gke.named import NamedDeployments
from dropforge.platforms.named import RevisionGone, Share
from dropforge.platforms.serving import Deployment
from dropforge_local.stack.deployment import cluster_objects

from ...deployments import here
from .test_named import Endpoint, meddling
from .test_serve import Cloud, cloud

__all__ = ["cloud"]  # a fixture
SERVER = NamedDeployments()
SETTLE_SECONDS = 2


@pytest.fixture
def region(cloud: Cloud) -> Iterator[Cloud]:
    """The cloud, whose region has a Gateway."""
    settings = {"DROPFORGE_ENDPOINT_GATEWAYS": "us-west1,us-central1", "DROPFORGE_ENDPOINT_SETTLE_SECONDS": "2"}
    with patch.dict(os.environ, settings):
        here.cache_clear()
        yield cloud
    here.cache_clear()


class Routed(Endpoint):
    """A named endpoint behind the Gateway."""

    def __init__(self, cloud: Cloud, name: str, **serve: Any) -> None:
        super().__init__(cloud, name, **serve)
        for manifest in cluster_objects():
            if manifest["kind"] == "Gateway":
                self.api.create(manifest)

    def split(self, *shares: tuple[int, int]) -> bool:
        wanted = [Share(self.revision(number), number, percent) for number, percent in shares]
        return SERVER.shift(here().cloud, self.service, wanted)

    @property
    def weights(self) -> dict[str, int]:
        return WeightedRoute().shares(self.route)

    @property
    def route(self) -> dict[str, Any]:
        found = self.api.get(self.service)
        assert found is not None
        return found


def is_up(url: str) -> bool:
    """Whether a revision answers through the load balancer."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    try:
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, timeout=60) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


def test_weights_move_by_a_conditional_change_and_only_once_every_proxy_has_them(region: Cloud) -> None:
    endpoint = Routed(region, "weighed")
    assert "/gateway.networking.k8s.io/httproutes/" in endpoint.service
    first = endpoint.deploy(1)
    assert first.endpoint_url.endswith("/weighed")
    assert first.url.removesuffix(f"/revisions/{endpoint.revision(1)}") == first.endpoint_url.removesuffix("/weighed")
    until(lambda: is_up(first.url) and is_up(first.endpoint_url))
    second = endpoint.deploy(2, serving=1)
    assert second.endpoint_url == first.endpoint_url
    assert endpoint.weights == {endpoint.revision(1): 100}, "a revision is deployed without requests"
    with patch.object(Kubernetes, "get", meddling(endpoint)):
        assert not endpoint.split((1, 90), (2, 10)), "another caller has changed the route meanwhile"
    assert endpoint.weights == {endpoint.revision(1): 100}
    began = utc_now()
    until(lambda: endpoint.split((1, 90), (2, 10)))
    assert (utc_now() - began).total_seconds() >= SETTLE_SECONDS
    assert endpoint.weights == {endpoint.revision(1): 90, endpoint.revision(2): 10}
    until(lambda: endpoint.split((2, 100), (1, 0)))
    assert endpoint.weights == {endpoint.revision(2): 100, endpoint.revision(1): 0}
    assert endpoint.api.patch(endpoint.server(1), {"spec": {"replicas": 0}})
    until(lambda: not (endpoint.api.get(endpoint.server(1)) or {})["status"].get("availableReplicas"))
    assert not endpoint.split((1, 100), (2, 0)), "requests do not move to a revision without pods"
    with pytest.raises(RevisionGone, match="does not exist any more"):
        endpoint.split((3, 10), (2, 90))
    assert endpoint.weights == {endpoint.revision(2): 100, endpoint.revision(1): 0}
    endpoint.delete()


def test_a_revision_that_the_route_names_is_not_pruned_and_a_missing_one_is_not_named(region: Cloud) -> None:
    endpoint = Routed(region, "named")
    for number in (1, 2, 3):
        endpoint.deploy(number, serving=number > 1)
    until(lambda: endpoint.split((1, 90), (3, 10)))
    endpoint.prune(3)
    until(lambda: endpoint.gone(2))
    assert not endpoint.gone(1)
    assert not endpoint.gone(3)
    until(lambda: endpoint.split((3, 100), (2, 0)))
    assert endpoint.weights == {endpoint.revision(3): 100}, "a Service that is gone would make the route invalid"
    endpoint.prune(3, 3)
    until(lambda: endpoint.gone(1))
    endpoint.delete()
    assert not list(endpoint.api.find("dropforge", "httproutes", "gateway.networking.k8s.io"))


def test_an_answer_has_time_and_pods_are_asked_for_their_health(region: Cloud) -> None:
    """Google's defaults cut an answer after 30 s, lose those of an ending pod, and ask for `/`, which vLLM lacks."""
    endpoint = Routed(region, "policed")
    endpoint.deploy(1)
    found = {}
    for plural in ("gcpbackendpolicies", "healthcheckpolicies"):
        (item,) = endpoint.api.find("dropforge", plural, "networking.gke.io")
        assert item["spec"]["targetRef"] == {"group": "", "kind": "Service", "name": endpoint.revision(1)}
        found[plural] = item["spec"]["default"]
    backend, health = found.values()
    pod = (endpoint.api.get(endpoint.server(1)) or {})["spec"]["template"]["spec"]
    assert backend["timeoutSec"] >= backend["connectionDraining"]["drainingTimeoutSec"]
    assert backend["connectionDraining"]["drainingTimeoutSec"] >= pod["terminationGracePeriodSeconds"]
    assert (
        health["config"]["httpHealthCheck"]["requestPath"] == pod["containers"][0]["readinessProbe"]["httpGet"]["path"]
    )
    endpoint.delete()


def test_a_cluster_without_its_gateway_is_told_and_changes_nothing(region: Cloud) -> None:
    endpoint = Endpoint(region, "lost")
    for gateway in endpoint.api.find("dropforge", "gateways", "gateway.networking.k8s.io"):
        name = endpoint.service.replace("httproutes/df-ep-lost", "gateways/endpoints")
        endpoint.api.delete(name, gateway["metadata"]["uid"])
    with pytest.raises(CloudError, match="gateways/endpoints does not exist"):
        SERVER.deploy(here().cloud, endpoint.candidate(1), [])
    assert not endpoint.api.find("dropforge", "deployments", "apps", labelSelector=f"{names.ENDPOINT_LABEL}=lost")


def test_an_endpoint_keeps_what_has_its_address(region: Cloud) -> None:
    """With a Gateway later, the URL of an endpoint that is a Service stays; a Service gives no shares."""
    run = region.run(endpoint="kept")
    spec, with_gateway = region.store.spec(run), here().settings
    without = replace(with_gateway, endpoint_gateways="us-west1")
    service, route = (
        SERVER.service_name(Deployment(run, spec, settings, utc_now(), endpoint="kept"))
        for settings in (without, with_gateway)
    )
    assert service.endswith("/namespaces/dropforge/services/df-ep-kept")
    assert route.endswith("/namespaces/dropforge/gateway.networking.k8s.io/httproutes/df-ep-kept")
    for settings in (without, with_gateway):
        deployment = Deployment(run, spec, settings, utc_now(), endpoint="kept")
        assert SERVER.service_name(deployment, service) == service
        assert SERVER.service_name(deployment, route) == route
        elsewhere = route.replace("us-central1", "us-east1")
        assert SERVER.service_name(deployment, elsewhere) != elsewhere
    assert SERVER.why_whole(route) == ""
    assert "Terraform: endpoint_gateway" in SERVER.why_whole(service)


def test_a_canary_is_refused_with_the_way_to_get_one(region: Cloud) -> None:
    canary = {"percent": 10, "for": "10m"}
    spec = region.store.spec(region.run(endpoint="shared-out", canary=canary))
    assert spec.serve is not None
    settings = replace(here().settings, serve_vllm_image="a/b@sha256:0", gke_cluster="c1")
    assert [problem.pointer for problem in spec.serve.missing(spec, settings)] == []
    (problem,) = spec.serve.missing(spec, replace(settings, endpoint_gateways=""))
    assert problem.pointer == "/serve/canary"
    assert "has none in us-central1 (Terraform: endpoint_gateway)" in problem.message
