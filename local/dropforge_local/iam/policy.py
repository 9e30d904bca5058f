"""Decides whether an account may do something: roles, bindings and conditions, compiled once.

`require` is what emulators call. It checks the account that the current request acts as (callers.py). Requests of the
project's owner, and the stack's own work, have no such account and may do everything.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dropforge_local.base.errors import ApiError

from .boundary import Boundary
from .conditions import Predicate, Resource, Unsupported, compile_condition
from .roles import ROLES_FILE, known_roles
from .terraform import Binding, Configuration

_PREFIX = "serviceAccount:"


class PolicyError(ValueError):
    """The policy names a role that the local stack does not know."""


@dataclass(frozen=True)
class _Grant:
    """A permission on a resource and everything below it. `resource` is "" for the project."""

    covers: Callable[[str], bool]
    condition: Predicate | None
    note: str = ""  # why the condition never holds here

    def allows(self, resource: str, attributes: Mapping[str, Any] | None) -> bool:
        if not self.covers(resource):
            return False
        return self.condition is None or self.condition(described(resource, attributes))


class Account:
    """The permissions of one account."""

    def __init__(
        self, email: str, grants: Mapping[str, tuple[_Grant, ...]], in_clusters: frozenset[tuple[str, str, str]]
    ) -> None:
        self.email = email
        self._grants = grants
        self._in_clusters = in_clusters

    def may(self, permission: str, resource: str = "", attributes: Mapping[str, Any] | None = None) -> bool:
        """Whether a binding grants the permission on the resource (its name without a service; "": the project)."""
        return any(grant.allows(resource, attributes) for grant in self._grants.get(permission, ()))

    def may_in_namespace(self, namespace: str, resource: str, verb: str) -> bool:
        """Whether a Role of a standing cluster grants a verb; `resource` as a Role names it, such as batch/jobs."""
        return (namespace, resource, verb) in self._in_clusters

    def require(self, permission: str, resource: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        """Raises PERMISSION_DENIED as Google's newer APIs word it, with the permission and the resource."""
        if self.may(permission, resource, attributes):
            return
        denied = f"Permission '{permission}' denied on resource '{resource or 'the project'}' (or it may not exist)."
        metadata = {"permission": permission, "resource": resource, "account": self.email}
        detail = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "IAM_PERMISSION_DENIED",
            "domain": "iam.googleapis.com",
            "metadata": metadata,
        }
        message = f"{denied} The account is {self.email}.{self.notes(permission, resource)}"
        raise ApiError("PERMISSION_DENIED", message, [detail])

    def within(self, boundary: Boundary) -> Account:
        """The account as a token within a Credential Access Boundary has it: both must allow a call."""
        return _Bounded(self, boundary)

    def notes(self, permission: str, resource: str) -> str:
        """Why conditions of bindings that would grant the permission do not hold here; "" without such bindings."""
        grants = self._grants.get(permission, ())
        return "".join(sorted({f" {grant.note}" for grant in grants if grant.note and grant.covers(resource)}))


class _Bounded(Account):
    def __init__(self, account: Account, boundary: Boundary) -> None:
        super().__init__(account.email, account._grants, frozenset())
        self._boundary = boundary

    def may(self, permission: str, resource: str = "", attributes: Mapping[str, Any] | None = None) -> bool:
        is_granted = super().may(permission, resource, attributes)
        return is_granted and self._boundary.allows(permission, described(resource, attributes))


current: contextvars.ContextVar[Account | None] = contextvars.ContextVar("account", default=None)


def require(permission: str, resource: str = "", attributes: Mapping[str, Any] | None = None) -> None:
    """Check the account of the current request. Raises PERMISSION_DENIED."""
    if (account := current.get()) is not None:
        account.require(permission, resource, attributes)


class Policy:
    """The accounts of a configuration. Raises PolicyError for an unknown role."""

    def __init__(self, configuration: Configuration) -> None:
        roles = {**known_roles(), **configuration.roles}
        named = frozenset(binding.resource for binding in configuration.bindings)
        grants: dict[str, dict[str, list[_Grant]]] = {}
        for binding in configuration.bindings:
            if binding.role not in roles:
                raise PolicyError(f"{binding.role} is not in {ROLES_FILE.name}; add it with the permissions used here")
            grant, held = _grant(binding, named), grants.setdefault(binding.member, {})
            for permission in roles[binding.role]:
                held.setdefault(permission, []).append(grant)
        in_clusters = dict(_in_clusters(configuration.cluster_objects))
        emails = {member.removeprefix(_PREFIX) for member in grants} | set(in_clusters)
        self._accounts = {
            email: Account(
                email,
                {name: tuple(found) for name, found in grants.get(_PREFIX + email, {}).items()},
                in_clusters.get(email, frozenset()),
            )
            for email in emails
        }

    def account(self, email: str) -> Account:
        """The account; one without any permission if no binding names it."""
        return self._accounts.get(email) or Account(email, {}, frozenset())

    def members(self, permission: str, resource: str) -> list[str]:
        """The e-mails of the accounts that have a permission on a resource."""
        return sorted(email for email, account in self._accounts.items() if account.may(permission, resource))


def _grant(binding: Binding, named: frozenset[str]) -> _Grant:
    covers = _covers(binding.resource, named)
    if not binding.condition:
        return _Grant(covers, None)
    try:
        return _Grant(covers, compile_condition(binding.condition))
    except Unsupported as error:
        note = f"The local stack cannot evaluate the condition {binding.condition!r} of {binding.role}: {error}."
        return _Grant(covers, lambda resource: False, note)


def _covers(resource: str, named: frozenset[str]) -> Callable[[str], bool]:
    """Whether a resource is the given resource or below it.

    A last "*" stands for every name with that beginning which no binding in `named` says more exactly.
    """
    if not resource:
        return lambda name: True
    if not resource.endswith("*"):
        below = f"{resource}/"
        return lambda name: name == resource or name.startswith(below)
    start, parent = resource[:-1], resource.rpartition("/")[0] + "/"
    closer = tuple(
        other[:-1] for other in named if other.endswith("*") and other != resource and other.startswith(start)
    )

    def is_other(name: str) -> bool:
        own = parent + name[len(parent) :].partition("/")[0]
        return own.startswith(start) and own not in named and not own.startswith(closer)

    return is_other


def described(name: str, attributes: Mapping[str, Any] | None) -> Resource:
    """A resource with the type and the service that conditions see."""
    if not name.startswith("projects/_/buckets/"):
        return Resource(name, attributes=attributes)
    kind = "Object" if "/objects/" in name else "Bucket"
    return Resource(name, f"storage.googleapis.com/{kind}", "storage.googleapis.com", attributes)


def _in_clusters(objects: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, frozenset[tuple[str, str, str]]]]:
    """The verbs of each user in each namespace, from Roles and RoleBindings."""
    found = list(objects)
    rules = {_key(item): frozenset(_verbs(item)) for item in found if item["kind"] == "Role"}
    for item in found:
        if item["kind"] == "RoleBinding":
            namespace = item["metadata"]["namespace"]
            for subject in item["subjects"]:
                yield subject["name"], rules[namespace, item["roleRef"]["name"]]


def _key(role: Mapping[str, Any]) -> tuple[str, str]:
    return role["metadata"]["namespace"], role["metadata"]["name"]


def _verbs(role: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                full = f"{group}/{resource}" if group else resource
                yield from ((role["metadata"]["namespace"], full, verb) for verb in rule["verbs"])
