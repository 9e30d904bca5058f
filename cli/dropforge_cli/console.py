"""`dropforge console`: the web page of a deployment, served on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from .deployment import connect
from .options import complete_run, state_option
from .plain import echo
from .problems import CliError
from .runs import find_run

if TYPE_CHECKING:
    from dropforge_console.access import Access

PORT = click.IntRange(0, 65535)
LINES = 40  # of the log of a run


@click.command()
@click.argument("run", default="", metavar="[RUN]", shell_complete=complete_run)
@click.option("--port", type=PORT, default=0, help="Port of the page; default: any free port.")
@state_option
def console(run: str, port: int, state: str | None) -> None:
    """Serve the web page of the runs on this machine, until Ctrl-C; prints a link that opens it once.

    With RUN, the link opens the page of this run: its id, the beginning of its id, a name, or `latest`.
    """
    from dropforge_console.server import serve

    deployment = connect(state)
    path = f"/runs/{find_run(deployment.store, run).run}" if run else "/runs"

    def tell(access: Access) -> None:
        echo(f"the console of {deployment.where}; Ctrl-C ends it")
        echo(f"open, within ten minutes: {access.link(path)}")

    try:
        serve(deployment.context, port, tell, _log_reader(deployment.stack.http) if deployment.stack else None)
    except OSError as error:
        raise CliError(f"port {port} cannot be used: {error}", "choose another --port") from None


def _log_reader(http: str) -> Callable[[str], list[str]]:
    """Return how the console reads the log of an emulated resource; `http` is the address of the local stack."""
    from .log_lines import readable
    from .logs import read_log

    return lambda resource: [readable(line) for line in (read_log(http, resource, LINES) or "").splitlines()]
