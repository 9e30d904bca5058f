"""No text is cut before it is redacted: half a credential is not recognised any more."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [file for folder in ("functions", "containers", "cli") for file in sorted((ROOT / folder).rglob("*.py"))]
# Attributes that hold the text of an error, an answer or a log.
TEXTS = {"message", "hint", "text", "body", "msg", "reason", "stdout", "stderr", "output"}


def cuts(code: str) -> list[str]:
    """The places of a module that shorten a text by a slice: `str(error)[:300]`."""
    slices = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Subscript)]
    ends = [node for node in slices if isinstance(node.slice, ast.Slice) and node.slice.lower is None]
    return [ast.unparse(node) for node in ends if is_text(node.value)]


def is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("str", "repr")
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Attribute) and node.attr in TEXTS)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_texts_are_shortened_by_cut(file: Path) -> None:
    assert cuts(file.read_text()) == []


@pytest.mark.parametrize("code", ["str(e)[:9]", "f'{e}'[:9]", "error.message[:9]", "repr(x)[:9]"])
def test_the_check_finds_a_slice_of_a_text(code: str) -> None:
    assert cuts(code)
