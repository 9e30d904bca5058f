"""Listing compared with a model that sorts and filters all names, and the number of rows that it reads."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge_local.emulators.storage import listing
from dropforge_local.emulators.storage.models import StoredObject

from .conftest import Api, Running

NAME = st.text(alphabet="ab/é\U0010ffff", min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.sets(NAME, max_size=12),
    prefix=st.one_of(st.just(""), NAME),
    delimiter=st.sampled_from(["", "/", "a", "/a"]),
    limit=st.integers(1, 5),
    start=st.one_of(st.just(""), NAME),
    end=st.one_of(st.just(""), NAME),
)
def test_all_pages_together_agree_with_the_model(
    api: Api, names: set[str], prefix: str, delimiter: str, limit: int, start: str, end: str
) -> None:
    bucket = api.bucket()
    for name in names:
        assert api.put(bucket, name, b"").status_code == 200
    params: dict[str, Any] = {"prefix": prefix, "delimiter": delimiter, "startOffset": start, "endOffset": end}
    items, prefixes = list_all(api, bucket, {**params, "maxResults": limit})
    chosen = [n for n in names if n.startswith(prefix) and n >= max(start, prefix) and (not end or n < end)]
    groups = {n: n.find(delimiter, len(prefix)) if delimiter else -1 for n in chosen}
    assert items == sorted(n for n in chosen if groups[n] < 0)
    assert prefixes == sorted({n[: groups[n] + len(delimiter)] for n in chosen if groups[n] >= 0})


def list_all(api: Api, bucket: str, params: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Read all pages; no page may have more than maxResults items."""
    items, prefixes, token = [], [], None
    while True:
        body = api.call("GET", f"b/{bucket}/o", params={**params, "pageToken": token} if token else params).json()
        page = [item["name"] for item in body.get("items", [])]
        assert len(page) + len(body.get("prefixes", [])) <= int(params.get("maxResults", 1000))
        items += page
        prefixes += body.get("prefixes", [])
        token = body.get("nextPageToken")
        if token is None:
            return items, prefixes


def test_pages_of_versions(api: Api) -> None:
    bucket = api.bucket(versioning={"enabled": True})
    made = [(name, api.put(bucket, name, b"x").json()["generation"]) for name in ("a", "b", "a", "c/d", "a", "c/d")]
    listed, token = [], ""
    while True:
        params = {"versions": "true", "maxResults": 2, "pageToken": token}
        body = api.call("GET", f"b/{bucket}/o", params=params).json()
        listed += [(item["name"], item["generation"]) for item in body["items"]]
        token = body.get("nextPageToken", "")
        if not token:
            break
    assert listed == sorted(made)


def test_empty_listing_has_no_items(api: Api) -> None:
    assert api.call("GET", f"b/{api.bucket()}/o").json() == {"kind": "storage#objects"}


def test_trailing_delimiter(api: Api) -> None:
    bucket = api.bucket()
    for name in ("t/", "t/x", "u"):
        api.put(bucket, name, b"")
    params = {"delimiter": "/", "includeTrailingDelimiter": "true"}
    assert list_all(api, bucket, params) == (["t/", "u"], ["t/"])
    assert list_all(api, bucket, {"delimiter": "/"}) == (["u"], ["t/"])


@pytest.mark.parametrize(
    ("glob", "matching"),
    [
        ("*", ["[x]", "a", "b.json"]),
        ("**", ["[x]", "a", "b.json", "d/a", "d/e/f.json"]),
        ("**.json", ["b.json", "d/e/f.json"]),
        ("d/*", ["d/a"]),
        ("?", ["a"]),
        ("[ab]*", ["a", "b.json"]),
        ("[!a]*", ["[x]", "b.json"]),
        ("{a,d/a}", ["a", "d/a"]),
        (r"\[x\]", ["[x]"]),
        ("d/**/f.json", ["d/e/f.json"]),
    ],
)
def test_glob(api: Api, glob: str, matching: list[str]) -> None:
    bucket = api.bucket()
    for name in ("a", "b.json", "d/a", "d/e/f.json", "[x]"):
        api.put(bucket, name, b"")
    items, _ = list_all(api, bucket, {"matchGlob": glob})
    assert items == matching


@pytest.mark.parametrize("glob", ["[z-a]", "{a", "a" * 100 + "*" * 300])
def test_unusual_globs_are_answered(api: Api, glob: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "a" * 500, b"")
    assert api.call("GET", f"b/{bucket}/o", params={"matchGlob": glob}).status_code in (200, 400)


@pytest.mark.parametrize(
    "params",
    [{"maxResults": "x"}, {"maxResults": -1}, {"pageToken": "!"}, {"pageToken": "YQ=="}, {"maxResults": 2**70}],
)
def test_bad_parameters_are_refused(api: Api, params: dict[str, Any]) -> None:
    assert api.call("GET", f"b/{api.bucket()}/o", params=params).status_code == 400


def test_listing_seeks(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delimiter listing of a deep tree touches one row per common prefix, and every query uses an index."""
    api, bucket = running.api, running.api.bucket()
    for top in range(4):
        for leaf in range(50):
            api.put(bucket, f"{top}/{leaf:03}", b"")
    rows = 0
    from_row = StoredObject.from_row

    def counted(row: Any) -> Any:
        nonlocal rows
        rows += 1
        return from_row(row)

    monkeypatch.setattr(StoredObject, "from_row", counted)
    assert list_all(api, bucket, {"delimiter": "/"})[1] == ["0/", "1/", "2/", "3/"]
    assert rows == 4


@pytest.mark.parametrize("query", [listing._LIVE, listing._VERSIONS])
def test_queries_use_an_index(running: Running, query: str) -> None:
    with closing(sqlite3.connect(running.blob_dir.parent / "state.sqlite")) as connection:
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + query.replace("?", "'x'"))]
    assert len(plan) == 1
    assert "bucket=? AND name>?" in plan[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("kind", {"kind": "storage#objects"}),
        ("items/name", {"items": [{"name": "a"}]}),
        ("items(name,size),kind", {"kind": "storage#objects", "items": [{"name": "a", "size": "1"}]}),
        ("items(metadata/*)", {"items": [{"metadata": {"k": "v"}}]}),
        ("*/name", {"kind": "storage#objects", "items": [{"name": "a"}]}),
    ],
)
def test_fields_selects_parts_of_an_answer(api: Api, fields: str, expected: dict[str, Any]) -> None:
    bucket = api.bucket()
    api.put(bucket, "a", b"1")
    api.object("PATCH", bucket, "a", json={"metadata": {"k": "v"}})
    assert api.call("GET", f"b/{bucket}/o", params={"fields": fields}).json() == expected


@pytest.mark.parametrize("fields", ["items(", "items)", ",", "items//name", "a b", "items()"])
def test_a_malformed_selection_is_refused(api: Api, fields: str) -> None:
    refused = api.call("GET", f"b/{api.bucket()}/o", params={"fields": fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"Invalid field selection {fields}"
