"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

SPEC_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)


def complete_run(context: click.Context, argument: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of the local stack's runs for the shell; none without a stack, because a shell must not wait."""
    from .deployment import of_stack, running, state_directory

    stack = running(state_directory(context.params.get("state")))
    if stack is None:
        return []
    return [run for run in of_stack(stack).store.runs() if run.startswith(incomplete)]


run_argument = click.argument("run", shell_complete=complete_run)
state_option = click.option(
    "--state", metavar="DIR", help="The local stack's directory; default: $DROPFORGE_STATE or build/local."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
model_config_option = click.option(
    "--model-config",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="The model's config.json, or its directory; default: that of model.source, if it can be had.",
)
