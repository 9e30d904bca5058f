"""What the account of a request may do in a cluster: SelfSubjectAccessReview and SelfSubjectRulesReview.

https://kubernetes.io/docs/reference/access-authn-authz/authorization/#checking-api-access
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .kinds import KINDS
from .paths import Target
from .refusals import bad_request
from .store import Object

GROUP = "authorization.k8s.io/v1"
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
EVERYTHING = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}

Refuse = Callable[[Target, str], str]
"""Why the account may not do a verb to a target; "" if it may."""


def review(kind: str, body: Any, refuse: Refuse | None) -> Object:
    """The answer to a review. `refuse` is None for the owner, who may do everything."""
    given = (body.get("apiVersion", GROUP), body.get("kind", kind)) if isinstance(body, dict) else ()
    if given != (GROUP, kind) or not isinstance(body.get("spec"), dict):
        raise bad_request(f"the body is no {kind} of {GROUP} with a spec")
    status = STATUSES[kind](body["spec"], refuse)
    return {"apiVersion": GROUP, "kind": kind, "metadata": {}, "spec": body["spec"], "status": status}


def _access(spec: Object, refuse: Refuse | None) -> Object:
    asked = spec.get("resourceAttributes") or {}
    if not asked and not spec.get("nonResourceAttributes"):
        raise bad_request("spec: exactly one of nonResourceAttributes or resourceAttributes must be specified")
    if refuse is None or not asked:
        return {"allowed": True}
    found = (known for known in KINDS if (known.group, known.plural) == (asked.get("group", ""), asked.get("resource")))
    if (kind := next(found, None)) is None:
        return {"allowed": False, "reason": f"this cluster has no resource {asked.get('resource')!r}"}
    target = Target(kind, asked.get("namespace", ""), asked.get("name", ""), asked.get("subresource", ""))
    reason = refuse(target, asked.get("verb", ""))
    return {"allowed": not reason, **({"reason": reason} if reason else {})}


def _rules(spec: Object, refuse: Refuse | None) -> Object:
    rules = [EVERYTHING]
    if refuse is not None:
        allowed = {
            kind: [verb for verb in VERBS if not refuse(Target(kind, spec.get("namespace", "")), verb)]
            for kind in KINDS
            if kind.namespaced
        }
        rules = [
            {"verbs": verbs, "apiGroups": [kind.group], "resources": [kind.plural]}
            for kind, verbs in allowed.items()
            if verbs
        ]
    return {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}


STATUSES = {"SelfSubjectAccessReview": _access, "SelfSubjectRulesReview": _rules}
PATHS = {f"/apis/{GROUP}/{kind.lower()}s": kind for kind in STATUSES}
