"""Create, update and delete objects by the API's rules: defaults, admission, validation and finalizers."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dropforge_local.base.clock import Clock

from . import admission, rules
from .applying import Owners, after_update, entries
from .config import KubernetesConfig
from .defaults import set_create_defaults, set_defaults
from .kinds import JOB, NAMESPACE, POD, SERVICE, SERVICE_ACCOUNT, Kind
from .refusals import (
    Cause,
    Refusal,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    forbidden_field,
    invalid,
    not_found,
)
from .schema import check
from .store import Object, Store
from .times import timestamp

ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so that no words appear
SYSTEM_METADATA = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
ORPHAN, FOREGROUND = "orphan", "foregroundDeletion"
CONTROLLERS = "kube-controller-manager"  # who writes in the name of no client
POLICIES = ("Background", "Foreground", "Orphan")
T = TypeVar("T")


@dataclass(frozen=True)
class DeleteOptions:
    """Options of a DELETE; `propagation` is an entry of POLICIES, or empty for the kind's default."""

    propagation: str = ""
    grace_seconds: int | None = None
    uid: str = ""
    resource_version: str = ""


class _Undo(Exception):
    """Rolls back a dry run."""


class Objects:
    """A cluster's objects, by the API's rules."""

    def __init__(self, store: Store, clock: Clock, config: KubernetesConfig) -> None:
        self.store = store
        self.clock = clock
        self._autopilot = config.autopilot
        self._dropped = config.ray_operator.absent

    def parse(self, kind: Kind, item: Any) -> tuple[Object, list[str]]:
        """A manifest as an object without unknown fields, and the names of the unknown fields."""
        if not isinstance(item, dict):
            raise bad_request(f"the body is a JSON {type(item).__name__}; expected an object")
        given = (item.get("apiVersion", kind.api_version), item.get("kind", kind.name))
        if given != (kind.api_version, kind.name):
            raise bad_request(
                f"the object provided is unrecognized (must be of type {kind.name}): {given[1]} of {given[0]}"
            )
        body = {key: value for key, value in item.items() if key not in ("apiVersion", "kind")}
        if kind.schema:
            clean, findings = check(kind.schema, body, self._dropped)
        else:
            metadata, findings = check("ObjectMeta", body.get("metadata") or {})
            clean = {**body, "metadata": metadata}
            findings.unknown = [f"metadata.{name}" for name in findings.unknown]
        # An empty field counts as missing, so that a write that only adds empty fields changes nothing.
        clean["metadata"] = {key: value for key, value in clean.get("metadata", {}).items() if value not in ({}, [])}
        self._refuse(kind, clean, findings.causes)
        return {"apiVersion": kind.api_version, "kind": kind.name, **clean}, findings.unknown

    def read(self, kind: Kind, namespace: str, name: str) -> Object:
        """The object. Refuses with 404 if it does not exist."""
        if (item := self.store.find(kind, namespace, name)) is None:
            raise not_found(kind, name)
        return item

    def create(self, kind: Kind, namespace: str, item: Object, owners: Owners | None = None) -> Object:
        """Store a new object (as `parse` gave it), after defaults, admission and validation.

        `owners` of its fields are known if the object is applied.
        """
        with self.store.db.transaction():
            metadata = item["metadata"]
            self._check_namespace(kind, namespace, metadata)
            if metadata.get("resourceVersion"):
                raise bad_request("resourceVersion should not be set on objects to be created")
            for field in (*SYSTEM_METADATA, "managedFields", "selfLink"):
                metadata.pop(field, None)
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = metadata["generateName"][:58] + random_suffix()
            metadata.setdefault("name", "")
            if kind.namespaced:
                metadata["namespace"] = namespace
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = timestamp(self.clock.now())
            if kind.has_status and kind != POD:
                metadata["generation"] = 1
            if kind.has_status:
                item.pop("status", None)
            self._complete(kind, item)
            set_create_defaults(kind, item)
            self._refuse(kind, item, list(rules.problems(kind, item)))
            admission.admit(kind, item, self.store, autopilot=self._autopilot)
            if self.store.find(kind, namespace, metadata["name"]) is not None:
                raise already_exists(kind, metadata["name"])
            if kind == SERVICE:
                self._allocate_address(item)
            if owners is not None:
                metadata["managedFields"] = entries(kind, owners, None, metadata["creationTimestamp"])
            created = self.store.insert(kind, item)
            if kind == NAMESPACE:
                # The real controller creates the account a moment later, and the real API refuses earlier pods.
                account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
                self.create(SERVICE_ACCOUNT, metadata["name"], account)
            return created

    def update(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        item: Object,
        *,
        status: bool = False,
        owners: Owners | None = None,
        manager: str = CONTROLLERS,
    ) -> Object:
        """Replace an object's desired state, or with `status` its status; 409 if `item` is not the latest version.

        `owners` of its fields are known if the object is applied; `manager` is the writer otherwise.
        """
        with self.store.db.transaction():
            old = self.read(kind, namespace, name)
            self._check_same(kind, name, item, old)
            if status:
                return self.store.replace(kind, _with_status(old, item))
            new = _merged(kind, item, old)
            if kind.namespaced:
                new["metadata"]["namespace"] = namespace
            self._complete(kind, new, old)
            self._refuse(kind, new, [*rules.problems(kind, new), *rules.update_problems(kind, new, old)])
            self._check_finalizers(kind, new, old)
            admission.admit(kind, new, self.store, autopilot=self._autopilot, old=old)
            if "generation" in old["metadata"] and new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"]["generation"] + 1
            if owners is None and "managedFields" in old["metadata"]:
                owners = after_update(kind, old, new, manager)
            if owners is not None:
                new["metadata"]["managedFields"] = entries(kind, owners, old, timestamp(self.clock.now()))
            return self.settle(kind, new)

    def delete(self, kind: Kind, namespace: str, name: str, options: DeleteOptions) -> tuple[Object, bool]:
        """Delete an object or begin its deletion; return the object and whether it no longer exists."""
        with self.store.db.transaction():
            item = self.read(kind, namespace, name)
            _check_preconditions(kind, name, item, options)
            if kind == NAMESPACE and name in ("default", "kube-system"):
                raise forbidden(kind, name, "this namespace may not be deleted")
            metadata = item["metadata"]
            grace = self._grace(kind, item, options)
            begun = "deletionTimestamp" in metadata
            if not begun or grace < metadata.get("deletionGracePeriodSeconds", 0):
                metadata["deletionTimestamp"] = timestamp(math.ceil(self.clock.now() + grace))
                metadata["deletionGracePeriodSeconds"] = grace
                if "generation" in metadata and not begun:
                    metadata["generation"] += 1
            self._set_propagation(kind, item, options.propagation)
            if kind == NAMESPACE:
                item["status"] = {**item.get("status", {}), "phase": "Terminating"}
            settled = self.settle(kind, item)
            return settled, self.store.find(kind, namespace, name) is None

    def delete_item(self, kind: Kind, item: Object, options: DeleteOptions) -> tuple[Object, bool]:
        """Like `delete`, for an object that the caller has read."""
        return self.delete(kind, item["metadata"].get("namespace", ""), item["metadata"]["name"], options)

    def remove_finalizer(self, kind: Kind, item: Object, finalizer: str) -> None:
        """Remove a finalizer from an object, and the object too if only this finalizer prevented its deletion."""
        finalizers = item["metadata"].get("finalizers", [])
        if finalizer in finalizers:
            item["metadata"]["finalizers"] = [kept for kept in finalizers if kept != finalizer]
            self.settle(kind, item)

    def settle(self, kind: Kind, item: Object) -> Object:
        """Write an object back, or remove it if it is being deleted and no finalizer or grace time holds it."""
        metadata = item["metadata"]
        if not metadata.get("finalizers"):
            metadata.pop("finalizers", None)
        held = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds", 0) > 0
        if kind == NAMESPACE:
            held = held or item.get("spec", {}).get("finalizers")
        if "deletionTimestamp" in metadata and not held:
            self.store.remove(kind, item)
            return item
        return self.store.replace(kind, item)

    def dry_run(self, work: Callable[[], T]) -> T:
        """Return the result of `work` and roll back everything that it wrote."""
        results: list[T] = []
        try:
            with self.store.db.transaction():
                results.append(work())
                raise _Undo
        except _Undo:
            return results[0]

    def _check_namespace(self, kind: Kind, namespace: str, metadata: Object) -> None:
        if not kind.namespaced:
            return
        given = metadata.get("namespace") or namespace
        if given != namespace:
            raise bad_request(
                f"the namespace of the provided object does not match the namespace sent on the request ({given!r},"
                f" {namespace!r})"
            )
        stored = self.read(NAMESPACE, "", namespace)
        if stored["status"]["phase"] == "Terminating":
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(kind, metadata.get("name", ""), why)

    def _complete(self, kind: Kind, item: Object, old: Object | None = None) -> None:
        if kind == SERVICE and old is not None:
            for field in ("clusterIP", "clusterIPs"):  # clients may omit them: the server assigned them
                if not item["spec"].get(field) and field in old["spec"]:
                    item["spec"][field] = old["spec"][field]
        if kind == JOB and old is not None and "selector" in old["spec"]:
            item["spec"].setdefault("selector", old["spec"]["selector"])
        set_defaults(kind, item)

    def _refuse(self, kind: Kind, item: Object, causes: list[Cause]) -> None:
        if causes:
            metadata = item["metadata"]
            raise invalid(kind, metadata.get("name") or metadata.get("generateName", ""), causes)

    def _check_same(self, kind: Kind, name: str, item: Object, old: Object) -> None:
        metadata, current = item["metadata"], old["metadata"]
        if metadata.get("name", name) != name:
            given = metadata["name"]
            raise bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")
        if metadata.get("namespace", current.get("namespace")) != current.get("namespace"):
            raise bad_request("the namespace of the object does not match the namespace on the request")
        if metadata.get("uid", current["uid"]) != current["uid"]:
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {current['uid']}"
            raise conflict(kind, name, why)
        if metadata.get("resourceVersion") not in (None, "", current["resourceVersion"]):
            raise conflict(kind, name)

    def _check_finalizers(self, kind: Kind, new: Object, old: Object) -> None:
        before, after = (item["metadata"].get("finalizers", []) for item in (old, new))
        added = [finalizer for finalizer in after if finalizer not in before]
        if added and "deletionTimestamp" in old["metadata"]:
            text = f"no new finalizers can be added if the object is being deleted, found new finalizers {added!r}"
            raise invalid(kind, old["metadata"]["name"], [forbidden_field("metadata.finalizers", text)])

    def _grace(self, kind: Kind, item: Object, options: DeleteOptions) -> int:
        """Seconds until removal. Only pods get a grace time, unless they were never scheduled or have ended."""
        if kind != POD:
            return 0
        if not item["spec"].get("nodeName") or item["status"]["phase"] in ("Succeeded", "Failed"):
            return 0
        default = item["spec"]["terminationGracePeriodSeconds"]
        return max(0, default if options.grace_seconds is None else options.grace_seconds)

    def _set_propagation(self, kind: Kind, item: Object, policy: str) -> None:
        """Add the finalizer of the policies Orphan and Foreground; the garbage collector removes it at its end."""
        # By default the pods of a job survive its deletion: a default from before garbage collection existed.
        policy = policy or ("Orphan" if kind == JOB else "")
        if not policy:
            return
        finalizers = [kept for kept in item["metadata"].get("finalizers", ()) if kept not in (ORPHAN, FOREGROUND)]
        extra = {"Orphan": ORPHAN, "Foreground": FOREGROUND}.get(policy)
        item["metadata"]["finalizers"] = [*finalizers, extra] if extra else finalizers

    def _allocate_address(self, item: Object) -> None:
        """Assign an address like GKE's; no process listens there (services.py annotates the real local address)."""
        spec = item["spec"]
        if not spec.get("clusterIP"):
            number = self.store.revision() + 1
            spec["clusterIP"] = f"34.118.{224 + number // 250 % 32}.{number % 250 + 2}"
        spec["clusterIPs"] = [spec["clusterIP"]]


def random_suffix() -> str:
    return "".join(random.choices(ALPHABET, k=5))


def strict_error(kind: Kind, unknown: list[str]) -> Refusal:
    """The refusal of unknown fields under fieldValidation=Strict."""
    listed = ", ".join(f'unknown field "{name}"' for name in unknown)
    return bad_request(
        f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: strict decoding error: {listed}'
    )


def _merged(kind: Kind, item: Object, old: Object) -> Object:
    """A client's new version, with the fields that only the server may write taken from the old version."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in SYSTEM_METADATA}
    for field in ("name", "namespace", *SYSTEM_METADATA):
        if field in old["metadata"]:
            metadata[field] = old["metadata"][field]
    metadata.setdefault("generateName", old["metadata"].get("generateName"))
    metadata = {key: value for key, value in metadata.items() if value is not None and key != "managedFields"}
    new = {**item, "metadata": metadata}
    if kind.has_status:
        new.pop("status", None)
        if "status" in old:
            new["status"] = old["status"]
    if kind == NAMESPACE:
        new["spec"] = old["spec"]
    return new


def _with_status(old: Object, item: Object) -> Object:
    status = {"status": item["status"]} if "status" in item else {}
    return {**{key: value for key, value in old.items() if key != "status"}, **status}


def _check_preconditions(kind: Kind, name: str, item: Object, options: DeleteOptions) -> None:
    metadata = item["metadata"]
    if options.uid and options.uid != metadata["uid"]:
        why = f"the UID in the precondition ({options.uid}) does not match the UID in record ({metadata['uid']})."
        raise conflict(kind, name, f"{why} The object might have been deleted and then recreated")
    if options.resource_version and options.resource_version != metadata["resourceVersion"]:
        why = (
            f"the ResourceVersion in the precondition ({options.resource_version}) does not match the ResourceVersion "
            f"in record ({metadata['resourceVersion']}). The object might have been modified"
        )
        raise conflict(kind, name, why)
