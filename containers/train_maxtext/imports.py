"""Imports MaxText quickly. Its packages have 4,000 modules, which every start and restart of the training imports."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# Packages that the training never uses. MaxText 0.2.5 imports them for DeepSeek's layers (sympy), and for the profiler
# of Pathways, which is a web server; Tunix 0.1.7 imports pandas for the logs of reinforcement learning.
UNUSED = frozenset({"fastapi", "pandas", "sympy", "uvicorn"})


class LazyFinder(MetaPathFinder):
    """Finds the packages of UNUSED. Python executes such a package only when an attribute of it is used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in UNUSED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules without the packages of UNUSED, and without a search for garbage.

    The modules stay until the process ends. So Python never searches them, neither now nor later: MaxText asks for a
    search after every tensor that it converts.
    """
    finder, was_enabled = LazyFinder(), gc.isenabled()
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        gc.freeze()
        if was_enabled:
            gc.enable()
