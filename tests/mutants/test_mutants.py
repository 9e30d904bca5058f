"""The catalogue of mutants fits the sources, operators change what they say, and the fixed mutants die."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from . import reach
from .mutant import ROOT, Mutant, catalogue
from .operators import drawn, modules, mutants_of
from .reach import Reach

CATALOGUE = catalogue()


def test_every_mutant_changes_its_file() -> None:
    assert len(CATALOGUE) >= 150
    for mutant in CATALOGUE:
        changed = mutant.applied((ROOT / mutant.file).read_text())
        assert changed != (ROOT / mutant.file).read_text(), mutant.id
        if mutant.file.endswith(".py"):
            compile(changed, mutant.id, "exec")


def test_every_mutant_says_what_it_breaks_or_why_it_breaks_nothing() -> None:
    unclear = [mutant.id for mutant in CATALOGUE if bool(mutant.breaks) == bool(mutant.equivalent or mutant.survives)]
    assert unclear == []


@pytest.mark.parametrize("source", ["a = 1\n", "a = 2\na = 2\n"], ids=["no longer there", "there twice"])
def test_an_old_text_that_does_not_occur_once_is_an_error_with_the_name_of_the_mutant(source: str) -> None:
    mutant = Mutant("stages/x/name", "functions/dropforge/stages/x.py", "a = 2", "a = 3", breaks="A promise.")
    with pytest.raises(ValueError, match=r"mutant stages/x/name occurs [02] times in .*stages/x\.py"):
        mutant.applied(source)


MODULE = '''
"""A docstring with 1."""

def first(é: int, items: list[int]) -> int | None:
    log.log("1 < 2")
    assert é > 0, "not 0"
    if not items or é < 3:  # a comment
        return None
    items.clear()
    return é + items[0]
'''
CHANGES = [
    ("é < 3", "é <= 3"),
    ("not items or é", "not items and é"),
    ("if not items", "if items"),
    ("é + items", "é - items"),
    ("return é + items[0]", "return None"),
    ("items.clear()", "pass"),
    ("items[0]", "items[1]"),
    ("< 3", "< 4"),
    ("if not items or é < 3", "if False"),
]


def test_operators_change_code_and_neither_texts_nor_types_nor_assertions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    changed = {mutant.applied(MODULE) for mutant in mutants_of(path, tmp_path)}
    assert changed == {MODULE.replace(old, new, 1) for old, new in CHANGES}


def test_drawn_mutants_are_python_and_the_same_for_the_same_seed() -> None:
    mutants = drawn(60, seed=1)
    assert [mutant.id for mutant in mutants] == [mutant.id for mutant in drawn(60, seed=1)]
    assert len({mutant.file for mutant in mutants}) > len(modules()) / 3
    for mutant in mutants:
        source = (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant.id


REACH = Reach(
    tests={
        "tests/a.py::slow": ["functions/m.py::Class.method"],
        "tests/a.py::other": ["functions/m.py::function"],
        "tests/b.py::quick": ["functions/m.py::Class.method"],
        "tests/c.py::fixture": [],
        "tests/d.py::foreign": ["functions/n.py::function"],
    },
    fixtures={"tests/c.py": ["functions/m.py::Class.method"]},
    simulations={f"wild {number}": ["functions/m.py::Class.method"] * (number % 2) for number in range(200)},
    seconds={
        "tests/a.py::slow": 2.0,
        "tests/a.py::other": 0.1,
        "tests/b.py::quick": 0.2,
        "tests/c.py::fixture": 0.1,
        "tests/d.py::foreign": 0.1,
    },
)


def test_a_mutant_meets_the_tests_that_call_its_function_first(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = Mutant("m/name", "functions/m.py", "a", "b")
    monkeypatch.setattr(reach, "function_of", lambda _: "functions/m.py::Class.method")
    tests = REACH.tests_of(mutant, 10)
    assert tests == ("tests/b.py::quick", "tests/a.py::slow", "tests/a.py::other", "tests/c.py::fixture")
    chosen = REACH.simulations_of(mutant, 30)
    assert len(chosen) == 30
    assert all("Class.method" in str(REACH.simulations[name]) for name in chosen)


def test_a_mutant_of_nothing_that_is_called_meets_a_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "function_of", lambda _: "functions/m.py::forgotten")
    assert 0 < len(REACH.simulations_of(Mutant("m/name", "functions/m.py", "a", "b"), 30)) < 30


def test_a_mutant_outside_of_functions_meets_all_tests_of_its_file() -> None:
    constant = next(mutant for mutant in CATALOGUE if mutant.file.endswith("yaml"))
    workflow = f"{reach.WORKFLOWS[constant.file]}::test"
    known = Reach(
        tests={
            workflow: [],
            **{f"tests/a.py::{number}": ["functions/dropforge/money/limits.py::due"] for number in range(20)},
        },
        seconds={workflow: 0.1, **{f"tests/a.py::{number}": 0.1 for number in range(20)}},
    )
    assert known.tests_of(constant, 10) == (workflow,)
    source = (ROOT / "functions/dropforge/money/limits.py").read_text()
    name = next(line for line in source.splitlines() if line.startswith("MIN_ATTEMPT_SECONDS"))
    assert len(known.tests_of(Mutant("money/name", "functions/dropforge/money/limits.py", name, "x"), 10)) == 20


def test_the_function_of_a_mutant_is_the_innermost_one_with_the_change() -> None:
    functions = {mutant.id: reach.function_of(mutant) for mutant in CATALOGUE}
    assert functions["stages/provision/does-not-note-the-wait"].endswith("stages/provision.py::_launch")
    assert functions["run/record/notes-nothing"].startswith("functions/dropforge/run/record.py::Ledger.with_state")
    assert all(not function for id_, function in functions.items() if id_.startswith("workflows/"))


def test_a_recorder_notes_the_called_functions_of_the_production_code() -> None:
    from dropforge.base.names import is_run_id

    with reach.Recorder(ROOT).on() as functions:
        is_run_id("demo-0123456789ab")
    assert functions == ["functions/dropforge/base/names.py::is_run_id"]


def test_the_fixed_mutants_die() -> None:
    """The command judges them in their copies of the tree, and first the tree without a mutant."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--fixed"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    count = sum(bool(mutant.fixed) for mutant in CATALOGUE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} mutants were killed" in done.stdout
    assert {mutant.fixed_judge for mutant in CATALOGUE} == {"", "unit", "chaos", "model"}
