"""The number of seeds that the chaos simulation runs and checks per minute, by the clock and by CPU time.

python -m bench.chaos --seeds 1000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from dropforge_local.chaos.checker import check
from dropforge_local.chaos.simulation import run

SEEDS = 300


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="number of seeds, from seed 0")
    options = parser.parse_args(arguments)
    began, used = time.monotonic(), time.process_time()
    results = [_simulate(seed) for seed in range(options.seeds)]
    seconds, used = time.monotonic() - began, time.process_time() - used
    milliseconds, facts = (statistics.median(values) for values in zip(*results, strict=True))
    print(f"{options.seeds} seeds, every promise kept: {options.seeds / seconds * 60:.0f} per minute", end="")
    print(f" ({options.seeds / used * 60:.0f} per minute of CPU); a seed: {milliseconds:.0f} ms, {facts:.0f} facts")


def _simulate(seed: int) -> tuple[float, int]:
    """Simulate a seed; return the milliseconds and the number of facts in its history."""
    began = time.perf_counter()
    history = run(seed)
    if problems := check(history):
        raise SystemExit(f"seed {seed} breaks a promise: {problems[0]}")
    return (time.perf_counter() - began) * 1000, len(history.facts)


if __name__ == "__main__":
    main(sys.argv[1:])
