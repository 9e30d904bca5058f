"""Fixtures that the whole suite shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_PYTHON = 3  # tools/maxtext_env.py
MAKER = pytest.StashKey["Maker"]()


def pytest_configure(config: pytest.Config) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        from .scheduling import COMPUTES, NICENESS

        if worker == COMPUTES:
            os.nice(NICENESS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours in place of xdist's own, where files are what is divided."""
    if config.getvalue("dist") != "loadfile":
        return None
    from .scheduling import Scheduling

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """MaxText's environment is made beside the first tests, if one needs it and it is not there."""
    if any("maxtext_environment" in getattr(item, "fixturenames", ()) for item in session.items):
        make_environment(session.config)


def make_environment(config: pytest.Config) -> Maker:
    if MAKER not in config.stash:
        config.stash[MAKER] = Maker()
        config.add_cleanup(config.stash[MAKER].end)
    return config.stash[MAKER]


class Maker:
    """tools/maxtext_env.py, as a process of its own."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (not a pipe, which nobody would empty yet)
        command = [sys.executable, str(ROOT / "tools" / "maxtext_env.py")]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._output, start_new_session=True)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what was printed."""
        code = self._process.wait()
        self._output.seek(0)
        return code, self._output.read().strip()

    def end(self) -> None:
        if self._process.poll() is None:  # no test has waited for it
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        self._output.close()


@pytest.fixture(scope="session")
def maxtext_environment(pytestconfig: pytest.Config) -> Path:
    """build/maxtext, with MaxText and Ray: made, or brought up to date with its lock.

    Skips where there is no Python 3.12 to make it of.
    """
    code, said = make_environment(pytestconfig).wait()
    if code == NO_PYTHON:
        pytest.skip(said)
    assert code == 0, said
    return Path(said.splitlines()[-1]).parent.parent
