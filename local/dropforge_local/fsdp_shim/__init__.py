"""Makes accelerate shard models (FSDP2) on processes without GPUs. Only containers of the local stack use it.

`environment` puts this directory on PYTHONPATH, where Python finds sitecustomize.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent
LOCAL_GPUS = "DROPFORGE_LOCAL_GPUS"


def environment(env: Mapping[str, str], gpus: int) -> dict[str, str]:
    """`env` for a container that requests `gpus` GPUs and runs as many CPU processes instead."""
    path = [str(DIRECTORY), *filter(None, [env.get("PYTHONPATH", "")])]
    return {**env, "PYTHONPATH": ":".join(path), LOCAL_GPUS: str(gpus)}
