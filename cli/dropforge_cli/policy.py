"""`dropforge policy`: check a policy.yaml before its deployment, and show what a deployment allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import ValidationError

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.base.redact import cut
from dropforge.spec import parse_spec
from dropforge.spec.policy import MAX_POLICY_BYTES, Policy, place_of, policy_of
from dropforge.stages.ceiling import policy_problems, with_defaults

from .deployment import Deployment, find
from .options import FILE, SPEC_FILE, json_option, spec_bytes, state_option
from .plain import echo, echo_json
from .problems import FAILED, CliError

_SHOWN = 80

file_option = click.option(
    "--file", "path", type=FILE, metavar="FILE", help="A policy.yaml; default: the deployment's policy."
)


@click.group()
def policy() -> None:
    """Check or show what an operator allows specs to use."""


@policy.command()
@click.argument("specs", nargs=-1, type=SPEC_FILE, metavar="[SPEC...]")
@json_option
@file_option
@state_option
def check(specs: tuple[Path, ...], as_json: bool, path: Path | None, state: str | None) -> None:
    """Check a policy, and which specs it refuses by which rule; exit 1 if the policy or a spec is refused."""
    policy, where = _policy(path, state)
    found = {spec: _problems(spec, policy) for spec in specs}
    if as_json:
        told = [refusal(spec, problems) for spec, problems in found.items()]
        echo_json({"policy": where, "specs": told})
    else:
        echo(f"{where}: ok")
        for spec, problems in found.items():
            for line in [str(problem) for problem in problems] or ["allowed"]:
                echo(f"{spec}: {line}")
    if any(found.values()):
        raise SystemExit(FAILED)


@policy.command()
@json_option
@file_option
@state_option
def show(as_json: bool, path: Path | None, state: str | None) -> None:
    """Print a policy with its default values, as YAML or JSON."""
    policy, _ = _policy(path, state)
    document = policy.model_dump(mode="json")
    if as_json:
        echo_json(document)
    else:
        echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def refusal(path: Path, problems: list[SpecProblem]) -> dict[str, Any]:
    """Return what is wrong with a spec, as JSON for programs; it is `ok` without a problem."""
    return {"spec": str(path), "ok": not problems, "problems": [problem._asdict() for problem in problems]}


def policy_in_use(deployment: Deployment | None) -> Policy:
    """Return the policy of a deployment, or the default policy without a deployment. Raises BrokenPolicy."""
    return policy_of(deployment.settings.policy if deployment else "")


def read_policy(path: Path) -> str:
    """Return a policy.yaml as the JSON text of DROPFORGE_POLICY. Raises CliError, which names every line in error."""
    document, root = _parse(path)
    try:
        text = json.dumps(document, allow_nan=False, default=str)
    except (RecursionError, TypeError, ValueError) as error:  # an alias of itself, a key that is no text, .nan
        raise CliError(f"{path} has a value that JSON cannot express: {error}") from error
    if len(text) > MAX_POLICY_BYTES:
        message = f"{path} is {len(text)} bytes of JSON; a function's setting holds {MAX_POLICY_BYTES}"
        raise CliError(message, "use patterns in place of long lists")
    problems = [f"{path}:{line}: the key {key!r} appears twice" for key, line in _repeated(root)]
    try:
        Policy.model_validate_json(text)
    except ValidationError as error:
        for found in error.errors(include_url=False):
            shown = cut(json.dumps(found["input"], default=str), _SHOWN)
            where = f"{path}:{_line(root, found['loc'])}: {place_of(found['loc'])}"
            problems.append(f"{where}: {found['msg']}, not {shown}")
    if problems:
        raise CliError("the policy is refused\n" + "\n".join(problems), "docs/policy.md describes every field")
    return text


def _policy(path: Path | None, state: str | None) -> tuple[Policy, str]:
    """Return the policy to check, and where it comes from."""
    if path is not None:
        return policy_of(read_policy(path)), str(path)
    deployment = find(state)
    if deployment is None:
        return policy_in_use(None), "the default policy"
    return policy_in_use(deployment), f"the policy of {deployment.where}"


def _problems(path: Path, policy: Policy) -> list[SpecProblem]:
    """Return what a policy refuses in a spec, or why the spec is none."""
    try:
        return policy_problems(with_defaults(parse_spec(spec_bytes(path)), policy), policy)
    except InvalidSpec as error:
        return error.problems


def _parse(path: Path) -> tuple[Any, yaml.Node | None]:
    """Return the content of a YAML file, and the tree that knows the lines. Raises CliError."""
    try:
        text = path.read_text(encoding="utf-8")
        return yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise CliError(f"{path} is not YAML: {error}") from error


def _line(node: yaml.Node | None, steps: tuple[int | str, ...]) -> int:
    """Return the line of a value; for a value that is missing, the line of what lacks it."""
    line = node.start_mark.line if node else 0
    for step in steps:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            key, node = next(((key, value) for key, value in node.value if key.value == step), (None, None))
            line = key.start_mark.line if key else line
            continue
        else:
            break
        line = node.start_mark.line if node else line
    return line + 1


def _repeated(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Yield each key that appears twice in a mapping, with its line. YAML readers disagree on which value counts."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.value, key.start_mark.line + 1
            seen.add(key.value)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)
