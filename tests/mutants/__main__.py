"""Judge mutants of the production code: which tests notice each change?

    python -m tests.mutants                                the whole catalogue; each mutant until a judge notices it
    python -m tests.mutants --continue                     the mutants that an interrupted command has not judged
    python -m tests.mutants --survivors --simulations 200  the survivors of earlier commands, more thoroughly
    python -m tests.mutants --only stages/retries          only the mutants whose id contains the text; may be repeated
    python -m tests.mutants --judge unit --judge model     only by these judges: unit, chaos, model
    python -m tests.mutants --tests tests/stages/x.py      the unit tests of this file or folder only; may be repeated
    python -m tests.mutants --every                        each mutant by every judge
    python -m tests.mutants --generic 100 --seed 3         mutants that operators make, drawn by a seed
    python -m tests.mutants --sample 50 --seed 3           a part of the catalogue, drawn by a seed
    python -m tests.mutants --fixed                        the part that CI runs
    python -m tests.mutants --table                        only sum up the verdicts of earlier commands

A judge begins with the tests and simulations that call the changed function, the cheapest first. The first command on
a tree records which these are (build/mutants/reach.json, some minutes), and that the judges find no fault with it.

It prints a line for each verdict, then a table by file, the score and the survivors. Each verdict is also a line of
build/mutants/verdicts.jsonl. The exit code is 1 if a mutant survives whose entry does not say why.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from . import operators
from .judges import JUDGES
from .lanes import TREES, Case, Lanes, Verdict
from .mutant import Mutant, catalogue
from .reach import Reach, digest

VERDICTS = TREES / "verdicts.jsonl"
REACH = TREES / "reach.json"
SIMULATIONS = 40
TEST_SECONDS = 10.0
SHOWN = 110  # characters of what noticed a mutant


def main() -> int:
    options = _options()
    known = _by_mutant(read(VERDICTS))
    entries = {mutant.id: mutant for mutant in catalogue()}
    if options.table:
        return _sum_up(entries, known)
    mutants = _mutants(options, known)
    verdicts: dict[str, list[Verdict]] = defaultdict(list)
    is_kept = options.continued or options.survivors
    with closing(Lanes(options.lanes, is_small=options.fixed)) as lanes:
        cases = _fixed_cases(lanes, mutants) if options.fixed else _cases(lanes, mutants, options)
        with open(os.devnull if options.fixed else VERDICTS, "a" if is_kept else "w") as log:
            for verdict in lanes.judge(cases, first=not options.every):
                verdicts[verdict.mutant].append(verdict)
                print(json.dumps(verdict), file=log, flush=True)
                print(_line(verdict), flush=True)
    if is_kept:
        verdicts = _by_mutant(read(VERDICTS))
    return _sum_up(entries | {mutant.id: mutant for mutant in mutants}, verdicts)


def _fixed_cases(lanes: Lanes, mutants: list[Mutant]) -> list[Case]:
    """Each mutant by what its entry names, after the unchanged tree."""
    cases = [Case(mutant, (mutant.fixed_judge,), _one(mutant, "unit"), _one(mutant, "chaos")) for mutant in mutants]
    tests, simulations = ({name for case in cases for name in getattr(case, part)} for part in ("tests", "simulations"))
    lanes.record(Case(None, tuple(JUDGES), tuple(sorted(tests)), tuple(sorted(simulations))))
    return cases


def _one(mutant: Mutant, judge: str) -> tuple[str, ...]:
    return (mutant.fixed,) if mutant.fixed_judge == judge else ()


def _cases(lanes: Lanes, mutants: list[Mutant], options: argparse.Namespace) -> list[Case]:
    """Each mutant by the tests and simulations that reach it, or by the tests that the command names."""
    if options.tests:
        return [Case(mutant, ("unit",), tuple(options.tests)) for mutant in mutants]
    reach = _reach(lanes)
    cases = []
    for mutant in mutants:
        tests = reach.tests_of(mutant, options.test_seconds)
        simulations = reach.simulations_of(mutant, options.simulations)
        usual = {
            "unit": sum(reach.seconds[test] for test in tests),
            "chaos": sum(reach.seconds[name] for name in simulations),
            "model": reach.seconds["model"],
        }
        judges = [judge for judge in options.judge or JUDGES if judge != "unit" or tests]
        cases.append(Case(mutant, tuple(judges), tests, simulations, usual))
    return cases


def _reach(lanes: Lanes) -> Reach:
    """Which functions each test and simulation of this tree reaches. Read from a file, or recorded now."""
    path = REACH.with_stem(f"{REACH.stem}-{digest()}")
    if not path.exists():
        print("recording what the tests and simulations reach", flush=True)
        lanes.record(Case(None, tuple(JUDGES))).write(path)
    return Reach.read(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which tests notice each change?")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="mutants whose id contains it")
    parser.add_argument("--judge", action="append", choices=JUDGES, help="only this judge; may be repeated")
    help_ = "only the unit tests in it; may be repeated"
    parser.add_argument("--tests", action="append", default=[], metavar="PATH", help=help_)
    parser.add_argument("--every", action="store_true", help="by every judge, also after one has noticed the mutant")
    parser.add_argument("--simulations", type=int, default=SIMULATIONS, help=f"of judge chaos (default {SIMULATIONS})")
    help_ = f"processor time of judge unit (default {TEST_SECONDS:.0f})"
    parser.add_argument("--test-seconds", type=float, default=TEST_SECONDS, metavar="SECONDS", help=help_)
    parser.add_argument("--lanes", type=int, default=1, help="judgements at a time (default 1)")
    parser.add_argument("--generic", type=int, default=0, metavar="N", help="draw N mutants that operators make")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N mutants of the catalogue")
    parser.add_argument("--seed", type=int, default=0, help="the seed that draws them (default 0)")
    parser.add_argument("--fixed", action="store_true", help="the part that CI runs")
    parser.add_argument("--continue", dest="continued", action="store_true", help="skip what was judged already")
    parser.add_argument("--survivors", action="store_true", help="only what survived earlier commands")
    parser.add_argument("--table", action="store_true", help="only sum up the verdicts of earlier commands")
    return parser.parse_args()


def _mutants(options: argparse.Namespace, known: Mapping[str, list[Verdict]]) -> list[Mutant]:
    """The wanted mutants. An equivalent one has nothing to be noticed."""
    every = operators.drawn(options.generic, options.seed) if options.generic else catalogue()
    mutants = [mutant for mutant in every if not mutant.equivalent and (mutant.fixed or not options.fixed)]
    if options.only:
        mutants = [mutant for mutant in mutants if any(text in mutant.id for text in options.only)]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    if options.survivors:
        return [mutant for mutant in mutants if mutant.id in known and not _is_killed(known[mutant.id])]
    if options.continued:
        return [mutant for mutant in mutants if not _is_judged(known.get(mutant.id, []), options)]
    return mutants


def _is_judged(verdicts: list[Verdict], options: argparse.Namespace) -> bool:
    """Whether no verdict is missing: an interrupted command may have left only some."""
    wanted = set(options.judge or JUDGES)
    return (_is_killed(verdicts) and not options.every) or wanted <= {verdict.judge for verdict in verdicts}


def _is_killed(verdicts: list[Verdict]) -> bool:
    return any(verdict.killer for verdict in verdicts)


def _by_mutant(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    by: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by[verdict.mutant].append(verdict)
    return by


def read(path: Path) -> list[Verdict]:
    """The verdicts in a file; none if there is no file."""
    return [Verdict(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _line(verdict: Verdict) -> str:
    end = f"killed: {' '.join(verdict.killer.split())}"[:SHOWN] if verdict.killer else "survives"
    return f"{verdict.mutant:<60} {verdict.judge:<6} {verdict.seconds:6.1f} s  {end}"


def _sum_up(mutants: dict[str, Mutant], verdicts: dict[str, list[Verdict]]) -> int:
    """Print who killed whom, the score and the survivors. Returns the exit code."""
    survivors = [id_ for id_, given in verdicts.items() if not _is_killed(given)]
    print(f"\n{_table(mutants, verdicts)}\n\n{_score(verdicts.values())}")
    for id_ in survivors:
        mutant = mutants.get(id_)
        print(f"survives: {id_}{f': {mutant.breaks or mutant.survives}' if mutant else ''}")
    explained = {mutant.id for mutant in mutants.values() if mutant.survives}
    return 0 if explained.issuperset(survivors) else 1


def _table(mutants: dict[str, Mutant], verdicts: dict[str, list[Verdict]]) -> str:
    """A row for each file, in Markdown: its mutants, those that were judged, and how many each judge killed first."""
    rows = ["| file | mutants | judged | " + " | ".join(JUDGES) + " | survive |", "|---|" + "--:|" * (len(JUDGES) + 3)]
    for file in sorted({mutants[id_].file for id_ in verdicts if id_ in mutants}):
        ids = [mutant.id for mutant in mutants.values() if mutant.file == file and not mutant.equivalent]
        judged = [verdicts[id_] for id_ in ids if id_ in verdicts]
        killers = Counter(next((verdict.judge for verdict in each if verdict.killer), "") for each in judged)
        cells = (len(ids), len(judged), *(killers[judge] for judge in JUDGES), killers[""])
        rows.append(f"| `{file.removeprefix('functions/dropforge/')}` | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def _score(verdicts: Iterable[list[Verdict]]) -> str:
    """How many mutants were killed, by anyone and by each judge."""
    given = list(verdicts)
    killed = sum(map(_is_killed, given))
    by = {judge: sum(any(v.killer and v.judge == judge for v in each) for each in given) for judge in JUDGES}
    shares = ", ".join(f"{judge} {count}" for judge, count in by.items())
    return f"{killed} of {len(given)} mutants were killed ({100 * killed / max(1, len(given)):.0f} %): {shares}"


if __name__ == "__main__":
    raise SystemExit(main())
