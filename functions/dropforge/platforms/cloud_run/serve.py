"""Serving `cloud_run`: vLLM on a Cloud Run service with one GPU, IAM on, scaling to zero.

API: https://cloud.google.com/run/docs/reference/rest/v2/projects.locations.services
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.classify import (
    classify,
    classify_create,
    classify_first_look,
    classify_text,
    client_errors,
)
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, list_places
from dropforge.cloud.resource import Resource, check_owner
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import (
    START_HINT,
    Deployment,
    Server,
    compile_variables,
    endpoint_labels,
    server_environment,
)
from dropforge.platforms.training import Waits
from dropforge.spec import JobSpec, seconds

from .catalog import cloud_run_price, cloud_run_regions
from .preview import with_launch_stage
from .spec import CloudRunServe

KIND = "run.googleapis.com/Service"
PORT = 8000
READY_WAIT_SECONDS = 20.0  # the wait of one call; the workflow calls again
LOOK_SECONDS = 0.2
# A startup probe's period and time-out are each at most 240 s. Their product with failureThreshold has a limit, too:
# the spec's startup_timeout is at most GPU_STARTUP_SECONDS.
PROBE_PERIOD_SECONDS = 5


class CloudRunService(Server):
    """See `Server` for the contract of each verb."""

    def region(self, deployment: Deployment) -> str:
        return _region(deployment.spec)

    def price(self, spec: JobSpec, placement: int | None = None) -> HourlyPrice:
        serve = _serve(spec)
        if serve.price_usd_per_hour is not None:
            return HourlyPrice(serve.price_usd_per_hour, None, "serve.price_usd_per_hour in the spec")
        return cloud_run_price(serve.accelerator, _region(spec), serve.cpu, serve.memory_gib)

    def resources(self, deployment: Deployment) -> list[Resource]:
        return [Resource(KIND, service_name(deployment), service_request(deployment))]

    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        try:
            known = self._service(cloud, service_name(deployment))
        except client_errors() as error:
            raise classify_first_look(error) from error
        try:
            if known is None:
                self._create(cloud, deployment)
            return self._ready(cloud, deployment)
        except client_errors() as error:
            raise classify(error) from error

    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        try:
            service = self._service(cloud, service_name(deployment))
        except client_errors() as error:
            raise classify(error) from error
        message = service.terminal_condition.message if service is not None else "the service does not exist"
        return CloudError(ErrorClass.CODE, message or "Cloud Run does not report the service as ready", START_HINT)

    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        try:
            return self._service(cloud, service_name(deployment)) is not None
        except client_errors() as error:
            raise classify(error) from error

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """List each region with GPUs, because the API cannot list all regions at once."""
        yield from list_places(cloud, cloud_run_regions(), lambda region: _services_in(cloud, region))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        from google.api_core.exceptions import NotFound

        services = cloud.clients.run_services()
        deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
        try:
            if not services.get_service(name=name, timeout=TIMEOUT_SECONDS).delete_time:
                services.delete_service(name=name, timeout=TIMEOUT_SECONDS)
            while cloud.clock.monotonic() < deadline:
                services.get_service(name=name, timeout=TIMEOUT_SECONDS)
                cloud.clock.sleep(LOOK_SECONDS)
        except NotFound:
            return True
        except client_errors() as error:
            raise classify(error) from error
        return False

    def _service(self, cloud: Cloud, name: str) -> Any:
        from google.api_core.exceptions import NotFound

        try:
            return cloud.clients.run_services().get_service(name=name, timeout=TIMEOUT_SECONDS)
        except NotFound:
            return None

    def _create(self, cloud: Cloud, deployment: Deployment) -> None:
        from google.api_core.exceptions import Conflict
        from google.cloud import run_v2

        request = service_request(deployment)
        service = run_v2.Service.from_json(json.dumps(request["service"]), ignore_unknown_fields=False)
        try:
            cloud.clients.run_services().create_service(
                parent=request["parent"], service=service, service_id=request["serviceId"], timeout=TIMEOUT_SECONDS
            )
        except Conflict:
            return  # an earlier create whose reply was lost; `_ready` checks the owner
        except client_errors() as error:
            raise classify_create(error) from error

    def _ready(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        """Wait for a while. Returns the URL once the service is ready, or what Cloud Run waits for."""
        from google.cloud import run_v2

        state = run_v2.Condition.State
        deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
        reason = ""
        while cloud.clock.monotonic() < deadline:
            service = self._service(cloud, service_name(deployment))
            if service is not None:
                check_owner(service.name, service.labels, deployment.run)
                condition = service.terminal_condition
                # A failed deployment never becomes the observed generation, so only success checks the generation.
                if not service.reconciling and condition.state == state.CONDITION_FAILED:
                    raise deployment_failure(condition.message)
                if not service.reconciling and service.observed_generation == service.generation:
                    return str(service.uri)
                reason = condition.message
            cloud.clock.sleep(LOOK_SECONDS)
        return Waits(reason or "Cloud Run creates the service and starts its container")


def deployment_failure(message: str) -> CloudError:
    """Why a revision is not ready: a cause in the project (quota, image), or its container."""
    error = classify_text("FAILED_PRECONDITION", message)
    if error.error_class is ErrorClass.CONFIG and re.search(r"container failed|startup probe", message, re.I):
        return CloudError(ErrorClass.CODE, message, START_HINT)
    return error


def service_name(deployment: Deployment) -> str:
    """The full resource name of the run's service."""
    parent = f"projects/{deployment.settings.project}/locations/{_region(deployment.spec)}"
    return f"{parent}/services/{names.endpoint_name(deployment.run)}"


def service_request(deployment: Deployment) -> dict[str, Any]:
    """The createService request as JSON."""
    labels, serve = endpoint_labels(deployment), _serve(deployment.spec)
    template = revision_template(deployment, labels, serve.min_instances)
    parent, _, service_id = service_name(deployment).rpartition("/services/")
    service = with_launch_stage({"labels": labels, "ingress": "INGRESS_TRAFFIC_ALL", "template": template})
    return {"parent": parent, "serviceId": service_id, "service": service}


def revision_template(deployment: Deployment, labels: dict[str, str], min_instances: int) -> dict[str, Any]:
    """The template of a revision that serves the model of a run, as JSON."""
    serve, settings = _serve(deployment.spec), deployment.settings
    return {
        "labels": labels,
        "serviceAccount": settings.server_service_account,
        "timeout": "600s",
        "scaling": {"minInstanceCount": min_instances, "maxInstanceCount": serve.max_instances},
        "maxInstanceRequestConcurrency": serve.max_num_seqs,
        "nodeSelector": {"accelerator": serve.accelerator},
        "gpuZonalRedundancyDisabled": True,
        "vpcAccess": {
            "networkInterfaces": [{"network": settings.network, "subnetwork": settings.subnetwork}],
            "egress": "PRIVATE_RANGES_ONLY",
        },
        "containers": [_container(deployment, serve)],
    }


def _services_in(cloud: Cloud, region: str) -> list[Listed]:
    parent = f"projects/{cloud.settings.project}/locations/{region}"
    services = cloud.clients.run_services().list_services(parent=parent, timeout=TIMEOUT_SECONDS)
    return [Listed(KIND, service.name, dict(service.labels), service.create_time) for service in services]


def _container(deployment: Deployment, serve: CloudRunServe) -> dict[str, Any]:
    limits = {"cpu": str(serve.cpu), "memory": f"{serve.memory_gib}Gi", "nvidia.com/gpu": "1"}
    image = deployment.settings.serve_vllm_image
    environment = server_environment(deployment, serve.max_model_len, serve.max_num_seqs)
    return {
        "image": image,
        "env": [*environment, *compile_variables(image)],
        # Instance-based billing: a service with a GPU must keep its CPU between requests.
        "resources": {"limits": limits, "cpuIdle": False, "startupCpuBoost": True},
        "ports": [{"name": "http1", "containerPort": PORT}],
        "startupProbe": {
            "httpGet": {"path": "/health", "port": PORT},
            "periodSeconds": PROBE_PERIOD_SECONDS,
            "timeoutSeconds": PROBE_PERIOD_SECONDS - 1,
            "failureThreshold": max(1, seconds(serve.startup_timeout) // PROBE_PERIOD_SECONDS),
        },
    }


def _region(spec: JobSpec) -> str:
    return _serve(spec).region or spec.target.placements[0].region


def _serve(spec: JobSpec) -> CloudRunServe:
    assert isinstance(spec.serve, CloudRunServe), "the registry gives this endpoint only specs of its type"
    return spec.serve
