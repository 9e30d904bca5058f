"""Every `make demo` of the README ends with a model that answers, and leaves nothing.

The commands come from the README and from make itself. `make demo` alone is in test_real_demo.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .commands import ROOT, Process

README = (ROOT / "README.md").read_text()
SPECS = sorted(set(re.findall(r"\]\((examples/local/\w+\.json)\)", README)) - {"examples/local/cloud_run.json"})
VARIANTS = re.findall(r"`make demo ([A-Z]+=\w+)`", README)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def demos() -> list[Any]:
    """The arguments of each `make demo` in the README, as parameters of a test."""
    arguments = [*VARIANTS, *(f"SPEC={spec}" for spec in SPECS)]
    return [pytest.param(each, marks=pytest.mark.engines if needs_maxtext(each) else []) for each in arguments]


def needs_maxtext(arguments: str) -> bool:
    return arguments.startswith(("SPEC=examples/local/tpu_vm", "SPEC=examples/local/ray"))


def test_the_readme_has_a_demo_for_each_target_and_for_two_models() -> None:
    assert {Path(spec).stem for spec in SPECS} >= {"gke", "tpu_vm", "ray"}
    assert "AGAIN=1" in VARIANTS


@pytest.mark.parametrize("arguments", demos())
def test_a_demo_of_the_readme_serves_a_model_and_leaves_nothing(
    arguments: str, start: Callable[..., Process], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if needs_maxtext(arguments):
        request.getfixturevalue("maxtext_environment")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    demo = start(command=command_of(arguments))
    assert demo.code(1500) == 0, demo.text()
    output = demo.text()
    for promise in promises(arguments):
        assert re.search(promise, output, re.M), f"{promise!r} is not in\n{output}"


def command_of(arguments: str) -> list[str]:
    """The command that `make demo ARGUMENTS` runs in the repository."""
    command = ["make", "-n", "--no-print-directory", "demo", arguments]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    make = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    program, *words = shlex.split(make.stdout.splitlines()[-1])
    return [str(ROOT / program), *words]


def promises(arguments: str) -> list[str]:
    """The lines that the README promises, as regular expressions."""
    nothing_left = "^what is left  0 resources, 0 processes, 0 ports$"
    if arguments == "AGAIN=1":
        return [
            r"^one URL  http://",
            "^first spec ",
            "^second spec ",
            "^rolled back ",
            "^the rollback took ",
            nothing_left,
        ]
    return [r"^ +\S+ s  succeeded ", r"^parity  sealed: ", "^Question: ", "^served ", nothing_left]
