"""The first command of a newcomer, `make setup`, with a Python that is too old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import install

ROOT = Path(__file__).resolve().parents[2]


def test_an_old_python_is_named_with_the_command_that_takes_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    assert install.main("build/none") == 1
    told = capsys.readouterr().err
    assert f"dropforge needs Python 3.11 or newer; {sys.executable} is 3.10.12\n" in told
    assert not (ROOT / "build" / "none").exists()
    [command] = [line.partition(": name another: ")[2] for line in told.splitlines() if line.startswith("hint")]
    words = ["make", "--dry-run", "--always-make", *command.split()[1:]]
    planned = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "/path/to/python3.12 tools/install.py build/venv" in planned
