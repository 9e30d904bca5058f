"""Serving `tpu_vm`: vLLM's TPU build on one TPU VM, reached inside the VPC only.

The machine runs the same startup script as a training machine, in the role of a server. Cloud TPU does not probe the
server, so `deploy` asks the server itself, at the node's address.
https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import dns, tpu
from dropforge.cloud.classify import classify, client_errors, something_may_exist
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed, list_places
from dropforge.cloud.resource import Resource
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import (
    START_HINT,
    Deployment,
    Server,
    compile_variables,
    endpoint_labels,
    server_environment,
)
from dropforge.platforms.training import Phase, Status, Waits
from dropforge.spec import JobSpec, seconds

from .catalog import TPU_VMS, tpu_vm_price
from .spec import TpuVmServe, TpuVmTarget
from .train import STARTUP_SCRIPT, being_created, key_metadata, status_of
from .written import read_written

READY_WAIT_SECONDS = 20.0  # the wait of one call; the workflow calls again
LOOK_SECONDS = 1.0
HEALTH_SECONDS = 5.0
CLOCKS_DIFFER = timedelta(seconds=2)  # of the machine and of Cloud TPU, at the most
_HINTS = {
    ErrorClass.STOCKOUT: "serve in another zone, on other capacity, or raise serve.startup_timeout",
    ErrorClass.PREEMPTED: "serve on capacity that Google does not preempt: on_demand, or a reservation",
    ErrorClass.INFRASTRUCTURE: "drop the spec again, or serve in another zone",
}


class TpuVmServer(Server):
    """See `Server` for the contract of each verb."""

    def region(self, deployment: Deployment) -> str:
        return _zone(deployment.spec)

    def price(self, spec: JobSpec, placement: int | None = None) -> HourlyPrice:
        serve = _serve(spec)
        if serve.price_usd_per_hour is not None:
            return HourlyPrice(serve.price_usd_per_hour, None, "serve.price_usd_per_hour in the spec")
        return tpu_vm_price(serve.accelerator_type, _zone(spec), serve.capacity, "serve.price_usd_per_hour")

    def resources(self, deployment: Deployment) -> list[Resource]:
        return tpu.resources(self.machine(deployment))

    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        return self.advance(cloud, deployment, self.machine(deployment))

    def advance(self, cloud: Cloud, deployment: Deployment, wanted: tpu.Machine) -> str | Waits:
        """Advance towards a machine that serves the deployment's model; its URL once its server answers."""
        deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
        answer: str | Waits = Waits(being_created(wanted))
        exists = self.ensure(cloud, wanted)
        with something_may_exist():
            while True:
                if exists:
                    answer = self._ready(cloud, deployment, wanted)
                if isinstance(answer, str):
                    return answer
                cloud.clock.sleep(LOOK_SECONDS)
                if cloud.clock.monotonic() >= deadline:
                    return answer
                exists = self.ensure(cloud, wanted)

    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        wanted = self.machine(deployment)
        try:
            status, url, reported = _look(cloud, deployment, wanted)
        except client_errors() as error:
            raise classify(error) from error
        if reported:
            return reported
        if status.phase is not Phase.RUNNING:
            return _error(status)
        hint = f"{START_HINT}; a firewall may keep requests from it (docs/serving.md)"
        return CloudError(ErrorClass.CODE, f"{wanted.node} runs, but nothing answers at {url}/health", hint)

    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        """A queued resource without its node does not answer, so only the node counts."""
        try:
            _, node = tpu.find_machine(cloud, self.machine(deployment))
        except client_errors() as error:
            raise classify(error) from error
        return node is not None

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        records = (dns.list_records,) if cloud.settings.endpoint_domain else ()
        lists = (tpu.list_queued, tpu.list_nodes, *records)
        is_used = bool(cloud.settings.serve_vllm_tpu_image)
        resources = list_places(cloud, lists, lambda list_zones: list_zones(cloud), is_used=is_used)
        yield from (each for each in resources if {names.EXPIRES_LABEL, names.ENDPOINT_LABEL} & each.labels.keys())

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        if kind == dns.RECORD:
            read = dns.find_record(cloud, name)
            return read is None or dns.change_record(cloud, name, read, "")
        return tpu.delete(cloud, kind, name)

    def machine(self, deployment: Deployment) -> tpu.Machine:
        """The endpoint's machine."""
        return machine(deployment)

    def ensure(self, cloud: Cloud, wanted: tpu.Machine) -> bool:
        """Request the machine unless it exists; True once it does. Raises CloudError."""
        return tpu.ensure(cloud, wanted)

    def _ready(self, cloud: Cloud, deployment: Deployment, wanted: tpu.Machine) -> str | Waits:
        """The URL once the server answers, or why it does not yet. Raises CloudError if it never will."""
        try:
            status, url, reported = _look(cloud, deployment, wanted)
        except client_errors() as error:
            raise classify(error) from error
        if url and status.phase is Phase.RUNNING and is_healthy(cloud, url):
            return url
        if status.phase is Phase.FAILED:
            raise _error(status)
        if reported and reported.error_class is not ErrorClass.TRANSIENT:
            raise reported
        if status.phase is Phase.RUNNING:
            return Waits("the machine runs; it pulls the image or loads the model")
        return Waits(reported.message if reported else status.message)


def machine(deployment: Deployment) -> tpu.Machine:
    """The endpoint's machine. It waits for capacity as long as the endpoint may take to start."""
    serve, settings = _serve(deployment.spec), deployment.settings
    parent = f"projects/{settings.project}/locations/{_zone(deployment.spec)}"
    name = names.endpoint_name(deployment.run)
    return tpu.Machine(
        settings=settings,
        run=deployment.run,
        node=f"{parent}/nodes/{name}",
        queued=f"{parent}/queuedResources/{name}" if serve.queued else "",
        accelerator_type=serve.accelerator_type,
        runtime_version=serve.runtime_version or TPU_VMS[serve.accelerator_type].runtimes[0],
        capacity=serve.capacity,
        reservation=serve.reservation,
        wait_seconds=seconds(serve.startup_timeout),
        use_seconds=seconds(serve.ttl),
        service_account=settings.server_service_account,
        labels=endpoint_labels(deployment),
        metadata=metadata(deployment),
        tags=(tpu.SERVER_TAG,),
    )


def metadata(deployment: Deployment) -> dict[str, str]:
    """The parameters of the startup script. There is no topic, because only training publishes job events."""
    serve, settings = _serve(deployment.spec), deployment.settings
    environment = server_environment(deployment, serve.max_model_len, serve.max_num_seqs)
    environment += compile_variables(settings.serve_vllm_tpu_image, tpu.WORK_DIRECTORY)
    return {
        "startup-script": STARTUP_SCRIPT.read_text(encoding="utf-8"),
        "dropforge-role": "serve",
        "dropforge-run": deployment.run,
        "dropforge-attempt": "0",
        "dropforge-image": settings.serve_vllm_tpu_image,
        "dropforge-env": tpu.server_variables(environment, TPU_VMS[serve.accelerator_type].chips),
        "dropforge-deadline": str(int(deployment.expires.timestamp())),
        "dropforge-runs-bucket": settings.runs_bucket,
        **key_metadata(deployment.run, settings, deployment.run_key),
    }


def url_of(node: Any) -> str | None:
    """The URL of a node's server; None while the node has no address."""
    if node is None or not node.network_endpoints:
        return None
    return f"http://{node.network_endpoints[0].ip_address}:{tpu.SERVER_PORT}"


def is_healthy(cloud: Cloud, url: str) -> bool:
    """Whether the server at `url` reports that its model is loaded."""
    try:
        return bool(cloud.clients.endpoint(url).get(f"{url}/health", timeout=HEALTH_SECONDS).ok)
    except client_errors():
        return False


def _look(cloud: Cloud, deployment: Deployment, wanted: tpu.Machine) -> tuple[Status, str | None, CloudError | None]:
    """The machine's status, its URL, and the failure that its startup script has written."""
    queued, node = tpu.find_machine(cloud, wanted)
    reported = None if node is None else _reported(cloud, deployment, node.create_time)
    return status_of(queued, node, wanted), url_of(node), reported


def _reported(cloud: Cloud, deployment: Deployment, since: datetime) -> CloudError | None:
    """The failure that the startup script of the endpoint's machine has written; None without one.

    A machine that served the model before may have failed, too: what was written before `since` is of another machine.
    """
    run, bucket = deployment.run, deployment.settings.runs_bucket
    name = names.server_object(run, "status.json")
    written = read_written(cloud, bucket, name, run, attempt=0, key=deployment.run_key)
    if written is None or written.error_class is None or written.time < since - CLOCKS_DIFFER:
        return None
    hint = f"see gs://{bucket}/{names.server_object(run, 'startup.log')}"
    return CloudError(written.error_class, written.message, hint)


def _error(status: Status) -> CloudError:
    """The error of an endpoint whose machine does not serve, by the machine's status."""
    error_class = status.error_class or ErrorClass.INFRASTRUCTURE
    if error_class is ErrorClass.TRANSIENT:  # the machine has ended, so the error does not pass
        error_class = ErrorClass.INFRASTRUCTURE
    return CloudError(error_class, status.message, _HINTS.get(error_class, status.hint))


def _zone(spec: JobSpec) -> str:
    if zone := _serve(spec).zone:
        return zone
    assert isinstance(spec.target, TpuVmTarget), "the spec was validated: without a zone, its target is a TPU VM"
    return spec.target.placements[0].zone


def _serve(spec: JobSpec) -> TpuVmServe:
    assert isinstance(spec.serve, TpuVmServe), "the registry gives this endpoint only specs of its type"
    return spec.serve
