"""`make bench` runs all benchmarks one after another; `python -m bench NAME...` runs the named benchmarks."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import bench


def main(names: list[str]) -> None:
    modules = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_"))
    for name in names or modules:
        print(f"\n## {name} (load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores)", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
