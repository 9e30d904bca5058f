"""Kubernetes: clusters whose pods are local process groups, for the official client and kubectl."""

from .config import Accelerator, KubernetesConfig
from .emulator import KubernetesEmulator

__all__ = ["Accelerator", "KubernetesConfig", "KubernetesEmulator"]
