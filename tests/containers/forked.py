"""Start training containers without their imports: fork them from a process that has imported the modules.

The imports of PyTorch, transformers and TRL take 6 s of processor time, which is more than the training of most tests.
A forked container is a process of its own, with its own environment, output, signals and exit code. Containers that
start ranks are not forked: the shims of the ranks act at the start of an interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from unittest.mock import patch

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "tests.containers.forked",
    "containers.train_trl.train",
    "containers.train_trl.methods.sft",
    "google.cloud.pubsub_v1",
    "google.cloud.secretmanager_v1",
    "google.cloud.storage",
    "transformers.models.gemma3.modeling_gemma3",
    "trl.trainer.sft_trainer",
)


def prepare(environment: Mapping[str, str]) -> None:
    """Start the process that imports, unless it runs; it ends with this process. Modules read `environment` while it
    imports them."""
    with patch.dict(os.environ, {**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}, clear=True):
        CONTEXT.set_forkserver_preload(list(MODULES))
        forkserver.ensure_running()


class Forked:
    """A forked container, with the part of subprocess.Popen that the tests use."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        reading, writing = CONTEXT.Pipe(duplex=False)
        with reading, writing:
            self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
            self._process = CONTEXT.Process(target=_run, args=(dict(environment), writing))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked container", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; return the rest of the output."""
        if self.stdout.closed:
            return "", None
        rest: list[str] = []
        reader = Thread(target=lambda: rest.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("a forked container", timeout or 0)
        self.stdout.close()
        self.wait(timeout)
        return rest[0], None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(environment: Mapping[str, str], output: Connection) -> None:
    """Become the container: `python -m containers.train_trl.train`."""
    from containers.common.attempt import exit_now
    from containers.train_trl import train

    with output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(train.__file__)]
    exit_now(train.main())
