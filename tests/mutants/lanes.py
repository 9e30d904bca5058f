"""Judges mutants in lanes: each lane has a copy of the tree, and every judgement is a process that this one forks.

This process has imported the libraries, but nothing of the project: a forked process imports the project from its
lane's copy, with the mutant in it. Limits end a mutant that never ends: of processor time, of time and of memory.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from .judges import JUDGES, Scope
from .mutant import ROOT, Mutant
from .reach import Reach

TREES = ROOT / "build" / "mutants"
SOURCES = ("", "functions", "local", "cli")  # the folders of a tree that are on the import path
GENERATED = ("build", ".*_cache", ".hypothesis", ".git", "*.pyc.*")  # the last: another process compiles just now
# A judgement that takes longer than the judgement of the unchanged tree times SLOWER, plus MORE_SECONDS, does not end.
SLOWER, MORE_SECONDS = 3, 10
LONGEST_SECONDS = 300.0  # of processor time, for a judgement of the unchanged tree
RECORD = "reach-{}.json"  # in a lane's folder build, by the judge
MEMORY_BYTES = 6 << 30
PATIENCE_SECONDS = 60.0  # for an event that a test waits for: a mutant may be why it never comes
WAIT_SECONDS = 1200  # for a judgement that waits for itself; a busy machine needs minutes for a good one
# The libraries that the judges import. The command imports them once, before it forks.
LIBRARIES = (
    "aiohttp", "click", "flask", "functions_framework", "google.api_core.exceptions", "google.auth.transport.requests",
    "google.cloud.container_v1", "google.cloud.pubsub_v1", "google.cloud.run_v2", "google.cloud.secretmanager_v1",
    "google.cloud.storage", "google.cloud.tpu_v2", "google.cloud.workflows.executions_v1", "google.oauth2.id_token",
    "hypothesis", "jsonschema", "kubernetes.client", "lark", "pydantic", "re2", "requests", "slack_sdk", "yaml",
)  # fmt: skip


class Verdict(NamedTuple):
    """A judge's verdict: what noticed the mutant, or "", and the processor seconds of the judgement."""

    mutant: str
    judge: str
    killer: str
    seconds: float


@dataclass(frozen=True)
class Case:
    """A mutant, None for the unchanged tree, and its judges in order.

    `tests` are its unit tests, and `simulations` its simulations; none: all. `usual` has the processor seconds of the
    judges on the unchanged tree.
    """

    mutant: Mutant | None
    judges: tuple[str, ...]
    tests: tuple[str, ...] = ()
    simulations: tuple[str, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Lane:
    """A copy of the tree, the case in it, and its judges: the one that judges now, and the next ones."""

    tree: Path
    case: Case
    judge: str = ""
    waiting: tuple[str, ...] = ()
    unchanged: str = ""  # the text of the mutated file

    @property
    def answer(self) -> Path:
        """Where the judge writes what has noticed the mutant."""
        return self.tree / "build" / "killer.json"


class Lanes:
    """`count` judgements at a time. `is_small`: the model has only a cancel."""

    def __init__(self, count: int, *, is_small: bool = False) -> None:
        for name in LIBRARIES:
            importlib.import_module(name)
        gc.freeze()  # the memory of the libraries stays shared
        self.is_small = is_small
        TREES.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="lanes-", dir=TREES)
        folder = Path(self._folder.name)
        self.idle = [Lane(_copy(folder / str(number)), Case(None, ())) for number in range(count)]
        self.busy: dict[int, Lane] = {}

    def close(self) -> None:
        """Remove the copies of the tree."""
        self._folder.cleanup()

    def record(self, unchanged: Case) -> Reach:
        """Return the functions that tests and simulations reach, and the seconds that each judge takes.

        Raises RuntimeError if a judge finds fault with the unchanged tree.
        """
        reach = Reach()
        for verdict in self.judge([unchanged]):
            if verdict.killer:
                raise RuntimeError(f"judge {verdict.judge} finds fault with the unchanged tree: {verdict.killer}")
            reach.seconds[verdict.judge] = verdict.seconds
        for path in self.idle[-1].tree.glob(f"build/{RECORD.format('*')}"):
            recorded = Reach.read(path)
            for name, known in vars(reach).items():
                known.update(getattr(recorded, name))
        return reach

    def judge(self, cases: Iterable[Case], *, first: bool = False) -> Iterator[Verdict]:
        """The verdicts of every case's judges; `first`: only up to the first judge that notices the mutant."""
        waiting = iter(cases)
        while True:
            while self.idle and (case := next(waiting, None)) is not None:
                lane = self.idle.pop()
                lane.case, lane.waiting = case, case.judges
                _write(lane)
                self._begin(lane)
            if not self.busy:
                return
            verdict, lane = self._end()
            yield verdict
            if lane.waiting and not (first and verdict.killer):
                self._begin(lane)
            else:
                _restore(lane)
                self.idle.append(lane)

    def _begin(self, lane: Lane) -> None:
        lane.judge, *rest = lane.waiting
        lane.waiting = tuple(rest)
        lane.answer.unlink(missing_ok=True)
        if pid := os.fork():
            self.busy[pid] = lane
            return
        record = None if lane.case.mutant else lane.tree / "build" / RECORD.format(lane.judge)
        _judge(lane, Scope(lane.case.tests, lane.case.simulations, record, self.is_small))

    def _end(self) -> tuple[Verdict, Lane]:
        """Wait for a judgement."""
        pid, status, used = os.wait4(-1, 0)
        lane = self.busy.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a test has left
        killer = json.loads(lane.answer.read_text()) if lane.answer.exists() else f"it does not end ({_how(status)})"
        id_ = lane.case.mutant.id if lane.case.mutant else "unchanged"
        return Verdict(id_, lane.judge, killer, used.ru_utime + used.ru_stime), lane


def _judge(lane: Lane, scope: Scope) -> NoReturn:
    """Judge in a forked process."""
    code = 1
    try:
        os.setsid()
        with open(lane.tree / "build" / "output.txt", "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        most = int(lane.case.usual.get(lane.judge, LONGEST_SECONDS) * SLOWER + MORE_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        faulthandler.dump_traceback_later(WAIT_SECONDS, exit=True)
        _enter(lane.tree)
        vars(importlib.import_module("tests.patience"))["PATIENCE_SECONDS"] = PATIENCE_SECONDS
        try:
            killer = JUDGES[lane.judge](scope)
        except BaseException as error:  # noqa: BLE001  # also of the simulation, and a pytest that gives up
            killer = f"{type(error).__name__}: {error}"[:300]
        lane.answer.write_text(json.dumps(killer))
        code = 0
    finally:
        os._exit(code)


def _enter(tree: Path) -> None:
    """Import the project from a tree from here on, also in the processes that tests start."""
    ours = {str(ROOT / folder) for folder in SOURCES}
    assert not [name for name in sys.modules if name.startswith("dropforge")], "only a judgement imports the project"
    sys.dont_write_bytecode = True  # the copy of a changed module may have the age and size of the unchanged one
    sys.path[:] = [*(str(tree / folder) for folder in SOURCES), *(path for path in sys.path if path not in ours)]
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(tree / folder) for folder in SOURCES)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.chdir(tree)


def _copy(tree: Path) -> Path:
    """Copy the project without what was generated, and compile what the judges import and was not compiled before."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*GENERATED), symlinks=True)
    command = [sys.executable, "-P", "-m", "compileall", "-q", *(folder for folder in SOURCES if folder)]
    subprocess.run(command, cwd=tree, check=True)
    (tree / "build").mkdir()
    return tree


def _write(lane: Lane) -> None:
    if mutant := lane.case.mutant:
        path = lane.tree / mutant.file
        lane.unchanged = path.read_text()
        path.write_text(mutant.applied(lane.unchanged))
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()


def _restore(lane: Lane) -> None:
    if mutant := lane.case.mutant:
        (lane.tree / mutant.file).write_text(lane.unchanged)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
