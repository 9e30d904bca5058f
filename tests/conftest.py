"""Fixtures that the whole suite shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_PYTHON = 3  # tools/maxtext_env.py


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours in place of xdist's own, where files are what is divided."""
    if config.getvalue("dist") != "loadfile":
        return None
    from .scheduling import Scheduling

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def maxtext_environment() -> Path:
    """build/maxtext, with MaxText and Ray: made, or brought up to date with its lock, by the first test that needs it.

    Skips where there is no Python 3.12 to make it of.
    """
    made = subprocess.run([sys.executable, str(ROOT / "tools" / "maxtext_env.py")], capture_output=True, text=True)
    if made.returncode == NO_PYTHON:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip()).parent.parent
