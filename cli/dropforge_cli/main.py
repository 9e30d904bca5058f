"""The `dropforge` command: its subcommands, and the exit codes after errors and Ctrl-C.

A command's module is imported when the command is called: most modules import Google's clients, which takes a second.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click

from dropforge import __version__

from . import INTERRUPTED


class Lazy(NamedTuple):
    """A command that is not imported yet: the module that has a command of its name, and its help in one sentence."""

    module: str
    help: str


# In the order of their use. tests/cli/test_main.py compares each sentence with the command's own.
COMMANDS = {
    "demo": Lazy("demo", "Train and serve a small model on this machine, then end everything it started."),
    "up": Lazy("local", "Start the local stack: emulated Google APIs and the functions, on this machine only."),
    "down": Lazy("local", "Stop the local stack and every container that it started, even after the stack was killed."),
    "init": Lazy("init", "Write a valid job spec to FILE (my-job.json); asks for each value that no option gives."),
    "data": Lazy("data", "Check training data before a run: forms, columns, faults of rows, lengths."),
    "validate": Lazy("specs", "Check job specs without dropping them."),
    "plan": Lazy("plan", "Show the resources, the memory and the maximum cost of a job spec."),
    "preflight": Lazy(
        "preflight", "Ask a deployment whether specs could run there, before they cost money; exit 1 if they could not."
    ),
    "policy": Lazy("policy", "Check or show what an operator allows specs to use."),
    "smoke": Lazy(
        "smoke",
        "Train on each target of a deployment, check every promise, end everything; exit 1 if a promise is broken.",
    ),
    "put": Lazy("sources", "Copy a file or a directory to a bucket, so that a spec can name it; prints its URI."),
    "submit": Lazy("specs", "Drop a job spec into the specs bucket; prints the run's id."),
    "runs": Lazy("runs", "List runs, newest first; a terminal shows the columns that fit."),
    "status": Lazy("runs", "Show a run: stages, attempts, cost, endpoint and resources."),
    "trace": Lazy("trace", "Show when each part of a run began and how long it took."),
    "logs": Lazy("logs", "Print the logs of a run's training and of its endpoint."),
    "cancel": Lazy("runs", "Request the end of a run, or of the endpoint of a finished run."),
    "cost": Lazy("cost", "Add up the cost of runs and endpoints so far, and show their maximum cost."),
    "audit": Lazy(
        "audit", "Compare every ledger with the cloud's list; exit 1 if they differ, or if a place cannot be listed."
    ),
    "chat": Lazy("chat", "Talk to the model of a run: once with MESSAGE or a pipe, else until an empty line."),
    "token": Lazy("token", "Print only the token of an endpoint, for scripts; OpenAI clients take it as API key."),
    "snippet": Lazy("snippet", "Print a program that asks an endpoint, with a held-out question if there is one."),
    "endpoints": Lazy("named", "List named endpoints: URL, model, requests and latency of an hour, cost and expiry."),
    "serve": Lazy("named", "Put the model of a finished run behind a named endpoint, without training."),
    "rollback": Lazy("named", "Let the previous model serve again; the present model is kept for another rollback."),
    "extend": Lazy(
        "named", "Let a named endpoint live for TTL from now, such as 36h or 7d; `never` removes its expiry."
    ),
    "budget": Lazy(
        "named", "Set what a named endpoint may cost, such as 50/month or 5/day; `none` removes the budget."
    ),
    "retire": Lazy("named", "End a named endpoint and delete it; its name cannot be used again."),
    "console": Lazy(
        "console", "Serve the web page of the runs on this machine, until Ctrl-C; prints a link that opens it once."
    ),
    "open": Lazy(
        "console", "Print a link to the console, and open it on a desktop; a link to a local stack opens once."
    ),
    "workflows": Lazy("workflows", "Check and run workflow sources."),
    "chaos": Lazy(
        "chaos", "Run the functions and the workflow in a simulated cloud whose faults are drawn from a seed."
    ),
}


class Commands(click.Group):
    """Lists commands in the order of their use. An expected error prints one line; Ctrl-C exits with 130."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (lazy := COMMANDS.get(cmd_name)) is None:
            return None
        command: click.Command = getattr(import_module(f".{lazy.module}", __package__), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            meant = f"did you mean {close[0]!r}?" if close else "`dropforge --help` lists them"
            ctx.fail(f"No such command {args[0]!r}; {meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _interruptible():
                from .problems import explained

                with explained():
                    return super().invoke(ctx)
        except KeyboardInterrupt:
            _end_interrupted(ctx)
        except click.Abort as abort:  # click's questions turn Ctrl-C and the end of the input into it
            if not isinstance(abort.__context__, KeyboardInterrupt):
                raise
            _end_interrupted(ctx)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a command clean up after Ctrl-C. Before and after it, Ctrl-C ends the program at once (start.py)."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a command that has cleaned up may ignore it
            signal.signal(signal.SIGINT, before)


def _end_interrupted(ctx: click.Context) -> NoReturn:
    from .plain import echo

    echo("interrupted", err=True)
    ctx.exit(INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dropforge")
def cli() -> None:
    """Drop a job spec into a bucket; dropforge fine-tunes the model, serves it, and deletes everything else.

    Commands use the running local stack, or the project in DROPFORGE_* variables or dropforge.toml.
    """
