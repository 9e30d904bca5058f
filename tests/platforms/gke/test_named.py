"""Named endpoints on GKE, verb by verb, with emulated clusters and Google's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import until

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import CloudError
from dropforge.cloud import kubernetes
from dropforge.cloud.kubernetes import Kubernetes
from dropforge.platforms.gke import named
from dropforge.platforms.gke.named import NamedDeployments
from dropforge.platforms.gke.serve import GkeDeployment
from dropforge.platforms.gke.workload import INSTANCE
from dropforge.platforms.named import Candidate, Reached, Share
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Waits

from ...deployments import here
from .test_serve import LOCATION, Cloud, cloud

__all__ = ["cloud"]  # a fixture
CLUSTER = f"{LOCATION}/clusters/c1"
SERVER = NamedDeployments()


class Endpoint:
    """A named endpoint, without the rollouts that change it."""

    def __init__(self, cloud: Cloud, name: str, **serve: Any) -> None:
        self.run = cloud.run(**serve, endpoint=name)
        self.name = name
        self.deployment = Deployment(self.run, cloud.store.spec(self.run), here().settings, utc_now(), endpoint=name)
        self.service = SERVER.service_name(self.deployment)
        self.api = kubernetes.connect(here().cloud, kubernetes.find_cluster(here().cloud, CLUSTER))

    def candidate(self, number: int, rollout: str = "") -> Candidate:
        return Candidate(rollout or f"rollout-{number}", number, self.deployment)

    def deploy(self, number: int, serving: int = 0) -> Reached:
        """Deploy a revision beside the one that serves, until it runs."""
        found: Reached | Waits = Waits("")

        def is_reached() -> bool:
            nonlocal found
            found = SERVER.deploy(here().cloud, self.candidate(number), [self.share(serving)] if serving else [])
            return isinstance(found, Reached)

        until(is_reached)
        assert isinstance(found, Reached)
        return found

    def share(self, number: int) -> Share:
        return Share(self.revision(number), number, 100)

    def shift(self, number: int) -> bool:
        return SERVER.shift(here().cloud, self.service, [self.share(number)])

    def revision(self, number: int) -> str:
        return names.named_revision(self.name, number)

    def server(self, number: int) -> str:
        return SERVER.resources(self.service, self.revision(number))[1]

    @property
    def selected(self) -> str:
        found = self.api.get(self.service)
        assert found is not None
        return str(found["spec"]["selector"][INSTANCE])

    def prune(self, last: int, *kept: int) -> None:
        SERVER.prune(here().cloud, self.service, set(map(self.revision, kept)), last)

    def gone(self, number: int) -> bool:
        return self.api.get(self.server(number)) is None

    def delete(self) -> None:
        until(lambda: SERVER.delete(here().cloud, self.service))
        listed = [each.name for each in GkeDeployment().listed(here().cloud)]
        assert not [name for name in listed if names.is_of_endpoint(name, self.name)]


def test_requests_move_by_a_conditional_switch_to_ready_pods_only(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "switched", max_instances=2)
    first = endpoint.deploy(1)
    second = endpoint.deploy(2, serving=1)
    assert (first.revision, second.revision) == (endpoint.revision(1), endpoint.revision(2))
    assert second.endpoint_url == first.endpoint_url
    assert len({first.url, second.url, first.endpoint_url}) == 3
    assert endpoint.selected == endpoint.revision(1), "a revision is deployed without requests"
    with patch.object(Kubernetes, "get", meddling(endpoint)):
        assert not endpoint.shift(2), "another caller has changed the Service meanwhile"
    assert endpoint.selected == endpoint.revision(1)
    assert endpoint.shift(2)
    assert endpoint.selected == endpoint.revision(2)
    assert SERVER.find(here().cloud, endpoint.service, 1) == first, "the revision before can still be called"
    assert endpoint.api.patch(endpoint.server(1), {"spec": {"replicas": 0}})
    until(lambda: not (endpoint.api.get(endpoint.server(1)) or {})["status"].get("availableReplicas"))
    assert not endpoint.shift(1)
    assert endpoint.selected == endpoint.revision(2), "requests do not move to a revision without pods"
    endpoint.delete()
    assert SERVER.find(here().cloud, endpoint.service, 2) is None
    with pytest.raises(CloudError, match="does not exist any more"):
        endpoint.shift(2)


def test_a_suspended_endpoint_resumes_the_revisions_that_exist(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "resumed", min_instances=2, max_instances=3)
    endpoint.deploy(1)
    fenced: list[int] = []

    def replicas() -> int:
        server = endpoint.api.get(endpoint.server(1))
        assert server is not None
        return int(server["spec"]["replicas"])

    def resume(*numbers: int) -> bool:
        return SERVER.resume(
            here().cloud, endpoint.service, list(map(endpoint.candidate, numbers)), lambda: fenced.append(1)
        )

    assert resume(1), "it is not suspended"
    assert (replicas(), fenced) == (2, []), "a revision that runs is not changed"
    until(lambda: SERVER.suspend(here().cloud, endpoint.service, [endpoint.share(1)]))
    assert replicas() == 0
    assert resume(1, 2), "a revision for a rollback may be deleted"
    assert (replicas(), len(fenced)) == (2, 1)
    with pytest.raises(CloudError, match="does not exist any more"):
        resume(2, 1)
    endpoint.delete()


def test_an_endpoint_whose_cluster_is_deleted_is_suspended_pruned_and_deleted(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "homeless")
    service = endpoint.service.replace("/clusters/c1/", "/clusters/deleted/")
    assert service != endpoint.service
    assert SERVER.suspend(here().cloud, service, [endpoint.share(1)]) is True
    SERVER.prune(here().cloud, service, set(), 1)
    assert SERVER.find(here().cloud, service, 1) is None
    assert SERVER.delete(here().cloud, service) is True
    with pytest.raises(CloudError, match="does not exist any more"):
        SERVER.resume(here().cloud, service, [endpoint.candidate(1)])


def test_a_first_revision_gets_no_requests_before_it_answers(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "unready")
    with patch.object(named, "url_once_ready", return_value=Waits("it loads the model")):
        assert SERVER.deploy(here().cloud, endpoint.candidate(1), []) == Waits("it loads the model")
    assert endpoint.api.get(endpoint.server(1)), "it starts"
    assert endpoint.api.get(endpoint.service) is None
    endpoint.deploy(1)
    assert endpoint.selected == endpoint.revision(1)
    endpoint.delete()


def meddling(endpoint: Endpoint) -> Callable[[Kubernetes, str], Any]:
    """A read of the object with the endpoint's address, followed by another caller's change."""
    read = Kubernetes.get

    def get(api: Kubernetes, name: str) -> Any:
        found = read(api, name)
        if name == endpoint.service:
            assert api.patch(name, {"metadata": {"annotations": {"who": "another"}}})
        return found

    return get


def test_only_old_revisions_that_do_not_answer_are_pruned(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "pruned")
    endpoint.deploy(1)
    endpoint.deploy(2, serving=1)
    endpoint.deploy(3, serving=1)
    endpoint.prune(2)  # no revision is kept by the record, but one of them answers
    until(lambda: endpoint.gone(2))
    assert not endpoint.gone(1), "it answers"
    assert not endpoint.gone(3), "its rollout has begun"
    assert endpoint.shift(3)
    endpoint.prune(3, 3, 1)
    assert not endpoint.gone(1), "it is kept for a rollback"
    endpoint.prune(3, 3)
    until(lambda: endpoint.gone(1))
    endpoint.delete()


def test_what_another_owner_has_made_is_no_revision(cloud: Cloud) -> None:
    endpoint = Endpoint(cloud, "taken")
    endpoint.deploy(1)
    with pytest.raises(CloudError, match="is of rollout rollout-1"):
        SERVER.deploy(here().cloud, endpoint.candidate(1, "another"), [])
    own = here().settings.deployment
    for name in (endpoint.server(1), endpoint.service):
        for owner in ("another", own):
            assert endpoint.api.patch(name, {"metadata": {"labels": {names.DEPLOYMENT_LABEL: owner}}})
            if owner != own:
                with pytest.raises(CloudError, match="exists and belongs to"):
                    SERVER.deploy(here().cloud, endpoint.candidate(1), [])
    endpoint.delete()


def test_an_ending_revision_has_time_for_its_answers(cloud: Cloud) -> None:
    for capacity, seconds in (("on_demand", 300), ("spot", 25)):
        endpoint = Endpoint(cloud, f"drained-{capacity.replace('_', '-')}", capacity=capacity)
        endpoint.deploy(1)
        server = endpoint.api.get(endpoint.server(1))
        assert server is not None
        pod = server["spec"]["template"]["spec"]
        variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        hook = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] == seconds
        assert 0 < int(variables["DROPFORGE_DRAIN_SECONDS"]) < seconds - hook
        endpoint.delete()
