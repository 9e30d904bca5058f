"""`dropforge chaos`: lives of the control plane in a simulated cloud with faults, drawn from seeds and checked."""

from __future__ import annotations

import time

import click

from dropforge_local.chaos.checker import Problem, check
from dropforge_local.chaos.history import History
from dropforge_local.chaos.simulation import run

SHOWN = 10  # problems of a seed: what follows the first is often its consequence


@click.command()
@click.option("--seed", type=click.IntRange(0), help="Replay this one.")
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True, help="How many, without --seed.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--verbose", is_flag=True, help="Print the whole history of --seed.")
def chaos(seed: int | None, seeds: int, first: int, verbose: bool) -> None:
    """Run the functions and the workflow in a simulated cloud whose faults are drawn from a seed.

    Nothing is started and nothing waits: hours pass in a fraction of a second. The same seed is the same life, in any
    process: its digest says so. Ends with 1 when a promise was broken.
    """
    broken = _replay(seed, verbose) if seed is not None else _many(range(first, first + seeds))
    if broken:
        raise SystemExit(1)


def _replay(seed: int, verbose: bool) -> bool:
    history = run(seed)
    problems = check(history)
    if verbose:
        for fact in history.facts:
            click.echo(str(fact))
    _report(history, problems)
    return bool(problems)


def _report(history: History, problems: list[Problem]) -> None:
    runs = len({fact.data["run"] for fact in history.of("dropped")})
    click.echo(f"seed {history.seed}: {len(history.facts)} facts of {runs} runs, digest {history.digest}")
    for problem in problems[:SHOWN]:
        click.echo(f"  {problem}")
    if len(problems) > SHOWN:
        click.echo(f"  and {len(problems) - SHOWN} more")


def _many(seeds: range) -> bool:
    broken = 0
    began = time.monotonic()
    for seed in seeds:
        history = run(seed)
        if problems := check(history):
            broken += 1
            _report(history, problems)
            click.echo(f"  replay: dropforge chaos --seed {seed} --verbose")
    minutes = (time.monotonic() - began) / 60
    click.echo(f"{len(seeds)} seeds, {broken} with broken promises, {len(seeds) / minutes:.0f} seeds per minute")
    return bool(broken)
