"""The checks of requests: names, labels, limits, GPU rules, quota.

Sources: https://cloud.google.com/run/docs/reference/rest/v2 and .../docs/configuring/{memory-limits,cpu,jobs/gpu}.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from google.cloud import run_v2

from dropforge_local.base.errors import ApiError

from ..kit.names import LABEL_KEY, LABEL_VALUE
from .capacity import GpuKind
from .config import GIB, CloudRunConfig
from .faults import Faults
from .messages import has, seconds
from .volumes import is_disk

IDENTIFIER = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
TOKEN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
ANNOTATION_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
SYSTEM_NAMESPACES = ("run.googleapis.com", "cloud.googleapis.com", "serving.knative.dev", "autoscaling.knative.dev")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
RESERVED_ENV = {"PORT", "K_SERVICE", "K_REVISION", "K_CONFIGURATION"}
SERVICE_ACCOUNT = re.compile(r"[a-z0-9-]{1,63}@[a-z0-9.-]+\.gserviceaccount\.com")
SECRET = re.compile(r"(projects/[a-z0-9-]+/secrets/)?[A-Za-z0-9_-]{1,255}")
NETWORK = re.compile(r"(projects/[^/]+/(global/networks|regions/[^/]+/subnetworks)/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
CONNECTOR = re.compile(r"(projects/[^/]+/locations/[^/]+/connectors/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
MEMORY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
GPU = "nvidia.com/gpu"
LIMITS = {"cpu", "memory", GPU}
MANUAL = run_v2.ServiceScaling.ScalingMode.MANUAL
MINIMUM_MEMORY_FOR_CPU = ((6, 4 * GIB), (4, 2 * GIB))
STANDARD_CPUS, MOST_MEMORY = (1, 2, 4, 6, 8), 32 * GIB  # of every instance without one of the largest GPUs
MINIMUM_CPU_FOR_MEMORY = ((24 * GIB, 8), (16 * GIB, 6), (8 * GIB, 4), (4 * GIB, 2))
LONGEST_TASK_SECONDS = 168 * 3600
LONGEST_GPU_TASK_SECONDS = 12 * 3600
LONGEST_REQUEST_SECONDS = 3600
# failureThreshold times periodSeconds: https://docs.cloud.google.com/run/docs/configuring/healthchecks (2026-11-22)
LONGEST_STARTUP_SECONDS, LONGEST_GPU_STARTUP_SECONDS = 600, 1800
# https://github.com/PolicyEngine/policyengine-api/pull/3729: the tag is part of a host name
LONGEST_TAG_AND_SERVICE = 46
# A value in Preview needs one of these launch stages (google.api.LaunchStage ALPHA and BETA).
PREVIEW_STAGES = (2, 3)
# Above this a task with a GPU is in Preview: .../docs/configuring/task-timeout (2026-11-22)
LONGEST_AVAILABLE_GPU_TASK_SECONDS = 3600
PREVIEW_ACCELERATORS = {"nvidia-rtx-pro-6000"}  # .../docs/configuring/jobs/gpu (2026-02-03)
LONGEST_ENV_VALUE = 32 * 1024
LARGEST_TASK_COUNT = 10_000
NOT_EMULATED_VOLUMES = {
    "gcs": "a bucket cannot be mounted without FUSE; read it with the storage client",
    "nfs": "there is no NFS server",
    "cloud_sql_instance": "there is no Cloud SQL",
    "secret": "containers share this machine's absolute paths; use an environment variable for the secret",
}
# https://docs.cloud.google.com/run/docs/configuring/jobs/ephemeral-disk (2026-11-22)
SMALLEST_DISK = 10 * GIB
MOST_DISKS = 10


def refuse(field: str, message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"{field}: {message}")


def check_region(region: str, config: CloudRunConfig) -> None:
    if region not in config.regions:
        raise ApiError("PERMISSION_DENIED", f"Permission denied on 'locations/{region}' (or it may not exist).")


def check_job(job: Any, region: str, config: CloudRunConfig) -> None:
    """Refuse a job that Cloud Run would refuse, or that the emulator does not support (UNIMPLEMENTED)."""
    _check_labels("job", job)
    _check_labels("job.template", job.template)
    _check_job_token(job)
    template = job.template
    _check_range("job.template.task_count", template.task_count, 1, LARGEST_TASK_COUNT)
    if template.parallelism < 0:
        raise refuse("job.template.parallelism", f"is {template.parallelism}; expected 0 or more")
    task = template.template
    at = "job.template.template"
    gpu = _check_workload(at, task, region, config)
    _check_range(f"{at}.max_retries", task.max_retries, 0, 10)
    check_task_timeout(f"{at}.timeout", seconds(task.timeout), gpu)
    previews = ["a GPU task above an hour"] if gpu and _is_preview_timeout(task.timeout) else []
    _check_launch_stage("job", job, [*previews, *_previews(task)])


def check_task_timeout(field: str, value: float, gpu: bool) -> None:
    longest = LONGEST_GPU_TASK_SECONDS if gpu else LONGEST_TASK_SECONDS
    if not 1 <= value <= longest:
        raise refuse(field, f"is {value:g} s; expected 1 to {longest} s{' for a task with a GPU' if gpu else ''}")


def _is_preview_timeout(timeout: Any) -> bool:
    return seconds(timeout) > LONGEST_AVAILABLE_GPU_TASK_SECONDS


def _previews(template: Any) -> list[str]:
    """The values of a task or revision template that are in Preview."""
    accelerator = template.node_selector.accelerator
    disks = ["an ephemeral disk"] if any(map(is_disk, template.volumes)) else []
    return [*([accelerator] if accelerator in PREVIEW_ACCELERATORS else []), *disks]


def _check_launch_stage(at: str, resource: Any, previews: list[str]) -> None:
    """Refuse values in Preview without their launch stage, as https://github.com/hashicorp/terraform-provider-google
    issue 14010 shows: 400 "Precondition check failed."."""
    if previews and resource.launch_stage not in PREVIEW_STAGES:
        why = f"{at}.launch_stage is not BETA, which {', '.join(previews)} needs"
        raise ApiError("FAILED_PRECONDITION", f"Precondition check failed. {why}")


def check_service(service: Any, region: str, config: CloudRunConfig) -> None:
    """Refuse a service that Cloud Run would refuse, or that the emulator does not support (UNIMPLEMENTED)."""
    _check_labels("service", service)
    _check_labels("service.template", service.template)
    for field in ("binary_authorization", "build_config", "multi_region_settings", "iap_enabled"):
        _check_emulated("service", service, field)
    if len(service.description) > 512:
        raise refuse("service.description", f"has {len(service.description)} characters; expected at most 512")
    template, at = service.template, "service.template"
    gpu = _check_workload(at, template, region, config)
    _check_emulated(at, template, "service_mesh")
    if gpu and template.containers[0].resources.cpu_idle:
        raise refuse(f"{at}.containers[0].resources.cpu_idle", "must be false for a service with a GPU")
    if not 1 <= seconds(template.timeout) <= LONGEST_REQUEST_SECONDS:
        raise refuse(f"{at}.timeout", f"is {seconds(template.timeout):g} s; expected 1 to {LONGEST_REQUEST_SECONDS} s")
    _check_range(f"{at}.max_instance_request_concurrency", template.max_instance_request_concurrency, 1, 1000)
    _check_scaling(service)
    check_traffic(service)
    _check_launch_stage("service", service, _previews(template))


def check_traffic(service: Any) -> None:
    total = sum(target.percent for target in service.traffic)
    if service.traffic and total != 100:
        raise refuse("service.traffic", f"percents total {total}; expected 100")
    for index, target in enumerate(service.traffic):
        kind = run_v2.TrafficTargetAllocationType
        if target.type_ == kind.TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION and not target.revision:
            raise refuse(f"service.traffic[{index}].revision", "is required with this type")
        if target.tag and not IDENTIFIER.fullmatch(target.tag):
            raise refuse(f"service.traffic[{index}].tag", f"is {target.tag!r}; expected {IDENTIFIER.pattern}")
        if target.tag and (length := len(target.tag) + len(service.name.rpartition("/")[2])) > LONGEST_TAG_AND_SERVICE:
            expected = f"expected at most {LONGEST_TAG_AND_SERVICE} together with the service's name, not {length}"
            raise refuse(f"service.traffic[{index}].tag", f"is {target.tag!r}; {expected}")
    tags = [target.tag for target in service.traffic if target.tag]
    if len(tags) != len(set(tags)):
        raise refuse("service.traffic", f"tags {tags!r} repeat")


def check_gpu_quota(kind: GpuKind | None, wanted: int, faults: Faults, config: CloudRunConfig) -> None:
    """Refuse more instances than the quota allows. Cloud Run checks this when a client writes the resource."""
    if kind is None or wanted <= (allowed := faults.gpu_quota(kind.region, kind.accelerator)):
        return
    redundancy = "with" if kind.redundant else "without"
    if allowed <= 0:
        text = f"You do not have quota for using GPUs {redundancy} zonal redundancy."
    else:
        text = f"Max instances must be set to {allowed} or fewer in order to set GPU requirements."
    suffix = "" if kind.redundant else "NoZonalRedundancy"
    name = f"{config.gpus[kind.accelerator].quota}Alloc{suffix}PerProjectRegion"
    raise ApiError(
        "FAILED_PRECONDITION",
        f"{text}\nTo request quota: g.co/cloudrun/gpu-quota\n\n"
        f"Quota violated:\n{name} requested: {wanted} allowed: {max(allowed, 0)}",
    )


def check_job_id(job_id: str) -> None:
    if not IDENTIFIER.fullmatch(job_id) or len(job_id) >= 64:
        raise refuse("job_id", f"is {job_id!r}; expected fewer than 64 of [a-z0-9-], starting with a letter")


def check_service_id(service_id: str) -> None:
    if not IDENTIFIER.fullmatch(service_id) or len(service_id) >= 50:
        raise refuse("service_id", f"is {service_id!r}; expected fewer than 50 of [a-z0-9-], starting with a letter")


def parse_cpu(text: str, field: str = "cpu") -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", text)
    value = float(match[1]) / (1000 if match[2] else 1) if match else 0.0
    if value < 0.08 or (value > 1 and value != int(value)):
        raise refuse(field, f"is {text!r}; expected whole CPUs, or 0.08 to 1")
    return value


def parse_memory(text: str, field: str = "memory") -> int:
    match = MEMORY.fullmatch(text)
    value = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if value < 128 * 2**20:
        raise refuse(field, f"is {text!r}; expected at least 128Mi, as in '512Mi' or '16Gi'")
    return value


def _check_job_token(job: Any) -> None:
    token = job.start_execution_token or job.run_execution_token
    if not token:
        return
    name = job.name.rsplit("/", 1)[-1]
    if not TOKEN.fullmatch(token):
        raise refuse("job.start_execution_token", f"is {token!r}; expected {TOKEN.pattern}")
    if len(name) + len(token) >= 63:
        raise refuse(
            "job.start_execution_token",
            f"{token!r} and the job's name {name!r} have {len(name) + len(token)} characters; expected fewer than 63",
        )


def _check_labels(at: str, resource: Any) -> None:
    if len(resource.labels) > 64:
        raise refuse(f"{at}.labels", f"has {len(resource.labels)} labels; expected at most 64")
    for key, value in resource.labels.items():
        _check_namespace(f"{at}.labels", key)
        if not LABEL_KEY.fullmatch(key):
            raise refuse(f"{at}.labels", f"key {key!r}; expected {LABEL_KEY.pattern}")
        if not LABEL_VALUE.fullmatch(value):
            raise refuse(f"{at}.labels[{key!r}]", f"is {value!r}; expected {LABEL_VALUE.pattern}")
    for key in resource.annotations:
        _check_namespace(f"{at}.annotations", key)
        if not ANNOTATION_KEY.fullmatch(key):
            raise refuse(f"{at}.annotations", f"key {key!r}; expected {ANNOTATION_KEY.pattern}")


def _check_namespace(at: str, key: str) -> None:
    domain = key.partition("/")[0] if "/" in key else ""
    if any(domain == system or domain.endswith(f".{system}") for system in SYSTEM_NAMESPACES):
        raise refuse(at, f"key {key!r} is in a system namespace, which the v2 API refuses; use the field instead")


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise refuse(field, f"is {value}; expected {least} to {most}")


def _check_emulated(at: str, message: Any, field: str) -> None:
    if has(message, field) and getattr(message, field):
        raise ApiError("UNIMPLEMENTED", f"{at}.{field} is not emulated by the local stack")


def _check_workload(at: str, template: Any, region: str, config: CloudRunConfig) -> bool:
    """Check the common part of task and revision templates; return whether the template has a GPU."""
    if len(template.containers) != 1:
        if not template.containers:
            raise refuse(f"{at}.containers", "is empty; expected one container")
        raise ApiError("UNIMPLEMENTED", f"{at}.containers: side-cars are not emulated by the local stack")
    _check_emulated(at, template, "encryption_key")
    for index, volume in enumerate(template.volumes):
        _check_volume(f"{at}.volumes[{index}]", volume)
    if len(template.volumes) > MOST_DISKS:
        raise refuse(f"{at}.volumes", f"has {len(template.volumes)} volumes; expected at most {MOST_DISKS}")
    _check_identity(at, template)
    container = template.containers[0]
    _check_container(f"{at}.containers[0]", container)
    _check_mounts(f"{at}.containers[0].volume_mounts", container, {volume.name for volume in template.volumes})
    gpu = _check_resources(at, template, container, region, config)
    _check_startup_time(f"{at}.containers[0].startup_probe", container.startup_probe, gpu)
    return gpu


def _check_volume(at: str, volume: Any) -> None:
    for kind, reason in NOT_EMULATED_VOLUMES.items():
        if has(volume, kind):
            raise ApiError("UNIMPLEMENTED", f"{at}.{kind} is not emulated: {reason}")
    if not has(volume, "empty_dir"):
        raise refuse(at, "has no source")
    if not is_disk(volume):
        raise ApiError("UNIMPLEMENTED", f"{at}.empty_dir is not emulated in memory; use medium DISK, or TMPDIR")
    if parse_memory(volume.empty_dir.size_limit, f"{at}.empty_dir.size_limit") < SMALLEST_DISK:
        raise refuse(f"{at}.empty_dir.size_limit", f"is {volume.empty_dir.size_limit!r}; expected at least 10Gi")


def _check_mounts(at: str, container: Any, volumes: set[str]) -> None:
    for index, mount in enumerate(container.volume_mounts):
        if mount.name not in volumes:
            raise refuse(f"{at}[{index}].name", f"{mount.name!r} names no volume")
        if not mount.mount_path.startswith("/"):
            raise refuse(f"{at}[{index}].mount_path", f"is {mount.mount_path!r}; expected an absolute path")


def _check_identity(at: str, template: Any) -> None:
    account = template.service_account
    if account and not SERVICE_ACCOUNT.fullmatch(account):
        raise refuse(f"{at}.service_account", f"is {account!r}; expected an email NAME@PROJECT.iam.gserviceaccount.com")
    access = template.vpc_access
    if access.connector and access.network_interfaces:
        raise refuse(f"{at}.vpc_access", "has both connector and network_interfaces; expected one of them")
    if access.connector and not CONNECTOR.fullmatch(access.connector):
        raise refuse(f"{at}.vpc_access.connector", f"is {access.connector!r}; expected {CONNECTOR.pattern}")
    if len(access.network_interfaces) > 1:
        raise refuse(f"{at}.vpc_access.network_interfaces", "has more than one interface; expected one")
    for interface in access.network_interfaces:
        given = [name for name in (interface.network, interface.subnetwork) if name]
        if not given:
            raise refuse(f"{at}.vpc_access.network_interfaces[0]", "needs a network or a subnetwork")
        if wrong := [name for name in given if not NETWORK.fullmatch(name)]:
            raise refuse(f"{at}.vpc_access.network_interfaces[0]", f"{wrong[0]!r}; expected {NETWORK.pattern}")


def _check_container(at: str, container: Any) -> None:
    for field in ("source_code", "base_image_uri", "depends_on"):
        _check_emulated(at, container, field)
    if len(container.ports) > 1:
        raise refuse(f"{at}.ports", f"has {len(container.ports)} ports; expected at most one")
    _check_env(at, container.env)
    for name, longest in (("startup_probe", 240), ("liveness_probe", 3600)):
        if has(container, name):
            _check_probe(f"{at}.{name}", getattr(container, name), longest)
    if has(container, "readiness_probe"):
        raise ApiError("UNIMPLEMENTED", f"{at}.readiness_probe is not emulated by the local stack")


def _check_env(at: str, variables: Iterable[Any]) -> None:
    seen: set[str] = set()
    for variable in variables:
        if not ENV_NAME.fullmatch(variable.name):
            raise refuse(f"{at}.env", f"name {variable.name!r}; expected {ENV_NAME.pattern}")
        if variable.name in RESERVED_ENV or variable.name.startswith("CLOUD_RUN_"):
            raise refuse(f"{at}.env", f"The following reserved env names were provided: {variable.name}.")
        if variable.name in seen:
            raise refuse(f"{at}.env", f"name {variable.name!r} is given twice")
        seen.add(variable.name)
        if len(variable.value) > LONGEST_ENV_VALUE:
            raise refuse(
                f"{at}.env[{variable.name!r}]", f"has {len(variable.value)} characters; expected 32768 at most"
            )
        secret = variable.value_source.secret_key_ref.secret
        if secret and not SECRET.fullmatch(secret):
            raise refuse(f"{at}.env[{variable.name!r}].value_source.secret_key_ref.secret", f"is {secret!r}")


def _check_probe(at: str, probe: Any, longest: int) -> None:
    kinds = [kind for kind in ("http_get", "tcp_socket", "grpc") if has(probe, kind)]
    if len(kinds) != 1:
        raise refuse(at, f"has {kinds!r}; expected exactly one of http_get, tcp_socket, grpc")
    if kinds == ["grpc"]:
        raise ApiError("UNIMPLEMENTED", f"{at}.grpc is not emulated by the local stack; use http_get or tcp_socket")
    port = getattr(probe, kinds[0]).port
    _check_range(f"{at}.{kinds[0]}.port", port or 1, 1, 65535)
    _check_range(f"{at}.initial_delay_seconds", probe.initial_delay_seconds, 0, longest)
    _check_range(f"{at}.period_seconds", probe.period_seconds, 1, longest)
    if not 1 <= probe.timeout_seconds <= probe.period_seconds:
        raise refuse(f"{at}.timeout_seconds", f"is {probe.timeout_seconds}; expected 1 to period_seconds")
    if probe.failure_threshold < 1:
        raise refuse(f"{at}.failure_threshold", f"is {probe.failure_threshold}; expected 1 or more")


def _check_startup_time(at: str, probe: Any, gpu: bool) -> None:
    longest = LONGEST_GPU_STARTUP_SECONDS if gpu else LONGEST_STARTUP_SECONDS
    if (total := probe.failure_threshold * probe.period_seconds) > longest:
        raise refuse(at, f"failure_threshold times period_seconds is {total} s; expected at most {longest} s")


def _check_resources(at: str, template: Any, container: Any, region: str, config: CloudRunConfig) -> bool:
    limits: Mapping[str, str] = container.resources.limits
    at_limits = f"{at}.containers[0].resources.limits"
    if unknown := sorted(set(limits) - LIMITS):
        raise refuse(at_limits, f"keys {unknown!r}; expected only {sorted(LIMITS)!r}")
    cpu = parse_cpu(limits["cpu"], f"{at_limits}[cpu]")
    memory = parse_memory(limits["memory"], f"{at_limits}[memory]")
    if not _is_large(template, config):
        if cpu > 1 and cpu not in STANDARD_CPUS:
            raise refuse(f"{at_limits}[cpu]", f"is {limits['cpu']!r}; expected 0.08 to 1, or one of 2, 4, 6, 8")
        if memory > MOST_MEMORY:
            raise refuse(f"{at_limits}[memory]", f"is {limits['memory']!r}; expected at most {MOST_MEMORY // GIB}Gi")
    needed_memory = next((least for above, least in MINIMUM_MEMORY_FOR_CPU if cpu >= above), 0)
    if memory < needed_memory:
        raise refuse(
            f"{at_limits}[memory]", f"is {limits['memory']!r}; {cpu:g} CPU need at least {needed_memory >> 20}Mi"
        )
    needed_cpu = next((least for above, least in MINIMUM_CPU_FOR_MEMORY if memory > above), 0)
    if cpu < needed_cpu:
        raise refuse(f"{at_limits}[cpu]", f"is {limits['cpu']!r}; {limits['memory']} need at least {needed_cpu} CPU")
    return _check_gpu(at, template, limits, cpu, memory, region, config)


def _is_large(template: Any, config: CloudRunConfig) -> bool:
    """Whether the template has a GPU whose instances are larger than all others. Google's pages do not list sizes."""
    gpu = config.gpus.get(template.node_selector.accelerator)
    return gpu is not None and gpu.minimum_cpu > max(STANDARD_CPUS)


def _check_gpu(
    at: str, template: Any, limits: Mapping[str, str], cpu: float, memory: int, region: str, config: CloudRunConfig
) -> bool:
    accelerator, count = template.node_selector.accelerator, limits.get(GPU)
    if not accelerator and count is None:
        return False
    field = f"{at}.containers[0].resources.limits[{GPU}]"
    if count != "1":
        raise refuse(field, f"is {count!r}; expected '1', the only count that Cloud Run has")
    if not accelerator:
        raise refuse(f"{at}.node_selector.accelerator", f"is required with {GPU}")
    gpu = config.gpus.get(accelerator)
    if gpu is None:
        raise refuse(f"{at}.node_selector.accelerator", f"is {accelerator!r}; expected one of {sorted(config.gpus)!r}")
    if region not in gpu.regions:
        regions = ", ".join(sorted(gpu.regions))
        raise refuse(
            f"{at}.node_selector.accelerator", f"{accelerator} is not available in {region}; it is in {regions}"
        )
    if cpu < gpu.minimum_cpu or memory < gpu.minimum_memory_bytes:
        raise refuse(
            f"{at}.containers[0].resources.limits",
            f"cpu {limits['cpu']} and memory {limits['memory']}; {accelerator} needs at least "
            f"{gpu.minimum_cpu:g} CPU and {gpu.minimum_memory_bytes // GIB}Gi",
        )
    return True


def _check_scaling(service: Any) -> None:
    scaling = service.scaling
    is_manual, has_count = scaling.scaling_mode == MANUAL, has(scaling, "manual_instance_count")
    if is_manual != has_count:
        expected = "scaling_mode MANUAL and manual_instance_count, or neither of them"
        raise refuse("service.scaling", f"has only one of the fields of manual scaling; expected {expected}")
    if is_manual and (scaling.manual_instance_count < 0 or scaling.min_instance_count or scaling.max_instance_count):
        raise refuse("service.scaling", "expected a manual_instance_count of 0 or more, and no minimum or maximum")
    for at, scaling in (("service.scaling", service.scaling), ("service.template.scaling", service.template.scaling)):
        least, most = scaling.min_instance_count, scaling.max_instance_count
        if least < 0 or most < 0 or (most and least > most):
            raise refuse(at, f"min_instance_count {least} and max_instance_count {most}; expected 0 <= min <= max")
