"""Rollouts of services: tags, traffic by revision, and the end of revisions that have neither."""

from __future__ import annotations

import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import run_v2

from dropforge_local.emulators.cloudrun import CloudRunConfig

from .test_services import GOOD, deploy, get, status

REVISION = "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION"
LATEST = "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST"


def short(name: str) -> str:
    return name.rpartition("/")[2]


def by_name(revision: str, percent: int, tag: str = "") -> dict[str, Any]:
    return {"type": REVISION, "revision": short(revision), "percent": percent, "tag": tag}


def update(cloud: Any, service: run_v2.Service, *paths: str, **fields: Any) -> Any:
    """Update only the fields at `paths`, as gcloud does; return the operation."""
    changed = run_v2.Service(name=service.name, **fields)
    return cloud.services.update_service(request={"service": changed, "update_mask": {"paths": list(paths)}})


def move(cloud: Any, service: run_v2.Service, *traffic: dict[str, Any]) -> run_v2.Service:
    return cloud.done(update(cloud, service, "traffic", traffic=list(traffic)))


def candidate(cloud: Any, make: Any, service: run_v2.Service, env: dict[str, str], **template: Any) -> run_v2.Service:
    """Deploy a revision with a tag and without a share; the share of the service's latest revision stays."""
    made = make.service(env, **template)
    latest = {"type": LATEST, "percent": 0, "tag": "new"}
    traffic = [by_name(service.latest_ready_revision, 100), latest]
    return cloud.done(update(cloud, service, "template", "traffic", template=made.template, traffic=traffic))


def containers(cloud: Any) -> list[str]:
    return [name for name in cloud.live() if name.startswith("container/")]


def tagged(service: run_v2.Service, tag: str) -> str:
    return next(str(target.uri) for target in service.traffic_statuses if target.tag == tag)


def test_traffic_moves_by_name_without_a_new_revision_and_back(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make)
    second = candidate(cloud, make, first, {"A": "1"})
    old, new = short(first.latest_ready_revision), short(second.latest_ready_revision)
    assert (get(second.uri)["revision"], get(tagged(second, "new"))["revision"]) == (old, new)
    moved = move(cloud, second, by_name(new, 100, "new"), by_name(old, 0, "old"))
    assert get(moved.uri)["revision"] == new
    warm = get(tagged(moved, "old"))
    back = move(cloud, moved, by_name(old, 100), by_name(new, 0, "new"))
    assert get(back.uri)["pid"] == warm["pid"], "a tagged revision keeps its instance, so a rollback starts nothing"
    assert len(list(cloud.revisions.list_revisions(parent=first.name))) == 2


def test_a_stream_outlives_the_loss_of_traffic(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make)
    connection = http.client.HTTPConnection(first.uri.removeprefix("http://"), timeout=60)
    connection.request("GET", "/stream", headers=GOOD)
    response = connection.getresponse()
    assert response.readline() == b"data: 0\n"
    pid = get(first.uri)["pid"]
    port = cloud.processes()
    second = candidate(cloud, make, first, {"A": "1"})
    moved = move(cloud, second, by_name(second.latest_ready_revision, 100))
    assert get(moved.uri)["pid"] != pid
    assert set(port) <= set(cloud.processes()), "the instance was ended below an open stream"
    # The stream's server sends the next events only when it is told: the old revision is reachable by a new tag.
    again = move(
        cloud, moved, by_name(moved.latest_ready_revision, 100), by_name(first.latest_ready_revision, 0, "old")
    )
    for _ in range(3):
        assert status(f"{tagged(again, 'old')}/next") == 200
    assert response.read().count(b"data:") == 2
    connection.close()


def test_requests_that_wait_for_a_slot_are_answered_when_the_traffic_moves(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make, max_instance_request_concurrency=1)
    second = candidate(cloud, make, first, {"A": "1"}, max_instance_request_concurrency=1)
    started = threading.Event()

    def call(_: int) -> int:
        started.set()
        return status(f"{first.uri}/slow?s=0.3")

    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(call, number) for number in range(6)]
        started.wait(60)
        move(cloud, second, by_name(second.latest_ready_revision, 100))
        assert [answer.result() for answer in answers] == [200] * 6


def test_only_a_revision_without_traffic_and_tag_can_be_deleted(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make)
    second = candidate(cloud, make, first, {"A": "1"})
    old, new = first.latest_ready_revision, second.latest_ready_revision
    for revision in (old, new):  # the one has all traffic, the other a tag
        with pytest.raises(exceptions.BadRequest, match="cannot be deleted"):
            cloud.revisions.delete_revision(name=revision)
    move(cloud, second, by_name(new, 100))
    cloud.done(cloud.revisions.delete_revision(name=old))
    assert [revision.name for revision in cloud.revisions.list_revisions(parent=first.name)] == [new]
    with pytest.raises(exceptions.NotFound):
        cloud.revisions.delete_revision(name=old)
    with pytest.raises(exceptions.BadRequest, match="does not exist"):
        move(cloud, second, by_name(old, 100))
    assert get(second.uri)["revision"] == short(new)


def test_traffic_moves_although_the_latest_revision_failed(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make)
    second = candidate(cloud, make, first, {"A": "1"})
    both = move(
        cloud, second, by_name(second.latest_ready_revision, 100), by_name(first.latest_ready_revision, 0, "old")
    )
    with pytest.raises(exceptions.FailedPrecondition):
        cloud.done(update(cloud, both, "template", template=make.service({"MODE": "die"}).template))
    assert get(both.uri)["revision"] == short(second.latest_ready_revision)
    move(cloud, both, by_name(first.latest_ready_revision, 100))
    assert get(both.uri)["revision"] == short(first.latest_ready_revision)
    assert len(list(cloud.revisions.list_revisions(parent=first.name))) == 3


def test_a_tag_and_the_name_of_its_service_fit_a_host_name(cloud: Any, make: Any) -> None:
    first = deploy(cloud, make)
    with pytest.raises(exceptions.BadRequest, match="at most 46 together"):
        move(cloud, first, by_name(first.latest_ready_revision, 100, "t" * 45))
    move(cloud, first, by_name(first.latest_ready_revision, 100, "t" * 44))


class TestMinimum:
    @pytest.fixture
    def config(self) -> CloudRunConfig:
        return CloudRunConfig(
            operation_seconds=0.02, grace_seconds=1.0, probe_seconds=0.05, idle_seconds=0.3, restart_seconds=0.05
        )

    def test_the_services_minimum_follows_the_traffic(self, cloud: Any, make: Any) -> None:
        """https://cloud.google.com/run/docs/configuring/min-instances: a service's minimum is divided by traffic."""
        first = deploy(cloud, make)
        kept = cloud.done(update(cloud, first, "scaling", scaling={"min_instance_count": 1}))
        assert kept.latest_ready_revision == first.latest_ready_revision
        cloud.until(lambda: containers(cloud), lambda running: len(running) == 1)
        second = candidate(cloud, make, kept, {"A": "1"})
        new = get(tagged(second, "new"))["pid"]
        cloud.until(lambda: new in cloud.processes(), lambda alive: not alive)
        move(
            cloud,
            second,
            by_name(second.latest_ready_revision, 100, "new"),
            by_name(first.latest_ready_revision, 0, "old"),
        )
        old = get(tagged(cloud.services.get_service(name=first.name), "old"))["pid"]
        cloud.until(lambda: old in cloud.processes(), lambda alive: not alive)
        cloud.until(lambda: containers(cloud), lambda running: len(running) == 1)
