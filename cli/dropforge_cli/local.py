"""`dropforge up` and `dropforge down`: the local stack. Its code is imported on use: it is large."""

from __future__ import annotations

import click

from .deployment import running, state_directory
from .options import state_option
from .problems import FAILED

PORT = click.IntRange(0, 65535)


@click.command()
@click.option("--foreground", is_flag=True, help="Serve until Ctrl-C instead of in the background.")
@click.option("--http-port", type=PORT, default=0, help="Port of the REST APIs; default: the last one, or a free one.")
@click.option("--grpc-port", type=PORT, default=0, help="Port of the gRPC APIs.")
@click.option("--functions-port", type=PORT, default=0, help="Port of the functions.")
@state_option
def up(foreground: bool, http_port: int, grpc_port: int, functions_port: int, state: str | None) -> None:
    """Start the local stack: emulated Google APIs and the functions, on this machine only."""
    from dropforge_local.stack import control as stack

    directory = state_directory(state)
    already = running(directory) is not None
    info = stack.up(
        directory, http_port=http_port, grpc_port=grpc_port, functions_port=functions_port, foreground=foreground
    )
    click.echo(f"the local stack {'runs already' if already else 'is ready'}, with its state in {directory}")
    click.echo(f"  REST APIs   {info.http}")
    click.echo(f"  gRPC APIs   {info.grpc}")
    click.echo(f"  functions   {info.functions}")
    click.echo(f"  project     {info.project}")
    click.echo(f"  specs go to gs://{info.environment['DROPFORGE_SPECS_BUCKET']}/specs/")
    click.echo(f"  Slack       {info.http}/slack/messages")
    click.echo(f"  kubectl     --kubeconfig {directory / 'kubeconfig'}")


@click.command()
@click.option("--delete", is_flag=True, help="Delete the state as well.")
@state_option
def down(delete: bool, state: str | None) -> None:
    """Stop the local stack and every container process that it started, even if it was killed."""
    from dropforge_local.stack import control as stack

    directory = state_directory(state)
    ended = stack.down(directory, delete=delete)
    for name in ended:
        click.echo(f"ended {name}")
    if not ended:
        click.echo(f"nothing was running in {directory}")
    left = stack.leftovers(directory)
    if left.processes or left.ports:
        click.echo(f"error: still there: processes {left.processes}, ports {left.ports}", err=True)
        raise SystemExit(FAILED)
