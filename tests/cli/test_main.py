"""The command itself: its help, and what it imports to print it."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from dropforge_cli.main import COMMANDS, cli

from .conftest import Run

# A .pth of the environment makes the empty package google.cloud itself.
HEAVY = ("google.api_core", "google.cloud.storage", "kubernetes", "pydantic", "requests", "rich")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_help_that_the_list_says(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=1000) == COMMANDS[name].help


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_imports_no_client_and_no_model(option: str) -> None:
    code = f"""
import sys
from dropforge_cli.main import cli
cli([{option!r}], standalone_mode=False)
print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_help_lists_every_command_whole(dropforge: Run) -> None:
    shown = " ".join(dropforge("--help").output.split())
    for name, lazy in COMMANDS.items():
        assert f"{name} {lazy.help}" in shown


def test_an_unknown_command_is_wrong_usage(dropforge: Run) -> None:
    result = dropforge("nothing")
    assert result.exit_code == 2
    assert "No such command 'nothing'; `dropforge --help` lists them" in result.output


def test_a_mistyped_command_is_guessed(dropforge: Run) -> None:
    assert "No such command 'stauts'; did you mean 'status'?" in dropforge("stauts").output
    assert "did you mean 'validate'?" in dropforge("valdate", "x.json").output
