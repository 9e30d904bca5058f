"""Faults on purpose: stock-outs, quotas, refused and slow API calls. The database keeps the switches."""

from __future__ import annotations

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.faults import Rule, Switches, check_choice
from .kinds import KINDS
from .refusals import REASONS, Refusal

VERBS = {
    "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "log", "proxy", "exec",
    "portforward", "*",
}  # fmt: skip
RESOURCES = {kind.plural for kind in KINDS} | {"*"}


class Faults(Switches):
    """The switches of all clusters: `stockout` names accelerators, `quota` limits them, `fail_next` fails API calls."""

    RULE = frozenset(
        ("cluster", "verb", "resource", "code", "count", "after_effect", "delay_seconds", "retry_after", "message")
    )

    def __init__(self, db: Database) -> None:
        actions = {"preempt": dict, "evict": dict}
        super().__init__(db, "kubernetes_settings", {"stockout": [], "quota": {}}, actions=actions)

    def checked_rule(self, rule: Rule) -> Rule:
        check_choice("verb", rule.get("verb", "*"), VERBS)
        check_choice("resource", rule.get("resource", "*"), RESOURCES)
        if "code" in rule and (not isinstance(rule["code"], int) or not 400 <= rule["code"] < 600):
            raise ApiError("INVALID_ARGUMENT", f"fail_next.code is {rule['code']!r}; expected an HTTP error's number")
        return {"cluster": "", "verb": "*", "resource": "*", **rule}

    def refusal(self, rule: Rule) -> Exception | None:
        if not (code := rule.get("code")):
            return None
        headers = {"Retry-After": str(rule["retry_after"])} if "retry_after" in rule else {}
        message = rule.get("message", f"{code} on purpose (faults of the local stack)")
        return Refusal(code, message, reason=REASONS.get(code, "Unknown"), headers=headers)

    def is_stocked_out(self, accelerator: str) -> bool:
        return accelerator in self.get("stockout")

    def quota(self, accelerator: str) -> int | None:
        """The quota of a cluster for the accelerator; None without a quota."""
        value = self.get("quota").get(accelerator)
        return None if value is None else int(value)

    def take_for(self, cluster: str, verb: str, resource: str) -> Rule | None:
        """The rule for this call, counted down; None without such a rule."""
        own = {"verb": (verb, "*"), "resource": (resource, "*")}
        return self.take(
            lambda rule: rule["cluster"] in cluster and all(rule[key] in values for key, values in own.items())
        )
