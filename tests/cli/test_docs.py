"""docs/cli.md (for `chaos`, docs/chaos.md) names every command and every option, and its configuration is complete."""

from __future__ import annotations

import re

import click
import pytest

from dropforge_cli import deployment
from dropforge_cli.main import cli

from .conftest import ROOT, Run

TEXT = (ROOT / "docs" / "cli.md").read_text()
CHAOS = (ROOT / "docs" / "chaos.md").read_text()
NAMES = cli.list_commands(click.Context(cli))


def test_every_command_and_option_is_documented() -> None:
    missing = [name for name in NAMES if f"`dropforge {name}" not in TEXT]
    for name in NAMES:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        options = [option for option in command.params if isinstance(option, click.Option)]
        missing += [name for option in options for name in option.opts if name not in TEXT + CHAOS]
    assert missing == []


def test_every_documented_command_exists() -> None:
    assert set(re.findall(r"`dropforge ([a-z]+)", TEXT)) <= set(NAMES)


def test_the_documented_configuration_works(dropforge: Run) -> None:
    example = re.search(r"```toml\n(.*?)```", TEXT, re.S)
    assert example is not None
    deployment.CONFIG.write_text(example[1])
    assert deployment.connect(None).settings.workflow_name.startswith("projects/my-project/locations/us-central1/")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(dropforge: Run, name: str) -> None:
    result = dropforge(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name}")


GALLERY = re.findall(
    r"\(\.\./(examples/[\w.-]+\.json)\) .* (\$[\d.,]+) \|$", (ROOT / "docs" / "gallery.md").read_text(), re.M
)


def test_the_gallery_has_every_example() -> None:
    assert {path for path, _ in GALLERY} == {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.json")}


@pytest.mark.parametrize(("path", "price"), GALLERY)
def test_the_gallery_has_the_worst_case_of_plan(dropforge: Run, path: str, price: str) -> None:
    assert f"worst case  {price} in all" in dropforge("plan", str(ROOT / path)).output
