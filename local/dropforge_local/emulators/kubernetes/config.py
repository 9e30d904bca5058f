"""Settings that differ between machines and tests: timings, capacity, ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .kuberay import Operator, operator


@dataclass(frozen=True)
class Accelerator:
    """A type of GPU or TPU: the maximum per node, and the maximum per cluster."""

    per_node: int
    total: int


# https://cloud.google.com/kubernetes-engine/docs/how-to/autopilot-gpus
ACCELERATORS = MappingProxyType(
    {
        "nvidia-b200": Accelerator(8, 16),
        "nvidia-h200-141gb": Accelerator(8, 16),
        "nvidia-h100-mega-80gb": Accelerator(8, 16),
        "nvidia-h100-80gb": Accelerator(8, 16),
        "nvidia-a100-80gb": Accelerator(8, 16),
        "nvidia-tesla-a100": Accelerator(16, 16),
        "nvidia-rtx-pro-6000": Accelerator(8, 8),
        "nvidia-l4": Accelerator(8, 16),
        "nvidia-tesla-t4": Accelerator(4, 8),
    }
)

# Chips of a host by the label gke-tpu-accelerator (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)
TPUS = MappingProxyType(
    {
        "tpu-v4-podslice": Accelerator(4, 256),
        "tpu-v5-lite-podslice": Accelerator(8, 256),
        "tpu-v5p-slice": Accelerator(4, 256),
        "tpu-v6e-slice": Accelerator(8, 256),
        "tpu7x": Accelerator(4, 256),
    }
)


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Timings and capacity of the emulated clusters; times of minutes in the cloud are short here.

    `kuberay` is the version of the Ray operator, one of kuberay.OPERATORS; another raises ValueError.
    """

    accelerators: Mapping[str, Accelerator] = field(default_factory=lambda: ACCELERATORS)
    tpus: Mapping[str, Accelerator] = field(default_factory=lambda: TPUS)
    reservations: frozenset[str] | None = None  # existing names; None: every name exists
    node_seconds: float = 0.5  # until a new node is ready
    node_idle_seconds: float = 60.0  # until an empty node is removed
    job_backoff_seconds: float = 10.0  # before a job's failed pod is replaced; doubles up to six minutes
    restart_seconds: float = 10.0  # CrashLoopBackOff's first delay; doubles up to five minutes
    pull_retry_seconds: float = 10.0  # ImagePullBackOff's first delay; doubles up to five minutes
    probe_seconds: float = 0.25  # period of probes until a container is ready, whatever its own period
    longest_pre_stop_seconds: float = 1.0  # of a preStop hook `sleep`, whatever the hook asks for
    preemption_grace_seconds: float = 15.0  # maximum grace time of pods when a spot node shuts down
    autopilot: bool = True  # refuse GPUs without a node selector for their type, as Autopilot's admission does
    watch_history: int = 2000  # changes kept for watches; a watch from an older change gets 410 Gone
    kuberay: str = "1.7"
    ray_probe_seconds: int = 10  # before the first readiness probe of a Ray pod, as in KubeRay
    ray_poll_seconds: float = 1.0  # between two polls of a Ray job; 3 in KubeRay
    ray_status_seconds: float = 30.0  # until a silent Ray head fails its job; 300 in KubeRay
    gateway_seconds: float = 0.2  # until the load balancer of a Gateway has a changed route; a minute in the cloud
    gateway_spread_seconds: float = 0.5  # after that, until each of its proxies has the route
    event_seconds: float = 3600.0  # until an event is deleted, as in Kubernetes
    kept_logs: int = 200  # ended containers whose output is kept, also after the deletion of their pods
    api_ports: range = range(16000, 17000)
    pod_ports: range = range(17000, 19000)
    service_ports: range = range(19000, 20000)

    def __post_init__(self) -> None:
        operator(self.kuberay)

    @property
    def ray_operator(self) -> Operator:
        """The Ray operator of this version."""
        return operator(self.kuberay)
