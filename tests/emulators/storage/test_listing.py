"""Listing compared with a model that sorts and filters all names, and the number of rows that it reads."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge_local.emulators.storage import listing
from dropforge_local.emulators.storage.listing import _Listing

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
        ("b*.json", ["b.json"]),
        ("b.j*.json", []),
    ],
)
def test_glob(api: Api, glob: str, matching: list[str]) -> None:
    bucket = api.bucket()
    for name in ("a", "b.json", "d/a", "d/e/f.json", "[x]"):
        api.put(bucket, name, b"")
    items, _ = list_all(api, bucket, {"matchGlob": glob})
    assert items == matching


@pytest.mark.parametrize("glob", ["runs/*/record.json", "runs/**/record.json", "runs/?/{record,spec}.json"])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_glob_finds_the_same_on_pages_of_any_size(api: Api, glob: str, limit: int) -> None:
    bucket = api.bucket()
    for run in ("a", "b", "c"):
        for leaf in ("events/1/record.json", "events/2", "record.json", "record.json.old", "spec.json"):
            api.put(bucket, f"runs/{run}/{leaf}", b"")
    wanted = {
        "runs/*/record.json": ["record.json"],
        "runs/**/record.json": ["events/1/record.json", "record.json"],
        "runs/?/{record,spec}.json": ["record.json", "spec.json"],
    }[glob]
    items, _ = list_all(api, bucket, {"prefix": "runs/", "matchGlob": glob, "maxResults": limit})
    assert items == [f"runs/{run}/{leaf}" for run in ("a", "b", "c") for leaf in wanted]


def test_a_glob_with_a_delimiter_matches_common_prefixes(api: Api) -> None:
    bucket = api.bucket()
    for name in ("runs/a/record.json", "runs/b/record.json", "runs/list.json"):
        api.put(bucket, name, b"")
    assert list_all(api, bucket, {"prefix": "runs/", "delimiter": "/", "matchGlob": "runs/a/"}) == ([], ["runs/a/"])


@pytest.mark.parametrize("fields", ["name", "generation,metageneration", "metadata,size,timeCreated", "name,crc32c"])
def test_some_fields_are_those_of_the_whole_object(api: Api, fields: str) -> None:
    bucket = api.bucket()
    api.put(bucket, "plain", b"x")
    api.put(bucket, "described", b"xy")
    assert api.call("PATCH", f"b/{bucket}/o/described", json={"metadata": {"a": "1"}}).status_code == 200
    whole = api.call("GET", f"b/{bucket}/o").json()["items"]
    some = api.call("GET", f"b/{bucket}/o", params={"fields": f"items({fields})"}).json()["items"]
    assert some == [{name: item[name] for name in fields.split(",") if name in item} for item in whole]


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
    rows_from = _Listing._rows

    def counted(listing: _Listing, position: Any) -> Any:
        nonlocal rows
        for row in rows_from(listing, position):
            rows += 1
            yield row

    monkeypatch.setattr(_Listing, "_rows", counted)
    assert list_all(api, bucket, {"delimiter": "/"})[1] == ["0/", "1/", "2/", "3/"]
    assert rows == 4


@pytest.mark.parametrize("query", [listing._LIVE, listing._VERSIONS])
def test_queries_use_an_index(running: Running, query: str) -> None:
    with closing(sqlite3.connect(running.blob_dir.parent / "state.sqlite")) as connection:
        filled = query.format(columns="*").replace("?", "'x'")
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {filled}")]
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
