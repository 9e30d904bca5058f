"""Kubernetes: clusters whose pods are local process groups, for the official client and kubectl.

Stored but without effect: HorizontalPodAutoscalers, security contexts, tolerations, priority,
preStop hooks, sessionAffinity. Not there at all, and answered 501 or 404: server-side apply, protobuf bodies, exec and
port-forward, RBAC, PersistentVolumes, DaemonSets, StatefulSets, CronJobs, affinity, exec and grpc probes.
Processes share one machine: a pod's port is another one locally (PORT says which), names of services do not resolve.
"""

from .config import Accelerator, KubernetesConfig
from .emulator import KubernetesEmulator

__all__ = ["Accelerator", "KubernetesConfig", "KubernetesEmulator"]
