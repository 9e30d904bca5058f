"""Every command, option, link and file that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from dropforge_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def text(request: pytest.FixtureRequest) -> str:
    document: Path = request.param
    return document.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_make_targets_exist(text: str) -> None:
    assert set(re.findall(r"(?:`|\$ )make ([a-z]+)", text)) <= TARGETS


def test_commands_of_the_dropforge_command_are_accepted(text: str) -> None:
    for line in re.findall(r"^\$ (?:build/venv/bin/)?dropforge (.*)$", text, re.M):
        name, *arguments = re.split(r"\s+#", line)[0].split()
        command = cli.commands.get(name) or cli.get_command(click.Context(cli), name)
        assert command is not None, line
        if isinstance(command, click.Group):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        command.make_context(name, [_existing(argument) for argument in arguments])


def _existing(argument: str) -> str:
    """Replace my-job.json by an existing file: click checks that files exist."""
    return str(ROOT / "examples" / "local" / "cloud_run.json") if argument == "my-job.json" else argument
