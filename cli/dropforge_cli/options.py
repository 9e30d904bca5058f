"""Arguments and options that several commands share."""

from __future__ import annotations

import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
SPEC_FILE = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True, path_type=Path)
STDIN = Path("-")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def spec_bytes(path: Path) -> bytes:
    """Read a spec from its file; `-` is the standard input, which can be read once."""
    from dropforge.spec import MAX_SPEC_BYTES

    return sys.stdin.buffer.read(MAX_SPEC_BYTES + 1) if path == STDIN else path.read_bytes()


def is_terminal() -> bool:
    """Whether a user can answer a question."""
    return sys.stdin.isatty()


class Since(click.ParamType[datetime]):
    """A time: how long ago (`36h`, `7d`), or a date with or without a time of day, in UTC."""

    name = "since"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if ago := re.fullmatch(r"([0-9]{1,6})([mhdw])", value):
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            self.fail(
                f"{value!r}; expected a length of time such as 36h or 7d, or a date such as 2026-11-20", param, ctx
            )
        return time if time.tzinfo else time.replace(tzinfo=UTC)


class Label(click.ParamType[tuple[str, str]]):
    """A label as `KEY=VALUE`."""

    name = "label"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, wanted = value.partition("=")
        if not key or not equals:
            self.fail(f"{value!r}; expected KEY=VALUE, such as team=search", param, ctx)
        return key, wanted


def complete_run(context: click.Context, argument: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of the local stack's runs for the shell; none without a stack, because a shell must not wait."""
    from .deployment import of_stack, running, state_directory

    stack = running(state_directory(context.params.get("state")))
    if stack is None:
        return []
    return [run for run in of_stack(stack).store.runs() if run.startswith(incomplete)]


def state_words() -> str:
    """Return ` --state DIR` as this command got it, for a command that it advises; "" without the option."""
    context = click.get_current_context(silent=True)
    state = context.params.get("state") if context else None
    return f" --state {shlex.quote(state)}" if state else ""


run_argument = click.argument("run", shell_complete=complete_run)
latest_argument = click.argument("run", default="latest", metavar="[RUN]", shell_complete=complete_run)
state_option = click.option(
    "--state", metavar="DIR", help="The local stack's directory; default: $DROPFORGE_STATE or build/local."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
since_option = click.option("--since", type=Since(), metavar="TIME", help="Only runs since TIME: 36h, 7d, 2026-11-20.")
model_config_option = click.option(
    "--model-config",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="The model's config.json, or its directory; default: that of model.source, if it can be read.",
)
