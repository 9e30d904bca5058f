"""A copy of functions/ alone starts in a clean environment that has only its requirements.txt."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from dropforge.base.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# From outside: the environment is to have nothing that is not required.
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
SETTINGS = [f"DROPFORGE_{field.name.upper()}" for field in fields(Settings) if field.default is MISSING]


@pytest.fixture(scope="session")
def clean_python() -> Path:
    """A virtual environment with the functions' requirements and nothing else; kept while they stay the same."""
    requirements = ROOT / "functions" / "requirements.txt"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    directory = ROOT / "build" / "functions-venv" / digest
    python = directory / "bin" / "python"
    if not (directory / ".installed").exists():
        venv.create(directory, with_pip=False, clear=True)
        # The requirements are all there is to install, of which `pip check` is asked below.
        install = [*PIP, python, "install", "--quiet", "--no-deps", "--no-compile", "--requirement", requirements]
        subprocess.run(install, check=True, timeout=600)
        (directory / ".installed").touch()
    return python


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_copy_of_functions_serves_with_only_its_requirements(clean_python: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "functions", source, ignore=shutil.ignore_patterns("__pycache__"))
    check = subprocess.run([*PIP, clean_python, "check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    environment = {"PATH": os.environ["PATH"], **dict.fromkeys(SETTINGS, "x")}
    command = [clean_python, "-m", "functions_framework", "--target", "inspect", "--source", source / "main.py"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", "0"], env=environment, cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        status = _first_answer(process)
    finally:
        process.terminate()
        process.wait(20)
    assert status == 400, (tmp_path / "log").read_text()


def _first_answer(process: subprocess.Popen[bytes]) -> int:
    """The status of a request without a body, once the server answers at all."""
    import psutil

    deadline = time.monotonic() + 180  # modules are compiled when they are first imported
    while time.monotonic() < deadline and process.poll() is None:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                url = f"http://127.0.0.1:{connection.laddr.port}/"
                try:
                    urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=30)
                except urllib.error.HTTPError as error:
                    error.close()
                    return error.code
        time.sleep(0.05)
    raise AssertionError(f"the function did not start; exit status {process.poll()}")
