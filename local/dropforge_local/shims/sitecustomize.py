"""Python imports this at start wherever its directory is on PYTHONPATH (local stack only: see __init__.py).

Ray listens on every interface unless its node is 127.0.0.1, and on Linux it replaces 127.0.0.1 by the machine's address
(ray._private.services). `ray start` receives the ports of a pod, but here all pods share the ports of a machine.

accelerate uses FSDP for several GPUs but silently runs DDP for several CPUs (AcceleratorState.__init__ checks for
MULTI_GPU and similar types). FSDP2 itself works on gloo. In ranks that `accelerate launch` started with FSDP, this
module reports CPU processes as GPU processes, so that containers train sharded models on a laptop.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

LOOPBACK = "127.0.0.1"
# Options of `ray start` that are ports of the pod, with Ray's defaults; a head uses all of them.
PORTS = {
    "dashboard-agent-listen-port": 52365,
    "metrics-export-port": 8080,
    "port": 6379,
    "dashboard-port": 8265,
    "ray-client-server-port": 10001,
}
WORKER_PORTS = ("dashboard-agent-listen-port", "metrics-export-port")
# The dashboard's modules that serve jobs, their state and the head; each module is a process of 100 MB.
DASHBOARD_MODULES = "JobHead,NodeHead,StateHead"
GCS_HEALTH_MODULE = "ReportHead"


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual and patches the modules of `patches` once they are loaded."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self.patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (patch := self.patches.pop(fullname, None)) is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def make_small(services: Any) -> None:
    """Keep a node on the loopback interface, and its dashboard small."""
    start = services.start_ray_process
    gcs_health = json.loads(os.environ["DROPFORGE_LOCAL_RAY"]).get("gcs_health")
    modules = f"{DASHBOARD_MODULES},{GCS_HEALTH_MODULE}" if gcs_health else DASHBOARD_MODULES

    def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == "dashboard":
            command = [*command, f"--modules-to-load={modules}"]
        return start(command, process_type, *args, **kwargs)

    services.start_ray_process = start_ray_process
    services.resolve_ip_for_localhost = lambda host: host
    services.get_node_ip_address = lambda address=None: LOOPBACK


def keep_jax_here(lib: Any) -> None:
    """Make JAX's coordinator and gloo, which would use this host's name, listen on the loopback interface."""
    serve, connect = lib._jax.get_distributed_runtime_service, lib._jax.make_gloo_tcp_collectives

    def get_distributed_runtime_service(address: str, *args: Any, **kwargs: Any) -> Any:
        return serve(f"{LOOPBACK}:{address.rpartition(':')[2]}", *args, **kwargs)

    def make_gloo_tcp_collectives(*args: Any, **kwargs: Any) -> Any:
        return connect(*args, **{"hostname": LOOPBACK, **kwargs})

    lib._jax.get_distributed_runtime_service = get_distributed_runtime_service
    lib._jax.make_gloo_tcp_collectives = make_gloo_tcp_collectives


def keep_programs(compiler: Any) -> None:
    """Make every process keep the programs that it compiles. JAX lets only the first process of a training write them.

    On CPUs the programs of each process have keys of their own. So the other processes would compile at every start.
    """
    first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    write = compiler._cache_write
    compiler._cache_write = FunctionType(write.__code__, {**vars(compiler), "distributed": first}, write.__name__)


def local_start(words: list[str], local: dict[str, Any]) -> list[str]:
    """The arguments of `ray start` for this machine: local ports, the head's address, the loopback interface."""
    head = "--head" in words
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    for name in PORTS if head else WORKER_PORTS:
        port = options.get(name, str(PORTS[name]))
        options[name] = str(local["ports"].get(port, port))
    options |= {"node-ip-address": LOOPBACK, "min-worker-port": "0", "max-worker-port": "0"}
    # Without this option a node uses the head's directory, which in a cluster is on another machine.
    options.setdefault("temp-dir", os.path.join(tempfile.gettempdir(), "ray"))
    options["object-store-memory"] = str(local["object_store_bytes"])
    options |= {"dashboard-host": LOOPBACK, "no-monitor": ""} if head else {"address": local["head"]}
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def call_cpus_gpus(state: Any) -> None:
    """Wrap PartialState.__init__, which decides on the distributed type."""
    initialise = state.PartialState.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = __init__


if text := os.environ.get("DROPFORGE_LOCAL_RAY"):
    patches = {
        "ray._private.services": make_small,
        "jax._src.lib": keep_jax_here,
        "jax._src.compiler": keep_programs,
    }
    sys.meta_path.insert(0, Finder(patches))
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    if script == "ray" and sys.argv[1:2] == ["start"]:
        sys.argv[2:] = local_start(sys.argv[2:], json.loads(text))
elif os.environ.get("DROPFORGE_LOCAL_GPUS") and os.environ.get("ACCELERATE_USE_FSDP") == "true":
    sys.meta_path.insert(0, Finder({"accelerate.state": call_cpus_gpus}))
