"""The content of terraform/, as python-hcl2 reads it: expressions stay text, such as "${var.prefix}-runs"."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import hcl2
import yaml

ROOT = Path(__file__).resolve().parents[2]
TERRAFORM = ROOT / "terraform"


@cache
def blocks(kind: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return every block of a kind by its labels: ("google_pubsub_topic", "requests") of a resource, () of locals."""
    labelled: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in sorted(TERRAFORM.glob("*.tf")):
        for block in _plain(hcl2.loads(path.read_text())).get(kind, ()):
            labels: tuple[str, ...] = ()
            while kind != "locals" and len(block) == 1 and len(labels) < (2 if kind in ("resource", "data") else 1):
                (label, block), *_ = block.items()
                labels = (*labels, label)
            labelled.setdefault(labels, {}).update(block)
    return labelled


def resources(kind: str = "") -> dict[tuple[str, ...], dict[str, Any]]:
    """Return every resource, or the resources of one type."""
    return {labels: block for labels, block in blocks("resource").items() if kind in ("", labels[0])}


def local(name: str) -> Any:
    return blocks("locals")[()][name]


def enabled_apis() -> set[str]:
    """Return the APIs that terraform/ enables, such as `run`."""
    services = resources("google_project_service").values()
    named = " ".join(str(service.get("for_each", service["service"])) for service in services)
    return set(re.findall(r"([a-z]+)\.googleapis\.com", named))


@cache
def permissions() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((TERRAFORM / "permissions.yaml").read_text())
    return content


@cache
def images() -> list[str]:
    """Return the containers whose images Cloud Build builds."""
    steps = yaml.safe_load((ROOT / "cloudbuild.yaml").read_text())["steps"]
    return sorted(step["id"] for step in steps)


def render(text: str, **variables: str) -> str:
    """Replace the variables of an expression by their values."""
    return re.sub(r"\$\{var\.(\w+)\}", lambda match: variables[match[1]], text)


def _plain(value: Any) -> Any:
    """Remove the quotes and marks that python-hcl2 keeps."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items() if not key.startswith("__")}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value
