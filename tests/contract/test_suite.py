"""The suite says what it could not test and which tests are flaky, and its collection stays cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import COLLECTED, ROOT
from ..untested import NO_PYTHON_312, untested_targets


def test_one_line_names_the_targets_that_were_not_tested_and_the_remedy() -> None:
    line = untested_targets([f"Skipped: {NO_PYTHON_312}: no python3.12 in PATH"] * 2 + ["Skipped: no gcloud"])
    assert line == (
        "NOT TESTED: training on the targets tpu_vm and ray (skipped tests: 2); install Python 3.12 "
        "(as python3.12 in PATH, or with `pyenv install 3.12`) and run `make test-engines` again"
    )


def test_nothing_is_said_where_every_target_was_tested() -> None:
    assert untested_targets(["Skipped: no gcloud"]) is None


def test_the_collection_imports_no_library_that_trains(pytestconfig: pytest.Config) -> None:
    """Each worker collects all files: an import of these at the top of a file takes 9 s of processor time in each."""
    collected = pytestconfig.stash[COLLECTED]
    libraries = ("accelerate", "bitsandbytes", "datasets", "jax", "peft", "ray", "torch", "transformers", "trl")
    assert [library for library in libraries if library in collected] == []


FAILS_ONCE = """
import pathlib
def test_fails_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first failure")
"""
ENDS_ITS_WORKER_ONCE = """
import os, pathlib
def test_ends_its_worker_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        os._exit(3)
"""
TEARDOWN_FAILS_ONCE = """
import pathlib, pytest
@pytest.fixture
def resource():
    yield
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first failure")
def test_with_a_resource(resource):
    pass
"""
ALWAYS_FAILS = """
def test_always_fails():
    raise AssertionError("wrong")
"""
CANNOT_BE_IMPORTED = "import no_such_module"


@pytest.mark.parametrize("source", [FAILS_ONCE, ENDS_ITS_WORKER_ONCE, TEARDOWN_FAILS_ONCE])
@pytest.mark.slow
def test_a_test_that_passes_alone_is_flaky_and_the_run_passes(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(source)
    ended = suite(tmp_path)
    assert ended.returncode == 0, ended.stdout
    *_, last = ended.stdout.split("FLAKY: failed once, passed alone")
    assert "FLAKY test_flaky.py::test_" in last
    assert "the first failure" in last or "crashed" in last
    assert "FLAKY test_flaky.py::test_" in (tmp_path / "build" / "ci" / "flaky.txt").read_text()


@pytest.mark.parametrize("source", [ALWAYS_FAILS, ALWAYS_FAILS + FAILS_ONCE, CANNOT_BE_IMPORTED])
@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(source)
    assert suite(tmp_path).returncode == 1


@pytest.mark.slow
def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text("".join(f"def test_{n}():\n    assert not {n + 1}\n" for n in range(11)))
    ended = suite(tmp_path)
    assert ended.returncode == 1
    assert "once more" not in ended.stdout


def suite(directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-P", str(ROOT / "tools" / "suite.py"), "--numprocesses", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment, timeout=300)
