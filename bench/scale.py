"""Many simulated runs against the quotas of a project (docs/scale.md): the quota met first, and how long runs wait.

python -m bench scale, or python -m bench.scale --runs 1000 --part 0.1. The clock is simulated: one core needs minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dropforge_local.chaos.history import History
from dropforge_local.chaos.quotas import Quotas
from dropforge_local.chaos.scale import AT_ONCE, REGIONS, Crowd, run_crowd
from dropforge_local.chaos.scale_rules import check_crowd, starts

RUNS, PART = 300, 0.05
HOUR = 3600.0
# After an increase of the rates of the API of Cloud Run, which Google grants on request.
INCREASED = Quotas(run_writes=300, run_reads=6000)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help="number of runs, all dropped in an hour")
    parser.add_argument("--part", type=float, default=PART, help=f"part of a deployment with {AT_ONCE:,} runs at once")
    options = parser.parse_args(arguments)
    room = round(1000 * options.part)
    crowd = Crowd(runs=options.runs, within=HOUR, part=options.part, regions=_regions(options.runs, room))
    print(f"{options.runs} runs dropped in an hour; room for {room} in each of {len(crowd.regions)} regions")
    report("new project", crowd)
    report("more requests", replace(crowd, quotas=INCREASED))
    places = room * len(crowd.regions)
    report(f"max_runs {places}", replace(crowd, quotas=INCREASED, max_runs=places))


def report(name: str, crowd: Crowd) -> None:
    """Simulate a crowd, check every promise, and print the figures."""
    began = time.process_time()
    history = run_crowd(crowd)
    seconds = time.process_time() - began
    found = check_crowd(history)
    print(f"\n{name}: {seconds:.0f} s of CPU, {_hours(history):.1f} h simulated, {len(found)} promises broken")
    for problem in found[:5]:
        print(f"  {problem}")
    _print_quotas(history, crowd.runs)
    _print_waits(history)
    calls = Counter(fact.data["instance"].rsplit("-", 1)[0] for fact in history.of("answer"))
    print("  calls a run:", ", ".join(f"{name} {count / crowd.runs:.1f}" for name, count in calls.most_common(4)))


def _regions(runs: int, room: int) -> tuple[str, ...]:
    """As many regions as have room for two thirds of the runs."""
    return REGIONS[: max(1, min(len(REGIONS), runs * 2 // 3 // room))]


def _hours(history: History) -> float:
    return (history.facts[-1].time - history.facts[0].time) / HOUR


def _print_quotas(history: History, runs: int) -> None:
    """The quotas in the order in which they were met."""
    first, count = dict[str, float](), Counter[str]()
    for fact in history.of("quota"):
        first.setdefault(fact.data["quota"], fact.time - history.facts[0].time)
        count[fact.data["quota"]] += 1
    for quota, met in first.items():
        print(f"  {quota:16} met after {met / 60:6.1f} min; refused {count[quota] / runs:7.1f} times a run")


def _print_waits(history: History) -> None:
    dropped = {fact.data["run"]: fact.time for fact in history.of("dropped")}
    begun: dict[str, float] = {}
    for (run, _), began in starts(history).items():
        begun[run] = min(began, begun.get(run, began))
    waits = sorted((began - dropped[run]) / 60 for run, began in begun.items())
    late = waits[int(len(waits) * 0.95)]
    print(f"  waits: median {statistics.median(waits):.1f} min, 95 % below {late:.0f} min, at most {waits[-1]:.0f} min")
    latest, overtaken = float("-inf"), 0.0
    for run in sorted(begun, key=begun.__getitem__):
        overtaken = max(overtaken, latest - dropped[run])
        latest = max(latest, dropped[run])
    print(f"  a run began after a run that was dropped up to {overtaken / 60:.1f} min later")


if __name__ == "__main__":
    main(sys.argv[1:])
