"""Mutants that no person wrote: the operators of mutation testing, applied to the syntax tree of a module.

An operator replaces a part of the source by another text and leaves the rest as it is. Text for people, logs, types and
assertions are left alone: no test should depend on them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .mutant import ROOT, Mutant

# The modules that the catalogue is about.
MODULES = (
    "functions/dropforge/stages/**/*.py",
    "functions/dropforge/platforms/*/*.py",
    "functions/dropforge/cloud/[dektl]*.py",
    "functions/dropforge/run/[rs][et][co]*.py",
    "functions/dropforge/tell/*.py",
    "functions/dropforge/money/limits.py",
    "functions/dropforge/stages/deletion.py",
)
# They check or describe specs, and have tests of their own; no run depends on a second look at them.
OTHERS = frozenset(
    {
        "admission.py",
        "ceiling.py",
        "catalog.py",
        "spec.py",
        "__init__.py",
        "slack.py",
        "mail.py",
        "teams.py",
        "github.py",
    }
)
OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
}  # fmt: skip
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break)
UNTOUCHED = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.AnnAssign, ast.arg)


class Change(NamedTuple):
    """A part of a source, by its first and last index (in bytes of UTF-8), and its replacement."""

    first: int
    last: int
    new: str
    operator: str


def drawn(count: int, seed: int) -> list[Mutant]:
    """`count` mutants of all modules, drawn by the seed: the same ones as long as the modules stay the same."""
    every = [mutant for path in modules() for mutant in mutants_of(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def modules() -> list[Path]:
    paths = {path for pattern in MODULES for path in ROOT.glob(pattern)}
    return sorted(path for path in paths if path.name not in OTHERS)


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Every mutant of a module, in the order of the places."""
    source = path.read_text()
    data, file = source.encode(), str(path.relative_to(root))
    mutants = []
    for change in sorted(_changes(ast.parse(source), _Places(data))):
        place, old = len(data[: change.first].decode()), data[change.first : change.last].decode()
        line, column = source.count("\n", 0, place) + 1, place - source.rfind("\n", 0, place)
        id_ = f"{file.removeprefix('functions/dropforge/')}:{line}:{column}:{change.operator}"
        shown = f"`{_short(old)}` becomes `{_short(change.new)}`"
        mutants.append(Mutant(id_, file, old, change.new, breaks=shown, place=place))
    return mutants


class _Places:
    """Indices of the nodes of a source in bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.starts = [0]
        for line in data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def of(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None, "ast.parse sets every place"
        assert node.end_col_offset is not None, "ast.parse sets every place"
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset


def _changes(node: ast.AST, places: _Places) -> Iterator[Change]:
    if isinstance(node, UNTOUCHED) or _is_for_people(node):
        return
    yield from _changes_of(node, places)
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child, places)


def _changes_of(node: ast.AST, places: _Places) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _between(node.left, node.comparators[0], node.ops[0], "comparison", places)
    elif isinstance(node, ast.BoolOp):
        yield _between(node.values[0], node.values[1], node.op, "and-or", places)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        first = places.of(node)[0]  # the operand may begin with a parenthesis, which stays
        yield Change(first, first + len("not "), "", "not")
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield _between(node.left, node.right, node.op, "arithmetic", places)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield Change(*places.of(node), str(not node.value), "constant")
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield Change(*places.of(node), repr(node.value + 1), "constant")
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield Change(*places.of(node.value), "None", "return")
    elif isinstance(node, DROPPED) and not _is_none(getattr(node, "value", None)):
        yield Change(*places.of(node), "pass", "dropped")
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield Change(*places.of(node.test), "False", "condition")


def _between(left: ast.expr, right: ast.expr, operator: ast.AST, name: str, places: _Places) -> Change:
    """The change of the operator between two operands. Parentheses may stand there, too."""
    old, new = OPERATORS[type(operator)]
    between, until = places.of(left)[1], places.of(right)[0]
    first = places.data.index(old.encode(), between, until)
    return Change(first, first + len(old), new, name)


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str))


def _is_for_people(node: ast.AST) -> bool:
    """Whether it is a docstring or a call that only logs."""
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    is_text = isinstance(value, ast.Constant)
    return is_text or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "log"
    )


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 50 else f"{text[:47]}..."
