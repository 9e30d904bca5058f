"""The Kubernetes API of a cluster behind an ApiClient that calls paths: objects, events and owner references.

The history records when each object begins and ceases to exist, by its Cloud Asset Inventory name. An object's
dependents are deleted first: https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from .world import World

Object = dict[str, Any]

# The history's name of each kind, by apiVersion and plural. Only the kinds that dropforge uses are simulated.
KINDS = {
    "v1/persistentvolumeclaims": "k8s.io/PersistentVolumeClaim",
    "v1/pods": "k8s.io/Pod",
    "v1/services": "k8s.io/Service",
    "batch/v1/jobs": "batch.k8s.io/Job",
    "apps/v1/deployments": "apps.k8s.io/Deployment",
    "autoscaling/v2/horizontalpodautoscalers": "autoscaling.k8s.io/HorizontalPodAutoscaler",
    "monitoring.googleapis.com/v1/podmonitorings": "monitoring.googleapis.com/PodMonitoring",
    "networking.k8s.io/v1/networkpolicies": "networking.k8s.io/NetworkPolicy",
    "ray.io/v1/rayjobs": "ray.io/RayJob",
    "ray.io/v1/rayclusters": "ray.io/RayCluster",
}
PAGE = 2  # objects of a page: fewer than clients ask for
_PATH = re.compile(r"/(?:api|apis/([^/]+))/([^/]+)/(?:namespaces/([^/]+)/)?([a-z]+)(?:/([^/]+))?")


class Api:
    """One cluster's API and its client. `made` is called for each new object.

    `deletion_began` is called when the deletion of an object begins; it calls `release` when the object may disappear.
    `removed` is called when the object disappears.
    """

    def __init__(self, world: World, cluster: str, has_ray: bool, lets_in: frozenset[str] | None = None) -> None:
        self.world = world
        self.cluster = cluster
        self.has_ray = has_ray
        self.lets_in = lets_in  # the functions that may use the API; None: all
        self.objects: dict[str, Object] = {}  # by full name
        self.accounts: dict[str, set[str]] = {}  # service accounts by namespace
        self.classes: set[str] = set()
        self.events: list[Object] = []
        self.is_open = True
        self.is_ending = False  # the cluster's deletion has begun: its controllers begin nothing
        self.made: Callable[[Object], None] = lambda _: None
        self.deletion_began: Callable[[Object], None] = self.release
        self.removed: Callable[[Object], None] = lambda _: None
        self._released: set[str] = set()

    # The client's side

    def param_serialize(
        self,
        method: str,
        path: str,
        *,
        query_params: list[tuple[str, str]],
        header_params: Mapping[str, str],
        body: Object | None,
        auth_settings: list[str],
    ) -> tuple[str, str, dict[str, str], Object | None]:
        return method, path, dict(query_params), copy.deepcopy(body)

    def call_api(
        self, verb: str, path: str, query: dict[str, str], body: Object | None, _request_timeout: float
    ) -> Any:
        is_known = self.lets_in is None or self.world.scheduler.current.name.rpartition("-")[0] in self.lets_in
        refusal = 403, _status("forbidden: Required permission")
        return self.world.effect(
            f"k8s.{verb} {path.rsplit('/', 1)[-1]}",
            lambda: _response(*(self._answer(verb, path, query, body) if is_known else refusal)),
            changes=verb != "GET",
            error=_broken,
        )

    def _answer(self, verb: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Object]:
        if not self.is_open:
            return 503, _status("the server is gone")
        match = _PATH.fullmatch(path)
        assert match is not None, f"{path} is no path of the Kubernetes API"
        group, version, namespace, plural, name = match.groups()
        collection = f"{group}/{version}/{plural}" if group else f"{version}/{plural}"
        if namespace is not None and namespace not in self.accounts:
            return 404, _status(f'namespaces "{namespace}" not found')
        if group == "ray.io" and not self.has_ray:
            return 404, _status("the server could not find the requested resource")
        if verb == "POST":
            return self._create(collection, namespace, body)
        if collection == "v1/events":
            return 200, {"items": self._events(**query)}
        assert collection in KINDS, f"{verb} {path} is not simulated: see chaos/kubernetes.py"
        prefix = self._prefix(collection, namespace)
        if name is None:
            return 200, self._list(prefix, **query)
        item = self.objects.get(f"{prefix}/{name}")
        if item is None:
            return 404, _status(f'{plural} "{name}" not found')
        return (200, item) if verb == "GET" else self._delete(item, **body)

    def _create(self, collection: str, namespace: str | None, body: Object) -> tuple[int, Object]:
        name = body["metadata"]["name"]
        assert namespace == body["metadata"].get("namespace"), "an object is made in its own namespace"
        assert collection == _collection(body), f"{body['kind']} is not of {collection}"
        if collection == "v1/namespaces":
            known = name in self.accounts
            self.accounts.setdefault(name, set())
        elif collection == "storage.k8s.io/v1/storageclasses":
            known = name in self.classes
            self.classes.add(name)
        elif collection == "v1/serviceaccounts":
            known = name in self.accounts[str(namespace)]
            self.accounts[str(namespace)].add(name)
        else:
            known = f"{self._prefix(collection, namespace)}/{name}" in self.objects
            if not known:
                return 201, self.add(body)
        return (409, _status(f'{collection} "{name}" already exists')) if known else (201, body)

    def _list(self, prefix: str, labelSelector: str, limit: str = "", **rest: str) -> Object:
        """A page of a list; `continue` is the name after which the page begins."""
        after = rest.pop("continue", "")
        assert not rest, f"query {rest} is not simulated"
        names = [name for name in sorted(self.objects) if name.rsplit("/", 1)[0] == prefix and name > after]
        selected = [name for name in names if is_selected(labelSelector, _labels(self.objects[name]))]
        page = selected[: min(PAGE, int(limit))] if limit else selected
        items = [{key: self.objects[name][key] for key in ("metadata", "spec", "status")} for name in page]
        return {"metadata": {"continue": page[-1]} if len(page) < len(selected) else {}, "items": items}

    def _delete(self, item: Object, propagationPolicy: str, preconditions: Object) -> tuple[int, Object]:
        assert propagationPolicy == "Foreground", "only deletion of the dependents first is simulated"
        if preconditions != {"uid": item["metadata"]["uid"]}:
            return 409, _status("the UID in the precondition does not match the UID in record")
        self.delete(item)
        return 200, item

    def _events(self, fieldSelector: str) -> list[Object]:
        wanted = dict(term.split("=") for term in fieldSelector.split(","))
        unknown = wanted.keys() - {"reason", *(f"involvedObject.{key}" for key in ("kind", "name", "uid"))}
        assert not unknown, f"events cannot be selected by {unknown}"
        return [event for event in self.events if all(_field(event, path) == value for path, value in wanted.items())]

    # The controllers' side

    def name_of(self, item: Object) -> str:
        return f"{self._prefix(_collection(item), item['metadata']['namespace'])}/{item['metadata']['name']}"

    def add(self, manifest: Object, owner: Object | None = None, share: float = 1.0) -> Object:
        """Create an object. `share` is the part of its attempt's or endpoint's price that is paid while it runs."""
        collection = _collection(manifest)
        assert collection in KINDS, f"{manifest['kind']} is not simulated: see chaos/kubernetes.py"
        item: Object = {**copy.deepcopy(manifest), "status": {}}
        metadata = item["metadata"]
        metadata |= {"uid": f"uid-{self.world.id()}", "creationTimestamp": self.stamp(), "generation": 1}
        if owner is not None:
            metadata["ownerReferences"] = [{"kind": owner["kind"], "uid": owner["metadata"]["uid"]}]
        name, by = self.name_of(item), self.name_of(owner) if owner else ""
        self.objects[name] = item
        self.world.fact("created", type=KINDS[collection], name=name, labels=dict(_labels(item)), owner=by, share=share)
        self.made(item)
        return item

    def exists(self, item: Object) -> bool:
        return self.is_open and self.objects.get(self.name_of(item)) is item

    def is_live(self, item: Object) -> bool:
        """Whether the object exists and its deletion has not begun, alone or with its cluster."""
        return self.exists(item) and not self.is_ending and "deletionTimestamp" not in item["metadata"]

    def owned(self, item: Object) -> list[Object]:
        uid = item["metadata"]["uid"]
        return [child for child in self.objects.values() if uid in _owners(child)]

    def family(self, item: Object) -> list[Object]:
        """An object and all its dependents."""
        return [item, *(member for child in self.owned(item) for member in self.family(child))]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects.values() if item["kind"] == kind]

    def delete(self, item: Object, *, orphan: bool = False) -> None:
        """Delete an object, with or without its dependents."""
        metadata = item["metadata"]
        if "deletionTimestamp" in metadata:
            return
        metadata["deletionTimestamp"] = self.stamp()
        self.world.deleting(name=self.name_of(item))
        for child in self.owned(item):
            if orphan:
                del child["metadata"]["ownerReferences"]
                for member in self.family(child):
                    self.world.fact("orphaned", name=self.name_of(member))
            else:
                self.delete(child)
        self.deletion_began(item)

    def release(self, item: Object) -> None:
        """Remove the last hold on an object except its dependents."""
        self._released.add(item["metadata"]["uid"])
        self._settle(item)

    def tell(self, item: Object, reason: str, message: str) -> None:
        """Record an event."""
        about = {"kind": item["kind"], "name": item["metadata"]["name"], "uid": item["metadata"]["uid"]}
        event = {"involvedObject": about, "reason": reason, "message": message, "lastTimestamp": self.stamp()}
        self.events.append(event)

    def stamp(self) -> str:
        return datetime.fromtimestamp(self.world.now, UTC).isoformat(timespec="seconds")

    def close(self) -> None:
        """Delete the cluster with all its objects."""
        self.is_open = False
        for item in list(self.objects.values()):
            self._end(item)

    def _settle(self, item: Object) -> None:
        if self.exists(item) and item["metadata"]["uid"] in self._released and not self.owned(item):
            owners = _owners(item)
            self._end(item)
            for owner in [other for other in self.objects.values() if other["metadata"]["uid"] in owners]:
                self._settle(owner)

    def _end(self, item: Object) -> None:
        name = self.name_of(item)
        del self.objects[name]
        self.removed(item)
        self.world.fact("gone", name=name)

    def _prefix(self, collection: str, namespace: str | None) -> str:
        group, _, plural = collection.rpartition("/")
        group = group.rpartition("/")[0]
        return f"{self.cluster}/k8s/namespaces/{namespace}/" + (f"{group}/" if group else "") + plural


def set_condition(item: Object, kind: str, status: str, reason: str = "", message: str = "") -> None:
    """Write a condition into an object's status; it replaces the condition of the same type."""
    others = [present for present in item["status"].get("conditions", []) if present["type"] != kind]
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    item["status"]["conditions"] = [*others, condition]


def has_condition(item: Object, *kinds: str) -> bool:
    conditions = item["status"].get("conditions", [])
    return any(condition["type"] in kinds and condition["status"] == "True" for condition in conditions)


def is_selected(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels have all of `key=value` and `key`, and none of `!key`."""
    assert not re.search(r"[() ]|!=|==", selector), f"selector {selector!r} is not simulated"

    def is_met(term: str) -> bool:
        key, equal, value = term.partition("=")
        if key.startswith("!"):
            return key[1:] not in labels
        return labels.get(key) == value if equal else key in labels

    return all(map(is_met, selector.split(",")))


def _collection(item: Object) -> str:
    kind = str(item["kind"]).lower()
    ending = {"s": f"{kind}es", "y": f"{kind[:-1]}ies"}
    return f"{item['apiVersion']}/{ending.get(kind[-1], f'{kind}s')}"


def _labels(item: Object) -> dict[str, str]:
    labels: dict[str, str] = item["metadata"].get("labels", {})
    return labels


def _owners(item: Object) -> list[str]:
    return [owner["uid"] for owner in item["metadata"].get("ownerReferences", [])]


def _field(event: Object, path: str) -> Any:
    first, _, rest = path.partition(".")
    return event[first][rest] if rest else event[first]


def _status(message: str) -> Object:
    return {"kind": "Status", "message": message}


def _response(status: int, body: Object) -> Any:
    """kubernetes.client.rest.RESTResponse with the present state."""
    data = json.dumps(body).encode()
    return SimpleNamespace(status=status, reason="", data=data, headers={}, read=lambda: data)


def _broken(timed_out: bool) -> Exception:
    from urllib3.exceptions import HTTPError, ProtocolError, TimeoutError

    error: HTTPError = TimeoutError("Read timed out.") if timed_out else ProtocolError("Connection aborted.")
    return error
