"""Discovery documents for clients: groups, resources, version and OpenAPI."""

from __future__ import annotations

from typing import Any

from .kinds import KINDS, Kind
from .schema import FIELDS, openapi

VERSION = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.5-gke.1080000",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "linux/amd64",
}
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
SUBRESOURCE_VERBS = {
    "log": ["get"],
    "proxy": ["create", "get", "update"],
    "exec": ["create", "get"],
    "portforward": ["create", "get"],
    "finalize": ["update"],
}


def document(path: str) -> dict[str, Any] | None:
    """The discovery document at `path`; None if no document is there."""
    steps = path.strip("/").split("/")
    if path == "/version":
        return VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in _groups()]}
    if path == "/api/v1":
        return _resources("", "v1")
    if steps[0] == "apis" and len(steps) == 2 and steps[1] in _groups():
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(steps[1])}
    if steps[0] == "apis" and len(steps) == 3 and (steps[1], steps[2]) in _versions():
        return _resources(steps[1], steps[2])
    if path == "/openapi/v3":
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}?hash=1"} for root in map(_root, KINDS)}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3/"))
    return None


def _groups() -> list[str]:
    return list(dict.fromkeys(kind.group for kind in KINDS if kind.group))


def _versions() -> set[tuple[str, str]]:
    return {(kind.group, kind.version) for kind in KINDS}


def _root(kind: Kind) -> str:
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def _group(name: str) -> dict[str, Any]:
    versions = [
        {"groupVersion": f"{group}/{version}", "version": version} for group, version in _versions() if group == name
    ]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _resources(group: str, version: str) -> dict[str, Any]:
    resources = []
    for kind in (known for known in KINDS if (known.group, known.version) == (group, version)):
        resources.append(
            {
                "name": kind.plural,
                "singularName": kind.name.lower(),
                "namespaced": kind.namespaced,
                "kind": kind.name,
                "verbs": VERBS,
                **({"shortNames": list(kind.short)} if kind.short else {}),
                **({"categories": list(kind.categories)} if kind.categories else {}),
            }
        )
        for name in kind.subresources:
            resources.append(
                {
                    "name": f"{kind.plural}/{name}",
                    "singularName": "",
                    "namespaced": kind.namespaced,
                    **(
                        {"group": "autoscaling", "version": "v1", "kind": "Scale"}
                        if name == "scale"
                        else {"kind": kind.name}
                    ),
                    "verbs": SUBRESOURCE_VERBS.get(name, ["get", "patch", "update"]),
                }
            )
    group_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


def _openapi(root: str) -> dict[str, Any] | None:
    """For kubectl: the known fields, and that the server validates them (the parameter fieldValidation)."""
    kinds = [kind for kind in KINDS if _root(kind) == root]
    if not kinds:
        return None
    schemas: dict[str, Any] = {name: openapi(name) for name in FIELDS}
    paths = {}
    for kind in kinds:
        gvk = {"group": kind.group, "version": kind.version, "kind": kind.name}
        own = schemas.setdefault(
            kind.name,
            {"type": "object", "properties": {"metadata": {"allOf": [{"$ref": "#/components/schemas/ObjectMeta"}]}},
             "x-kubernetes-preserve-unknown-fields": True},
        )  # fmt: skip
        own["x-kubernetes-group-version-kind"] = [gvk]
        own["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
        namespace = "/namespaces/{namespace}" if kind.namespaced else ""
        paths[f"/{root}{namespace}/{kind.plural}/{{name}}"] = {"patch": _patch_operation(gvk)}
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _patch_operation(gvk: dict[str, str]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in ("dryRun", "fieldManager", "fieldValidation")
    ]
    return {
        "parameters": parameters,
        "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": gvk,
    }
