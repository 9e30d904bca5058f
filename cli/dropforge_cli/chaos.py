"""`dropforge chaos`: run the control plane in a simulated cloud with random faults, and check its promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import click

from dropforge_local.chaos.checker import Problem, check
from dropforge_local.chaos.faults import STRIKES, Strike
from dropforge_local.chaos.focus import Aim, cell_of, coverage
from dropforge_local.chaos.history import History
from dropforge_local.chaos.simulation import run, run_focused, run_repeated, run_struck
from dropforge_local.chaos.specs import TARGETS

from .display import counted
from .plain import echo

STRUCK_TARGET = "cloud_run"  # the default target of the run that a fault strikes
SHOWN = 10  # problems of a simulation: later problems often follow from the first
LIVES: dict[str, Callable[..., History]] = {  # by the option that asks for them
    "--focused": run_focused,
    "--repeated": run_repeated,
    "--containers": partial(run, real_containers=True),
}
Simulation = tuple[str, Callable[[], History]]  # the options that replay a simulation, and the simulation


@click.command()
@click.option("--seed", type=click.IntRange(0), help="Replay this seed.")
@click.option(
    "--seeds", type=click.IntRange(1), default=100, show_default=True, help="Number of seeds, without --seed."
)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first seed.")
@click.option("--strike", metavar="EFFECT:FAULT", help="Replay one run with only this fault.")
@click.option("--each", is_flag=True, help="Strike one run at each of its effects with each fault, one at a time.")
@click.option("--focused", is_flag=True, help="One run for each seed, struck once, in a state that the seed chooses.")
@click.option("--repeated", is_flag=True, help="Users also send again what they have sent, and join a run by that.")
@click.option("--containers", is_flag=True, help="With the real code of containers/ in the containers of the runs.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(sorted(TARGETS)),
    help="Target of the runs; may be repeated.",
)
@click.option("--verbose", is_flag=True, help="Print the whole history.")
def chaos(
    seed: int | None,
    seeds: int,
    first: int,
    strike: str | None,
    each: bool,
    focused: bool,
    repeated: bool,
    containers: bool,
    targets: tuple[str, ...],
    verbose: bool,
) -> None:
    """Run the functions and the workflow in a simulated cloud whose faults are drawn from a seed.

    It starts no process and does not wait: hours pass in a fraction of a second. One seed has the same history in every
    process, and so the same digest. Exits with 1 if a promise was broken.
    """
    lives = [life for life, is_wanted in zip(LIVES, (focused, repeated, containers), strict=True) if is_wanted]
    if len(lives) > 1 or (lives and lives != ["--containers"] and (each or strike)):
        raise click.UsageError(f"{' and '.join(LIVES)} exclude each other; --strike and --each take --containers alone")
    began = time.monotonic()
    count, broken = 0, 0
    cells: list[Aim | None] = []
    is_replay = seed is not None or strike is not None
    chosen = range(first, first + seeds) if seed is None else range(seed, seed + 1)
    simulations = list(_simulations(chosen, strike, each, "".join(lives), targets))
    for options, simulate in counted(simulations, len(simulations), "simulations"):
        history = simulate()
        problems = check(history)
        count, broken = count + 1, broken + bool(problems)
        cells.append(cell_of(history) if focused else None)
        if verbose:
            for fact in history.facts:
                echo(str(fact))
        if is_replay or problems:
            _report(options, history, problems)
        if problems and not is_replay:
            echo(f"  replay: dropforge chaos {options} --verbose")
    if not is_replay:
        rate = count / (time.monotonic() - began) * 60
        echo(f"{count} simulations, {broken} with broken promises, {rate:.0f} per minute")
    if focused and not is_replay:
        echo(coverage(cells, targets or tuple(TARGETS)))
    if broken:
        raise SystemExit(1)


def _simulations(
    seeds: range, strike: str | None, each: bool, life: str, targets: tuple[str, ...]
) -> Iterator[Simulation]:
    options = "".join(f" {option}" for option in (life, *(f"--target {target}" for target in targets)) if option)
    if strike is None and not each:
        simulate, drawn = LIVES.get(life, run), targets or tuple(TARGETS)
        yield from ((f"--seed {seed}{options}", partial(simulate, seed, drawn)) for seed in seeds)
        return
    if len(targets) > 1:
        raise click.BadParameter(f"{', '.join(targets)}: --strike and --each run one target", param_hint="--target")
    target = targets[0] if targets else STRUCK_TARGET
    simulate = partial(run_struck, target=target, real_containers=life == "--containers")
    for fault in _each_strike(simulate) if strike is None else [_strike(strike)]:
        yield f"--strike {fault.effect}:{fault.fault}{options}", partial(simulate, fault)


def _each_strike(simulate: Callable[[Strike], History]) -> Iterator[Strike]:
    effects = simulate(Strike(0, STRIKES[0])).facts[-1].data["effects"]
    yield from (Strike(effect, fault) for effect in range(1, effects + 1) for fault in STRIKES)


def _strike(text: str) -> Strike:
    effect, _, fault = text.partition(":")
    if not effect.isdecimal() or fault not in STRIKES:
        raise click.BadParameter(f"{text!r} is not EFFECT:FAULT; the faults are {', '.join(STRIKES)}")
    return Strike(int(effect), fault)


def _report(options: str, history: History, problems: list[Problem]) -> None:
    runs = len({fact.data["run"] for fact in history.of("dropped")})
    echo(f"{options}: {len(history.facts)} facts of {runs} runs, digest {history.digest}")
    for problem in problems[:SHOWN]:
        echo(f"  {problem}")
    if len(problems) > SHOWN:
        echo(f"  and {len(problems) - SHOWN} more")
