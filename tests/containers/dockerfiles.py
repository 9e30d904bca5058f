"""Compares the Dockerfiles of this repository with tests/data/images.toml and containers/bases.toml."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dropforge_local.containers.dockerfile import Stage, UnsupportedDockerfile, evaluate, parse

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
FACTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "data" / "images.toml").read_text())
BASES: dict[str, dict[str, Any]] = tomllib.loads((CONTAINERS / "bases.toml").read_text())
LOCKS = "/opt/locks"
# Of a RUN: what needs no check of its own.
PLAIN = re.compile(
    r"apt-get update|rm -rf (/var/lib/apt/lists/\*|/opt/uv)|command -v vllm|python3 -c .*"
    r"|export (PATH=/opt/uv/bin:\$PATH )?UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy"
)


@dataclass
class Built:
    """The effects of a Dockerfile's RUN instructions."""

    installs: list[dict[str, Any]] = field(default_factory=list)
    debian: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    interpreters: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


@cache
def expected_files(role: str) -> dict[str, Path]:
    """Return the files of an image below /app, by their place, without looking at its Dockerfile."""
    files = {}
    for place, source in FACTS[role]["files"].items():
        path = ROOT / source
        found = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
        for item in found:
            if "__pycache__" not in item.parts:
                name = "" if item == path else f"/{item.relative_to(path)}"
                files[f"{place}{name}"] = item
    return files


def problems(role: str, dockerfile: Path) -> list[str]:
    """Return everything in which a Dockerfile differs from what its image must be."""
    try:
        stage = evaluate(dockerfile, ROOT)
    except UnsupportedDockerfile as error:
        return [str(error)]
    facts, base, text = FACTS[role], BASES[role], dockerfile.read_text()
    built = _built(text, stage)
    found = built.problems
    froms = [line for line in text.splitlines() if line.startswith(("FROM", "ARG BASE"))]
    if froms != [f"ARG BASE={base['image']}@{base['digest']}", "FROM ${BASE}"]:
        found.append(f"its base is {froms}, expected {base}")
    same = {
        "user": (stage.user, facts["user"]),
        "working directory": (stage.workdir, facts["workdir"]),
        "entry point": ([*stage.entrypoint, *stage.cmd], facts["entrypoint"]),
        "environment": (stage.env, facts["env"]),
        "labels": (stage.labels, facts["labels"]),
        "files": (
            {place: path for place, path in stage.files.items() if place.startswith("/app")},
            expected_files(role),
        ),
        "packages of Debian": (built.debian, facts["debian"]),
        "installs": (built.installs, facts["installs"]),
        "users": (built.users, [facts["user"]] if facts["user"] != "0" else []),
        "caches": ([stage.arguments.get(name) for name in ("UV_NO_CACHE", "UV_COMPILE_BYTECODE")], ["1", "1"]),
    }
    found += [f"its {what} are {is_}, expected {wanted}" for what, (is_, wanted) in same.items() if is_ != wanted]
    if built.removed != {"/opt/uv"} | ({"/var/lib/apt/lists/*"} if facts["debian"] else set()):
        found.append(f"it removes {built.removed}")
    return found


def _built(text: str, stage: Stage) -> Built:
    built = Built()
    for instruction in parse(text):
        if instruction.keyword == "RUN":
            for command in _commands(instruction.text):
                _read(command, stage, built)
    return built


def _commands(text: str) -> Iterator[list[str]]:
    words: list[str] = []
    for word in [*shlex.split(text), "&&"]:
        if word != "&&":
            words.append(word)
        else:
            yield words
            words = []


def _read(words: list[str], stage: Stage, built: Built) -> None:
    variables = []
    while words and re.match(r"[A-Z_]+=", words[0]):
        variables.append(words.pop(0))
    words = [re.sub(r"\$\{(\w+)\}", lambda match: stage.arguments.get(match[1], ""), word) for word in words]
    line = " ".join(words)
    if words[:1] == ["/opt/uv/bin/uv"]:
        words[0] = "uv"
    if words[:4] == ["python3", "-m", "pip", "install"]:
        _install(words[4:], "--target", "--no-cache-dir", variables, stage, built)
    elif words[:3] == ["uv", "pip", "install"]:
        _install(words[3:], "--python", "", variables, stage, built)
    elif words[:3] == ["uv", "venv", "--python"] and len(words) == 5:
        built.interpreters[words[4]] = words[3]
    elif line.startswith("apt-get install --yes --no-install-recommends "):
        built.debian += words[4:]
    elif words[:4] == ["useradd", "--system", "--create-home", "--uid"] and len(words) == 6:
        built.users.append(words[4])
    elif PLAIN.fullmatch(line):
        built.removed |= {words[2]} if words[0] == "rm" else set()
    else:
        built.problems.append(f"RUN has an unknown command: {line}")


def _install(words: list[str], place: str, cache: str, variables: list[str], stage: Stage, built: Built) -> None:
    """Read one install. Each option must be known; a build of sources may only use what the locks have installed."""
    given: dict[str, list[str]] = {}
    while words:
        option = words.pop(0)
        takes = option in (place, "--index-url", "--requirement")
        given.setdefault(option, []).append(words.pop(0) if takes and words else "")
    builds = "--no-build-isolation" in given
    wanted = {place, "--no-deps", "--require-hashes", "--requirement"} | ({cache} if cache else set())
    if place == "--python":
        wanted.add("--no-build-isolation" if builds else "--no-build")
    if set(given) - {"--index-url"} != wanted or variables != (["PYTHONPATH=/opt/uv"] if builds else []):
        built.problems.append(f"an install has the options {sorted(given)} and the variables {variables}")
    if len(given.get("--index-url", [])) > 1 or len(given.get(place, [])) != 1:
        built.problems.append(f"an install has {given}, expected one index and one place")
        return
    (environment,) = given[place]
    locks = [stage.files.get(f"{LOCKS}/{name}", Path(f"no {name}")) for name in given.get("--requirement", [])]
    built.installs.append(
        {
            "environment": environment,
            "python": built.interpreters.get(environment, ""),
            "index": given.get("--index-url", [""])[0],
            "locks": [str(path.relative_to(CONTAINERS)) if path.is_absolute() else str(path) for path in locks],
        }
    )
