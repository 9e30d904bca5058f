"""What the deployment's own accounts may do: permissions without which a run would fail only after it was accepted.

Policy Troubleshooter answers for other principals, groups, roles and folders included; testIamPermissions only for the
caller. https://cloud.google.com/policy-intelligence/docs/troubleshoot-access
"""

from __future__ import annotations

from collections.abc import Iterable

from dropforge.base.settings import Settings
from dropforge.platforms import servers, targets
from dropforge.platforms.platform import Permission
from dropforge.spec import JobSpec

from . import google_apis
from .google_apis import NotAsked, Refused

# What every run needs; the platforms declare what their targets and endpoints need.
ALWAYS = (
    Permission("on_spec_uploaded", "project", "workflows.executions.create"),
    Permission("on_spec_uploaded", "specs_bucket", "storage.objects.get"),
    Permission("on_job_event", "project", "workflows.callbacks.send"),
    Permission("provision", "trainer_account", "iam.serviceAccounts.actAs"),
    Permission("notify", "run_events_topic", "pubsub.topics.publish"),
    Permission("trainer", "runs_bucket", "storage.objects.get"),
    Permission("trainer", "job_events_topic", "pubsub.topics.publish"),
)


def needed(specs: Iterable[JobSpec]) -> list[Permission]:
    """The permissions that the specs need, each once."""
    permissions = [*ALWAYS]
    for spec in specs:
        permissions += targets()[spec.target.type].permissions
        permissions += servers()[spec.serve.type].permissions if spec.serve else ()
    return list(dict.fromkeys(permissions))


def state(settings: Settings, use: Permission) -> str:
    """CAN_ACCESS, CANNOT_ACCESS, UNKNOWN_INFO or UNKNOWN_CONDITIONAL. Raises NotAsked and Refused."""
    asked = {"principal": email(settings, use.account), "permission": use.permission}
    body = {"accessTuple": {**asked, "fullResourceName": _resource(settings, use.scope)}}
    try:
        answer = google_apis.post("policytroubleshooter", "v3/iam:troubleshoot", body)
    except Refused as error:
        if error.status == 403:
            raise NotAsked(f"Policy Troubleshooter may not be asked: {error}") from None
        raise
    return str(answer.get("overallAccessState", "no answer"))


def email(settings: Settings, account: str) -> str:
    """Accounts are called after the trainer's (terraform/service_accounts.tf)."""
    prefix, found, domain = settings.trainer_service_account.partition("-trainer@")
    if not found:
        raise NotAsked(f"{settings.trainer_service_account} is not named as terraform/ names accounts")
    return f"{prefix}-{account.replace('_', '-')}@{domain}"


def _resource(settings: Settings, scope: str) -> str:
    """https://cloud.google.com/iam/docs/full-resource-names"""
    iam = f"//iam.googleapis.com/projects/{settings.project}"
    named = {
        "specs_bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.specs_bucket}",
        "runs_bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.runs_bucket}",
        "run_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.run_events_topic)}",
        "job_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.job_events_topic)}",
        "trainer_account": f"{iam}/serviceAccounts/{settings.trainer_service_account}",
        "server_account": f"{iam}/serviceAccounts/{settings.server_service_account}",
    }
    return named.get(scope, f"//cloudresourcemanager.googleapis.com/projects/{settings.project}")
