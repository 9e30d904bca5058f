"""Patches for libraries in containers of the local stack, whose processes have neither GPUs nor isolated ports.

- accelerate shards models (FSDP2) on CPU processes.
- The pods of a Ray cluster, which are processes of a single machine here, start and find each other.

The functions below put this directory on PYTHONPATH, where Python finds sitecustomize.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
LOCAL_GPUS = "DROPFORGE_LOCAL_GPUS"
LOCAL_RAY = "DROPFORGE_LOCAL_RAY"
HEAD_AGENT = "DROPFORGE_RAY_HEAD_AGENT"
OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB; by default it takes 30 % of the machine


def fsdp_environment(env: Mapping[str, str], gpus: int) -> dict[str, str]:
    """`env` for a container that requests `gpus` GPUs and runs as many CPU processes instead."""
    return {**env, "PYTHONPATH": _python_path(env), LOCAL_GPUS: str(gpus)}


def ray_environment(
    env: Mapping[str, str], ports: Mapping[int, int], head: str, agent: str = "", *, gcs_health: bool = False
) -> dict[str, str]:
    """`env` for a Ray node; `ports` maps its pod's ports to ports of this machine.

    `head` is the address of the cluster's GCS; `agent` accepts connections once the head has started. With `gcs_health`
    the head's dashboard answers /api/gcs_healthz, which costs a process of 100 MB.
    """
    local = {"ports": ports, "head": head, "object_store_bytes": OBJECT_STORE_BYTES, "gcs_health": gcs_health}
    return {
        **env,
        "PYTHONPATH": _python_path(env),
        LOCAL_RAY: json.dumps(local),
        "RAY_ADDRESS": head,
        HEAD_AGENT: agent,
        # Otherwise Ray starts a worker for each logical CPU of this machine, not of the pod.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's defaults are fixed ports: 44217 and 44227.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
    }


def _python_path(env: Mapping[str, str]) -> str:
    return ":".join([str(DIRECTORY), *filter(None, [env.get("PYTHONPATH", "")])])
