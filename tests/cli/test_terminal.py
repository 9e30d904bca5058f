"""Every command in a pipe and on a terminal of 80 columns: help, JSON, colours and control sequences."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator

import click
import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.record import RunError, RunState
from dropforge_cli.main import cli

from .commands import COMMAND
from .conftest import Deployed, Run, attempt, served

COLUMNS = 80
RUN = "a-job-of-many-letter-0123456789ab"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)m")
# What they print is data that programs read.
DATA = ("plan", "preflight", "runs", "status", "logs", "cost", "audit")


def walk(command: click.Command, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child, *names, name)


@pytest.mark.parametrize("names", list(walk(cli)), ids=" ".join)
def test_every_command_has_plain_help_of_80_columns(dropforge: Run, names: tuple[str, ...]) -> None:
    result = dropforge(*names, "--help")
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert max(map(len, result.output.splitlines())) <= COLUMNS


@pytest.mark.parametrize("name", DATA)
def test_data_has_json(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert "--json" in {option for parameter in command.params for option in parameter.opts}


def on_terminal(*arguments: str, **environment: str) -> str:
    """Run a command on a terminal of 80 columns; return what it printed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    unset = {"NO_COLOR", "COLUMNS", "FORCE_COLOR"}
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    command = [*COMMAND, *arguments]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**clean, "TERM": "xterm-256color", **environment}
    )
    os.close(slave)
    printed = b""
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while chunk := _read(terminal.fileno()):
            printed += chunk
    assert process.wait() == 0, printed
    return printed.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the process has closed its side
        return b""


@pytest.fixture
def failed(deployed: Deployed) -> Deployed:
    error = RunError(error_class=ErrorClass.DATA, message="line 3 is not JSON", hint="correct the data set")
    deployed.record(RUN, RunState.FAILED, name="a" * 60, error=error, **served())
    for number in range(25):
        deployed.record(f"job-{number:012x}", RunState.REJECTED, attempts=[attempt()])
    return deployed


def test_runs_on_a_terminal_of_80_columns(failed: Deployed) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal("runs", "--sort", "cost"))
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]
    rows = [line for line in lines if re.match(r"[a-z0-9-]+-[0-9a-f]{12} ", line)]
    assert len(rows) == 20
    assert rows[0].startswith(f"{RUN} ")
    assert max(map(len, rows)) <= COLUMNS
    assert "6 more: `--limit 26` lists them all" in lines


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_stay_away_if_the_user_says_so(failed: Deployed, environment: dict[str, str], coloured: bool) -> None:
    text = on_terminal("status", RUN, **environment)
    assert "line 3 is not JSON" in text
    assert bool(COLOUR.search(text)) is coloured


@pytest.mark.parametrize("arguments", [["runs"], ["status", RUN], ["cost"], ["runs", "--json"], ["cost", "--csv"]])
def test_a_pipe_gets_no_control_sequence(failed: Deployed, arguments: list[str]) -> None:
    result = failed.run(*arguments)
    assert "\x1b" not in result.output
    assert "\r" not in result.output
