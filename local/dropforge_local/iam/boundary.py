"""Credential Access Boundaries: the most that a token of the Security Token Service may do.

https://cloud.google.com/iam/docs/reference/sts/rest/v1/AccessBoundary (2026-11-26): up to 10 rules, each for a bucket,
with the roles whose permissions it leaves, and an optional condition on the name of an object or the prefix of a list,
of up to 2,048 characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .conditions import Resource, Unsupported, compile_condition
from .roles import known_roles

MOST_RULES = 10
MOST_CHARACTERS = 2048  # of an expression
_RESOURCE = "//storage.googleapis.com/projects/_/buckets/"
_ROLE = "inRole:"


@dataclass(frozen=True)
class _Rule:
    bucket: str
    permissions: frozenset[str]
    condition: Callable[[Resource], bool]

    def allows(self, permission: str, resource: Resource) -> bool:
        is_there = resource.name == self.bucket or resource.name.startswith(f"{self.bucket}/")
        return permission in self.permissions and is_there and self.condition(resource)


class Boundary:
    """The rules of a boundary. Raises ValueError for what the service refuses or the local stack cannot evaluate."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        rules = document.get("accessBoundary", {}).get("accessBoundaryRules")
        if not isinstance(rules, list) or not 1 <= len(rules) <= MOST_RULES:
            raise ValueError(f"accessBoundary.accessBoundaryRules has not 1 to {MOST_RULES} rules")
        self._rules = [_rule(rule) for rule in rules]

    def allows(self, permission: str, resource: Resource) -> bool:
        """Whether a rule leaves a permission on a resource."""
        return any(rule.allows(permission, resource) for rule in self._rules)


@lru_cache(256)
def boundary_of(text: str) -> Boundary:
    """The boundary in a token: JSON. Raises ValueError."""
    return Boundary(json.loads(text))


def _rule(rule: Mapping[str, Any]) -> _Rule:
    resource, roles = rule.get("availableResource", ""), rule.get("availablePermissions", [])
    if not resource.startswith(_RESOURCE) or "/" in resource.removeprefix(_RESOURCE):
        raise ValueError(f"availableResource is {resource!r}; expected {_RESOURCE}BUCKET")
    known = known_roles()
    names = [role.removeprefix(_ROLE) for role in roles]
    if not names or any(
        not role.startswith(_ROLE) or name not in known for role, name in zip(roles, names, strict=True)
    ):
        raise ValueError(f"availablePermissions is {roles!r}; expected {_ROLE} and a role of roles.yaml")
    expression = rule.get("availabilityCondition", {}).get("expression", "true")
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters; expected at most {MOST_CHARACTERS}")
    try:
        condition = compile_condition(expression)
    except Unsupported as error:
        raise ValueError(f"the condition {expression!r}: {error}") from None
    permissions = frozenset(permission for name in names for permission in known[name])
    return _Rule(resource.removeprefix("//storage.googleapis.com/"), permissions, condition)
