"""The Terraform provider `google` as tests/data/google_provider.yaml describes it; checks terraform/ against that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[1] / "data" / "google_provider.yaml"
OUTPUT = "output"
# https://developer.hashicorp.com/terraform/language/meta-arguments; a provisioner is Terraform's own block, too.
META_ARGUMENTS = {"count", "depends_on", "for_each", "lifecycle", "provider", "provisioner"}
NO_LIMIT = 0
# The mark of a block: how often the block appears at least and at most, and whether Google fills it in.
MARKS = {
    "!": (1, 1, False),
    "?": (0, 1, False),
    "+": (1, NO_LIMIT, False),
    "*": (0, NO_LIMIT, False),
    "~": (0, 1, True),
}


@dataclass(frozen=True)
class Argument:
    """`type` is Terraform's notation, such as `list(string)`; `values` are all that the argument takes, if listed.

    `limits` are the least and the most of a number, or of the seconds in a text such as "600s".
    """

    type: str
    required: bool = False
    values: tuple[str, ...] = ()
    is_output: bool = False
    limits: tuple[int, int] | None = None


@dataclass(frozen=True)
class Schema:
    """A resource or a nested block. The last three fields describe a nested block."""

    arguments: dict[str, Argument] = field(default_factory=dict)
    blocks: dict[str, Schema] = field(default_factory=dict)
    at_least: int = 0
    at_most: int = NO_LIMIT
    is_computed: bool = False


@cache
def schemas(kind: str) -> dict[str, Schema]:
    """The schemas of `resources` or `data_sources`, by type."""
    described: dict[str, Any] = yaml.safe_load(DATA.read_text())[kind]
    return {name: _schema(fields) for name, fields in described.items()}


def problems(where: str, body: Mapping[str, Any], schema: Schema) -> Iterator[str]:
    """What the provider would refuse in `body`, a resource as python-hcl2 reads it."""
    given = {name: value for name, value in body.items() if name not in META_ARGUMENTS}
    given |= {name: _contents(block) for dynamic in given.pop("dynamic", ()) for name, block in dynamic.items()}
    for name, value in given.items():
        if name in schema.blocks:
            yield from _block_problems(f"{where}.{name}", value, schema.blocks[name])
        elif name in schema.arguments:
            yield from _argument_problems(f"{where}.{name}", value, schema.arguments[name])
        else:
            yield f"{where}.{name}: unknown; if the provider has it, describe it in tests/data/{DATA.name}"
    required = {name for name, argument in schema.arguments.items() if argument.required}
    required |= {name for name, block in schema.blocks.items() if block.at_least}
    yield from (f"{where}.{name}: missing" for name in sorted(required - given.keys()))


def _schema(fields: Mapping[str, Any] | None, mark: str = "*") -> Schema:
    arguments, blocks = {}, {}
    for key, described in (fields or {}).items():
        name, mark_of_field = re.fullmatch(r"(\w+)([!?+*~]?)", key).groups()  # type: ignore[union-attr]
        if isinstance(described, dict):
            blocks[name] = _schema(described, mark_of_field)
        else:
            arguments[name] = _argument(described, required=mark_of_field == "!")
    return Schema(arguments, blocks, *MARKS[mark])


def _argument(described: str | list[str], required: bool) -> Argument:
    if isinstance(described, list):
        return Argument("string", required, tuple(described))
    if described == OUTPUT:
        return Argument("string", is_output=True)
    if limited := re.fullmatch(r"(seconds\()?(\d+)\.\.(\d+)\)?", described):
        return Argument("string" if limited[1] else "number", required, limits=(int(limited[2]), int(limited[3])))
    return Argument(described, required)


def arguments(body: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The path of every argument and block that `body` uses, such as `lifecycle_rule.action.type`."""
    given = dict(body)
    given |= {name: _contents(block) for dynamic in given.pop("dynamic", ()) for name, block in dynamic.items()}
    for name, value in given.items():
        if name in META_ARGUMENTS:
            continue
        yield f"{where}{name}"
        for block in value if isinstance(value, list) else ():
            if isinstance(block, dict):
                yield from arguments(block, f"{where}{name}.")


def _contents(dynamic: Any) -> list[dict[str, Any]]:
    """The blocks that a `dynamic` block makes, as if there were one for each `content`."""
    contents: list[dict[str, Any]] = dynamic["content"]
    return contents


def _block_problems(where: str, value: Any, schema: Schema) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where}: a block, written as an argument"
        return
    if schema.at_most != NO_LIMIT and len(value) > schema.at_most:
        yield f"{where}: appears {len(value)} times, at most {schema.at_most} allowed"
    for body in value:
        yield from problems(where, body, schema)


def _argument_problems(where: str, value: Any, argument: Argument) -> Iterator[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{where}: an argument, written as a block"
    elif argument.is_output:
        yield f"{where}: set by Google only"
    elif isinstance(value, str) and "${" in value:
        return  # an expression: the real terraform judges its type
    elif argument.values and value not in argument.values:
        yield f"{where}: {value!r} is none of {', '.join(argument.values)}"
    elif not isinstance(value, _literals(argument.type)):
        yield f"{where}: {value!r} is no {argument.type}"
    elif argument.limits and not _is_within(value, argument.type, *argument.limits):
        yield f"{where}: {value!r} is not from {argument.limits[0]} to {argument.limits[1]}"


def _is_within(value: object, kind: str, least: int, most: int) -> bool:
    number = re.fullmatch(r"(\d+)s" if kind == "string" else r"(\d+)", str(value))
    return number is not None and least <= int(number[1]) <= most


def _literals(kind: str) -> tuple[type, ...]:
    """The Python types in which python-hcl2 reads a literal of a type."""
    collection = kind.partition("(")[0]
    return {"bool": (bool,), "number": (int, float), "string": (str,), "map": (dict,)}.get(collection, (list,))
