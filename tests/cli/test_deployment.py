"""Which deployment a command talks to, and what it says when there is none or its description is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dropforge_cli import deployment
from dropforge_cli.problems import CliError

from .conftest import Run, toml, write_toml


def test_without_any_deployment_the_answer_is_what_to_do(dropforge: Run) -> None:
    for arguments in (["runs"], ["status", "x"], ["logs", "x"], ["cancel", "x"]):
        result = dropforge(*arguments)
        assert result.exit_code == 1
        assert result.stderr == (
            f"error: no local stack runs in {Path('build/local').resolve()}, and no project is configured\n"
            "hint: start one with `dropforge up`, or describe a project in DROPFORGE_* variables or in dropforge.toml\n"
        )


def test_the_file_describes_a_project(dropforge: Run) -> None:
    write_toml(toml())
    found = deployment.connect(None)
    assert found.settings.project == "p"
    assert found.where == "project p, from dropforge.toml"
    assert found.stack is None
    assert found.settings.check_interval_seconds == 300


def test_variables_go_before_the_file(dropforge: Run) -> None:
    write_toml({**toml(), "check_interval_seconds": 60})
    os.environ["DROPFORGE_PROJECT"] = "other"
    found = deployment.connect(None)
    assert (found.settings.project, found.settings.location) == ("other", "us-central1")
    assert found.settings.check_interval_seconds == 60
    assert found.where == "project other, from the environment"


def test_an_explicit_state_directory_means_its_stack_and_nothing_else(dropforge: Run) -> None:
    write_toml(toml())
    with pytest.raises(CliError, match=r"no local stack runs in .*/elsewhere"):
        deployment.connect("elsewhere")


def test_a_stack_whose_process_is_gone_does_not_run(dropforge: Run) -> None:
    state = Path("build/local")
    state.mkdir(parents=True)
    fields = {"http": "", "grpc": "", "functions": "", "project": "", "environment": {}}
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
def test_a_wrong_file_is_said_to_be_wrong(dropforge: Run, text: str, expected: str) -> None:
    Path("dropforge.toml").write_text(text)
    result = dropforge("runs")
    assert result.exit_code == 1
    assert expected in result.stderr
    assert "Traceback" not in result.output
