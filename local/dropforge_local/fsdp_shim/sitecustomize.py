"""Python imports this at start wherever its directory is on PYTHONPATH (local stack only: see __init__.py).

accelerate uses FSDP for several GPUs but silently runs DDP for several CPUs (AcceleratorState.__init__ checks for
MULTI_GPU and similar types). FSDP2 itself works on gloo. In ranks that `accelerate launch` started with FSDP, this
module reports CPU processes as GPU processes, so that containers train sharded models on a laptop.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STATE = "accelerate.state"


class Finder(importlib.abc.MetaPathFinder):
    """Finds `accelerate.state` as usual and patches it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != STATE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                call_cpus_gpus(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def call_cpus_gpus(state: Any) -> None:
    """Wrap PartialState.__init__, which decides on the distributed type."""
    initialise = state.PartialState.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = __init__


if os.environ.get("DROPFORGE_LOCAL_GPUS") and os.environ.get("ACCELERATE_USE_FSDP") == "true":
    sys.meta_path.insert(0, Finder())
