"""The locks: complete, with hashes, as their inputs say. A change by hand is noticed without a network."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tools import lock

from .configuration import ROOT

LOCKS = {item.path: item for item in lock.LOCKS}


def test_every_lock_is_up_to_date() -> None:
    assert [problem for item in lock.LOCKS for problem in lock.check(item)] == []


def test_no_lock_is_forgotten() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("containers", "tools")
        for path in (ROOT / folder).rglob("*.lock.txt")
    }
    assert found - {"containers/nothing.lock.txt"} == LOCKS.keys() - {"functions/requirements.txt"}


@pytest.mark.parametrize("path", LOCKS)
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"==(\S+)", r"==9\1"),  # another version
        (r"sha256:.", "sha256:x"),  # no hash
        (r"(sha256:.{63})[0-9a-f]", lambda match: f"{match[1]}{'0' if match[0][-1] != '0' else '1'}"),  # another file
        (r"(?m)^(\w[\w.-]*==.*\\\n    \S+.*)$", r"\1\nevil==1.0 \\\n    --hash=sha256:" + "0" * 64),
        (r"(?m)^\w[\w.-]*==(.|\n)*?(?=^\w|\Z)", ""),  # one package less
    ],
)
def test_a_change_of_a_lock_is_noticed(path: str, pattern: str, replacement: str, tmp_path: Path) -> None:
    text = (ROOT / path).read_text()
    changed = re.sub(pattern, replacement, text, count=1)
    assert changed != text
    copy = tmp_path / "lock.txt"
    copy.write_text(changed)
    assert lock.check(replace(LOCKS[path], path=str(copy))) != []


@pytest.mark.parametrize("path", [path for path, item in LOCKS.items() if item.source not in ("", "lock.txt")])
def test_a_change_of_the_inputs_is_noticed(path: str, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text((ROOT / LOCKS[path].source).read_text() + "pip==1.0\n")
    problems = lock.check(replace(LOCKS[path], source=str(source)))
    assert f"{path} has pip==None, but {source} asks for pip==1.0; run `make lock`" in problems
