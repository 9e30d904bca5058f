"""Write docs/spec-reference.md from the JSON Schema of the job spec; `--check` fails when the page differs.

The schema comes from the pydantic models, so the page cannot lack a field. The examples are those of examples/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dropforge.spec import job_spec_schema

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "spec-reference.md"
HEAD = """\
# Spec reference
For people who write job specs: this page lists every field of a job spec, with its type, its default and its meaning.

`make tables` makes this page from [job_spec.schema.json](../schemas/job_spec.schema.json). If the spec's `$schema`
names this schema, an editor completes and explains the fields. `dropforge validate` also applies the rules that a
schema cannot express. dropforge refuses unknown fields.

A duration is a whole number with a unit: `90s`, `45m`, `2h`, `7d`. A field without a default is required.
"""
# The spec whose part shows a kind of target or endpoint.
EXAMPLES = {
    "target cloud_run": "examples/cloud-run-gemma-2b-qlora",
    "target gke": "examples/gke-gemma-3-12b-fsdp",
    "target tpu_vm": "examples/tpu-vm-qwen3-4b",
    "target ray": "examples/ray-llama3-8b-sft",
    "serve cloud_run": "examples/cloud-run-gemma-2b-qlora",
    "serve gke": "examples/gke-gemma-3-12b-fsdp",
    "serve tpu_vm": "examples/tpu-vm-qwen3-4b",
    "serve training_vm": "examples/local/tpu_vm_kept",
}


def main(argv: list[str]) -> int:
    text = page()
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    if "--check" in argv:
        print("docs/spec-reference.md differs from the job spec; run `make tables`", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


def page() -> str:
    """Return the page: the spec's own fields, then a section for each field that is an object."""
    schema = job_spec_schema()
    minimal = json.loads((ROOT / "schemas" / "examples" / "valid" / "minimal.json").read_text())
    parts = [HEAD, "## The smallest spec", _json(minimal), "## The spec's fields", table(schema, schema)]
    for name, field in schema["properties"].items():
        parts += section(name, field, schema)
    return "\n".join(parts).rstrip() + "\n"


def section(name: str, field: dict[str, Any], schema: dict[str, Any], of: str = "", level: int = 2) -> Iterator[str]:
    """Yield the parts of the section about a field; nothing about a field that has no fields of its own.

    `of` names the kinds of the enclosing object that have this field.
    """
    classes = [schema["$defs"][ref] for ref in references(field)]
    for definition in classes:
        kind = kind_name(definition) or of
        yield f"{'#' * level} `{name}`" + (f": {kind}" if kind else "")
        yield definition["description"] + "\n"
        yield table(definition, schema)
        yield from example(name, kind)
    for (child, ref), kinds in _children(classes).items():
        yield from section(f"{name}.{child}", {"$ref": f"#/$defs/{ref}"}, schema, ", ".join(kinds), level + 1)


def kind_name(definition: dict[str, Any]) -> str:
    """Return the value of `type` that selects a class; "" for a class without one."""
    return str(definition["properties"].get("type", {}).get("const", ""))


def example(name: str, kind: str) -> Iterator[str]:
    """Yield the part of a full-size example that shows a kind of target or endpoint."""
    file = EXAMPLES.get(f"{name} {kind}")
    if file is None:
        return
    part = json.loads((ROOT / f"{file}.json").read_text())[name]
    if part["type"] != kind:
        raise ValueError(f"{file}.json has a {name} of type {part['type']!r}; expected {kind!r}: correct EXAMPLES")
    yield f"In [{file}.json](../{file}.json):"
    yield _json(part)


def _children(classes: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Return the fields of some classes that are objects: the kinds of the classes, by name and class of the field."""
    children: dict[tuple[str, str], list[str]] = {}
    for definition in classes:
        for child, field in definition["properties"].items():
            for ref in references(field):
                children.setdefault((child, ref), []).extend(filter(None, [kind_name(definition)]))
    # The fields in the order of the first class that has them.
    return dict(
        sorted(children.items(), key=lambda item: list(dict.fromkeys(c for c, _ in children)).index(item[0][0]))
    )


def references(field: dict[str, Any]) -> list[str]:
    """Return the names of the classes that a field's value may have."""
    if "$ref" in field:
        return [field["$ref"].rsplit("/", 1)[1]]
    branches = [*field.get("anyOf", []), *field.get("oneOf", [])]
    items = [field["items"]] if isinstance(field.get("items"), dict) else []
    return [ref for branch in [*branches, *items] for ref in references(branch)]


def table(definition: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a row for each field of a class."""
    required = definition.get("required", [])
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in definition["properties"].items():
        default = "required" if name in required else _default(field)
        rows.append(f"| `{name}` | {kind_of(field, schema)} | {default} | {field.get('description', '')} |")
    return "\n".join(rows) + "\n"


def kind_of(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a field's type with its limits, for a cell of a table."""
    if "$ref" in field:
        return "object"
    if branches := field.get("anyOf") or field.get("oneOf"):
        kinds = [kind_of(branch, schema) for branch in branches]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) + (
            " or null" if "null" in kinds and field.get("default", "") is not None else ""
        )
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {kind_of(field['items'], schema)}s"
    if field["type"] == "object":
        return "object of names and texts"
    return _simple(field)


def _simple(field: dict[str, Any]) -> str:
    if field["type"] != "string":
        word = {"integer": "whole number", "number": "number", "boolean": "true or false"}.get(field["type"], "null")
        return " ".join(filter(None, [word, _limits(field)]))
    return "duration" if "90s" in field.get("examples", []) else "text"


def _limits(field: dict[str, Any]) -> str:
    least = f"from {field['minimum']:,}" if "minimum" in field else ""
    above = f"above {field['exclusiveMinimum']:,}" if "exclusiveMinimum" in field else ""
    most = f"to {field['maximum']:,}" if "maximum" in field else ""
    below = f"below {field['exclusiveMaximum']:,}" if "exclusiveMaximum" in field else ""
    return ", ".join(filter(None, [" ".join(filter(None, [least, most])), above, below]))


def _default(field: dict[str, Any]) -> str:
    """Return the default of a field; the fields of an object have their own defaults."""
    default = field.get("default")
    if default is None:
        return "none"
    return "see there" if default and isinstance(default, dict) else f"`{json.dumps(default)}`"


def _json(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
