"""Lets the pods of a Ray cluster, which are processes of one machine here, start and find each other.

`environment` puts this directory on PYTHONPATH, where Python finds sitecustomize.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

DIRECTORY = Path(__file__).parent
LOCAL_RAY = "DROPFORGE_LOCAL_RAY"
HEAD_AGENT = "DROPFORGE_RAY_HEAD_AGENT"
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes is 75 MiB; by default it takes 30 % of the machine


def environment(env: Mapping[str, str], ports: Mapping[int, int], head: str, agent: str = "") -> dict[str, str]:
    """`env` for a Ray node whose pod's ports are `ports` of this machine.

    `head` is where its cluster's GCS listens, and `agent` what listens there once the head has started.
    """
    path = [str(DIRECTORY), *filter(None, [env.get("PYTHONPATH", "")])]
    local = {"ports": ports, "head": head, "object_store_bytes": OBJECT_STORE_BYTES}
    return {
        **env,
        "PYTHONPATH": ":".join(path),
        LOCAL_RAY: json.dumps(local),
        "RAY_ADDRESS": head,
        HEAD_AGENT: agent,
        # Ray starts a worker for each logical CPU otherwise, and a pod's are not this machine's.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Two ports that Ray has by number: 44217 and 44227.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
    }
