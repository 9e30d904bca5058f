"""Run the installed gcloud, forked from a process that has imported its modules: the imports take most of its time."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from .forked import Nursery

ENTRY = "googlecloudsdk.gcloud_main:main"
RunGcloud = Callable[[Sequence[str], Mapping[str, str]], subprocess.CompletedProcess[str]]
OPTIONS = ("-E", "-S", "-P", "-W", "ignore")  # the script `gcloud` takes -S, and this -W


class Gcloud:
    """Runs gcloud. An installation without a Python of its own runs as a user starts it."""

    def __init__(self) -> None:
        self._nursery = _nursery()

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Do what `subprocess.run(["gcloud", *arguments], ...)` does, and keep the output."""
        command = ["gcloud", *arguments]
        if self._nursery is None:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        with open("/dev/null") as nothing, _file() as output, _file() as errors:
            streams = (nothing.fileno(), output.fileno(), errors.fileno())
            process = self._nursery.start(command, streams, environment, Path.cwd())
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, code, output.read(), errors.read())

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def _nursery() -> Nursery | None:
    root = Path(shutil.which("gcloud") or "/none/none").resolve().parent.parent
    python, library = root / "platform" / "bundledpythonunix" / "bin" / "python3", root / "lib"
    if not python.exists() or not (library / "googlecloudsdk" / "gcloud_main.py").exists():
        return None
    return Nursery(ENTRY, (str(python), *OPTIONS), [str(library / "third_party"), str(library)])
