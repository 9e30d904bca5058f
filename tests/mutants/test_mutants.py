"""The catalogue of mutants fits the sources, operators change what they say, and the fixed mutants die."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .mutant import ROOT, Mutant, catalogue
from .operators import drawn, modules, mutants_of

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


def test_the_fixed_mutants_die() -> None:
    """The command judges them in their copies of the tree, and first the tree without a mutant."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--fixed"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    count = sum(bool(mutant.fixed) for mutant in CATALOGUE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} of {count} mutants were killed" in done.stdout
    assert {mutant.fixed in ("model", "chaos") for mutant in CATALOGUE if mutant.fixed} == {True, False}
