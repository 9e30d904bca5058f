"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

SPEC_FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)

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
