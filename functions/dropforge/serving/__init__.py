"""The endpoint kinds, by the name that a spec's `serve.type` gives: one line each, imported on use."""

from __future__ import annotations

from importlib import import_module

from .base import Server

SERVERS = {
    "cloud_run": "cloud_run:CloudRunService",
    "gke": "gke:GkeDeployment",
    "tpu_vm": "tpu_vm:TpuVmServer",
    "training_vm": "training_vm:TrainingVm",
}


def get_server(kind: str) -> Server:
    """The endpoint kind of that name. Raises KeyError: specs are validated before they get here."""
    module, name = SERVERS[kind].split(":")
    server: Server = getattr(import_module(f"{__name__}.{module}"), name)()
    return server
