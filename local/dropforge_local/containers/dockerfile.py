"""Reads a Dockerfile far enough to lay out the files and the command of its final stage, without building anything.

Grammar: https://docs.docker.com/reference/dockerfile/. RUN is not executed: the local virtual environment stands for
the Python packages that it installs. The names of the packages that it installs with apt are recorded. An unknown
instruction that would change the files or the command raises `UnsupportedDockerfile`. The parser is ours because
dockerfile-parse reads the lines of a here-document as instructions.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from posixpath import join, normpath

from .programs import apt_packages

SKIPPED = {"RUN", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER"}
IGNORED_FILES = ("__pycache__", ".git", "*.pyc")  # no image needs them, and they would change the digest at every run
VARIABLE = re.compile(r"\\(\$)|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
Rules = tuple[tuple[bool, str], ...]  # of a .dockerignore: whether it leaves files out, and the pattern of their names
HEREDOC = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")


class UnsupportedDockerfile(Exception):
    """The Dockerfile has an instruction that cannot be imitated without Docker, or that Docker would refuse."""


@dataclass(frozen=True)
class Instruction:
    keyword: str
    flags: Mapping[str, str]
    text: str
    line: int


@dataclass
class Stage:
    """The content of a stage so far: files by container path, directories, and the image's configuration."""

    name: str = ""
    files: dict[str, Path] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)  # installed with apt
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    notes: list[str] = field(default_factory=list)


def parse(text: str) -> list[Instruction]:
    """Split into instructions: joins continued lines, skips comments and the bodies of here-documents."""
    lines = enumerate(text.splitlines(), start=1)
    instructions = []
    for number, line in lines:
        joined = _join_continuation(line, lines)
        if not joined.strip() or joined.lstrip().startswith("#"):
            continue
        keyword, _, rest = joined.strip().partition(" ")
        flags, rest = _split_flags(rest.strip())
        for terminator in HEREDOC.findall(rest) if keyword.upper() in ("RUN", "COPY", "ADD") else ():
            _swallow_heredoc(terminator, lines)
        instructions.append(Instruction(keyword.upper(), flags, rest, number))
    return instructions


def evaluate(dockerfile: Path, context: Path) -> Stage:
    """Lay out the final stage. Raises UnsupportedDockerfile with the file and line."""
    stages: list[Stage] = []
    arguments: dict[str, str] = {}
    ignored = _ignore_rules(dockerfile, context)
    for instruction in parse(dockerfile.read_text(encoding="utf-8")):
        try:
            if instruction.keyword == "FROM":
                stages.append(_begin_stage(instruction, stages, arguments))
            elif not stages:
                _apply_argument(arguments, {}, instruction)
            else:
                _apply(stages, arguments, instruction, context, ignored)
        except UnsupportedDockerfile as error:
            raise UnsupportedDockerfile(f"{dockerfile}:{instruction.line}: {error}") from None
    if not stages:
        raise UnsupportedDockerfile(f"{dockerfile} has no FROM")
    return stages[-1]


def _begin_stage(instruction: Instruction, stages: list[Stage], arguments: dict[str, str]) -> Stage:
    words = _expand(instruction.text, arguments).split()
    if not words or (len(words) != 1 and (len(words) != 3 or words[1].lower() != "as")):
        raise UnsupportedDockerfile(f"FROM {instruction.text!r}; expected FROM <image> [AS <name>]")
    base = _find_stage(words[0], stages)
    name = words[2].lower() if len(words) == 3 else ""
    if base is None:
        return Stage(name=name)
    stage = copy.deepcopy(base)
    stage.name, stage.arguments, stage.notes = name, {}, []
    return stage


def _apply(
    stages: list[Stage],
    arguments: dict[str, str],
    instruction: Instruction,
    context: Path,
    ignored: Rules,
) -> None:
    stage, keyword = stages[-1], instruction.keyword
    scope = {**stage.arguments, **stage.env}
    if keyword in SKIPPED:
        stage.notes.append(f"line {instruction.line}: {keyword} is not imitated")
        if keyword == "RUN":
            stage.packages |= apt_packages(_expand(instruction.text, scope))
    elif keyword == "ARG":
        _apply_argument(stage.arguments, arguments, instruction)
    elif keyword == "ENV":
        stage.env.update(_assignments(instruction.text, scope))
    elif keyword == "LABEL":
        stage.labels.update(_assignments(instruction.text, scope))
    elif keyword == "WORKDIR":
        stage.workdir = _absolute(stage, _expand(instruction.text.strip(), scope))
        stage.directories.add(stage.workdir)
    elif keyword == "USER":
        stage.user = _expand(instruction.text.strip(), scope)
    elif keyword in ("COPY", "ADD"):
        _copy(stages, instruction, scope, context, ignored)
    elif keyword == "ENTRYPOINT":
        # As in Docker, a new ENTRYPOINT clears the CMD of the base.
        stage.entrypoint, stage.cmd = _command(instruction.text, stage), ()
    elif keyword == "CMD":
        stage.cmd = _command(instruction.text, stage)
    elif keyword == "SHELL":
        stage.shell = tuple(_exec_form(instruction.text) or ())
    else:
        raise UnsupportedDockerfile(f"{keyword} is not known to the local stack")


def _apply_argument(target: dict[str, str], defaults: Mapping[str, str], instruction: Instruction) -> None:
    if instruction.keyword != "ARG":
        raise UnsupportedDockerfile(f"{instruction.keyword} stands before the first FROM; only ARG may")
    for word in shlex.split(instruction.text):
        name, given, value = word.partition("=")
        if given or name in defaults:
            target[name] = _expand(value, {**defaults, **target}) if given else defaults[name]


def _copy(
    stages: list[Stage],
    instruction: Instruction,
    scope: Mapping[str, str],
    context: Path,
    ignored: Rules,
) -> None:
    stage = stages[-1]
    words = [_expand(word, scope) for word in _exec_form(instruction.text) or shlex.split(instruction.text)]
    if len(words) < 2 or HEREDOC.search(instruction.text):
        raise UnsupportedDockerfile(f"{instruction.keyword} {instruction.text!r}; expected <source>... <destination>")
    *sources, destination = words
    into_directory = destination.endswith("/") or len(sources) > 1
    target = _absolute(stage, destination)
    if "from" in instruction.flags:
        _copy_from_stage(stages, instruction, sources, target, into_directory)
        return
    for source in sources:
        if "://" in source or (instruction.keyword == "ADD" and re.search(r"\.(tar|tgz|tar\.\w+)$", source)):
            raise UnsupportedDockerfile(f"ADD of {source!r} (a URL or an archive) is not imitated; COPY files instead")
        for path in _matches(context, source, ignored):
            _place(stage, path, target, into_directory or "*" in source, context, ignored)


def _copy_from_stage(
    stages: list[Stage], instruction: Instruction, sources: list[str], target: str, into_directory: bool
) -> None:
    stage, other = stages[-1], _find_stage(instruction.flags["from"], stages[:-1])
    for source in sources:
        root = normpath(join("/", source))
        paths = [path for path in (other.files if other else ()) if path == root or path.startswith(f"{root}/")]
        if not paths or other is None:
            # RUN (installed packages) or another image has made them: the virtual environment stands for them.
            where = instruction.flags["from"]
            stage.notes.append(f"line {instruction.line}: nothing known at {source!r} of {where!r}; skipped")
        for path in paths:
            name = target if path != root else (join(target, root.rpartition("/")[2]) if into_directory else target)
            stage.files[normpath(name + path[len(root) :])] = other.files[path] if other else Path(path)


def _matches(context: Path, source: str, ignored: Rules) -> list[Path]:
    relative = normpath(source.lstrip("/"))
    if relative.startswith(".."):
        raise UnsupportedDockerfile(f"COPY source {source!r} is outside of the build context {str(context)!r}")
    paths = sorted(context.glob(relative)) if any(sign in relative for sign in "*?[") else [context / relative]
    paths = [path for path in paths if path.exists() and not _is_ignored(path.relative_to(context).as_posix(), ignored)]
    if not paths:
        raise UnsupportedDockerfile(f"COPY source {source!r} is not in the build context {str(context)!r}")
    return paths


def _place(stage: Stage, path: Path, target: str, into_directory: bool, context: Path, ignored: Rules) -> None:
    """Docker copies a directory's contents, not the directory; a file goes into a destination that ends with "/"."""
    if path.is_file():
        stage.files[normpath(join(target, path.name)) if into_directory or target in stage.directories else target] = (
            path
        )
        return
    stage.directories.add(target)
    for root, directories, names in os.walk(path):
        folder = Path(root)
        relative, below = folder.relative_to(context).as_posix(), folder.relative_to(path).as_posix()
        directories[:] = sorted(name for name in directories if not _is_ignored(join(relative, name), ignored))
        for name in names:
            if not _is_ignored(join(relative, name), ignored):
                stage.files[normpath(join(target, below, name))] = folder / name


def _ignore_rules(dockerfile: Path, context: Path) -> Rules:
    """(ignored, pattern) rules of the .dockerignore, in order; the last that matches decides."""
    own = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    path = own if own.exists() else context / ".dockerignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return tuple((not rule.startswith("!"), normpath(rule.lstrip("!").strip().lstrip("/"))) for rule in rules)


@lru_cache(maxsize=10_000)  # the images of a stack have the same files
def _is_ignored(name: str, rules: Rules) -> bool:
    """Whether a file or directory, by its name below the context, is not in the context."""
    relative = normpath(name)
    if any(fnmatch.fnmatch(part, pattern) for part in relative.split("/") for pattern in IGNORED_FILES):
        return True
    verdict = False
    for ignored, rule in rules:
        # "**/x" also matches x at the top; a rule for a directory applies to all files below it.
        patterns = {rule, rule.removeprefix("**/")}
        if any(fnmatch.fnmatch(relative, form) for pattern in patterns for form in (pattern, f"{pattern}/*")):
            verdict = ignored
    return verdict


def _command(text: str, stage: Stage) -> tuple[str, ...]:
    words = _exec_form(text)
    return tuple(words) if words is not None else (*stage.shell, text)


def _exec_form(text: str) -> list[str] | None:
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _assignments(text: str, scope: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if "=" not in text.split(None, 1)[0]:  # the old form: ENV NAME value with spaces
        name, _, value = text.partition(" ")
        yield name, _expand(value.strip(), scope)
        return
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        yield name, _expand(value, scope)


def _expand(text: str, scope: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        dollar, plain, braced, operator, word = match.groups()
        current = scope.get(plain or braced or "", "")
        if dollar:
            return "$"
        if operator == "-":
            return current or word
        return (word if current else "") if operator == "+" else current

    return VARIABLE.sub(value, text)


def _absolute(stage: Stage, path: str) -> str:
    return normpath(join(stage.workdir, path))


def _find_stage(name: str, stages: list[Stage]) -> Stage | None:
    if name.isdigit():
        return stages[int(name)] if int(name) < len(stages) else None
    return next((stage for stage in reversed(stages) if stage.name and stage.name == name.lower()), None)


def _join_continuation(line: str, lines: Iterator[tuple[int, str]]) -> str:
    while line.rstrip().endswith("\\") and not line.lstrip().startswith("#"):
        line = line.rstrip()[:-1]
        following = next((text for _, text in lines if not text.lstrip().startswith("#")), "")
        line += following
    return line


def _split_flags(text: str) -> tuple[dict[str, str], str]:
    flags = {}
    while match := re.match(r"--([\w-]+)(?:=(\S+))?\s+", text):
        flags[match[1]] = match[2] or ""
        text = text[match.end() :]
    return flags, text.strip()


def _swallow_heredoc(terminator: str, lines: Iterator[tuple[int, str]]) -> None:
    for _, text in lines:
        if text.strip() == terminator:
            return
