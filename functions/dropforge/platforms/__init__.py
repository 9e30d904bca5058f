"""The platforms: where a run trains (`get_target`) and where its model is served (`get_server`), imported on use."""

from __future__ import annotations

from importlib import import_module

from .serving import Server
from .training import Target

TARGETS = {
    "cloud_run": "cloud_run.train:CloudRunJobs",
    "gke": "gke.train:GkeJobs",
    "ray": "ray.train:RayJobs",
    "tpu_vm": "tpu_vm.train:TpuVms",
}
SERVERS = {
    "cloud_run": "cloud_run.serve:CloudRunService",
    "gke": "gke.serve:GkeDeployment",
    "tpu_vm": "tpu_vm.serve:TpuVmServer",
    "training_vm": "tpu_vm.training_vm:TrainingVm",
}


def get_target(kind: str) -> Target:
    """The target of that name. Raises KeyError: specs are validated before they get here."""
    module, name = TARGETS[kind].split(":")
    target: Target = getattr(import_module(f"{__name__}.{module}"), name)()
    return target


def get_server(kind: str) -> Server:
    """The endpoint kind of that name. Raises KeyError: specs are validated before they get here."""
    module, name = SERVERS[kind].split(":")
    server: Server = getattr(import_module(f"{__name__}.{module}"), name)()
    return server
