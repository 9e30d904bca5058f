"""Services: deployed, called through their ports, scaled to zero, probed, updated and deleted."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import run_v2

from dropforge_local.emulators.cloudrun import CloudRunConfig

STATE = run_v2.Condition.State
REASON = run_v2.Condition.RevisionReason
GOOD = {"Authorization": "Bearer good"}


def deploy(cloud: Any, make: Any, env: dict[str, str] | None = None, **template: Any) -> run_v2.Service:
    service = make.service(env, **template)
    return cloud.done(cloud.services.create_service(parent=make.parent, service=service, service_id="s1"))


def get(url: str, headers: dict[str, str] = GOOD, timeout: float = 20) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        return json.loads(response.read())


def status(url: str, headers: dict[str, str] = GOOD, data: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_deployed_service_is_ready_and_answers(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    assert (service.terminal_condition.state, service.reconciling) == (STATE.CONDITION_SUCCEEDED, False)
    assert service.observed_generation == service.generation == 1
    assert service.latest_ready_revision == service.latest_created_revision
    assert service.latest_ready_revision.startswith(f"{service.name}/revisions/s1-00001-")
    assert [(status.percent, status.revision) for status in service.traffic_statuses] == [
        (100, service.latest_ready_revision.rsplit("/")[-1])
    ]
    answer = get(f"{service.uri}/v1/x?a=%2Fb")
    assert (answer["path"], answer["service"]) == ("/v1/x?a=%2Fb", "s1")
    assert answer["headers"]["X-Forwarded-Proto"] == "http"
    revision = cloud.revisions.get_revision(name=service.latest_ready_revision)
    assert (revision.service, revision.max_instance_request_concurrency) == ("s1", 80)
    assert len(list(cloud.revisions.list_revisions(parent=service.name))) == 1
    assert "serving s1-00001" in cloud.logs(service.name)


def test_callers_need_a_token_unless_the_service_disables_the_check(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    assert [status(service.uri, headers) for headers in ({}, {"Authorization": "Bearer bad"}, GOOD)] == [403, 403, 200]
    service.invoker_iam_disabled = True
    request = run_v2.UpdateServiceRequest(service=service, update_mask={"paths": ["invoker_iam_disabled"]})
    updated = cloud.done(cloud.services.update_service(request=request))
    assert updated.latest_ready_revision == service.latest_ready_revision
    assert status(service.uri, {}) == 200


def test_delete_ends_the_instance_and_closes_the_port(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    assert cloud.processes()
    cloud.done(cloud.services.delete_service(name=service.name))
    assert (cloud.live(), cloud.processes()) == ([], [])
    with pytest.raises(exceptions.NotFound):
        cloud.services.get_service(name=service.name)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(service.uri.rpartition(":")[2])), timeout=60)


def test_answers_are_streamed(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    connection = http.client.HTTPConnection(service.uri.removeprefix("http://"), timeout=60)
    connection.request("GET", "/stream", headers=GOOD)
    response = connection.getresponse()
    seen = []
    while line := response.readline():
        if line.strip():
            seen.append(line.decode().strip())
            assert status(f"{service.uri}/next") == 200  # the server sends the next event only now
    connection.close()
    assert seen == ["data: 0", "data: 1", "data: 2"]


def test_bodies_pass_both_ways(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    body = b"x" * 3_000_000
    request = urllib.request.Request(f"{service.uri}/echo", data=body, headers=GOOD)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert (response.status, response.read()) == (201, body)


class TestIdle:
    @pytest.fixture
    def config(self) -> CloudRunConfig:
        return CloudRunConfig(
            operation_seconds=0.02, grace_seconds=1.0, probe_seconds=0.05, idle_seconds=0.5, restart_seconds=0.1
        )

    def test_an_idle_service_scales_to_zero_and_starts_again(self, cloud: Any, make: Any) -> None:
        service = deploy(cloud, make)
        first = get(service.uri)["pid"]
        cloud.until(cloud.processes, lambda pids: not pids)
        second = get(service.uri)["pid"]
        assert first != second

    def test_minimum_instances_stay(self, cloud: Any, make: Any) -> None:
        service = deploy(cloud, make, scaling={"min_instance_count": 1, "max_instance_count": 1})
        first = get(service.uri)["pid"]
        time.sleep(1.2)
        assert get(service.uri)["pid"] == first
        assert status(f"{service.uri}/crash") == 503
        cloud.until(cloud.processes, bool)
        assert get(service.uri)["pid"] != first

    def test_a_busy_instance_is_not_idle(self, cloud: Any, make: Any) -> None:
        service = deploy(cloud, make)
        assert status(f"{service.uri}/slow?s=1.3") == 200


def test_crashed_instance_is_replaced_at_the_next_request(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    first = get(service.uri)["pid"]
    assert status(f"{service.uri}/crash") == 503
    assert get(service.uri)["pid"] != first


def test_requests_above_the_concurrency_wait(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make, max_instance_request_concurrency=1)
    begun = time.monotonic()
    threads = [threading.Thread(target=status, args=(f"{service.uri}/slow?s=0.4",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun > 1.1


def test_a_busy_service_refuses_requests_without_asking_its_instance(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    cloud.faults(busy=2)
    assert [status(f"{service.uri}/") for _ in range(3)] == [429, 429, 200]
    for wrong in (-1, True, "3"):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            cloud.faults(busy=wrong)


def test_request_past_the_timeout_is_504(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make, timeout="1s")
    assert status(f"{service.uri}/slow?s=5") == 504


def test_a_revision_is_ready_after_its_startup_probe(cloud: Any, make: Any) -> None:
    probe = {"http_get": {"path": "/health"}, "period_seconds": 1, "timeout_seconds": 1, "failure_threshold": 100}
    begun = time.monotonic()
    service = deploy(cloud, make, {"WARM_UP": "1"}, container={"startup_probe": probe})
    assert time.monotonic() - begun > 0.9
    assert status(service.uri) == 200


def failed(cloud: Any, make: Any, match: str, **arguments: Any) -> run_v2.Revision:
    with pytest.raises(exceptions.FailedPrecondition, match=match):
        deploy(cloud, make, **arguments)
    service = cloud.services.get_service(name=f"{make.parent}/services/s1")
    assert (service.terminal_condition.state, service.uri) == (STATE.CONDITION_FAILED, "")
    assert (service.latest_ready_revision, service.reconciling) == ("", False)
    assert cloud.processes() == []
    return cloud.revisions.get_revision(name=service.latest_created_revision)


def test_container_that_ends_fails_the_revision_with_its_last_lines(cloud: Any, make: Any) -> None:
    revision = failed(
        cloud, make, r"(?s)is not ready and cannot serve.*exit\(3\).*model not found", env={"MODE": "die"}
    )
    assert revision.conditions[0].revision_reason == REASON.HEALTH_CHECK_CONTAINER_ERROR


def test_failed_startup_probe_fails_the_revision(cloud: Any, make: Any) -> None:
    probe = {"tcp_socket": {}, "period_seconds": 240, "timeout_seconds": 1, "failure_threshold": 1}
    container = {"startup_probe": probe}

    def let_the_time_pass() -> None:
        name = f"{make.parent}/services/s1"
        cloud.until(lambda: cloud.processes() and cloud.logs(name), lambda log: log and "never listening" in log)
        cloud.clock.advance(300)

    with ThreadPoolExecutor(1) as threads:
        passing = threads.submit(let_the_time_pass)
        failed(cloud, make, "(?s)allocated timeout.*never listening", env={"MODE": "mute"}, container=container)
        passing.result()


def test_missing_image_and_secret_fail_the_service(cloud: Any, make: Any) -> None:
    with pytest.raises(exceptions.NotFound, match="no-such"):
        deploy(cloud, make, container={"image": f"{make.registry}/no-such:1"})
    service = cloud.services.get_service(name=f"{make.parent}/services/s1")
    ready = cloud.revisions.get_revision(name=service.latest_created_revision).conditions[0]
    assert ready.reason == run_v2.Condition.CommonReason.CONTAINER_MISSING


def test_failed_update_keeps_serving_the_old_revision(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    broken = make.service({"MODE": "die"})
    broken.name = service.name
    with pytest.raises(exceptions.FailedPrecondition):
        cloud.done(cloud.services.update_service(service=broken))
    now = cloud.services.get_service(name=service.name)
    assert (now.latest_ready_revision, now.observed_generation, now.generation) == (service.latest_ready_revision, 1, 2)
    assert get(service.uri)["revision"] == service.latest_ready_revision.rsplit("/")[-1]


def test_update_moves_the_traffic_and_retires_the_old_instance(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    old = get(service.uri)
    changed = make.service({"A": "1"})
    changed.name = service.name
    updated = cloud.done(cloud.services.update_service(service=changed))
    new = get(service.uri)
    assert (updated.uri, updated.latest_ready_revision.rsplit("/")[-1]) == (service.uri, new["revision"])
    assert new["revision"].startswith("s1-00002-")
    cloud.until(lambda: old["pid"] in cloud.processes(), lambda alive: not alive)


def test_canary_has_its_own_address_until_traffic_moves(cloud: Any, make: Any) -> None:
    service = deploy(cloud, make)
    old = service.latest_ready_revision.rsplit("/")[-1]
    canary = make.service(
        {"A": "1"},
        traffic=[
            {"type": "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION", "revision": old, "percent": 100},
            {"type": "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST", "percent": 0, "tag": "canary"},
        ],
    )
    canary.name = service.name
    updated = cloud.done(cloud.services.update_service(service=canary))
    assert get(service.uri)["revision"] == old
    assert get(updated.traffic_statuses[1].uri)["revision"] == updated.latest_ready_revision.rsplit("/")[-1] != old
    moved = make.service({"A": "1"})
    moved.name = service.name
    final = cloud.done(cloud.services.update_service(service=moved))
    assert final.latest_ready_revision == updated.latest_ready_revision
    assert get(service.uri)["revision"] != old


def test_a_newer_state_does_not_wait_for_a_hanging_revision(cloud: Any, make: Any) -> None:
    service = make.service({"MODE": "mute"})
    first = cloud.services.create_service(parent=make.parent, service=service, service_id="s1")
    name = f"{make.parent}/services/s1"
    cloud.until(cloud.processes, bool)
    good = make.service()
    good.name = name
    cloud.done(cloud.services.update_service(service=good))
    with pytest.raises(exceptions.Aborted):
        cloud.done(first)
    hanging = make.service({"MODE": "mute"})
    hanging.name = name
    cloud.services.update_service(service=hanging)
    cloud.done(cloud.services.delete_service(name=name))
    assert (cloud.live(), cloud.processes()) == ([], [])


def test_stock_out_fails_a_gpu_service(cloud: Any, make: Any) -> None:
    cloud.faults(stockout=["us-central1"])
    limits = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    with pytest.raises(exceptions.ResourceExhausted, match="Insufficient capacity"):
        deploy(
            cloud,
            make,
            container={"resources": {"limits": limits, "cpu_idle": False}},
            node_selector={"accelerator": "nvidia-l4"},
            scaling={"max_instance_count": 1},
        )


def test_names_conflicts_and_validate_only(cloud: Any, make: Any) -> None:
    request = run_v2.CreateServiceRequest(
        parent=make.parent, service=make.service(), service_id="s1", validate_only=True
    )
    assert cloud.done(cloud.services.create_service(request=request)).traffic[0].percent == 100
    assert cloud.live() == []
    deploy(cloud, make)
    with pytest.raises(exceptions.Conflict, match="already exists"):
        deploy(cloud, make)
    with pytest.raises(exceptions.BadRequest, match="fewer than 50"):
        cloud.services.create_service(parent=make.parent, service=make.service(), service_id="s" * 50)
    assert [service.name for service in cloud.services.list_services(parent=make.parent)] == [
        f"{make.parent}/services/s1"
    ]
