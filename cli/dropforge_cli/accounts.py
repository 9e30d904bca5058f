"""The permissions of the deployment's accounts. Without one of them, a run would fail after its acceptance.

Policy Troubleshooter answers for any principal, including groups, roles and folders. testIamPermissions answers only
for the caller. https://cloud.google.com/policy-intelligence/docs/troubleshoot-access
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dropforge.base.settings import Settings
from dropforge.cloud import google_apis
from dropforge.cloud.google_apis import NotAsked, Refused
from dropforge.platforms import servers, targets
from dropforge.platforms.platform import Permission
from dropforge.spec import JobSpec

# Permissions that every run needs. Each platform declares the permissions of its targets and endpoints.
ALWAYS = (
    Permission("on_spec_uploaded", "project", "workflows.executions.create"),
    Permission("on_spec_uploaded", "specs_bucket", "storage.objects.get"),
    Permission("on_job_event", "project", "workflows.callbacks.send"),
    Permission("provision", "trainer_account", "iam.serviceAccounts.actAs"),
    Permission("teardown", "run_events_topic", "pubsub.topics.publish"),
    Permission("access", "lent_objects", "storage.objects.create"),
    Permission("trainer", "job_events_topic", "pubsub.topics.publish"),
)
_EXAMPLE_RUN = "preflight"  # no run has this id: see names.is_run_id


def needed(specs: Iterable[JobSpec]) -> list[Permission]:
    """Return the permissions that the specs need, without duplicates."""
    permissions = [*ALWAYS]
    for spec in specs:
        permissions += targets()[spec.target.type].permissions
        permissions += servers()[spec.serve.type].permissions if spec.serve else ()
    return list(dict.fromkeys(permissions))


def support_levels(project: str) -> dict[str, str]:
    """Return SUPPORTED, TESTING or NOT_SUPPORTED for every permission that custom roles of a project could have.

    https://cloud.google.com/iam/docs/reference/rest/v1/permissions/queryTestablePermissions (at most 1000 on a page)
    """
    body: dict[str, Any] = {
        "fullResourceName": f"//cloudresourcemanager.googleapis.com/projects/{project}",
        "pageSize": 1000,
    }
    levels: dict[str, str] = {}
    while True:
        answer = google_apis.post("iam", "v1/permissions:queryTestablePermissions", body)
        for permission in answer.get("permissions", ()):
            # Google leaves the level out where it is SUPPORTED.
            levels[permission["name"]] = permission.get("customRolesSupportLevel", "SUPPORTED")
        if not answer.get("nextPageToken"):
            return levels
        body["pageToken"] = answer["nextPageToken"]


def state(settings: Settings, use: Permission) -> str:
    """Return CAN_ACCESS, CANNOT_ACCESS, UNKNOWN_INFO or UNKNOWN_CONDITIONAL. Raises NotAsked and Refused."""
    access = {
        "principal": email(settings, use.account),
        "permission": use.permission,
        "fullResourceName": _resource(settings, use.scope),
        **_condition_context(settings, use.scope),
    }
    try:
        answer = google_apis.post("policytroubleshooter", "v3/iam:troubleshoot", {"accessTuple": access})
    except Refused as error:
        if error.status == 403:
            raise NotAsked(f"Policy Troubleshooter refuses the caller: {error}") from None
        raise
    return str(answer.get("overallAccessState", "no answer"))


def email(settings: Settings, account: str) -> str:
    """Return an account's e-mail. Its prefix is that of the trainer's account (terraform/service_accounts.tf)."""
    prefix, separator, domain = settings.trainer_service_account.partition("-trainer@")
    if not separator:
        raise NotAsked(
            f"the name {settings.trainer_service_account} is not from terraform/, so other names are unknown"
        )
    return f"{prefix}-{account.replace('_', '-')}@{domain}"


def _resource(settings: Settings, scope: str) -> str:
    """Return the full name of a scope (https://cloud.google.com/iam/docs/full-resource-names)."""
    iam = f"//iam.googleapis.com/projects/{settings.project}"
    names = {
        "specs_bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.specs_bucket}",
        "lent_objects": f"//storage.googleapis.com/projects/_/buckets/{settings.runs_bucket}",
        "run_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.run_events_topic)}",
        "job_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.job_events_topic)}",
        "trainer_account": f"{iam}/serviceAccounts/{settings.trainer_service_account}",
        "server_account": f"{iam}/serviceAccounts/{settings.server_service_account}",
    }
    return names.get(scope, f"//cloudresourcemanager.googleapis.com/projects/{settings.project}")


def _condition_context(settings: Settings, scope: str) -> dict[str, Any]:
    """Return the object that the condition of a grant is about: without it, the answer is UNKNOWN_CONDITIONAL.

    https://cloud.google.com/policy-intelligence/docs/reference/policytroubleshooter/rest/v3/iam/troubleshoot
    """
    if scope != "lent_objects":
        return {}
    name = f"projects/_/buckets/{settings.runs_bucket}/objects/models/{_EXAMPLE_RUN}/MANIFEST.json"
    service = "storage.googleapis.com"
    return {"conditionContext": {"resource": {"service": service, "type": f"{service}/Object", "name": name}}}
