"""Patches, selectors and quantities: the examples of the standards, and random input."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge_local.emulators.kubernetes.controllers.jobs import format_indexes, parse_indexes
from dropforge_local.emulators.kubernetes.kinds import POD
from dropforge_local.emulators.kubernetes.patches import (
    JSON_PATCH,
    STRATEGIC_PATCH,
    apply_patch,
    json_patch,
    merge_patch,
    strategic_patch,
)
from dropforge_local.emulators.kubernetes.quantities import parse_quantity, whole
from dropforge_local.emulators.kubernetes.refusals import Refusal
from dropforge_local.emulators.kubernetes.selectors import parse_labels, parse_selector

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@pytest.mark.parametrize(
    ("current", "patch", "result"),
    [  # RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_the_rfc(current: Any, patch: Any, result: Any) -> None:
    assert merge_patch(current, patch) == result


@pytest.mark.parametrize(
    ("current", "patch", "result"),
    [  # RFC 6902, appendix A
        ({"foo": "bar"}, [{"op": "add", "path": "/baz", "value": "qux"}], {"foo": "bar", "baz": "qux"}),
        ({"foo": ["a", "b"]}, [{"op": "add", "path": "/foo/1", "value": "x"}], {"foo": ["a", "x", "b"]}),
        ({"foo": ["a"]}, [{"op": "add", "path": "/foo/-", "value": ["b"]}], {"foo": ["a", ["b"]]}),
        ({"foo": 1, "baz": 2}, [{"op": "remove", "path": "/baz"}], {"foo": 1}),
        ({"foo": ["a", "b", "c"]}, [{"op": "remove", "path": "/foo/1"}], {"foo": ["a", "c"]}),
        ({"baz": 1}, [{"op": "replace", "path": "/baz", "value": 2}], {"baz": 2}),
        ({"a": {"b": 1}, "c": {}}, [{"op": "move", "from": "/a/b", "path": "/c/d"}], {"a": {}, "c": {"d": 1}}),
        ({"a": ["w", "x", "y"]}, [{"op": "move", "from": "/a/1", "path": "/a/2"}], {"a": ["w", "y", "x"]}),
        ({"a": {"b": 1}}, [{"op": "copy", "from": "/a", "path": "/c"}], {"a": {"b": 1}, "c": {"b": 1}}),
        ({"a~b": {"c/d": 1}}, [{"op": "test", "path": "/a~0b/c~1d", "value": 1}], {"a~b": {"c/d": 1}}),
        ({"a": 1}, [{"op": "add", "path": "", "value": {"b": 2}}], {"b": 2}),
    ],
)
def test_json_patch_follows_the_rfc(current: Any, patch: Any, result: Any) -> None:
    assert json_patch(current, patch) == result


@pytest.mark.parametrize(
    "patch",
    [
        [{"op": "add", "path": "/a/b", "value": 1}],
        [{"op": "remove", "path": "/missing"}],
        [{"op": "replace", "path": "/missing", "value": 1}],
        [{"op": "test", "path": "/foo", "value": "other"}],
        [{"op": "add", "path": "/list/5", "value": 1}],
        [{"op": "add", "path": "/list/01", "value": 1}],
        [{"op": "frobnicate", "path": "/foo"}],
        [{"op": "add", "path": "foo", "value": 1}],
        [{"op": "add", "value": 1}],
        [{"op": "move", "from": "/object", "path": "/object/inside"}],
    ],
)
def test_json_patches_that_do_not_apply_are_refused(patch: Any) -> None:
    with pytest.raises(Refusal) as refused:
        json_patch({"foo": "bar", "list": [1], "object": {}}, patch)
    assert refused.value.code == 422


@given(JSON, JSON)
def test_merge_patch_is_idempotent(current: Any, patch: Any) -> None:
    once = merge_patch(current, patch)
    assert merge_patch(once, patch) == once


@given(st.lists(st.fixed_dictionaries({}, optional={"op": SCALARS, "path": SCALARS, "value": JSON, "from": SCALARS})))
def test_wild_json_patches_are_applied_or_refused(patch: Any) -> None:
    try:
        apply_patch(JSON_PATCH, {"metadata": {"name": "x"}, "list": [1, 2]}, patch, "Pod")
    except Refusal as refusal:
        assert refusal.code in (400, 422)  # noqa: PT017


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "$patch", "$retainKeys", "status"]), JSON))
def test_wild_strategic_patches_are_applied_or_refused(patch: Any) -> None:
    current = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "a"}]}}
    try:
        apply_patch(STRATEGIC_PATCH, current, patch, "Pod")
    except Refusal as refusal:
        assert refusal.code in (400, 422)  # noqa: PT017


def containers(*names: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, "image": "i", "args": ["1"]} for name in names]}}


def test_strategic_merge_merges_lists_by_key() -> None:
    patch = {"spec": {"containers": [{"name": "b", "image": "new"}, {"name": "c", "image": "added"}]}}
    result = strategic_patch(containers("a", "b"), patch, "Pod")["spec"]["containers"]
    assert [(item["name"], item["image"]) for item in result] == [("a", "i"), ("b", "new"), ("c", "added")]
    assert result[1]["args"] == ["1"]


def test_strategic_merge_obeys_directives() -> None:
    current = {**containers("a", "b"), "metadata": {"finalizers": ["x/1", "x/2"]}}
    patch = {
        "metadata": {"$deleteFromPrimitiveList/finalizers": ["x/1"], "finalizers": ["x/3"]},
        "spec": {
            "$setElementOrder/containers": [{"name": "c"}, {"name": "b"}],
            "containers": [{"name": "a", "$patch": "delete"}, {"name": "c", "image": "j"}],
        },
    }
    result = strategic_patch(current, patch, "Pod")
    assert result["metadata"]["finalizers"] == ["x/2", "x/3"]
    assert [item["name"] for item in result["spec"]["containers"]] == ["c", "b"]
    replaced = strategic_patch(current, {"spec": {"$patch": "replace", "hostname": "h"}}, "Pod")
    assert replaced["spec"] == {"hostname": "h"}
    strategy = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    before = {"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}
    assert strategic_patch(before, strategy, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_lists_without_a_key_are_replaced() -> None:
    current = {"spec": {"tolerations": [{"key": "a"}], "containers": [{"name": "a", "args": ["1", "2"]}]}}
    patch = {"spec": {"tolerations": [{"key": "b"}], "containers": [{"name": "a", "args": ["3"]}]}}
    result = strategic_patch(current, patch, "Pod")["spec"]
    assert (result["tolerations"], result["containers"][0]["args"]) == ([{"key": "b"}], ["3"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1), ("500m", Fraction(1, 2)), ("1.5Gi", 3 * 2**29), ("1e3", 1000), ("1E3", 1000), ("2E", 2 * 10**18),
        ("-1", -1), ("+.5", Fraction(1, 2)), ("5.", 5), ("100n", Fraction(1, 10**7)), ("12Ki", 12288),
    ],
)  # fmt: skip
def test_quantities(text: str, number: Any) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize(
    "text", ["", "1GB", "Gi", "1 Gi", "1ki", "--1", "1e", "0x1", "1_000", "٣", None, True, [], "NaN"]
)
def test_what_is_no_quantity(text: Any) -> None:
    with pytest.raises(ValueError, match="quantities must match"):
        parse_quantity(text)


@given(st.text())
def test_any_text_is_a_quantity_or_not(text: str) -> None:
    try:
        assert whole(text) >= parse_quantity(text)
    except ValueError as error:
        assert "quantities must match" in str(error)  # noqa: PT017


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from(["", "k", "M", "Ki", "Mi", "Gi"]))
def test_whole_quantities_survive(number: int, suffix: str) -> None:
    assert whole(f"{number}{suffix}") % max(number, 1) == 0


@pytest.mark.parametrize(
    ("selector", "matching"),
    [
        ("", "abc"), ("app=x", "a"), ("app==x", "a"), ("app!=x", "bc"), ("app in (x, y)", "ab"),
        ("app notin (x)", "bc"), ("app", "ab"), ("!app", "c"), ("app in (x,y),tier=1", "b"), ("tier", "b"),
        ("app=", ""), ("a.b/c=d", "c"),
    ],
)  # fmt: skip
def test_label_selectors(selector: str, matching: str) -> None:
    labels = {"a": {"app": "x"}, "b": {"app": "y", "tier": "1"}, "c": {"a.b/c": "d"}}
    requirements = parse_labels(selector)
    assert (
        "".join(name for name in labels if all(requirement.matches(labels[name]) for requirement in requirements))
        == matching
    )


@pytest.mark.parametrize(
    "selector", ["=", "a=b,", "a in x", "a in (x", "a b", ",a", "a=b=c", "-a", "a>1", "a/b/c", "a=-"]
)
def test_malformed_label_selectors_are_refused(selector: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse_labels(selector)
    assert refused.value.code == 400


@settings(max_examples=300)
@given(st.text(alphabet='ab=!,() in/.-<>\n"x', max_size=14), st.text(alphabet="metadat.n=!,x ", max_size=16))
def test_wild_selectors_are_parsed_or_refused(labels: str, fields: str) -> None:
    pod = {"metadata": {"name": "x", "labels": {"a": "b"}}, "spec": {}, "status": {}}
    try:
        parse_selector(POD, labels, fields).matches(POD, pod)
    except Refusal as refusal:
        assert refusal.code == 400  # noqa: PT017


def test_field_selectors_know_their_fields() -> None:
    pod = {"metadata": {"name": "x"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
    assert parse_selector(POD, "", "status.phase!=Failed,spec.nodeName=n").matches(POD, pod)
    assert not parse_selector(POD, "", "metadata.name=y").matches(POD, pod)
    with pytest.raises(Refusal, match="field label not supported"):
        parse_selector(POD, "", "spec.hostname=x")


@given(st.sets(st.integers(0, 50)))
def test_completed_indexes_survive(indexes: set[int]) -> None:
    text = format_indexes(indexes)
    assert parse_indexes(text) == indexes
    assert json.dumps(text).isascii()


def test_completed_indexes_read_as_kubernetes_writes_them() -> None:
    assert format_indexes({0, 1, 2, 4, 6, 7}) == "0-2,4,6,7"
