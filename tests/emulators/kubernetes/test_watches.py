"""Watches: changes since a revision, with selectors, until the timeout; 410 Gone for old revisions."""

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
    with urllib.request.urlopen(request, timeout=60, context=kube._tls) as response:
        return [json.loads(line) for line in response]


def test_watch_continues_from_a_revision(kube: Kube) -> None:
    first = put(kube, "a")
    put(kube, "b")
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"data": {"k": "1"}})
    kube.core.delete_namespaced_config_map("b", kube.namespace)
    received = events(kube, resourceVersion=first.metadata.resource_version)
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in received] == [
        ("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b"),
    ]  # fmt: skip
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in received]
    assert versions == sorted(versions)


def test_watch_without_a_revision_starts_with_the_present_objects(kube: Kube) -> None:
    put(kube, "a")
    for version in ("", "0"):
        assert [event["type"] for event in events(kube, resourceVersion=version)] == ["ADDED"]


def test_objects_enter_and_leave_a_selector(kube: Kube) -> None:
    first = put(kube, "a", app="x")
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"metadata": {"labels": {"app": "y"}}})
    kube.core.patch_namespaced_config_map("a", kube.namespace, {"metadata": {"labels": {"app": "x"}}})
    version = first.metadata.resource_version
    received = events(kube, resourceVersion=version, labelSelector="app%3Dx")
    assert [event["type"] for event in received] == ["DELETED", "ADDED"]


def test_bookmarks_report_the_revision(kube: Kube) -> None:
    put(kube, "a")
    received = events(kube, allowWatchBookmarks="true")
    assert [event["type"] for event in received] == ["ADDED", "BOOKMARK"]
    assert int(received[1]["object"]["metadata"]["resourceVersion"]) >= int(
        received[0]["object"]["metadata"]["resourceVersion"]
    )
    initial = events(kube, sendInitialEvents="true", allowWatchBookmarks="true", resourceVersionMatch="NotOlderThan")
    assert initial[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_watches_see_changes_as_they_happen(kube: Kube) -> None:
    watcher, seen = watch.Watch(), []

    def follow() -> None:
        for event in watcher.stream(kube.core.list_namespaced_config_map, kube.namespace, timeout_seconds=200):
            seen.append((event["type"], event["object"].metadata.name))
            if event["type"] == "DELETED":
                watcher.stop()

    follower = threading.Thread(target=follow)
    follower.start()
    put(kube, "a")
    kube.until(lambda: list(seen), bool)
    kube.core.delete_namespaced_config_map("a", kube.namespace)
    follower.join(60)
    assert seen == [("ADDED", "a"), ("DELETED", "a")]


def test_old_revisions_are_refused_with_410(kube: Kube) -> None:
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
    received = events(kube, resourceVersion=first.metadata.resource_version)
    assert (received[0]["type"], received[0]["object"]["code"], received[0]["object"]["reason"]) == (
        "ERROR",
        410,
        "Expired",
    )
    with pytest.raises(exceptions.ApiException) as refused:
        kube.core.list_namespaced_config_map(kube.namespace, limit=1, _continue=page.metadata._continue)
    assert refused.value.status == 410


def test_future_revisions_are_refused(kube: Kube) -> None:
    code, body, _ = kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods?watch=1&resourceVersion=99999999")
    assert (code, body["details"]["causes"][0]["reason"]) == (504, "ResourceVersionTooLarge")
    assert kube.call("GET", f"/api/v1/namespaces/{kube.namespace}/pods?watch=1&resourceVersion=x")[0] == 400
