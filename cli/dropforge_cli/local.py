"""`dropforge up` and `dropforge down`: the local stack. Its code is large, so the commands import it on use."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click

from dropforge.spec.policy import VARIABLE

from .console import console_link
from .deployment import running, state_directory
from .display import working
from .options import FILE, state_option
from .plain import echo
from .policy import read_policy
from .problems import FAILED, CliError

PORT = click.IntRange(0, 65535)


@click.command()
@click.option("--foreground", is_flag=True, help="Serve until Ctrl-C instead of in the background.")
@click.option(
    "--http-port", type=PORT, default=0, help="Port of the REST APIs; default: the last port, or a free port."
)
@click.option("--grpc-port", type=PORT, default=0, help="Port of the gRPC APIs.")
@click.option("--functions-port", type=PORT, default=0, help="Port of the functions.")
@click.option("--console-port", type=PORT, default=0, help="Port of the console.")
@click.option("--policy", type=FILE, metavar="FILE", help="A policy.yaml; kept for later starts.")
@state_option
def up(
    foreground: bool,
    http_port: int,
    grpc_port: int,
    functions_port: int,
    console_port: int,
    policy: Path | None,
    state: str | None,
) -> None:
    """Start the local stack: emulated Google APIs and the functions, on this machine only."""
    from dropforge_local.stack import control as stack

    directory = state_directory(state)
    is_running = running(directory) is not None
    if policy is not None:
        _keep_policy(directory, policy, is_running)
    with nullcontext() if foreground else working("starting the local stack"):
        info = stack.up(
            directory,
            http_port=http_port,
            grpc_port=grpc_port,
            functions_port=functions_port,
            console_port=console_port,
            foreground=foreground,
        )
    echo(f"the local stack {'runs already' if is_running else 'is ready'}, with its state in {directory}")
    echo(f"  REST APIs   {info.http}")
    echo(f"  gRPC APIs   {info.grpc}")
    echo(f"  functions   {info.functions}")
    echo(f"  project     {info.project}")
    echo(f"  specs go to gs://{info.environment['DROPFORGE_SPECS_BUCKET']}/specs/")
    echo(f"  Slack       {info.http}/slack/messages")
    if info.console:
        echo(f"  console     {console_link(directory, info)}")
        echo("              the link opens once, within ten minutes; `dropforge open` prints another")
    echo(f"  kubectl     --kubeconfig {directory / 'kubeconfig'}")


def _keep_policy(directory: Path, policy: Path, is_running: bool) -> None:
    """Write the policy into the stack's configuration. Raises CliError while the stack runs with another policy."""
    from dropforge_local.stack.config import StackConfig

    config = StackConfig.of(directory)
    settings = {**config.settings, VARIABLE: read_policy(policy)}
    if is_running and settings != config.settings:
        raise CliError(f"the stack in {directory} runs with another policy", "end it with `dropforge down` first")
    replace(config, settings=settings).save(directory)


@click.command()
@click.option("--delete", is_flag=True, help="Also delete the state.")
@state_option
def down(delete: bool, state: str | None) -> None:
    """Stop the local stack and every container that it started, even after the stack was killed."""
    from dropforge_local.stack import control as stack

    directory = state_directory(state)
    with working("ending the local stack"):
        ended = stack.down(directory, delete=delete)
    for name in ended:
        echo(f"ended {name}")
    if not ended:
        echo(f"nothing was running in {directory}")
    left = stack.leftovers(directory)
    if left.processes or left.ports:
        echo(f"error: still running: processes {left.processes}, ports {left.ports}", err=True)
        raise SystemExit(FAILED)
