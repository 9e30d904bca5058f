"""A copy of functions/ alone starts in a clean environment that has only its requirements.txt."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from tools import uv

from dropforge.base.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# pip and uv run outside of the environment, which contains nothing but the requirements.
PIP = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--python"]
SETTINGS = [f"DROPFORGE_{field.name.upper()}" for field in fields(Settings) if field.default is MISSING]


@pytest.fixture(scope="session")
def clean_python() -> Path:
    """A virtual environment with the functions' requirements only; reused until the requirements change."""
    requirements = ROOT / "functions" / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    directory = ROOT / "build" / "functions-venv" / digest
    python = directory / "bin" / "python"
    if not (directory / ".installed").exists():
        venv.create(directory, with_pip=False, clear=True)
        uv.install(python, requirements)  # requirements.txt is complete: the test runs `pip check`
        (directory / ".installed").touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_copy_of_functions_serves_with_only_its_requirements(clean_python: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "functions", source, ignore=shutil.ignore_patterns("__pycache__"))
    check = subprocess.run([*PIP, str(clean_python), "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    environment = {"PATH": os.environ["PATH"], **dict.fromkeys(SETTINGS, "x")}
    framework = [str(clean_python), "-m", "functions_framework", "--target", "inspect"]
    command = [*framework, "--source", str(source / "main.py")]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"], env=environment, cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        status = _first_answer(process)
    finally:
        process.terminate()
        process.wait(60)
    assert status == 400, (tmp_path / "log").read_text()


def _first_answer(process: subprocess.Popen[bytes]) -> int:
    """Wait until the server answers; return the status of a request without a body."""
    import psutil

    deadline = time.monotonic() + 180  # the first import compiles the modules
    while time.monotonic() < deadline and process.poll() is None:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                url = f"http://127.0.0.1:{connection.laddr.port}/"
                try:
                    urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=60)
                except urllib.error.HTTPError as error:
                    error.close()
                    return error.code
        time.sleep(0.05)
    raise AssertionError(f"the function did not start; exit status {process.poll()}")
