"""The resources of an endpoint, and the reason that an endpoint reports when it does not become ready."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from google.api_core.exceptions import NotFound
from google.cloud import run_v2, tpu_v2

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import pods
from dropforge.cloud.clients import Clients
from dropforge.platforms.cloud_run import serve as cloud_run
from dropforge.platforms.gke import serve as gke
from dropforge.platforms.gke import workload
from dropforge.platforms.serving import Deployment, endpoint_key, server_environment
from dropforge.platforms.tpu_vm import serve as tpu_vm
from dropforge.spec import JobSpec
from dropforge.stages import admission
from dropforge.stages.admission import deployment_problems

from ..deployments import REQUIRED, cloud_with, settings_with
from ..schemas import kubernetes

FAILED = run_v2.Condition.State.CONDITION_FAILED
RUN = "text-to-sql-0123456789ab"
FULL: dict[str, Any] = {
    "accelerator": "nvidia-h100-80gb",
    "accelerator_count": 4,
    "capacity": "reservation",
    "reservation": "reserved-gpus",
    "cpu": 24,
    "memory_gib": 200,
    "min_instances": 2,
    "max_instances": 5,
    "target_queue_length": 7,
}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("The user-provided container failed to start and listen on the port", ErrorClass.CODE),
        (
            "Revision is not ready. The user-provided container failed the configured startup probe checks.",
            ErrorClass.CODE,
        ),
        ("You do not have quota for using GPUs without zonal redundancy.", ErrorClass.QUOTA),
        ("Image 'x' not found.", ErrorClass.CONFIG),
    ],
)
def test_a_failed_service_is_classified(monkeypatch: pytest.MonkeyPatch, message: str, expected: ErrorClass) -> None:
    condition = run_v2.Condition(state=FAILED, message=message)
    service = run_v2.Service(labels={"dropforge-run": RUN}, terminal_condition=condition)
    monkeypatch.setattr(cloud_run, "service_name", lambda deployment: "s")
    monkeypatch.setattr(cloud_run.CloudRunService, "_service", lambda self, cloud, name: service)
    with pytest.raises(CloudError) as failure:
        cloud_run.CloudRunService().deploy(cloud_with(), deployment())
    assert failure.value.error_class is expected
    assert failure.value.hint


def test_the_server_gets_the_name_of_its_key_and_never_the_key() -> None:
    keyed = replace(deployment(), settings=replace(deployment().settings, endpoint_key_secret="the-key"))
    references = {variable["name"]: variable["value"] for variable in server_environment(keyed, 8, 1)}
    project = keyed.settings.project
    expected = {"VLLM_API_KEY": f"projects/{project}/secrets/the-key/versions/latest"}
    assert json.loads(references["DROPFORGE_SECRETS"]) == expected
    assert "DROPFORGE_SECRETS" not in str(server_environment(deployment(), 8, 1))  # the deployment has no key


@pytest.mark.parametrize(
    ("held", "message"), [(b"", "is empty"), (b"\xff", "is not UTF-8"), (NotFound("gone"), "cannot be read: NotFound")]
)
def test_a_key_that_cannot_be_used_is_an_error_of_the_deployment(held: bytes | Exception, message: str) -> None:
    access = Mock(side_effect=held if isinstance(held, Exception) else None)
    access.return_value.payload.data = held
    settings = replace(settings_with(), endpoint_key_secret="the-key")
    with pytest.raises(CloudError, match=message) as error:
        endpoint_key(cloud_with(settings, secrets=Mock(access_secret_version=access)), deployment().spec)
    assert error.value.error_class is ErrorClass.CONFIG
    assert "docs/deploy.md" in error.value.hint


def test_a_spec_is_refused_until_the_key_has_a_version() -> None:
    settings = replace(settings_with(), endpoint_key_secret="the-key")
    cloud = cloud_with(settings, secrets=Mock(get_secret_version=Mock(side_effect=NotFound("none"))))
    (problem,) = admission._missing_secrets(cloud, deployment().spec)
    assert (problem.pointer, problem.found) == ("/serve", "'the-key'")
    on_cloud_run = deployment(type="cloud_run", accelerator="nvidia-l4")
    assert admission._missing_secrets(cloud, on_cloud_run.spec) == []


def deployment(trains_on: dict[str, Any] | None = None, **serve: Any) -> Deployment:
    text = {
        "api_version": "dropforge/v1",
        "name": "text-to-sql",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "gke", "placements": [{"region": "us-central1"}], "cluster": trains_on or {}},
        "serve": {"type": "gke", **serve},
        "labels": {"team": "sql"},
    }
    accounts = {"trainer_service_account": "trainer", "server_service_account": "server"}
    settings = settings_with(serve_vllm_image="registry/serve-vllm@sha256:1", gke_cluster="standing", **accounts)
    return Deployment(RUN, JobSpec.model_validate_json(json.dumps(text)), settings, datetime(2026, 11, 22, tzinfo=UTC))


def own(**serve: Any) -> workload.Workload:
    return workload.own_workload(deployment(**serve))


@pytest.mark.parametrize("serve", [{}, FULL, {"capacity": "spot"}, {"capacity": "flex_start"}], ids=str)
def test_kubernetes_accepts_the_manifests(serve: dict[str, Any]) -> None:
    manifests = [resource.request for resource in gke.GkeDeployment().resources(deployment(**serve))]
    assert {"Deployment", "Service"} <= {manifest["kind"] for manifest in manifests}
    for manifest in manifests:
        if manifest["kind"] != "PodMonitoring":  # a custom resource of GKE
            kubernetes.check(manifest)


def test_an_endpoint_is_internal_and_scaled_on_request_only() -> None:
    kinds = [resource.kind for resource in gke.GkeDeployment().resources(deployment())]
    assert kinds == ["apps.k8s.io/Deployment", "k8s.io/Service", "monitoring.googleapis.com/PodMonitoring"]
    service = workload.service_manifest(own())
    assert service["metadata"]["annotations"]["networking.gke.io/load-balancer-type"] == "Internal"
    metric = workload.autoscaler_manifest(own(**FULL))["spec"]["metrics"][0]["pods"]
    assert metric["metric"]["name"] == "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"
    assert metric["target"] == {"type": "AverageValue", "averageValue": "7"}


def test_vllm_s_metrics_are_read_from_the_port_of_the_endpoint_s_own_pods() -> None:
    """Four times a minute for the autoscaler, else once: Google bills each sample."""
    for serve, interval in (({}, "60s"), (FULL, "15s")):
        made = own(**serve)
        pod = workload.deployment_manifest(made)["spec"]["template"]
        monitored = workload.monitoring_manifest(made)["spec"]
        [endpoint] = monitored["endpoints"]
        assert (endpoint["path"], endpoint["interval"]) == ("/metrics", interval)
        assert endpoint["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
        assert monitored["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_an_instance_uses_all_its_gpus_and_the_service_selects_its_pods_only() -> None:
    spec = workload.deployment_manifest(own(**FULL))["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    container = pod["containers"][0]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["DROPFORGE_TENSOR_PARALLEL_SIZE"] == container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert environment["DROPFORGE_MODEL_URI"].endswith(f"/models/{RUN}")
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"]["maxSurge"] == 0  # a surge would need more GPUs
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 30 * 60
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "reserved-gpus"
    # Training pods carry the labels of the run, too: a selector on those labels would send them requests.
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert names.RUN_LABEL not in spec["selector"]["matchLabels"]
    assert labels[names.EXPIRES_LABEL] == "1795305600"
    assert workload.service_manifest(own())["spec"]["selector"] == spec["selector"]["matchLabels"]


def test_the_cluster_is_named_by_the_endpoint_the_target_or_the_deployment() -> None:
    assert "/clusters/own/" in gke.GkeDeployment().resources(deployment({"name": "trains"}, cluster="own"))[0].name
    assert workload.cluster_of(deployment({"name": "trains"})) == "projects/x/locations/us-central1/clusters/trains"
    assert workload.cluster_of(deployment({"create": True}, region="europe-west4")).endswith(
        "europe-west4/clusters/standing"
    )


@pytest.mark.parametrize(
    ("ingress", "url"),
    [
        ([{"ip": "10.0.0.5"}], "http://10.0.0.5:8000"),
        ([{"ip": "127.0.0.1", "ports": [{"port": 19001, "protocol": "TCP"}]}], "http://127.0.0.1:19001"),
        ([{"hostname": "h.internal"}], "http://h.internal:8000"),
        ([], None),
        (None, None),
    ],
)
def test_the_url_has_the_address_of_the_load_balancer(ingress: Any, url: str | None) -> None:
    status = {} if ingress is None else {"loadBalancer": {"ingress": ingress}}
    assert workload.url_of({**workload.service_manifest(own()), "status": status}) == url


def test_an_endpoint_without_tls_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DROPFORGE_EMULATOR_TOKEN", raising=False)
    assert "Authorization" not in Clients().endpoint("http://10.0.0.5:8000").headers


def on_tpu(target: dict[str, Any] | None = None, **serve: Any) -> Deployment:
    text = {
        "api_version": "dropforge/v1",
        "name": "text-to-sql",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "training": {"adapter": {"type": "none"}},
        "target": target or {"type": "tpu_vm", "placements": [{"zone": "us-west4-a"}, {"zone": "us-west1-c"}]},
        "serve": {"type": "tpu_vm", **serve},
        "labels": {"team": "sql"},
    }
    changes = {"server_service_account": "server@p1", "serve_vllm_tpu_image": "registry/serve-vllm-tpu@sha256:1"}
    settings = settings_with(**{**dict.fromkeys(REQUIRED, "p1"), **changes})
    return Deployment(RUN, JobSpec.model_validate_json(json.dumps(text)), settings, datetime(2026, 11, 22, tzinfo=UTC))


def test_the_requests_for_a_tpu_vm_are_exact() -> None:
    deployed = on_tpu(accelerator_type="v5litepod-4", capacity="spot", startup_timeout="20m")
    queued, node = tpu_vm.TpuVmServer().resources(deployed)
    zone, name = "projects/p1/locations/us-west4-a", f"df-{RUN}-serve"
    assert (queued.name, node.name) == (f"{zone}/queuedResources/{name}", f"{zone}/nodes/{name}")
    tpu_v2.CreateQueuedResourceRequest.from_json(json.dumps(queued.request))  # raises for an unknown field
    resource = queued.request["queuedResource"]
    spec = resource.pop("tpu")["nodeSpec"][0]
    assert resource == {"spot": {}, "queueingPolicy": {"validUntilDuration": "1200s"}}
    metadata = spec["node"].pop("metadata")
    assert spec == {
        "parent": zone,
        "nodeId": name,
        "node": {
            "acceleratorType": "v5litepod-4",
            "runtimeVersion": "v2-alpha-tpuv5-lite",
            "networkConfig": {
                "network": "projects/p1/global/networks/default",
                "subnetwork": "projects/p1/regions/us-west4/subnetworks/default",
                "enableExternalIps": False,
            },
            "serviceAccount": {"email": "server@p1", "scope": ["https://www.googleapis.com/auth/cloud-platform"]},
            "labels": {
                "managed-by": "dropforge",
                "dropforge-run": RUN,
                "dropforge-deployment": names.deployment_id(deployed.settings.runs_bucket),
                "dropforge-expires": "1795305600",
                "team": "sql",
            },
            "tags": ["dropforge-server"],
        },
    }
    script = metadata.pop("startup-script")
    assert {key for key in metadata if f"#   {key} " in script.split("set -Eeuo")[0]} == set(metadata)
    environment = dict(line.split("=", 1) for line in metadata.pop("dropforge-env").splitlines())
    assert environment == {
        "DROPFORGE_PROJECT": "p1",
        "DROPFORGE_MODEL_URI": f"gs://p1/models/{RUN}",
        "DROPFORGE_SERVED_MODEL_NAME": "text-to-sql",
        "DROPFORGE_MAX_MODEL_LEN": "2048",
        "DROPFORGE_MAX_NUM_SEQS": "32",
        "DROPFORGE_SAMPLING": "greedy",
        "DROPFORGE_COMPILE_CACHE": "/work",
        "DROPFORGE_IMAGE": "registry/serve-vllm-tpu@sha256:1",
        "DROPFORGE_TENSOR_PARALLEL_SIZE": "4",
        "DROPFORGE_WORK_DIRECTORY": "/work",
        "PORT": "8000",
    }
    assert metadata == {
        "dropforge-role": "serve",
        "dropforge-run": RUN,
        "dropforge-attempt": "0",
        "dropforge-image": "registry/serve-vllm-tpu@sha256:1",
        "dropforge-deadline": "1795305600",
        "dropforge-runs-bucket": "p1",
    }


def test_without_a_queued_resource_the_node_is_the_endpoint() -> None:
    elsewhere = {"type": "cloud_run", "placements": [{"region": "us-central1"}]}
    deployed = on_tpu(elsewhere, zone="us-south1-a", queued=False, capacity="reservation")
    [node] = tpu_vm.TpuVmServer().resources(deployed)
    assert node.kind == "tpu.googleapis.com/Node"
    assert names.is_endpoint(node.name, RUN)
    assert node.request["node"]["schedulingConfig"] == {"reserved": True}
    tpu_v2.CreateNodeRequest.from_json(json.dumps(node.request))


def test_the_price_of_a_tpu_vm_comes_from_the_spec_else_from_the_catalog() -> None:
    server = tpu_vm.TpuVmServer()
    assert server.price(on_tpu(price_usd_per_hour=4.8).spec).usd_per_hour == 4.8
    assert server.price(on_tpu().spec).usd_per_hour == 9.6
    unknown = server.price(on_tpu(accelerator_type="v5p-8", zone="europe-west4-b").spec)
    assert unknown.usd_per_hour is None
    assert "serve.price_usd_per_hour" in unknown.source


@pytest.mark.parametrize(("addresses", "url"), [(["10.0.0.7"], "http://10.0.0.7:8000"), ([], None)])
def test_the_url_has_the_address_of_the_node(addresses: list[str], url: str | None) -> None:
    # The API gives every node the port 8470; the server listens on another port.
    endpoints = [{"ip_address": address, "port": 8470} for address in addresses]
    assert tpu_vm.url_of(tpu_v2.Node(network_endpoints=endpoints)) == url


def test_a_deployment_without_the_image_refuses_the_spec() -> None:
    deployed = on_tpu()
    complete = replace(deployed.settings, train_maxtext_image="trainer")
    assert deployment_problems(deployed.spec, complete) == []
    [problem] = deployment_problems(deployed.spec, replace(complete, serve_vllm_tpu_image=""))
    assert problem.pointer == "/serve/type"
    assert "DROPFORGE_SERVE_VLLM_TPU_IMAGE" in str(problem.expected)
    on_gke = deployment()
    assert deployment_problems(on_gke.spec, replace(on_gke.settings, serve_vllm_tpu_image="")) == []


def pod(state: dict[str, Any], restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    container = {"name": "server", "image": "i", "state": state, "restartCount": restarts, "lastState": last or {}}
    return {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Pending", "containerStatuses": [container]}}


def ended(code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, **more}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def event(reason: str, message: str, time: str = "2026-11-21T10:00:00Z") -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": time}


BACK_OFF = waiting("ImagePullBackOff", 'Back-off pulling image "i"')


@pytest.mark.parametrize(
    ("state", "restarts", "last", "events", "expected"),
    [
        (waiting("ContainerCreating"), 0, None, [], None),
        (waiting("ErrImagePull", "i: not found"), 0, None, [], ErrorClass.CONFIG),
        (waiting("ErrImagePull", "unexpected status: 403 Forbidden"), 0, None, [], ErrorClass.PERMISSION),
        (waiting("ErrImagePull", "net/http: TLS handshake timeout"), 0, None, [], None),
        (BACK_OFF, 0, None, [event("Failed", "Failed to pull image: denied")], ErrorClass.PERMISSION),
        (BACK_OFF, 0, None, [], None),
        (waiting("InvalidImageName"), 0, None, [], ErrorClass.CONFIG),
        (waiting("CrashLoopBackOff"), 1, ended(70), [], None),
        (waiting("CrashLoopBackOff"), 3, ended(70), [], ErrorClass.CODE),
        ({"running": {}}, 1, ended(137, "OOMKilled"), [], ErrorClass.OUT_OF_MEMORY),
    ],
)
def test_a_pod_is_broken_when_waiting_is_useless(
    state: Any, restarts: int, last: Any, events: list[Any], expected: ErrorClass | None
) -> None:
    problem = pods.broken(pod(state, restarts, last), events)
    assert (problem and problem.error_class) is expected
    assert problem is None or problem.hint


SCALE_UP = "Node scale up in zones us-central1-a associated with this pod failed: {}. Pod is at risk."


@pytest.mark.parametrize(
    ("events", "expected", "text"),
    [
        ([event("FailedScaleUp", SCALE_UP.format("GCE out of resources"))], ErrorClass.STOCKOUT, "out of resources"),
        ([event("FailedScaleUp", SCALE_UP.format("GCE quota exceeded"))], ErrorClass.QUOTA, "quota exceeded"),
        ([event("FailedScaleUp", SCALE_UP.format("GCE reservation 'x' not found"))], ErrorClass.CONFIG, "'x'"),
        ([event("FailedScheduling", "0/3 nodes are available")], ErrorClass.STOCKOUT, "0/3 nodes"),
        ([], ErrorClass.STOCKOUT, "no node fits"),
    ],
)
def test_an_unschedulable_pod_reports_the_missing_resource(events: list[Any], expected: ErrorClass, text: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "no node fits"}
    problem = pods.unschedulable({"metadata": {"name": "p"}, "spec": {}, "status": {"conditions": [condition]}}, events)
    assert problem
    assert problem.error_class is expected
    assert text in problem.message
    assert problem.hint
    bound = {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"conditions": [condition]}}
    assert pods.unschedulable(bound, events) is None


def test_the_latest_event_of_a_reason_counts() -> None:
    later, earlier = event("Failed", "later", "2026-11-21T10:00:01Z"), event("Failed", "earlier")
    assert pods.last_event([later, earlier], "Other", "Failed") == "later"
