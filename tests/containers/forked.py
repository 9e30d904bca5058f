"""Start containers without their imports: fork them from a process that has imported the modules.

The imports of PyTorch, transformers and TRL take 6 s of processor time, which is more than the training of most tests.
A forked container is a process of its own, with its own environment, output, signals and exit code. So are the launcher
and the ranks of a training, and the stand-in engine of a server: each is a child of the process that starts it, in a
session of its own.

A process with threads cannot fork safely, and a container has gRPC's threads when it starts the launcher. Each process
therefore forks its children first; they wait until it starts them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn
from unittest.mock import patch

from containers.common.attempt import exit_now
from containers.common.world import read_world
from dropforge_local import shims

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).resolve().parents[2]
TRAIN = "containers.train_trl.train"
SERVE = "containers.serve_vllm.serve"
ENGINE = "containers.serve_vllm.standin"
LAUNCH = "accelerate.commands.launch"
HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"  # it starts the ranks
IMPORTED = "tests.containers.imported"
MODULES = (  # that a forked process has imported
    "tests.containers.forked",
    TRAIN,
    SERVE,
    ENGINE,
    LAUNCH,
    HANDLER,
    "containers.serve_vllm.prompt",
    "containers.serve_vllm.standin_gate",
    "containers.train_trl.methods.sft",
    "containers.train_trl.ranks",
    "google.cloud.pubsub_v1",
    "google.cloud.secretmanager_v1",
    "google.cloud.storage",
    "torch.distributed.run",
    "transformers.models.gemma3.modeling_gemma3",
    "trl.trainer.sft_trainer",
)


def prepare(environment: Mapping[str, str]) -> None:
    """Start the process that imports, unless it runs; it ends with this process. Modules read `environment` while it
    imports them."""
    with patch.dict(os.environ, {**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}, clear=True):
        CONTEXT.set_forkserver_preload([IMPORTED])
        forkserver.ensure_running()


class Forked:
    """A forked container, with the part of subprocess.Popen that the tests use."""

    def __init__(self, environment: Mapping[str, str], module: str = TRAIN) -> None:
        reading, writing = CONTEXT.Pipe(duplex=False)
        with reading, writing:
            self.stdout = os.fdopen(os.dup(reading.fileno()), encoding="utf-8")
            self._process = CONTEXT.Process(target=_run, args=(module, dict(environment), writing))
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

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Popen(subprocess.Popen[Any]):
    """Starts `python -m` of a launcher, a rank or an engine in a child that this process has forked already."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        words = list(args[args.index("-m") + 1 :]) if "-m" in args else []
        if words[:1] not in ([LAUNCH], [TRAIN], [ENGINE]):
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        child = WAITING.pop(0)
        child.start(words, prepare=options[1], environment=options[5])
        self.pid = child.pid
        self._child_created = True


class Waiting:
    """A forked child that waits until this process starts it; it ends with this process."""

    def __init__(self) -> None:
        self._connection, its_end = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for inherited in (self, *WAITING):
                inherited._connection.close()
            WAITING.clear()
            _wait(its_end)
        its_end.close()

    def start(self, words: Sequence[str], prepare: Callable[[], None] | None, environment: Mapping[str, str]) -> None:
        """Let it run a module with arguments, after `prepare`; return when it leads its session."""
        with self._connection:
            self._connection.send((words, prepare, dict(environment)))
            self._connection.recv()


WAITING: list[Waiting] = []  # the children that this process has not started yet


def _wait(starter: Connection) -> NoReturn:
    """Become the program that the parent starts with `start_new_session`, or as the leader of a process group."""
    with starter:
        try:
            words, prepare, environment = starter.recv()
        except EOFError:  # the parent has ended
            os._exit(0)
        os.setsid()
        if prepare is not None:
            prepare()
        starter.send(None)
    _become(words, environment)


def _run(module: str, environment: Mapping[str, str], output: Connection) -> None:
    """Become the container: `python -m MODULE`."""
    with output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    _become([module], environment)


def _become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module with arguments and end, as an interpreter does."""
    os.environ.clear()
    os.environ.update(environment)
    for _ in range(_children(words[0], environment)):
        WAITING.append(Waiting())
    subprocess.Popen = Popen  # type: ignore[misc]
    importlib.import_module(HANDLER).__dict__["Popen"] = Popen
    _customise()
    module = importlib.import_module(words[0])
    sys.argv = [str(module.__file__), *words[1:]]
    try:
        code = module.main(*words[1:]) if words[0] == ENGINE else module.main()
    except BaseException:  # noqa: BLE001  (an interpreter prints every exception, too)
        traceback.print_exc()
        code = 1
    exit_now(code or 0)


def _children(module: str, environment: Mapping[str, str]) -> int:
    """How many processes the module starts: a server its engine, a trainer its launcher, the launcher its ranks."""
    if module == ENGINE or "LOCAL_RANK" in environment:
        return 0
    if module == SERVE:
        return 1
    if module == LAUNCH:
        return int(environment["DROPFORGE_NUM_PROCESSES"])
    return int(read_world(environment, []).starts_ranks)


def _customise() -> None:
    """Import sitecustomize from PYTHONPATH, as an interpreter does at its start.

    It patches modules once they are loaded. Here they are loaded already, and nothing has used them yet.
    """
    if str(shims.DIRECTORY) not in os.environ["PYTHONPATH"].split(":"):
        return
    sys.path.insert(0, str(shims.DIRECTORY))
    sys.modules.pop("sitecustomize", None)  # Debian's Python has a module of this name, too
    finder = importlib.import_module("sitecustomize").Finder
    for patches in [each.patches for each in sys.meta_path if isinstance(each, finder)]:
        for name in patches.keys() & sys.modules.keys():
            patches.pop(name)(sys.modules[name])
