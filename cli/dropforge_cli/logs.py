"""`dropforge logs`: the output of a run's training containers and its endpoint."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable

import click

from dropforge.base.log_lines import GCLOUD_FORMAT, entries, readable, readable_gcloud
from dropforge.base.redact import redact
from dropforge.run.record import Ledger
from dropforge.run.store import RunStore
from dropforge_console.cloud_logs import filter_of
from dropforge_local.stack.logs import read_log

from .deployment import Deployment, connect
from .display import awaited, working
from .options import latest_argument, state_option
from .plain import echo
from .problems import CliError
from .runs import find_run

FOLLOW_SECONDS = 0.5


@click.command()
@latest_argument
@click.option("--follow", is_flag=True, help="Print new lines until the run ends.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="Print only the last N lines of each container.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as the containers wrote them.")
@state_option
def logs(run: str, follow: bool, tail: int | None, as_json: bool, state: str | None) -> None:
    """Print the logs of a run's training and of its endpoint.

    RUN is its id, the beginning of its id, a name (the newest run of that name), or `latest`, the default.
    """
    deployment = connect(state)
    store = deployment.store
    run = find_run(deployment, run).run
    shown = redact if as_json else readable
    if deployment.stack is None:
        _run_gcloud(deployment, store.ledger(run), follow, tail, as_json)
    elif follow:
        _follow(deployment.stack.http, store, run, tail, shown)
    else:
        _print_all(deployment.stack.http, store.ledger(run), tail, shown)


def gcloud_command(deployment: Deployment, ledger: Ledger, follow: bool, tail: int | None, as_json: bool) -> list[str]:
    """Return the gcloud command that prints the logs of a run's resources. With `tail`, the newest entry is first."""
    project = f"--project={deployment.settings.project}"
    filters = filter_of(ledger.entries)
    line = f"--format={'json' if as_json else GCLOUD_FORMAT}"
    if follow:
        return ["gcloud", "beta", "logging", "tail", filters, project, line]
    limit = [] if tail is None else [f"--limit={tail}"]
    order = "desc" if tail is not None else "asc"
    return ["gcloud", "logging", "read", filters, project, line, "--freshness=30d", f"--order={order}", *limit]


def _run_gcloud(deployment: Deployment, ledger: Ledger, follow: bool, tail: int | None, as_json: bool) -> None:
    if not ledger.entries:
        raise CliError("the run has no resources yet, so there are no logs", "see `dropforge status`")
    command = gcloud_command(deployment, ledger, follow, tail, as_json)
    echo(f"$ {shlex.join(command)}", err=True)
    if shutil.which("gcloud") is None:
        raise CliError("gcloud is not installed here", "run the command above on a machine with gcloud")
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace") as gcloud:
        assert gcloud.stdout is not None, "it is a pipe"
        lines: Iterable[str] = (line.removesuffix("\n") for line in gcloud.stdout)
        if tail is not None and not follow and not as_json:
            with working("reading the logs"):
                newest_first = list(entries(lines))
            lines = (line for entry in reversed(newest_first) for line in entry)
        for line in awaited(lines, "reading the logs"):
            echo(redact(line) if as_json else readable_gcloud(line))
    if gcloud.returncode:
        raise CliError(f"gcloud exited with {gcloud.returncode}")


def _print_all(http: str, ledger: Ledger, tail: int | None, shown: Callable[[str], str]) -> None:
    with working("reading the logs"):
        outputs = {entry.name: text for entry in ledger.entries if (text := read_log(http, entry.name, tail))}
    if not outputs:
        echo("no container of this run has any output yet", err=True)
    for resource, text in outputs.items():
        echo(f"--- {resource}", err=True)
        _print_lines(text, shown)


def _print_lines(text: str, shown: Callable[[str], str]) -> None:
    """Print whole lines in one piece: a credential may have several lines."""
    echo(redact("\n".join(shown(line) for line in text.removesuffix("\n").split("\n"))))


def _follow(http: str, store: RunStore, run: str, tail: int | None, shown: Callable[[str], str]) -> None:
    """Print new lines until the run is terminal. A log only grows, so a length says what was printed."""
    printed: dict[str, int] = {}
    current = ""
    while True:
        ended = store.record(run).state.is_terminal  # read before the logs, so that the last lines are printed
        for entry in store.ledger(run).entries:
            text = read_log(http, entry.name) or ""
            start = printed.get(entry.name, _tail_start(text, tail))
            end = len(text) if ended else text.rfind("\n") + 1  # a line is printed once it is whole
            if end <= start:
                continue
            if current != entry.name:
                current = entry.name
                echo(f"--- {current}", err=True)
            _print_lines(text[start:end], shown)
            printed[entry.name] = end
        if ended:
            return
        time.sleep(FOLLOW_SECONDS)


def _tail_start(text: str, tail: int | None) -> int:
    return 0 if tail is None else len(text) - len("".join(text.splitlines(keepends=True)[-tail:]))
