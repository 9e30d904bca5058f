"""The permission of IAM that a request to a cluster needs. Every request needs `CONNECT` too.

In a standing cluster, a Role may grant what IAM does not grant.
https://cloud.google.com/kubernetes-engine/docs/reference/api-permissions (2026-11-23)
"""

from __future__ import annotations

from dropforge_local.iam.policy import Account

from .paths import Target

CONNECT = "container.clusters.connect"
_COLLECTIONS = {
    name.lower(): name
    for name in (
        "configMaps",
        "cronJobs",
        "horizontalPodAutoscalers",
        "persistentVolumeClaims",
        "replicaSets",
        "serviceAccounts",
    )
}
_BUILT_IN_GROUPS = ("", "apps", "autoscaling", "batch", "coordination.k8s.io")
_VERBS = {"watch": "list", "patch": "update", "deletecollection": "delete"}
_SUBRESOURCES = {"log": "getLogs", "portforward": "portForward"}
_STREAMS = ("log", "exec", "portforward")  # a Role grants what a GET asks for as `get`


def iam_permission(target: Target, verb: str) -> str:
    """The permission that grants a verb in every cluster of the project."""
    if target.kind.group not in _BUILT_IN_GROUPS and "." in target.kind.group:
        return f"container.thirdPartyObjects.{_VERBS.get(verb, verb)}"
    collection = _COLLECTIONS.get(target.kind.plural, target.kind.plural)
    if target.subresource in _SUBRESOURCES:
        return f"container.{collection}.{_SUBRESOURCES[target.subresource]}"
    if target.subresource == "status":
        return f"container.{collection}.{'getStatus' if verb == 'get' else 'updateStatus'}"
    return f"container.{collection}.{target.subresource or _VERBS.get(verb, verb)}"


def refusal(account: Account, cluster: str, target: Target, verb: str, *, has_roles: bool) -> str:
    """Why an account may not make a request; "" if it may. `has_roles`: the cluster has the deployment's Roles."""
    if not account.may(CONNECT, cluster):
        return f'permission "{CONNECT}" on {cluster} is required of "{account.email}"'
    role_verb = "get" if verb in _STREAMS else verb
    if has_roles and account.may_in_namespace(target.namespace, target.resource, role_verb):
        return ""
    permission = iam_permission(target, verb)
    if account.may(permission, cluster):
        return ""
    plural = f"{target.kind.plural}/{target.subresource}" if target.subresource else target.kind.plural
    name = f' "{target.name}"' if target.name else ""
    where = f' in the namespace "{target.namespace}"' if target.namespace else " at the cluster scope"
    full = f"{plural}.{target.kind.group}" if target.kind.group else plural
    return (
        f'{full}{name} is forbidden: User "{account.email}" cannot {role_verb} resource "{plural}" in API group '
        f'"{target.kind.group}"{where}: requires one of ["{permission}"] permission(s).'
    )
