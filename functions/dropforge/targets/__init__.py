"""The targets, by the name that a spec gives: one line each, imported on use."""

from __future__ import annotations

from importlib import import_module

from .base import Target

TARGETS = {
    "cloud_run": "cloud_run:CloudRunJobs",
    "gke": "gke:GkeJobs",
    "ray": "ray:RayJobs",
    "tpu_vm": "tpu_vm:TpuVms",
}


def get_target(kind: str) -> Target:
    """The target of that name. Raises KeyError: specs are validated before they get here."""
    module, name = TARGETS[kind].split(":")
    target: Target = getattr(import_module(f"{__name__}.{module}"), name)()
    return target
