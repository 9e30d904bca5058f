"""The README's examples run as they are printed, and its promise to import nothing of the repository holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workflows_engine

PACKAGE = Path(workflows_engine.__file__).parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("example", "output"), [(EXAMPLES[0], '"paid 42"\n'), (EXAMPLES[1], "")], ids=["embed", "test"]
)
def test_an_example_runs(tmp_path: Path, example: str, output: str) -> None:
    command = [sys.executable, "-P", "-W", "error", "-c", example]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (output, "")


def test_the_embedding_example_continues_in_a_second_process(tmp_path: Path) -> None:
    for _ in range(2):
        command = [sys.executable, "-P", "-c", EXAMPLES[0]]
        done = subprocess.run(command, cwd=tmp_path, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == '"paid 42"\n'


def test_the_package_and_its_tests_import_nothing_of_the_repository() -> None:
    for file in [*PACKAGE.rglob("*.py"), *Path(__file__).parent.glob("*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom) and not node.level]
        assert not [name for name in names if name.split(".")[0].startswith("dropforge")], file


def test_every_public_name_is_there() -> None:
    assert sorted(workflows_engine.__all__) == workflows_engine.__all__
    assert all(hasattr(workflows_engine, name) for name in workflows_engine.__all__)
