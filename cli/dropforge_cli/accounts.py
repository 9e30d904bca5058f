"""The permissions of the deployment's accounts. Without one of them, a run would fail after its acceptance.

Policy Troubleshooter answers for any principal, including groups, roles and folders. testIamPermissions answers only
for the caller. https://cloud.google.com/policy-intelligence/docs/troubleshoot-access
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dropforge.base.settings import Settings

from . import google_apis
from .google_apis import NotAsked, Refused


class Use(NamedTuple):
    """A permission of an account in terraform/permissions.yaml. `of` is `target TYPE`, `serve TYPE`, or "" for all."""

    account: str
    scope: str
    permission: str
    of: str = ""


USES = (
    Use("on_spec_uploaded", "project", "workflows.executions.create"),
    Use("on_spec_uploaded", "specs_bucket", "storage.objects.get"),
    Use("on_job_event", "project", "workflows.callbacks.send"),
    Use("provision", "trainer_account", "iam.serviceAccounts.actAs"),
    Use("provision", "project", "run.jobs.create", "target cloud_run"),
    Use("provision", "clusters", "container.clusters.connect", "target gke"),
    Use("provision", "clusters", "container.clusters.connect", "target ray"),
    Use("provision", "tpus", "tpu.nodes.create", "target tpu_vm"),
    Use("deploy", "server_account", "iam.serviceAccounts.actAs", "serve cloud_run"),
    Use("deploy", "project", "run.services.create", "serve cloud_run"),
    Use("deploy", "clusters", "container.clusters.connect", "serve gke"),
    Use("deploy", "server_account", "iam.serviceAccounts.actAs", "serve tpu_vm"),
    Use("deploy", "tpus", "tpu.nodes.create", "serve tpu_vm"),
    Use("notify", "run_events_topic", "pubsub.topics.publish"),
    Use("trainer", "runs_bucket", "storage.objects.get"),
    Use("trainer", "job_events_topic", "pubsub.topics.publish"),
)


def used(stages: Iterable[str]) -> Iterator[Use]:
    """Yield the permissions that specs with these parts (`target gke`, `serve cloud_run`) need."""
    parts = {"", *stages}
    return (use for use in USES if use.of in parts)


def state(settings: Settings, use: Use) -> str:
    """Return CAN_ACCESS, CANNOT_ACCESS, UNKNOWN_INFO or UNKNOWN_CONDITIONAL. Raises NotAsked and Refused."""
    access = {"principal": email(settings, use.account), "permission": use.permission}
    body = {"accessTuple": {**access, "fullResourceName": _resource(settings, use.scope)}}
    try:
        answer = google_apis.post("policytroubleshooter", "v3/iam:troubleshoot", body)
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
        "runs_bucket": f"//storage.googleapis.com/projects/_/buckets/{settings.runs_bucket}",
        "run_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.run_events_topic)}",
        "job_events_topic": f"//pubsub.googleapis.com/{settings.topic(settings.job_events_topic)}",
        "trainer_account": f"{iam}/serviceAccounts/{settings.trainer_service_account}",
        "server_account": f"{iam}/serviceAccounts/{settings.server_service_account}",
    }
    return names.get(scope, f"//cloudresourcemanager.googleapis.com/projects/{settings.project}")
