"""Refuse a spec whose target the local stack cannot run on this machine."""

from __future__ import annotations

import platform

from dropforge.spec import JobSpec

from .problems import CliError

# Why a target or an endpoint needs Linux, by its type.
LINUX_ONLY = {
    "ray": "Ray supports clusters of several nodes on Linux only "
    "(https://docs.ray.io/en/latest/cluster/getting-started.html)",
    "tpu_vm": "the startup script of a TPU VM needs GNU's tools, and every emulated TPU VM needs an address of its own",
}


def check_machine(spec: JobSpec) -> None:
    """Raise CliError if the spec has a target or an endpoint that needs Linux, and this machine has another system."""
    system = platform.system()
    types = {"/target/type": spec.target.type, "/serve/type": spec.serve.type if spec.serve else ""}
    for pointer, name in types.items():
        if system != "Linux" and name in LINUX_ONLY:
            raise CliError(
                f"{pointer} is {name!r}, which the local stack cannot run on {system}: {LINUX_ONLY[name]}",
                "choose cloud_run or gke, or run the local stack on Linux; see README.md",
            )
