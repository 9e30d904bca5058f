"""KubeRay's RayJob as tests/data/kuberay.yaml describes it: the fields that dropforge uses, and no other."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from . import kubernetes

DATA = Path(__file__).resolve().parents[1] / "data" / "kuberay.yaml"
Schema = dict[str, Any]
_TYPES: dict[str, Schema] = {
    "map(string)": {"type": "object", "additionalProperties": {"type": "string"}},
    "metadata": {"type": "object"},  # check() checks it, together with the pods
    "pod": {"type": "object"},
}


def check(manifest: dict[str, Any]) -> None:
    """Raise ValidationError (of jsonschema, or of kubernetes_validate in pods) if KubeRay would not take the RayJob."""
    _validator().validate(manifest)
    kubernetes.check({"apiVersion": "v1", "kind": "Pod", "metadata": manifest["metadata"]})
    cluster = manifest["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        kubernetes.check_pod_template(group["template"])


@cache
def fields() -> dict[str, Any]:
    """The content of tests/data/kuberay.yaml."""
    described: dict[str, Any] = yaml.safe_load(DATA.read_text())
    return described


@cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_object(fields()))


def _object(described: dict[str, Any]) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for key, value in described.items():
        name, mark = re.fullmatch(r"(\w+)(!|\[\]|)", key).groups()  # type: ignore[union-attr]
        properties[name] = {"type": "array", "items": _field(value)} if mark == "[]" else _field(value)
        required += [name] if mark == "!" else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _field(described: dict[str, Any] | list[str] | str) -> Schema:
    if isinstance(described, dict):
        return _object(described)
    if isinstance(described, list):
        return {"enum": described}
    return _TYPES.get(described, {"type": described})
