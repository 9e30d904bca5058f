"""`dropforge console` and `dropforge open`: the web page of a deployment."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from dropforge_console.asking import Unanswered
from dropforge_console.passes import Passes

from .deployment import Deployment, connect, state_directory
from .endpoints import token_of
from .options import complete_run, state_option
from .plain import echo
from .problems import CliError
from .runs import find_run

if TYPE_CHECKING:
    from dropforge_console.playground import Callee
    from dropforge_local.stack.config import StackInfo

PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("run", default="", metavar="[RUN]", shell_complete=complete_run)
@click.option("--port", type=PORT, default=0, help="Port of the page; default: any free port.")
@state_option
def console(run: str, port: int, state: str | None) -> None:
    """Serve the web page of the runs on this machine, until Ctrl-C; prints a link that opens it once.

    With RUN, the link opens the page of this run: its id, the beginning of its id, a name, or `latest`.
    """
    from dropforge_console.access import Access
    from dropforge_console.server import host_of, listen, serve

    deployment = connect(state)
    path = page_of(deployment, run)
    try:
        listener = listen(port)
    except OSError as error:
        raise CliError(f"port {port} cannot be used: {error}", "choose another --port") from None
    with listener, TemporaryDirectory(prefix="dropforge-console-") as directory:
        access = Access(host_of(listener), Passes(Path(directory), time.time))
        echo(f"the console of {deployment.where}; Ctrl-C ends it")
        echo(f"open, within ten minutes: {access.link(path)}")
        serve(deployment.context, listener, access, _log_reader(deployment), partial(_token_of, deployment))


@click.command()
@click.argument("subject", default="", metavar="[RUN|ENDPOINT]", shell_complete=complete_run)
@state_option
def open(subject: str, state: str | None) -> None:
    """Print a link to the console, and open it on a desktop; a link to a local stack opens once.

    It leads to a run (its id, the beginning of its id, a name, or `latest`), to a named endpoint, or to every run.
    """
    deployment = connect(state)
    root = deployment.settings.console_url.rstrip("/")
    if not root:
        raise CliError(f"{deployment.where} has no console_url", "`dropforge console` serves the page on this machine")
    path = page_of(deployment, subject)
    directory = state_directory(state)
    link = console_link(directory, deployment.stack, path) if deployment.stack else root + path
    echo(link)
    if sys.stdout.isatty() and has_desktop():
        click.launch(_through_file(directory / "open.html", link) if deployment.stack else link)


def console_link(directory: Path, stack: StackInfo, path: str = "/runs") -> str:
    """Return a link that opens a page of a local stack's console, once, within ten minutes."""
    from dropforge_local.stack.config import console_directory

    return Passes(console_directory(directory), time.time).link(stack.console, path)


def page_of(deployment: Deployment, subject: str) -> str:
    """Return the path of the page of a named endpoint or of a run, or that of every run. Raises CliError."""
    if not subject:
        return "/runs"
    if subject in deployment.context.endpoints.names():
        return f"/endpoints#endpoint-{subject}"
    return f"/runs/{find_run(deployment, subject).run}"


def has_desktop() -> bool:
    """Whether a browser can open a window here."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _through_file(path: Path, link: str) -> str:
    """Return the URI of a private file that leads to a link: every user of the machine sees a program's arguments."""
    path.touch(mode=0o600)
    path.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={link}">\n')
    return path.as_uri()


def _token_of(deployment: Deployment, callee: Callee) -> str:
    """The token of an endpoint, as `dropforge token` prints it: google-auth has none for a user."""
    try:
        return token_of(deployment, callee.spec)
    except CliError as error:
        raise Unanswered(error.message, error.hint) from error


def _log_reader(deployment: Deployment) -> Callable[[str], list[str]] | None:
    """Return how the console reads the log of an emulated resource; None without a local stack."""
    if deployment.stack is None:
        return None
    from dropforge_local.stack.logs import last_lines

    http = deployment.stack.http
    return lambda resource: last_lines(http, resource)
