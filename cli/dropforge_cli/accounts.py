"""What the deployment's own accounts may do: permissions without which a run would fail only after it was accepted.

Policy Troubleshooter answers for other principals, groups, roles and folders included; testIamPermissions only for the
caller. https://cloud.google.com/policy-intelligence/docs/troubleshoot-access
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dropforge.base.settings import Settings

from . import google_apis
from .google_apis import NotAsked, Refused


class Use(NamedTuple):
    """A permission that an account needs, by terraform/permissions.yaml; `of` is a stage and its type, "" for all."""

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
    """What specs with these stages (`target gke`, `serve cloud_run`) need."""
    wanted = {"", *stages}
    return (use for use in USES if use.of in wanted)


def state(settings: Settings, use: Use) -> str:
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
