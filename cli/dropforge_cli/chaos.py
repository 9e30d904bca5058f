"""`dropforge chaos`: lives of the control plane in a simulated cloud with faults, drawn from seeds and checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import click

from dropforge_local.chaos.checker import Problem, check
from dropforge_local.chaos.faults import STRIKES, Strike
from dropforge_local.chaos.history import History
from dropforge_local.chaos.simulation import run, run_struck
from dropforge_local.chaos.specs import TARGETS

ONE = "cloud_run"  # the target of the one run that is struck
SHOWN = 10  # problems of a life: what follows the first is often its consequence
Life = tuple[str, Callable[[], History]]  # the options that replay it, and itself


@click.command()
@click.option("--seed", type=click.IntRange(0), help="Replay this one.")
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True, help="How many, if none is named.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--strike", metavar="EFFECT:FAULT", help="Replay one run that nothing but this fault strikes.")
@click.option("--each", is_flag=True, help="Strike that run at each of its effects with each fault, one at a time.")
@click.option(
    "--target", "targets", multiple=True, type=click.Choice(sorted(TARGETS)), help="Of the runs; several: as drawn."
)
@click.option("--verbose", is_flag=True, help="Print the whole history.")
def chaos(
    seed: int | None, seeds: int, first: int, strike: str | None, each: bool, targets: tuple[str, ...], verbose: bool
) -> None:
    """Run the functions and the workflow in a simulated cloud whose faults are drawn from a seed.

    Nothing is started and nothing waits: hours pass in a fraction of a second. The same seed is the same life, in any
    process: its digest says so. Ends with 1 when a promise was broken.
    """
    began = time.monotonic()
    lives, broken = 0, 0
    named = seed is not None or strike is not None
    lots = range(first, first + seeds) if seed is None else range(seed, seed + 1)
    for options, live in _lives(lots, strike, each, targets):
        history = live()
        problems = check(history)
        lives, broken = lives + 1, broken + bool(problems)
        if verbose:
            for fact in history.facts:
                click.echo(str(fact))
        if named or problems:
            _report(options, history, problems)
        if problems and not named:
            click.echo(f"  replay: dropforge chaos {options} --verbose")
    if not named:
        rate = lives / (time.monotonic() - began) * 60
        click.echo(f"{lives} lives, {broken} with broken promises, {rate:.0f} per minute")
    if broken:
        raise SystemExit(1)


def _lives(seeds: range, strike: str | None, each: bool, targets: tuple[str, ...]) -> Iterator[Life]:
    chosen = "".join(f" --target {target}" for target in targets)
    if strike is None and not each:
        drawn = targets or tuple(TARGETS)
        yield from ((f"--seed {seed}{chosen}", partial(run, seed, drawn)) for seed in seeds)
        return
    if len(targets) > 1:
        raise click.BadParameter(
            f"{', '.join(targets)}: one run is struck, which has one target", param_hint="--target"
        )
    target = targets[0] if targets else ONE
    for one in _each_strike(target) if strike is None else [_strike(strike)]:
        yield f"--strike {one.effect}:{one.fault}{chosen}", partial(run_struck, one, target)


def _each_strike(target: str) -> Iterator[Strike]:
    effects = run_struck(Strike(0, STRIKES[0]), target).facts[-1].data["effects"]
    yield from (Strike(effect, fault) for effect in range(1, effects + 1) for fault in STRIKES)


def _strike(text: str) -> Strike:
    effect, _, fault = text.partition(":")
    if not effect.isdecimal() or fault not in STRIKES:
        raise click.BadParameter(f"{text!r} is not EFFECT:FAULT; the faults are {', '.join(STRIKES)}")
    return Strike(int(effect), fault)


def _report(options: str, history: History, problems: list[Problem]) -> None:
    runs = len({fact.data["run"] for fact in history.of("dropped")})
    click.echo(f"{options}: {len(history.facts)} facts of {runs} runs, digest {history.digest}")
    for problem in problems[:SHOWN]:
        click.echo(f"  {problem}")
    if len(problems) > SHOWN:
        click.echo(f"  and {len(problems) - SHOWN} more")
