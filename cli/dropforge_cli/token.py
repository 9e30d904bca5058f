"""`dropforge token`: what a request to a run's endpoint brings as its bearer token."""

from __future__ import annotations

import click

from .callee import callee_of
from .deployment import connect
from .display import working
from .endpoints import PAGE, token_of
from .options import run_argument, state_option
from .plain import echo


@click.command()
@run_argument
@state_option
def token(run: str, state: str | None) -> None:
    """Print only the token of an endpoint, for scripts; OpenAI clients take it as API key.

    RUN is a run, or the name of an endpoint.
    """
    deployment = connect(state)
    callee = callee_of(deployment, run)
    with working("getting a token"):
        value = token_of(deployment, callee.spec)
    if value:
        echo(value)
    else:
        echo(f"the endpoint of {callee.name} demands no token; its network guards it: {PAGE}#the-token", err=True)
