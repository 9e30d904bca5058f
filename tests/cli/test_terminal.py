"""Every command in a pipe and on a terminal of 80 columns: help, JSON, colours and control sequences."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import click
import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.record import RunError, RunState
from dropforge_cli.display import awaited
from dropforge_cli.main import cli

from ..deployments import clients
from ..forked import Forked, Nursery
from .commands import COMMAND
from .conftest import EXAMPLE, Deployed, Run, attempt, entry, served

COLUMNS = 80
RUN = "a-job-of-many-letter-0123456789ab"
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)m")
# What they print is data that programs read.
DATA = [
    *(["validate"], ["plan"], ["preflight"], ["runs"], ["status"], ["trace"], ["logs"], ["cost"], ["audit"]),
    *(["endpoints"], ["policy", "check"], ["policy", "show"]),
]


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


@pytest.mark.parametrize("names", DATA, ids=" ".join)
def test_data_has_json(names: list[str]) -> None:
    command: click.Command | None = cli
    for name in names:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    assert command is not None
    assert "--json" in {option for parameter in command.params for option in parameter.opts}


def on_terminal(
    *arguments: str,
    command: Sequence[str] = COMMAND,
    stdout: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    nursery: Nursery | None = None,
) -> str:
    """Run a command on a terminal of 80 columns; return what it printed there.

    `stdout` may be another file. A nursery forks the command (forked.py).
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    unset = {"NO_COLOR", "COLUMNS", "FORCE_COLOR"}
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    words, clean = [*command, *arguments], {**clean, "TERM": "xterm-256color", **environment}
    result = slave if stdout is None else stdout
    process: subprocess.Popen[bytes] | Forked
    if nursery is None:
        process = subprocess.Popen(words, stdin=slave, stdout=result, stderr=slave, env=clean)
    else:
        process = nursery.start(words, (slave, result, slave), clean, Path.cwd())
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


def test_runs_on_a_terminal_of_80_columns(failed: Deployed, nursery: Nursery) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal("runs", "--sort", "cost", nursery=nursery))
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]
    rows = [line for line in lines if re.match(r"[a-z0-9-]+-[0-9a-f]{12} ", line)]
    assert len(rows) == 20
    assert rows[0].startswith(f"{RUN} ")
    assert max(map(len, rows)) <= COLUMNS
    assert "6 more: `--limit 26` lists them all" in lines


OUTPUTS = (
    ["runs"], ["status", RUN], ["trace", RUN], ["cost"], ["cost", "--by", "model"], ["endpoints"], ["policy", "show"],
    ["validate", "spec.json"], ["plan", "spec.json"],
)  # fmt: skip


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
def test_80_columns_split_no_name_and_only_names_are_longer(
    failed: Deployed, nursery: Nursery, arguments: list[str]
) -> None:
    """A name that is longer than a line is the last word of its line: the terminal wraps it, and it can be copied.

    The spec is copied into the working directory: the path of this checkout can be longer than a line.
    """
    Path("spec.json").write_bytes(EXAMPLE.read_bytes())
    resource = f"projects/p/locations/us-central1/services/df-{RUN}-serve-and-more"
    failed.ledger(RUN, entry("run.googleapis.com/Service", resource))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(*arguments, nursery=nursery))
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    assert all(len(" ".join(line.split(" ")[:-1])) <= COLUMNS for line in lines)
    assert [line for line in lines if len(line) > COLUMNS and "/" not in line.split(" ")[-1]] == []
    if RUN in arguments:
        assert any(RUN in line for line in lines)
    if arguments[0] == "status":
        assert any(line.endswith(resource) for line in lines)


def test_a_terminal_shows_that_a_command_works(failed: Deployed, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    clients.storage().create_bucket("rows")
    assert "listing runs" in on_terminal("runs")
    assert "copying to gs://rows/rows.csv" in on_terminal("put", str(tmp_path / "rows.csv"), "gs://rows/rows.csv")


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["plan", str(EXAMPLE)], ["the model's configuration"]),
        (["validate", str(EXAMPLE)], ["the model's configuration"]),
        (
            ["submit", str(EXAMPLE)],
            ["an earlier run", "the first rows of the data", "the model and", "dropping the spec"],
        ),
        (["status", RUN], ["reading the endpoints", "reading the run"]),
        (["trace", RUN], ["reading the trace"]),
        (["cost"], ["reading the endpoints"]),
        (["endpoints"], ["reading the endpoints"]),
    ],
    ids=lambda value: value[0],
)
def test_a_terminal_shows_what_a_command_asks_the_cloud(
    failed: Deployed, nursery: Nursery, arguments: list[str], work: list[str]
) -> None:
    text = on_terminal(*arguments, nursery=nursery)
    assert [part for part in work if part not in text] == []


COUNT = """
from dropforge_cli import display
display.QUICK_SECONDS = 0
for number in display.counted(range(3), 3, "numbers"):
    print(number)
"""


def test_a_bar_on_the_terminal_leaves_the_result_in_the_file(tmp_path: Path) -> None:
    with (tmp_path / "result").open("w") as file:
        text = on_terminal(stdout=file.fileno(), command=[sys.executable, "-P", "-c", COUNT])
    assert "numbers" in text
    assert (tmp_path / "result").read_text() == "0\n1\n2\n"


def test_what_is_awaited_comes_whole() -> None:
    assert [list(awaited(range(count), "waits")) for count in (0, 1, 3)] == [[], [0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_stay_away_if_the_user_says_so(
    failed: Deployed, nursery: Nursery, environment: dict[str, str], coloured: bool
) -> None:
    text = on_terminal("status", RUN, environment=environment, nursery=nursery)
    assert "line 3 is not JSON" in text
    assert bool(COLOUR.search(text)) is coloured


@pytest.mark.parametrize("arguments", [["runs"], ["status", RUN], ["cost"], ["runs", "--json"], ["cost", "--csv"]])
def test_a_pipe_gets_no_control_sequence(failed: Deployed, arguments: list[str]) -> None:
    result = failed.run(*arguments)
    assert "\x1b" not in result.output
    assert "\r" not in result.output
