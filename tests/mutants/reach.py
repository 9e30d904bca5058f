"""Which tests and simulations reach each function of the control plane; recorded once, on the unchanged tree.

A test that never calls the function with the change cannot notice the change. So a judge begins with those that do.
Caches hide calls, and a module's fixtures run in its first test only: what is recorded is a good order, and no proof.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import pytest

from .mutant import ROOT, Mutant

# The sources that decide what a test reaches.
SOURCES = ("functions", "workflows", "local/dropforge_local", "tests")
# The tests of each workflow's text, with mocked calls.
WORKFLOWS = {
    f"workflows/{name}.workflows.yaml": f"tests/contract/test_{name}_workflow.py" for name in ("run", "rollout")
}
LEAST = 12  # tests or simulations of a mutant whose function hardly any reach
MOST_TESTS = 150  # of a mutant: the cheapest ones


@dataclass
class Reach:
    """The functions ("file::qualified name") that each test, each test file's fixtures and each simulation call.

    `seconds` is the processor time of each test and simulation, and of judge "model" as a whole.
    """

    tests: dict[str, list[str]] = field(default_factory=dict)
    fixtures: dict[str, list[str]] = field(default_factory=dict)
    simulations: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))

    def tests_of(self, mutant: Mutant, seconds: float) -> tuple[str, ...]:
        """Tests that take about so much time: those that call the function, then those whose fixtures do, cheapest
        first; then those that call another function of the file."""
        function = function_of(mutant)
        ranks: dict[str, int] = {}
        for test, called in self.tests.items():
            if function in called or (not function and _is_about(test, called, mutant.file)):
                ranks[test] = 0
            elif function in self.fixtures.get(_file(test), ()):
                ranks[test] = 1
            elif _is_about(test, called, mutant.file):
                ranks[test] = 2
        chosen: list[str] = []
        for test in sorted(ranks, key=lambda each: (ranks[each], self.seconds[each])):
            if ranks[test] == 2 and len(chosen) >= LEAST:
                break
            if len(chosen) >= LEAST and (seconds < 0 or len(chosen) == MOST_TESTS):
                break
            chosen.append(test)
            seconds -= self.seconds[test]
        files = list(dict.fromkeys(_file(test) for test in chosen))
        return tuple(sorted(chosen, key=lambda test: files.index(_file(test))))

    def simulations_of(self, mutant: Mutant, count: int) -> tuple[str, ...]:
        """So many simulations, spread over those that call the function; others fill up what is missing."""
        function = function_of(mutant)
        reaching = [name for name, called in self.simulations.items() if not function or function in called]
        others = [name for name in self.simulations if name not in set(reaching)]
        return (*_spread(reaching, count), *_spread(others, max(0, LEAST - len(reaching))))


class Recorder:
    """Notes the functions of a tree that are called, in all threads that begin while it is on."""

    def __init__(self, tree: Path) -> None:
        self._prefix = f"{tree}{os.sep}"
        self._seen: set[CodeType] = set()

    @contextmanager
    def on(self) -> Iterator[list[str]]:
        """The list has the functions once the block ends."""
        functions: list[str] = []
        self._seen = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield functions
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            codes = [code for code in list(self._seen) if code.co_filename.startswith(f"{self._prefix}functions")]
            functions += sorted({f"{code.co_filename[len(self._prefix) :]}::{code.co_qualname}" for code in codes})

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._seen.add(frame.f_code)


class TestsRecorder:
    """A plugin of pytest that records the reach of each test."""

    def __init__(self, tree: Path) -> None:
        self.reach = Reach()
        self._recorder = Recorder(tree)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._timed(item), self._recorder.on() as functions:
            yield
        known = self.reach.fixtures.setdefault(_file(item.nodeid), [])
        known += [function for function in functions if function not in known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._timed(item), self._recorder.on() as functions:
            yield
        self.reach.tests[item.nodeid] = functions

    @contextmanager
    def _timed(self, item: Any) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds = self.reach.seconds
        seconds[item.nodeid] = seconds.get(item.nodeid, 0.0) + time.process_time() - began


def function_of(mutant: Mutant) -> str:
    """The innermost function that a mutant changes; "" for a change outside of functions, and for a workflow."""
    source = (ROOT / mutant.file).read_text()
    if not mutant.file.endswith(".py"):
        return ""
    place = source.index(mutant.old) if mutant.place is None else mutant.place
    same = next((at for at, pair in enumerate(zip(mutant.old, mutant.new, strict=False)) if len({*pair}) == 2), 0)
    line = source.count("\n", 0, place + same) + 1
    names = [name for name, first, last in _functions_of(source) if first <= line <= last]
    return f"{mutant.file}::{names[-1]}" if names else ""


def digest() -> str:
    """Of all sources that decide what a test reaches."""
    total = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:16]


@cache  # the catalogue has many mutants of one file
def _functions_of(source: str) -> list[tuple[str, int, int]]:
    return list(_functions(ast.parse(source), ""))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """The qualified name, and the first and last line, of each function; a function before those within it."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None, "the tree comes from a source"
            yield f"{prefix}{child.name}", child.lineno, child.end_lineno
            inner = f"{prefix}{child.name}.<locals>."
        elif isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        yield from _functions(child, inner)


def _is_about(test: str, called: list[str], file: str) -> bool:
    """Whether a test calls any function of a file, or runs the workflow."""
    if file in WORKFLOWS:
        return _file(test) == WORKFLOWS[file]
    return any(each.startswith(f"{file}::") for each in called)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _spread(names: list[str], count: int) -> list[str]:
    """At most `count` of the names, evenly spread, in their order."""
    step = max(1, len(names) // max(1, count))
    return names[::step][:count]
