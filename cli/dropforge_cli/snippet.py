"""`dropforge snippet`: a runnable text that asks a run's endpoint, in Python, curl or JavaScript."""

from __future__ import annotations

import click

from dropforge.run.record import Record
from dropforge.spec import JobSpec
from dropforge_console.snippets import Messages, export_of, template_of
from dropforge_console.snippets import snippet as write

from .callee import callee_of
from .deployment import Deployment, connect
from .display import working
from .options import run_argument, state_option, state_words
from .plain import echo
from .report import held_out_sample


@click.command()
@run_argument
@click.option(
    "--lang", type=click.Choice(("python", "curl", "js")), default="python", show_default=True, help="The language."
)
@state_option
def snippet(run: str, lang: str, state: str | None) -> None:
    """Print a program that asks an endpoint, with a held-out question if there is one.

    RUN is a run, or the name of an endpoint.
    """
    deployment = connect(state)
    name, endpoint, record, spec = callee_of(deployment, run)
    export = export_of(spec, name, state_words())
    echo(write(lang, endpoint, example(deployment, record, spec), export))


def example(deployment: Deployment, record: Record, spec: JobSpec) -> Messages:
    """Return messages that the model understands: a held-out question, else the unfilled template of the training."""
    with working("reading a held-out question"):
        sample = held_out_sample(deployment, record)
    if sample:
        return [{"role": message["role"], "content": message["content"]} for message in sample["prompt"]]
    return template_of(spec)
