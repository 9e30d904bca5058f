"""Every request that creates a resource is one that Google takes: judged by Google's descriptions, field by field.

The requests are those of all examples and of all valid specs of schemas/, on each of their placements.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from google.protobuf import json_format

from dropforge.cloud.resource import Resource
from dropforge.platforms import get_server, get_target, servers, targets
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Launch
from dropforge.spec import parse_spec

from ..deployments import settings_with
from ..schemas import google_requests
from ..schemas.google_requests import Unacceptable, check, facts

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted(
    path
    for pattern in ("examples/*.json", "examples/local/*.json", "schemas/examples/valid/*.json",
                    "functions/dropforge/platforms/*/smoke.json")
    for path in ROOT.glob(pattern)
)  # fmt: skip
RUN = "text-to-sql-0123456789ab"
NOW = datetime(2026, 11, 23, tzinfo=UTC)
IMAGE = f"us-central1-docker.pkg.dev/my-project/dropforge/image@sha256:{'0' * 64}"
SETTINGS = settings_with(
    project="my-project",
    gke_cluster="standing",
    network="dropforge",
    subnetwork="dropforge",
    **{f"{name}_image": IMAGE for name in ("train_trl", "train_maxtext", "train_ray", "serve_vllm", "serve_vllm_tpu")},
    **{f"{name}_service_account": f"dropforge-{name}@my-project.iam.gserviceaccount.com"
       for name in ("trainer", "server", "nodes")},
)  # fmt: skip
REFUSED = (Unacceptable, jsonschema.ValidationError, json_format.ParseError)


def resources(path: Path) -> Iterator[Resource]:
    """The create requests of a spec's attempts and endpoint."""
    spec = parse_spec(path.read_bytes())
    launches = [
        Launch(RUN, 1, placement, spec, SETTINGS, NOW, 3600, key="") for placement in range(len(spec.target.placements))
    ]
    for launch in launches:
        yield from get_target(spec.target.type).resources(launch)
    if spec.serve:
        yield from get_server(spec.serve.type).resources(Deployment(RUN, spec, SETTINGS, NOW, launches[0]))


@cache
def created() -> dict[str, list[Resource]]:
    """All of them by kind, without the names of resources that another resource makes."""
    found: dict[str, list[Resource]] = {}
    for path in SPECS:
        for resource in resources(path):
            if resource.request:
                found.setdefault(resource.kind, []).append(resource)
    return found


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_google_takes_every_request(path: Path) -> None:
    for resource in resources(path):
        if resource.request:
            check(resource)


def test_the_specs_use_every_target_and_every_endpoint() -> None:
    specs = [parse_spec(path.read_bytes()) for path in SPECS]
    assert {spec.target.type for spec in specs} == set(targets())
    assert {spec.serve.type for spec in specs if spec.serve} == set(servers())
    assert facts().keys() <= created().keys(), "a description that no request uses"


def change(kind: str, *path: str | int, to: Any = ..., key: str = "") -> Resource:
    """The first request of a kind that has the path, with another value (or key) there; without a value: removed."""
    for resource in created()[kind]:
        request = copy.deepcopy(resource.request)
        parent: Any = request
        try:
            for step in path[:-1]:
                parent = parent[step]
            old = parent[path[-1]]
        except (KeyError, IndexError):
            continue
        if key or to is ...:
            del parent[path[-1]]
        if key:
            parent[key] = old
        elif to is not ...:
            parent[path[-1]] = to
        return replace(resource, request=request)
    raise AssertionError(f"no request of {kind} has {path}")


JOB, SERVICE = "run.googleapis.com/Job", "run.googleapis.com/Service"
CLUSTER, DISK = "container.googleapis.com/Cluster", "compute.googleapis.com/Disk"
NODE, QUEUED = "tpu.googleapis.com/Node", "tpu.googleapis.com/QueuedResource"
TASK = ("job", "template", "template")
CONTAINER = ("service", "template", "containers", 0)
SPEC = ("queuedResource", "tpu", "nodeSpec", 0)


@pytest.mark.parametrize(
    ("kind", "path", "key"),
    [
        (JOB, (*TASK, "maxRetries"), "maxRetry"),
        (JOB, (*TASK, "gpuZonalRedundancyDisabled"), "zonalRedundancyDisabled"),
        (JOB, ("job", "startExecutionToken"), "executionToken"),
        (SERVICE, (*CONTAINER, "startupProbe", "httpGet"), "http"),
        (SERVICE, ("service", "template", "scaling", "maxInstanceCount"), "maxInstances"),
        (CLUSTER, ("cluster", "controlPlaneEndpointsConfig", "ipEndpointsConfig"), "ipEndpointConfig"),
        (CLUSTER, ("cluster", "addonsConfig", "rayOperatorConfig"), "rayConfig"),
        (NODE, ("node", "schedulingConfig", "spot"), "preemptable"),
        (QUEUED, (*SPEC, "node", "networkConfig"), "network"),
        (QUEUED, ("queuedResource", "queueingPolicy", "validUntilDuration"), "validUntil"),
        (DISK, ("disk", "sizeGb"), "sizeGib"),
        ("monitoring.googleapis.com/PodMonitoring", ("spec", "endpoints"), "podMetricsEndpoints"),
    ],
)
def test_an_unknown_field_is_refused(kind: str, path: tuple[str | int, ...], key: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=key):
        check(change(kind, *path, key=key))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (JOB, (*TASK, "executionEnvironment"), "EXECUTION_ENVIRONMENT_GEN3"),
        (JOB, (*TASK, "vpcAccess", "egress"), "PRIVATE_RANGES"),
        (JOB, (*TASK, "nodeSelector", "accelerator"), "nvidia-h100"),
        (SERVICE, ("service", "ingress"), "INGRESS_ALL"),
        (SERVICE, (*CONTAINER, "ports", 0, "name"), "http2"),
        (CLUSTER, ("cluster", "releaseChannel", "channel"), "LATEST"),
        (NODE, ("node", "dataDisks", 0, "mode"), "RW"),
    ],
)
def test_an_unknown_value_is_refused(kind: str, path: tuple[str | int, ...], value: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=value):
        check(change(kind, *path, to=value))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (JOB, (*TASK, "containers", 0, "image")),
        (JOB, ("job", "template")),
        (SERVICE, ("serviceId",)),
        (CLUSTER, ("cluster", "name")),
        (NODE, ("node", "runtimeVersion")),
        (QUEUED, (*SPEC, "node")),
        (DISK, ("disk", "type")),
    ],
)
def test_a_missing_field_is_refused(kind: str, path: tuple[str | int, ...]) -> None:
    with pytest.raises(jsonschema.ValidationError, match=f"'{path[-1]}' is a required property"):
        check(change(kind, *path))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (JOB, (*TASK, "timeout"), "604801s"),
        (JOB, (*TASK, "timeout"), "3600"),
        (JOB, (*TASK, "maxRetries"), 11),
        (JOB, (*TASK, "containers", 0, "env", 0, "value"), "x" * 32769),
        (JOB, ("job", "labels"), {"Team": "search"}),
        (JOB, ("job", "labels"), {"run.googleapis.com/x": "y"}),
        (SERVICE, ("serviceId",), "s" * 50),
        (SERVICE, ("service", "template", "timeout"), "3601s"),
        (SERVICE, ("service", "template", "maxInstanceRequestConcurrency"), 1001),
        (SERVICE, (*CONTAINER, "startupProbe", "periodSeconds"), 241),
        (SERVICE, (*CONTAINER, "resources", "cpuIdle"), "false"),
        (CLUSTER, ("cluster", "name"), "c" * 41),
        (NODE, ("node", "acceleratorType"), "v5litepod"),
        (QUEUED, ("requestId",), "today"),
        (DISK, ("disk", "name"), "Disk"),
        (DISK, ("disk", "sizeGb"), "0"),
    ],
)
def test_a_value_beyond_a_limit_is_refused(kind: str, path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(REFUSED, match=r"longer than|maximum|does not match|too long|is not|match any"):
        check(change(kind, *path, to=value))


def on_disk(job: dict[str, Any]) -> None:
    job["template"]["template"]["volumes"] = [{"name": "work", "emptyDir": {"medium": "DISK", "sizeLimit": "10Gi"}}]


def beta(job: dict[str, Any]) -> None:
    on_disk(job)
    job["launchStage"] = "BETA"


@pytest.mark.parametrize(("mistake", "is_taken"), [(on_disk, False), (beta, True)])
def test_a_preview_needs_its_launch_stage(mistake: Callable[[dict[str, Any]], None], is_taken: bool) -> None:
    resource = created()[JOB][0]
    request = copy.deepcopy(resource.request)
    mistake(request["job"])
    changed = replace(resource, request=request)
    if is_taken:
        check(changed)
    else:
        with pytest.raises(
            Unacceptable, match=r"emptyDir\.medium=DISK is BETA, and the request has no such launchStage"
        ):
            check(changed)


PLACE = "projects/my-project/locations/us-central1"
SAMPLES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "data" / "google_samples.yaml").read_text())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["sample"])
def test_the_launch_stages_are_those_of_googles_acceptance_tests(sample: dict[str, Any]) -> None:
    """A sample passes with its launch stage, and a sample in preview does not pass without."""
    field = google_requests.BODIES[sample["kind"].partition("/")[2]]
    named = {"parent": PLACE, **({f"{field}Id": "sample"} if f"{field}Id!" in facts()[sample["kind"]] else {})}
    staged = {"launchStage": sample["stage"]} if sample["stage"] != "GA" else {}
    check(Resource(sample["kind"], "sample", {**named, field: {**sample[field], **staged}}))
    if staged:
        with pytest.raises(Unacceptable, match="has no such launchStage"):
            check(Resource(sample["kind"], "sample", {**named, field: sample[field]}))


def test_the_samples_show_every_feature_of_gpu_jobs_and_services() -> None:
    """The fields that Google has kept in preview at some time are in a sample that needs no launch stage."""
    shown = {name for sample in SAMPLES if sample["stage"] == "GA" for name in _names(sample)}
    once = {"template.nodeSelector", "template.gpuZonalRedundancyDisabled", "job.startExecutionToken",
            "vpcAccess.networkInterfaces"}  # fmt: skip
    sent = {name for kind in (JOB, SERVICE) for resource in created()[kind] for name in _names(resource.request)}
    assert once <= sent, "a field that no request has any more"
    assert once <= shown


# Fields that no sample has; Google's discovery document and client know them.
UNSAMPLED = {
    NODE: {"schedulingConfig.reserved"},
    QUEUED: {
        *("queuedResource.guaranteed", "guaranteed.minDuration", "queuedResource.reservationName"),
        *("queuedResource.queueingPolicy", "queueingPolicy.validUntilDuration", "queuedResource.spot"),
    },
    CLUSTER: set(),
}


@pytest.mark.parametrize("kind", UNSAMPLED)
def test_the_samples_show_the_fields_of_tpu_machines_and_clusters(kind: str) -> None:
    api, _, name = kind.partition("/")
    field = google_requests.BODIES[name]
    shown = {shown for sample in SAMPLES if sample["kind"].startswith(api) for shown in _names(sample)}
    sent = {sent for resource in created()[kind] for sent in _names(resource.request[field], field)}
    assert sent - shown == UNSAMPLED[kind]


def _names(value: Any, parent: str = "") -> Iterator[str]:
    """Every field as `parent.field`. The keys of maps are ours, and left out."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield f"{parent}.{key}"
        if key not in ("labels", "resourceLabels", "metadata"):
            yield from _names(inner, key)
    for inner in value if isinstance(value, list) else ():
        yield from _names(inner, parent)


def test_the_names_and_values_are_those_of_googles_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients judge too: a wrong line in tests/data/google_requests.yaml does not let a mistake pass."""
    with monkeypatch.context() as patch:
        patch.setattr(google_requests, "_object", lambda described: {})
        for resource in (
            change(JOB, *TASK, "maxRetries", key="maxRetry"),
            change(CLUSTER, "cluster", "autopilot", key="autoPilot"),
            change(NODE, "node", "dataDisks", 0, "mode", to="RW"),
            change(DISK, "disk", "sizeGb", key="sizeGib"),
        ):
            with pytest.raises(json_format.ParseError):
                check(resource)


def test_a_kind_without_a_description_is_refused() -> None:
    pod_monitoring = created()["monitoring.googleapis.com/PodMonitoring"][0]
    unknown = replace(pod_monitoring, kind="x.io/X", request={**pod_monitoring.request, "kind": "X"})
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check(unknown)


def test_a_misspelt_field_of_a_kubernetes_object_is_refused() -> None:
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        check(change("batch.k8s.io/Job", "spec", "backoffLimit", key="backofLimit"))


def test_jobs_and_probes_keep_the_limits_across_fields() -> None:
    """The discovery document of Cloud Run states them at startExecutionToken and at the probe's fields."""
    for job in created()[JOB]:
        assert len(job.request["jobId"]) + len(job.request["job"]["startExecutionToken"]) < 63
    for service in created()[SERVICE]:
        (container,) = service.request["service"]["template"]["containers"]
        assert container["startupProbe"]["timeoutSeconds"] < container["startupProbe"]["periodSeconds"]
    for queued in created()[QUEUED]:
        tiers = queued.request["queuedResource"].keys() & {"spot", "guaranteed"}
        assert len(tiers) <= 1
    for cluster in created()[CLUSTER]:
        assert re.fullmatch(r"[a-z][a-z0-9-]*", cluster.request["cluster"]["name"])
