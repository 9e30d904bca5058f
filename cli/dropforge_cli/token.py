"""`dropforge token`: what a request to a run's endpoint brings as its bearer token."""

from __future__ import annotations

import click

from .deployment import connect
from .endpoints import PAGE, endpoint_of, token_of
from .options import run_argument, state_option
from .plain import echo
from .runs import find_run


@click.command()
@run_argument
@state_option
def token(run: str, state: str | None) -> None:
    """Print the token of a run's endpoint, alone, for scripts: the API key of an OpenAI client."""
    deployment = connect(state)
    record = find_run(deployment.store, run)
    endpoint_of(record)
    if value := token_of(deployment, deployment.store.spec(record.run)):
        echo(value)
    else:
        echo(f"the endpoint of {record.run} demands no token; its network guards it: {PAGE}#the-token", err=True)
