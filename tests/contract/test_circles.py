"""No two modules import each other, not even for types alone: import-linter does not see imports for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .configuration import ROOT

PACKAGES = (
    "functions/dropforge",
    "local/dropforge_local",
    "local/workflows_engine",
    "cli/dropforge_cli",
    "console/dropforge_console",
    "containers",
)


def imports(root: Path) -> dict[str, set[str]]:
    """The modules of the same package that each module imports, wherever it does."""
    files = {".".join((root.name, *file.relative_to(root).with_suffix("").parts)): file for file in root.rglob("*.py")}
    return {name: {found for found in _imported(name, file) if found in files} for name, file in files.items()}


def _imported(name: str, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))


def circles(found: dict[str, set[str]]) -> set[frozenset[str]]:
    """The pairs of modules that import each other."""
    return {frozenset((one, other)) for one, others in found.items() for other in others if one in found[other]}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_import_each_other(package: str) -> None:
    found = imports(ROOT / package)
    assert len(found) > 5
    assert circles(found) == set()


def test_the_rule_finds_an_import_for_types(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "a.py").write_text("from . import b\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import A\n")
    assert circles(imports(package)) == {frozenset({"pack.a", "pack.b"})}
