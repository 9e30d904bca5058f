"""The suite says at its end what it could not test on this machine, and its collection stays cheap."""

from __future__ import annotations

import pytest

from ..conftest import COLLECTED
from ..untested import NO_PYTHON_312, untested_targets


def test_one_line_names_the_targets_that_were_not_tested_and_the_remedy() -> None:
    line = untested_targets([f"Skipped: {NO_PYTHON_312}: no python3.12 in PATH"] * 2 + ["Skipped: no gcloud"])
    assert line == (
        "NOT TESTED: training on the targets tpu_vm and ray (skipped tests: 2); install Python 3.12 "
        "(as python3.12 in PATH, or with `pyenv install 3.12`) and run `make test` again"
    )


def test_nothing_is_said_where_every_target_was_tested() -> None:
    assert untested_targets(["Skipped: no gcloud"]) is None


def test_the_collection_imports_no_library_that_trains(pytestconfig: pytest.Config) -> None:
    """Each worker collects all files: an import of these at the top of a file takes 9 s of processor time in each."""
    collected = pytestconfig.stash[COLLECTED]
    libraries = ("accelerate", "bitsandbytes", "datasets", "jax", "peft", "ray", "torch", "transformers", "trl")
    assert [library for library in libraries if library in collected] == []
