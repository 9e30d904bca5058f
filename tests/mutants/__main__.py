"""Judge mutants of the production code: which tests notice each change?

    python -m tests.mutants                                the whole catalogue, by every judge
    python -m tests.mutants --only stages/retries          only the mutants whose id contains the text; may be repeated
    python -m tests.mutants --judge unit --judge model     only by these judges: unit, model, chaos
    python -m tests.mutants --first                        each mutant only up to the first judge that notices it
    python -m tests.mutants --generic 100 --seed 3         mutants that operators make, drawn by a seed
    python -m tests.mutants --sample 50 --seed 3           a part of the catalogue, drawn by a seed
    python -m tests.mutants --fixed                        the part that CI runs

It prints a line for each verdict, then who killed whom, the score and the survivors. Each verdict is also a line of
build/mutants/verdicts.jsonl: --continue skips the mutants that it has, --table sums it up. The exit code is 1 if a
mutant survives whose entry does not say why.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from . import operators
from .judges import JUDGES
from .lanes import TREES, Case, Lanes, Verdict
from .mutant import Mutant, catalogue

VERDICTS = TREES / "verdicts.jsonl"
SEEDS = 60
FIXED_SEEDS = 12
SHOWN = 110  # characters of what noticed a mutant


def main() -> int:
    options = _options()
    if options.table:
        noted: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in read(VERDICTS):
            noted[verdict.mutant].append(verdict)
        return _sum_up({mutant.id: mutant for mutant in catalogue()}, noted)
    mutants = _mutants(options)
    cases = [_case(mutant, options) for mutant in mutants]
    seeds = FIXED_SEEDS if options.fixed else options.seeds
    verdicts: dict[str, list[Verdict]] = defaultdict(list)
    with closing(Lanes(options.lanes, seeds, is_small=options.fixed)) as lanes:
        wanted = tuple(judge for judge in JUDGES if any(judge in case.judges for case in cases))
        lanes.calibrate(Case(None, wanted, tuple(sorted({test for case in cases for test in case.tests}))))
        with open(os.devnull if options.fixed else VERDICTS, "a" if options.continued else "w") as log:
            for verdict in lanes.judge(cases, first=options.first):
                verdicts[verdict.mutant].append(verdict)
                print(json.dumps(verdict), file=log, flush=True)
                print(_line(verdict), flush=True)
    return _sum_up({mutant.id: mutant for mutant in mutants}, verdicts)


def _case(mutant: Mutant, options: argparse.Namespace) -> Case:
    if not options.fixed:
        return Case(mutant, tuple(options.judge or JUDGES))
    if mutant.fixed in JUDGES:
        return Case(mutant, (mutant.fixed,))
    return Case(mutant, ("unit",), (mutant.fixed,))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which tests notice each change?")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="mutants whose id contains it")
    parser.add_argument("--judge", action="append", choices=JUDGES, help="only this judge; may be repeated")
    parser.add_argument("--first", action="store_true", help="stop at the first judge that notices the mutant")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"simulations of judge chaos (default {SEEDS})")
    parser.add_argument("--lanes", type=int, default=1, help="judgements at a time (default 1)")
    parser.add_argument("--generic", type=int, default=0, metavar="N", help="draw N mutants that operators make")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N mutants of the catalogue")
    parser.add_argument("--seed", type=int, default=0, help="the seed that draws them (default 0)")
    parser.add_argument("--fixed", action="store_true", help="the part that CI runs")
    parser.add_argument("--continue", dest="continued", action="store_true", help="skip what has a verdict already")
    parser.add_argument("--table", action="store_true", help="only sum up the verdicts of earlier commands")
    return parser.parse_args()


def _mutants(options: argparse.Namespace) -> list[Mutant]:
    """The wanted mutants. An equivalent one has nothing to be noticed."""
    every = operators.drawn(options.generic, options.seed) if options.generic else catalogue()
    mutants = [mutant for mutant in every if not mutant.equivalent and (mutant.fixed or not options.fixed)]
    if options.only:
        mutants = [mutant for mutant in mutants if any(text in mutant.id for text in options.only)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    done = {verdict.mutant for verdict in read(VERDICTS)} if options.continued else set()
    return [mutant for mutant in mutants if mutant.id not in done]


def read(path: Path) -> list[Verdict]:
    """The verdicts in a file; none if there is no file."""
    return [Verdict(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _line(verdict: Verdict) -> str:
    end = f"killed: {' '.join(verdict.killer.split())}"[:SHOWN] if verdict.killer else "survives"
    return f"{verdict.mutant:<60} {verdict.judge:<6} {verdict.seconds:6.1f} s  {end}"


def _sum_up(mutants: dict[str, Mutant], verdicts: dict[str, list[Verdict]]) -> int:
    """Print who killed whom, the score and the survivors. Returns the exit code."""
    survivors = [id_ for id_, given in verdicts.items() if not any(verdict.killer for verdict in given)]
    print(f"\n{_table(verdicts)}\n\n{_score(verdicts.values())}")
    for id_ in survivors:
        mutant = mutants.get(id_)
        print(f"survives: {id_}{f': {mutant.breaks or mutant.survives}' if mutant else ''}")
    explained = {mutant.id for mutant in mutants.values() if mutant.survives}
    return 0 if explained.issuperset(survivors) else 1


def _table(verdicts: dict[str, list[Verdict]]) -> str:
    """A row for each mutant and a column for each judge; empty where a judge did not see the mutant."""
    rows = [["mutant", *JUDGES]]
    for id_, given in sorted(verdicts.items()):
        by = {verdict.judge: "killed" if verdict.killer else "survives" for verdict in given}
        rows.append([id_, *(by.get(judge, "") for judge in JUDGES)])
    return "\n".join(f"{name:<62}" + "".join(f"{cell:<10}" for cell in cells) for name, *cells in rows)


def _score(verdicts: Iterable[list[Verdict]]) -> str:
    """How many mutants were killed, by anyone and by each judge."""
    given = list(verdicts)
    killed = sum(any(verdict.killer for verdict in each) for each in given)
    by = {judge: sum(any(v.killer and v.judge == judge for v in each) for each in given) for judge in JUDGES}
    shares = ", ".join(f"{judge} {count}" for judge, count in by.items())
    return f"{killed} of {len(given)} mutants were killed ({100 * killed / max(1, len(given)):.0f} %): {shares}"


if __name__ == "__main__":
    raise SystemExit(main())
