"""`make bench` runs all benchmarks one after another; `python -m bench NAME...` runs the named benchmarks.

`python -m bench --before COMMIT NAME...` also runs them in the tree of a commit, and prints the ratios (_before.py).
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
from collections.abc import Sequence

import bench


def main(arguments: Sequence[str] | None = None) -> None:
    benchmarks = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(benchmarks))
    parser.add_argument("--before", metavar="COMMIT", help="also measure the tree of this commit, and print the ratios")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="with --before: rounds of both trees (3)")
    options = parser.parse_args(arguments)
    names = options.names or benchmarks
    if unknown := sorted(set(names) - set(benchmarks)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(benchmarks)}")
    if options.before:
        from ._before import compare

        compare(options.before, names, options.rounds)
        return
    for name in names:
        print(f"\n## {name} (load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores)", flush=True)
        importlib.import_module(f"bench.{name}").main()


if __name__ == "__main__":
    main()
