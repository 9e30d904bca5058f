"""The emulator's hand-written tables of fields agree with Kubernetes' own schema; and what the tables refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dropforge_local.emulators.kubernetes.refusals import Refusal
from dropforge_local.emulators.kubernetes.schema import FIELDS, UNSUPPORTED, Type, check

from ...schemas import kuberay, kubernetes

PUBLISHED = kubernetes.definitions()
GATEWAY = yaml.safe_load((Path(__file__).resolve().parents[2] / "data" / "gateway.yaml").read_text())
# The objects themselves, whose parts are in GATEWAY.
GATEWAY_KINDS = {"Gateway", "HTTPRoute", "GCPBackendPolicy", "GCPGatewayPolicy", "HealthCheckPolicy"}
KUBERAY = {name for name in FIELDS if name.startswith("Ray")} | {"HeadGroupSpec", "WorkerGroupSpec"}
# Every object has metadata, whether its schema requires them or not.
ALWAYS_THERE = {"metadata"}
TYPES = {"str": "string", "enum": "string", "int": "integer", "bool": "boolean", "list": "array"}


def form_of(schema: dict[str, Any]) -> str:
    """The name of the type that a published schema describes."""
    if "$ref" in schema:
        name: str = schema["$ref"].rsplit(".", 1)[1]
        return {"Time": "time", "MicroTime": "time", "Quantity": "quantity", "IntOrString": "port"}.get(name, name)
    kinds = schema.get("type", "")
    return str(next((kind for kind in kinds if kind != "null"), "") if isinstance(kinds, list) else kinds)


def agrees(emulated: Type, published: dict[str, Any]) -> bool:
    form = form_of(published)
    if emulated.form == "object":
        return emulated.name == form
    if emulated.form == "map":
        return form == "object"
    return emulated.form == "any" or TYPES.get(emulated.form, emulated.form) == form


def disagreements(name: str, fields: dict[str, Any]) -> list[str]:
    """The fields of an emulated type that Kubernetes does not have, has with another type, or requires in addition."""
    published = PUBLISHED[name]["properties"]
    unknown = [f"{name}.{field} is no field of Kubernetes" for field in fields if field not in published]
    known = {field: described for field, described in fields.items() if field in published}
    different = [
        f"{name}.{field}: {described.type} is not {published[field]}"
        for field, described in known.items()
        if not agrees(described.type, published[field])
    ]
    required = {field for field, described in fields.items() if described.required}
    required |= ALWAYS_THERE | UNSUPPORTED.get(name, set())
    missing = [f"{name}.{field} is required" for field in PUBLISHED[name].get("required", ()) if field not in required]
    return unknown + different + missing


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - KUBERAY - GATEWAY.keys() - GATEWAY_KINDS - {"ObjectMeta"}))
def test_tables_agree_with_the_published_schema(name: str) -> None:
    assert disagreements(name, FIELDS[name]) == []


@pytest.mark.parametrize(
    ("name", "field", "other", "problem"),
    [
        ("JobSpec", "parallelism", "paralelism", "JobSpec.paralelism is no field of Kubernetes"),
        ("JobSpec", "template", "parallelism", "JobSpec.parallelism: .* is not "),
        ("PodSpec", "containers", None, "PodSpec.containers is required"),
    ],
)
def test_a_table_with_a_mistake_does_not_agree(name: str, field: str, other: str | None, problem: str) -> None:
    fields = dict(FIELDS[name])
    described = fields.pop(field)
    mistaken = {**fields, other: described} if other else fields
    assert any(re.match(problem, found) for found in disagreements(name, mistaken))


@pytest.mark.parametrize("name", GATEWAY)
def test_tables_agree_with_the_gateway_api(name: str) -> None:
    published = {field.rstrip("!"): form for field, form in GATEWAY[name].items()}
    assert published.keys() - FIELDS[name].keys() == UNSUPPORTED.get(name, set())
    for field, described in FIELDS[name].items():
        form = published[field]
        if isinstance(form, list):
            assert list(described.type.values) == form
        else:
            assert TYPES.get(described.type.form, "object") == form
    # "" is the group of a Service: a required field that may be empty is checked by gatewayrules.py.
    required = {field for field, described in FIELDS[name].items() if described.required}
    assert required | {"group"} >= {field.rstrip("!") for field in GATEWAY[name] if field.endswith("!")}


def test_every_field_of_a_rayjob_that_dropforge_uses_is_emulated() -> None:
    assert unknown_to_the_emulator("RayJobSpec", kuberay.fields()["spec!"]) == []
    renamed = {"rayClusterSpec": {"workerGroupSpecs[]": {"numHosts": "integer"}}}
    assert unknown_to_the_emulator("RayJobSpec", renamed) == ["WorkerGroupSpec.numHosts"]


def unknown_to_the_emulator(name: str, described: dict[str, Any]) -> list[str]:
    """The fields of tests/data/kuberay.yaml that the emulator's tables lack."""
    unknown = []
    for key, value in described.items():
        field = FIELDS[name].get(key.rstrip("![]"))
        if field is None:
            unknown.append(f"{name}.{key}")
        elif isinstance(value, dict):
            unknown += unknown_to_the_emulator((field.type.item or field.type).name, value)
    return unknown


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - GATEWAY.keys()))
def test_every_field_of_kubernetes_is_emulated_or_listed_as_not_emulated(name: str) -> None:
    assert PUBLISHED[name]["properties"].keys() - FIELDS[name].keys() == UNSUPPORTED[name]


def test_check_copies_without_nulls_and_unknown_fields() -> None:
    body = {"metadata": {"name": "a", "labels": None}, "data": {"k": "v"}, "dta": {}, "metadat": None}
    clean, findings = check("ConfigMap", body)
    assert clean == {"metadata": {"name": "a"}, "data": {"k": "v"}}
    assert findings.unknown == ["dta"]


@pytest.mark.parametrize(
    ("type_name", "body", "code", "text"),
    [
        ("ConfigMap", {"data": {"k": 1}}, 400, "cannot unmarshal int into field data[k] of type string"),
        ("ConfigMap", {"data": ["k"]}, 400, "of type map"),
        ("Secret", {"data": {"k": "no base64!"}}, 400, "data[k]"),
        ("Container", {"name": "a", "args": "x"}, 400, "of type array"),
        ("Container", {"name": "a", "args": [None]}, 400, "args[0]"),
        ("Container", {"name": "a", "stdin": "true"}, 400, "of type bool"),
        ("JobSpec", {"template": {}, "parallelism": 2**63}, 400, "int64"),
        ("JobSpec", {"template": {}, "parallelism": 1.5}, 400, "float"),
        ("JobSpec", {"template": {}, "parallelism": True}, 400, "bool"),
        ("EmptyDirVolumeSource", {"sizeLimit": "1GB"}, 400, "regular expression"),
        ("ObjectMeta", {"creationTimestamp": "yesterday"}, 400, "creationTimestamp"),
        ("PodSpec", {"containers": [], "affinity": {}}, 501, "affinity (PodSpec.affinity) is not emulated"),
    ],
)
def test_unreadable_objects_are_refused(type_name: str, body: dict[str, Any], code: int, text: str) -> None:
    with pytest.raises(Refusal) as refused:
        check(type_name, body)
    assert refused.value.code == code
    assert text in refused.value.message


def test_whole_floats_are_integers_and_quantities_strings() -> None:
    assert check("JobSpec", {"template": {"spec": {}}, "parallelism": 2.0})[0]["parallelism"] == 2
    assert check("ResourceRequirements", {"limits": {"cpu": 2}})[0] == {"limits": {"cpu": "2"}}
