"""The requests that create resources, judged by Google's own descriptions.

tests/data/google_requests.yaml condenses Google's discovery documents; the messages of the google-cloud-* clients are
the second judge of names and values. Kubernetes objects have judges of their own: kubernetes.py and kuberay.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from google.protobuf import json_format

from dropforge.cloud.resource import Resource

from . import kuberay, kubernetes

DATA = Path(__file__).resolve().parents[1] / "data" / "google_requests.yaml"
KEY = re.compile(r"(?P<name>[\w.$/-]+?)(?P<many>\[\]|\[1\])?(?P<required>!)?(?:@(?P<stage>\w+))?")
STAGES = ("GA", "BETA", "ALPHA")  # a launch stage allows the features of the stages before it
# The field of a request that has the resource.
BODIES = {"Job": "job", "Service": "service", "Cluster": "cluster", "Node": "node", "QueuedResource": "queuedResource",
          "Disk": "disk"}  # fmt: skip
LABELS = {
    "type": "object",
    "maxProperties": 64,
    "propertyNames": {"pattern": r"^(?!run\.googleapis)[a-z][a-z0-9_-]{0,62}$"},
    "additionalProperties": {"type": "string", "pattern": "^[a-z0-9_-]{0,63}$"},
}
Schema = dict[str, Any]


def _most_seconds(_: Any, most: int, duration: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """A keyword of JSON Schema: the longest duration, such as "600s"."""
    if isinstance(duration, str) and re.fullmatch(r"\d+s", duration) and int(duration[:-1]) > most:
        yield jsonschema.ValidationError(f"{duration!r} is longer than {most}s")


VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"mostSeconds": _most_seconds})


class Unacceptable(Exception):
    """Google would refuse the request, or ignore a part of it."""


def check(resource: Resource) -> None:
    """Raise Unacceptable, or an error of jsonschema or kubernetes_validate, if Google would not take the request."""
    if resource.kind == "ray.io/RayJob":
        kuberay.check(resource.request)
    elif resource.kind in facts():
        _check_facts(resource)
    else:
        kubernetes.check(resource.request)  # which refuses a kind that it does not know


@cache
def facts() -> dict[str, Any]:
    """The descriptions by the resource's kind."""
    described: dict[str, Any] = yaml.safe_load(DATA.read_text())
    return {kind: fields for kind, fields in described.items() if kind != "types"}


@cache
def _types() -> dict[str, Any]:
    return dict(yaml.safe_load(DATA.read_text())["types"])


def _check_facts(resource: Resource) -> None:
    described, request = facts()[resource.kind], resource.request
    VALIDATOR(_object(described)).validate(request)
    body = request.get(BODIES.get(resource.kind.rpartition("/")[2], ""), {})
    allowed = STAGES.index(body.get("launchStage", "GA"))
    previews = list(_previews(described, request, ""))
    for at, stage in previews:
        if STAGES.index(stage) > allowed:
            raise Unacceptable(f"{resource.kind}{at} is {stage}, and the request has no such launchStage")
    # The clients are older than the previews, and do not know all of their names.
    if not previews and (message := _message(resource.kind)) is not None:
        json_format.ParseDict(body, message)


def _message(kind: str) -> Any:
    """An empty protocol buffer of the resource; None for a kind without one."""
    from google.cloud import compute_v1, container_v1, run_v2, tpu_v2

    api, _, name = kind.partition("/")
    modules = {
        "run.googleapis.com": run_v2,
        "container.googleapis.com": container_v1,
        "tpu.googleapis.com": tpu_v2,
        "compute.googleapis.com": compute_v1,
    }
    if api not in modules:
        return None
    message = getattr(modules[api], name)
    return message.pb(message())


def _object(described: dict[str, Any]) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for key, value in described.items():
        found = _key(key)
        schema = _field(value)
        if found["many"]:
            schema = {
                "type": "array",
                "items": schema,
                **({"minItems": 1, "maxItems": 1} if found["many"] == "[1]" else {}),
            }
        properties[found["name"]] = schema
        required += [found["name"]] if found["required"] else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _field(described: Any) -> Schema:
    if isinstance(described, dict):
        return _object(described)
    if isinstance(described, list):
        return {"enum": [str(value).partition("@")[0] for value in described]}
    if described in _types():
        return _field(_types()[described])
    if match := re.fullmatch(r"(\d+)\.\.(\d*)", described):
        return {"type": "integer", "minimum": int(match[1]), **({"maximum": int(match[2])} if match[2] else {})}
    if match := re.fullmatch(r"/(.*)/", described):
        return {"type": "string", "pattern": f"^(?:{match[1]})$"}
    if match := re.fullmatch(r"text\((\d+)\)", described):
        return {"type": "string", "maxLength": int(match[1])}
    if match := re.fullmatch(r"duration\((\d*)\)", described):
        return {"type": "string", "pattern": r"^[1-9]\d*s$", **({"mostSeconds": int(match[1])} if match[1] else {})}
    simple: dict[str, Schema] = {
        "labels": LABELS,
        "map(string)": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    return simple.get(described, {"type": described})


def _previews(described: Any, value: Any, at: str) -> Iterator[tuple[str, str]]:
    """(path, stage) of every field and value of a request that is marked as a preview."""
    if isinstance(described, list):
        stages = dict(str(known).partition("@")[::2] for known in described)
        if stage := stages.get(value):
            yield f"{at}={value}", stage
    elif isinstance(described, dict):
        for key, inner in described.items():
            found = _key(key)
            if found["name"] not in value:
                continue
            here, given = f"{at}.{found['name']}", value[found["name"]]
            if found["stage"]:
                yield here, found["stage"]
            for item in given if found["many"] else [given]:
                yield from _previews(inner, item, here)


def _key(key: str) -> dict[str, Any]:
    match = KEY.fullmatch(key)
    assert match, f"{key!r} in {DATA.name} is no field"
    return match.groupdict()
