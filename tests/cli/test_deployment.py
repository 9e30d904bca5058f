"""Which deployment a command uses, and its error without a deployment or with a wrong configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dropforge_cli import deployment
from dropforge_cli.problems import CliError

from .conftest import Run, toml, write_toml


def test_without_a_deployment_the_error_says_what_to_do(dropforge: Run) -> None:
    for arguments in (["runs"], ["status", "x"], ["logs", "x"], ["cancel", "x"]):
        result = dropforge(*arguments)
        assert result.exit_code == 1
        assert result.stderr == (
            f"error: no local stack runs in {Path('build/local').resolve()}, and no project is configured\n"
            "hint: start one with `dropforge up`, go to the directory where you did, or describe a project in "
            "DROPFORGE_* variables or in dropforge.toml\n"
        )


def test_the_file_describes_a_project(dropforge: Run) -> None:
    write_toml(toml())
    connected = deployment.connect(None)
    assert connected.settings.project == "p"
    assert connected.where == "project p, from dropforge.toml"
    assert connected.stack is None
    assert connected.settings.check_interval_seconds == 300


def test_variables_override_the_file(dropforge: Run) -> None:
    write_toml({**toml(), "check_interval_seconds": 60})
    os.environ["DROPFORGE_PROJECT"] = "other"
    connected = deployment.connect(None)
    assert (connected.settings.project, connected.settings.location) == ("other", "us-central1")
    assert connected.settings.check_interval_seconds == 60
    assert connected.where == "project other, from the environment"


def test_an_explicit_state_directory_allows_only_its_stack(dropforge: Run) -> None:
    write_toml(toml())
    with pytest.raises(CliError, match=r"no local stack runs in .*/elsewhere"):
        deployment.connect("elsewhere")


def test_a_stack_without_a_process_does_not_run(dropforge: Run) -> None:
    state = Path("build/local")
    state.mkdir(parents=True)
    fields = {"http": "", "grpc": "", "functions": "", "project": "", "environment": {}, "console": ""}
    (state / "stack.json").write_text(json.dumps({"pid": os.getpid(), "started": 1.0, **fields}))
    assert deployment.find(None) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("project = ", "dropforge.toml is not TOML"),
        ('projekt = "p"', "unknown key 'projekt'"),
        ("project = true", "project is True; expected text or a whole number"),
        ("project = 1.5", "project is 1.5"),
        ('project = "p"', "DROPFORGE_LOCATION is not set; DROPFORGE_SPECS_BUCKET is not set"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_problem(dropforge: Run, text: str, expected: str) -> None:
    Path("dropforge.toml").write_text(text)
    result = dropforge("runs")
    assert result.exit_code == 1
    assert expected in result.stderr
    assert "Traceback" not in result.output
