"""Watches: what changed since a revision, through selectors, until the time is up; too old is Gone."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import exceptions

from .conftest import TOKEN, Kube


def put(kube: Kube, name: str, **labels: str) -> Any:
    body = {"metadata": {"name": name, "labels": labels}}
    return kube.core.create_namespaced_config_map(kube.namespace, body)


def events(kube: Kube, **query: str) -> list[dict[str, Any]]:
    text = "&".join(f"{key}={value}" for key, value in {"watch": "1", "timeoutSeconds": "1", **query}.items())
    url = f"{kube.url}/api/v1/namespaces/{kube.namespace}/configmaps?{text}"
    request = urllib.request.Request(url, headers={"Authorization": TOKEN})
    with urllib.request.urlopen(request, timeout=20, context=kube._tls) as response:
        return [json.loads(line) for line in response]


def test_a_watch_goes_on_from_a_revision(kube: Kube) -> None:
    first = put(kube, "a")
    put(kube, "b")
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"data": {"k": "1"}})
    kube.core.delete_namespaced_config_map("b", kube.namespace)
    found = events(kube, resourceVersion=first.metadata.resource_version)
    assert [(one["type"], one["object"]["metadata"]["name"]) for one in found] == [
        ("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b"),
    ]  # fmt: skip
    versions = [int(one["object"]["metadata"]["resourceVersion"]) for one in found]
    assert versions == sorted(versions)


def test_a_watch_from_nowhere_begins_with_what_is_there(kube: Kube) -> None:
    put(kube, "a")
    for version in ("", "0"):
        assert [one["type"] for one in events(kube, resourceVersion=version)] == ["ADDED"]


def test_objects_enter_and_leave_a_selector(kube: Kube) -> None:
    first = put(kube, "a", app="x")
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"metadata": {"labels": {"app": "y"}}})
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"metadata": {"labels": {"app": "x"}}})
    version = first.metadata.resource_version
    found = events(kube, resourceVersion=version, labelSelector="app%3Dx")
    assert [one["type"] for one in found] == ["DELETED", "ADDED"]


def test_bookmarks_tell_how_far_it_is(kube: Kube) -> None:
    put(kube, "a")
    found = events(kube, allowWatchBookmarks="true")
    assert [one["type"] for one in found] == ["ADDED", "BOOKMARK"]
    assert int(found[1]["object"]["metadata"]["resourceVersion"]) >= int(
        found[0]["object"]["metadata"]["resourceVersion"]
    )
    initial = events(kube, sendInitialEvents="true", allowWatchBookmarks="true", resourceVersionMatch="NotOlderThan")
    assert initial[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_watches_see_changes_as_they_happen(kube: Kube) -> None:
    watcher, seen = watch.Watch(), []

    def follow() -> None:
        for event in watcher.stream(kube.core.list_namespaced_config_map, kube.namespace, timeout_seconds=20):
            seen.append((event["type"], event["object"].metadata.name))
            if event["type"] == "DELETED":
                watcher.stop()

    follower = threading.Thread(target=follow)
    follower.start()
    put(kube, "a")
    kube.until(lambda: list(seen), bool)
    kube.core.delete_namespaced_config_map("a", kube.namespace)
    follower.join(10)
    assert seen == [("ADDED", "a"), ("DELETED", "a")]


def test_what_is_too_old_is_gone(kube: Kube) -> None:
    first = put(kube, "a")
    page = kube.core.list_namespaced_config_map(kube.namespace, limit=1)
    put(kube, "b")
    page = kube.core.list_namespaced_config_map(kube.namespace, limit=1)
    for number in range(270):  # the history of these tests' cluster holds 200 changes
        kube.call(
            "PATCH",
            f"/api/v1/namespaces/{kube.namespace}/configmaps/a",
            {"data": {"k": str(number)}},
            "application/merge-patch+json",
        )
    found = events(kube, resourceVersion=first.metadata.resource_version)
    assert (found[0]["type"], found[0]["object"]["code"], found[0]["object"]["reason"]) == ("ERROR", 410, "Expired")
    with pytest.raises(exceptions.ApiException) as gone:
        kube.core.list_namespaced_config_map(kube.namespace, limit=1, _continue=page.metadata._continue)
    assert gone.value.status == 410


def test_the_future_cannot_be_watched(kube: Kube) -> None:
    code, body, _ = kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods?watch=1&resourceVersion=99999999")
    assert (code, body["details"]["causes"][0]["reason"]) == (504, "ResourceVersionTooLarge")
    assert kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods?watch=1&resourceVersion=x")[0] == 400
