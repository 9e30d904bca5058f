"""What other engines need, installed in build/peers/ when a benchmark first asks for it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tools import uv

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "build" / "peers"


class Missing(Exception):
    """This machine cannot have the engine; the text says why."""


def python_with(name: str, *packages: str) -> str:
    """Return the interpreter of an environment that has the packages, each with its exact version. Raises Missing."""
    directory = HOME / name
    python, stamp = directory / "bin" / "python", directory / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(packages):
        subprocess.run([sys.executable, "-P", "-m", "venv", "--clear", str(directory)], check=True)
        command = [uv.program(), "pip", "install", "--quiet", "--python", str(python), *packages]
        _install(command, {**os.environ, **uv.settings()})
        stamp.write_text(" ".join(packages))
    return str(python)


def restate_server(version: str) -> str:
    """Return Restate's server, a program of 216 MB in a package of the npm registry. Raises Missing."""
    machine = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"@restatedev/restate-server-{sys.platform}-{machine}"
    directory = HOME / "restate-server"
    program = directory / "node_modules" / package / "bin" / "restate-server"
    if not program.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise Missing("its server comes by npm, which is not installed here")
        _install([npm, "install", "--silent", "--prefix", str(directory), f"{package}@{version}"], dict(os.environ))
    return str(program)


def _install(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"`{' '.join(command[:3])}` failed: {(done.stderr or done.stdout).strip()[-300:]}")
