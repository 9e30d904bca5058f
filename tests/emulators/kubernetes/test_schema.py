"""The hand-written tables against the published schema, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge_local.emulators.kubernetes.refusals import Refusal
from dropforge_local.emulators.kubernetes.schema import FIELDS, UNSUPPORTED, Type, check

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "k8s-1.35-subset-strict.json"


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is not here")
    definitions = json.loads(PUBLISHED.read_text())["$defs"]
    # autoscaling/v1 has types of the same names: v2 comes later in the file's order of versions and wins
    return {name.rsplit(".", 1)[1]: definitions[name] for name in sorted(definitions)}


def form_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit(".", 1)[1]
        return {"Time": "time", "Quantity": "quantity", "IntOrString": "port"}.get(name, name)
    kinds = schema.get("type", "")
    kind = next((one for one in kinds if one != "null"), "") if isinstance(kinds, list) else kinds
    return str(kind)


def agrees(ours: Type, theirs: dict[str, Any]) -> bool:
    form = form_of(theirs)
    expected = {"str": "string", "enum": "string", "int": "integer", "bool": "boolean", "list": "array"}
    if ours.form == "object":
        return ours.name == form
    if ours.form == "map":
        return form == "object"
    return ours.form == "any" or expected.get(ours.form, ours.form) == form


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"ObjectMeta"}))
def test_tables_agree_with_the_published_schema(name: str, published: dict[str, Any]) -> None:
    if name not in published:
        pytest.skip("not in the published subset")
    theirs = published[name]["properties"]
    for field, ours in FIELDS[name].items():
        assert field in theirs, f"{name}.{field} is no field of Kubernetes"
        assert agrees(ours.type, theirs[field]), f"{name}.{field}: {ours.type} is not {theirs[field]}"
    required = set(published[name].get("required", ()))
    mine = {field for field, ours in FIELDS[name].items() if ours.required}
    assert required <= mine | UNSUPPORTED.get(name, set())


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_fields_that_are_not_emulated_exist_in_kubernetes(name: str, published: dict[str, Any]) -> None:
    known = set(published[name]["properties"])
    assert known >= UNSUPPORTED[name]
    left = known - UNSUPPORTED[name] - set(FIELDS[name])
    assert not left, f"{name} has {left} too: honour them, or say that they are not emulated"


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
