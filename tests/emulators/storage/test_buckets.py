"""Buckets: names, fields, pages, IAM, ACLs, and features that are not emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.emulators.storage import StorageEmulator
from workflows_engine import VirtualClock

from .conftest import Api


def create(api: Api, **resource: Any) -> int:
    return api.call("POST", "b", params={"project": "p"}, json=resource).status_code


@pytest.mark.parametrize("name", ["abc", "a-b_c.d", "0" * 63, ".".join(["a" * 60] * 3), "9-b"])
def test_accepted_names(api: Api, name: str) -> None:
    assert create(api, name=name) == 200


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ab",
        "a" * 64,
        "Abc",
        "-abc",
        "abc-",
        "a..b",
        "a.-b",
        "a b",
        "a/b",
        "é" * 5,
        "192.168.1.1",
        "goog-x",
        "my-google",
        "a" * 64 + ".b",
        5,
        None,
    ],
)
def test_refused_names(api: Api, name: object) -> None:
    assert create(api, name=name) == 400


@pytest.mark.parametrize(
    "resource",
    [
        {"labels": {"Upper": "x"}},
        {"labels": {"a": "X"}},
        {"labels": {f"k{i}": "v" for i in range(65)}},
        {"labels": []},
        {"lifecycle": {"rule": [{"action": {"type": "Explode"}, "condition": {"age": 1}}]}},
        {"lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {}}]}},
        {"lifecycle": {"rule": 5}},
        {"lifecycle": {"rule": [5]}},
        {"location": "no such place"},
        {"storageClass": "FAST"},
        {"versioning": True},
    ],
)
def test_refused_fields(api: Api, resource: dict[str, Any]) -> None:
    assert create(api, name="refused", **resource) == 400


@pytest.mark.parametrize(
    "resource",
    [
        {"objectRetention": {"mode": "Enabled"}},
        {"softDeletePolicy": {"retentionDurationSeconds": "604800"}},
        {"encryption": {"defaultKmsKeyName": "k"}},
        {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}},
    ],
)
def test_unsupported_fields_are_refused(api: Api, resource: dict[str, Any]) -> None:
    reply = api.call("POST", "b", params={"project": "p"}, json={"name": "refused", **resource})
    assert (reply.status_code, "not emulated" in reply.json()["error"]["message"]) == (501, True)


def test_fields_with_default_values_are_accepted(api: Api) -> None:
    default = {"softDeletePolicy": {"retentionDurationSeconds": "0"}, "hierarchicalNamespace": {"enabled": False}}
    assert create(api, name="defaults", acl=[], **default) == 200


def test_project_is_required(api: Api) -> None:
    assert api.call("POST", "b", json={"name": "abc"}).status_code == 400
    assert api.call("GET", "b").status_code == 400


def test_update_replaces_and_patch_merges(api: Api) -> None:
    bucket = api.bucket(labels={"a": "1"}, location="EU")
    patched = api.call("PATCH", f"b/{bucket}", json={"labels": {"b": "2"}, "storageClass": "NEARLINE"}).json()
    assert (patched["labels"], patched["storageClass"]) == ({"a": "1", "b": "2"}, "NEARLINE")
    assert api.call("PATCH", f"b/{bucket}", json={"labels": {"a": None}}).json()["labels"] == {"b": "2"}
    updated = api.call("PUT", f"b/{bucket}", json={"versioning": {"enabled": True}}).json()
    assert ("labels" in updated, updated["location"], updated["metageneration"]) == (False, "EU", "4")
    assert api.call("PATCH", f"b/{bucket}", json={"location": "US"}).status_code == 400


def test_pages_of_buckets(api: Api) -> None:
    made = sorted(api.bucket() for _ in range(5))
    listed, token = [], ""
    while True:
        params = {"project": "p", "prefix": "b-", "maxResults": 2, "pageToken": token}
        body = api.call("GET", "b", params=params).json()
        listed += [item["name"] for item in body["items"]]
        token = body.get("nextPageToken", "")
        if not token:
            break
    assert listed == made


def test_stale_policy_is_refused(api: Api) -> None:
    path = f"b/{api.bucket()}/iam"
    stale = api.call("GET", path).json()
    bindings = [{"role": "roles/storage.admin", "members": ["user:a@example.com"]}]
    assert api.call("PUT", path, json={"bindings": bindings, "etag": stale["etag"]}).status_code == 200
    assert api.call("PUT", path, json={"bindings": [], "etag": stale["etag"]}).status_code == 412
    assert api.call("GET", path).json()["bindings"] == bindings


@pytest.mark.parametrize(
    "policy",
    [
        {"bindings": 5},
        {"bindings": [5]},
        {"bindings": [{"role": "admin"}]},
        {"bindings": [{"role": "roles/x", "members": ["nobody"]}]},
        {"version": 2, "bindings": []},
    ],
)
def test_malformed_policy(api: Api, policy: dict[str, Any]) -> None:
    assert api.call("PUT", f"b/{api.bucket()}/iam", json=policy).status_code == 400


def test_permissions(api: Api) -> None:
    path = f"b/{api.bucket()}/iam/testPermissions"
    asked = ["storage.buckets.get", "storage.objects.create"]
    assert api.call("GET", path, params={"permissions": asked}).json()["permissions"] == asked
    assert api.call("GET", path, params={"permissions": "run.jobs.get"}).status_code == 400
    assert api.call("GET", path).status_code == 400


def test_acls_are_refused_as_with_uniform_access(api: Api) -> None:
    bucket = api.bucket()
    for path in (f"b/{bucket}/acl", f"b/{bucket}/o/x/acl/allUsers", f"b/{bucket}/defaultObjectAcl"):
        reply = api.call("GET", path)
        assert (reply.status_code, "uniform bucket-level access" in reply.text) == (400, True)


@pytest.mark.parametrize("path", ["b/{}/folders", "projects/p/hmacKeys", "b/{}/anywhereCaches"])
def test_unsupported_features_answer_501(api: Api, path: str) -> None:
    reply = api.call("GET", path.format(api.bucket()))
    assert (reply.status_code, "not emulated by the local stack" in reply.text) == (501, True)


def test_create_bucket_for_the_stack_is_idempotent(tmp_path: Path) -> None:
    db = Database(":memory:")
    emulator = StorageEmulator(db, tmp_path, SystemClock())
    emulator.create_bucket("specs", location="europe-west4")
    emulator.create_bucket("specs")
    (row,) = db.connection.execute("SELECT name, attributes FROM storage_buckets").fetchall()
    assert (row["name"], "EUROPE-WEST4" in row["attributes"]) == ("specs", True)
    db.close()


def test_generations_do_not_depend_on_the_clock(tmp_path: Path) -> None:
    """Generations increase even when the clock stops or goes back."""
    db = Database(":memory:")
    made = []
    for start in (1000.0, 500.0):
        objects = StorageEmulator(db, tmp_path, VirtualClock(start))._state.objects
        with db.transaction():
            made += [objects._next_generation() for _ in range(3)]
    assert made == [1_000_000_000 + index for index in range(6)]
    db.close()
