"""Derive functions/requirements.txt (exact, transitive, the control plane only) from lock.txt.

lock.txt is a pip constraints file that pins every package of every part. To change a version, edit lock.txt, run
`make setup lock`, and commit both files. `--check` fails when functions/requirements.txt is out of date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "functions" / "requirements.txt"
HEADER = "# Derived from lock.txt by `make lock`; do not edit.\n"
# Cloud Functions run on Linux with CPython 3.11: evaluate markers for that platform on every machine.
ENVIRONMENT = {
    "python_version": "3.11",
    "python_full_version": "3.11.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}


def main(argv: list[str]) -> int:
    text = HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(closure().items()))
    if "--check" not in argv:
        OUTPUT.write_text(text)
        return 0
    if OUTPUT.exists() and OUTPUT.read_text() == text:
        return 0
    print("functions/requirements.txt differs from lock.txt; run `make lock`", file=sys.stderr)
    return 1


def closure() -> dict[str, str]:
    """Return every distribution that the control plane needs, with its pinned version."""
    pins = {
        canonicalize_name(name): version.split("+")[0]
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "lock.txt").read_text(), re.M)
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    todo = [Requirement(line) for line in project["dependencies"]]
    needed: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name not in pins:
            raise SystemExit(f"lock.txt does not pin {name}, which the control plane needs")
        needed[name] = pins[name]
        todo += [r for r in map(Requirement, requires(name) or []) if applies(r, requirement.extras)]
    return needed


def applies(requirement: Requirement, extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**ENVIRONMENT, "extra": extra}) for extra in extras or {""})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
