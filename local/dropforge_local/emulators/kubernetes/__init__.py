"""Kubernetes: clusters whose pods are local process groups, for the official client and kubectl.

Stored without effect: HorizontalPodAutoscalers, security contexts, tolerations, priority, sessionAffinity,
preStop hooks other than `sleep`. Not emulated, answered with 501 or 404: RBAC, PersistentVolumes, DaemonSets,
StatefulSets, CronJobs, GatewayClasses, affinity, exec and grpc probes. Protobuf bodies of large kinds, such as a Job,
are answered with 501 and a command that sends JSON.
The load balancer of a Gateway has an address with a local port, for a listener of any port.
All processes share a machine: a pod's port maps to a local port (given by PORT), and names of services do not resolve.
"""

from .config import Accelerator, KubernetesConfig
from .emulator import KubernetesEmulator

__all__ = ["Accelerator", "KubernetesConfig", "KubernetesEmulator"]
