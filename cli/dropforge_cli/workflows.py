"""`dropforge workflows`: check and run Google Cloud Workflows sources without an account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dropforge.base.redact import cut
from workflows_engine import (
    Clock,
    DeployError,
    EngineError,
    Limits,
    Problem,
    ScriptedMocks,
    Simulation,
    SystemClock,
    VirtualClock,
    billing_summary,
    compile_source,
    simulate,
    timeline,
)

from .display import working
from .plain import echo, echo_json
from .problems import CliError

SOURCE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def workflows() -> None:
    """Check and run workflow sources."""


@workflows.command()
@click.argument("file", type=SOURCE)
@click.option("--no-limits", is_flag=True, help="Do not enforce the limits of the service.")
def lint(file: Path, no_limits: bool) -> None:
    """Print the mistakes for which the service refuses to deploy FILE, with line and column."""
    limits = Limits.lifted() if no_limits else Limits()
    try:
        _, problems = compile_source(_text(file), limits)
    except DeployError as error:
        _print_problems(file, error.problems)
        raise SystemExit(1) from None
    _print_problems(file, problems)
    echo(f"{file}: ok")


@workflows.command()
@click.argument("file", type=SOURCE)
@click.option("--data", default="null", help="The execution's argument, as JSON.")
@click.option(
    "--clock", type=click.Choice(["system", "virtual"]), default="system", help="virtual: waits take no time."
)
@click.option("--mock", type=SOURCE, help="Canned answers for calls, in place of requests.")
@click.option("--env", multiple=True, metavar="KEY=VALUE", help="A user environment variable of the workflow.")
@click.option("--no-limits", is_flag=True, help="Do not enforce the limits of the service.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the result.")
def run(
    file: Path, data: str, clock: str, mock: Path | None, env: tuple[str, ...], no_limits: bool, quiet: bool
) -> None:
    """Run FILE once. Print its timeline and its cost in the cloud to stderr, its result to stdout."""
    time: Clock = VirtualClock() if clock == "virtual" else SystemClock()
    try:
        with working(f"running {file}"):
            simulation = simulate(
                _text(file),
                _json(data),
                mocks=ScriptedMocks(_text(mock)) if mock else None,
                env=_environment(env),
                clock=time,
                limits=Limits.lifted() if no_limits else Limits(),
            )
    except DeployError as error:
        _print_problems(file, error.problems)
        raise SystemExit(1) from None
    except EngineError as error:
        raise CliError(str(error)) from error
    if not quiet:
        _print_timeline(simulation)
    if simulation.state != "SUCCEEDED":
        error_ = simulation.record.error or {}
        echo(f"{simulation.state}: {error_.get('context', '')}", err=True)
        raise SystemExit(1)
    echo_json(simulation.result)


def _print_timeline(simulation: Simulation) -> None:
    record = simulation.record
    echo(f"{'at':>10} {'took':>9}  step", err=True)
    for line in timeline(simulation.entries, origin=record.started or record.created):
        echo(line, err=True)
    echo(billing_summary(record.steps, record.external_steps), err=True)


def _print_problems(file: Path, problems: list[Problem]) -> None:
    for problem in problems:
        echo(f"{file}:{problem}", err=problem.severity == "error")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8 text: {error}") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{cut(text, 60)!r} is not JSON: {error}", param_hint="--data") from error


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--env")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
