"""The `dropforge` command: its subcommands, and the exit codes after errors and Ctrl-C."""

from __future__ import annotations

from typing import Any

import click

from dropforge import __version__

from .audit import audit
from .chat import chat
from .demo import demo
from .init import init
from .local import down, up
from .logs import logs
from .plain import echo
from .plan import plan
from .policy import policy
from .preflight import preflight
from .problems import INTERRUPTED, explained
from .runs import cancel, runs, status
from .smoke import smoke
from .snippet import snippet
from .sources import put
from .specs import submit, validate
from .token import token


class Commands(click.Group):
    """Lists commands in the order of their use. An expected error prints one line; Ctrl-C exits with 130."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, "workflows", "chaos"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "workflows":
            from .workflows import workflows  # importing the engine takes longer than most commands

            return workflows
        if cmd_name == "chaos":
            from .chaos import chaos  # so does importing the functions

            return chaos
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with explained():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dropforge")
def cli() -> None:
    """Drop a job spec into a bucket; dropforge fine-tunes the model, serves it, and deletes everything else.

    Commands use the running local stack, or the project in DROPFORGE_* variables or dropforge.toml.
    """


for command in (
    demo,
    up,
    down,
    init,
    validate,
    plan,
    preflight,
    policy,
    smoke,
    put,
    submit,
    runs,
    status,
    logs,
    cancel,
    audit,
    chat,
    token,
    snippet,
):
    cli.add_command(command)
