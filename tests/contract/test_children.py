"""Every Python process that the stack, the commands and the tests start has `-P` or `-I`.

Without them Python imports from the working directory, or from the script's folder: a user's json.py would replace the
standard library's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL = ROOT / "local" / "dropforge_local" / "emulators" / "tpu" / "shims" / "docker"
SAFE = {"-P", "-I"}
OF_THE_REPOSITORY = ("tests.", "bench.")  # these modules are found in the working directory, the repository


def commands(source: str) -> Iterator[list[ast.expr]]:
    """Yield the elements of each list or tuple that starts with `sys.executable`, and has more elements."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.List | ast.Tuple)
            and len(node.elts) > 1
            and ast.unparse(node.elts[0]) == "sys.executable"
        ):
            yield node.elts


def is_safe(command: list[ast.expr]) -> bool:
    words = [word.value if isinstance(word, ast.Constant) else None for word in command[1:3]]
    return words[0] in SAFE or (words[0] == "-m" and str(words[1]).startswith(OF_THE_REPOSITORY))


@pytest.mark.parametrize("folder", ["local", "cli", "tests", "bench", "tools"])
def test_children_import_nothing_from_the_working_directory(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    unsafe = [
        f"{path.relative_to(ROOT)}:{command[0].lineno}"
        for path in paths
        for command in commands(path.read_text())
        if not is_safe(command)
    ]
    assert paths
    assert unsafe == []


def test_the_docker_of_a_machine_imports_nothing_from_the_working_directory() -> None:
    (start,) = [line for line in SHELL.read_text().splitlines() if line.startswith("exec ")]
    assert start.split()[2] in SAFE


@pytest.mark.parametrize(
    ("source", "safe"),
    [
        ('run([sys.executable, "-P", "-c", code])', True),
        ('run((sys.executable, "-I", "-S", path))', True),
        ('run([sys.executable, "-m", "bench.engine"])', True),
        ('run([sys.executable, "-c", code])', False),
        ("run([sys.executable, str(script)])", False),
        ('run([sys.executable, "-m", "functions_framework"])', False),
    ],
)
def test_the_rule_sees_each_way_to_start_a_child(source: str, safe: bool) -> None:
    assert [is_safe(command) for command in commands(source)] == [safe]
