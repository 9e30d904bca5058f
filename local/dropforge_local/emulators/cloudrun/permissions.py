"""The permissions that each method needs: https://cloud.google.com/run/docs/reference/iam/permissions (2026-11-23).

Whoever creates a job or a service also needs to read its images, and to act as its service account.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..kit import access

INVOKE = "run.routes.invoke"
_IMAGE = re.compile(r"([a-z0-9-]+)-docker\.pkg\.dev/([^/]+)/([^/]+)/")
NEEDS = access.table(
    """
    create_job run.jobs.create parent
    list_jobs run.jobs.list parent
    get_job run.jobs.get name
    update_job run.jobs.update job.name
    delete_job run.jobs.delete name
    run_job run.jobs.run name
    list_executions run.executions.list parent
    get_execution run.executions.get name
    cancel_execution run.executions.cancel name
    delete_execution run.executions.delete name
    list_tasks run.tasks.list parent
    get_task run.tasks.get name
    create_service run.services.create parent
    list_services run.services.list parent
    get_service run.services.get name
    update_service run.services.update service.name
    delete_service run.services.delete name
    list_revisions run.revisions.list parent
    get_revision run.revisions.get name
    delete_revision run.revisions.delete name
    get_operation run.operations.get name
    delete_operation run.operations.delete name
    wait_operation run.operations.get name
    list_operations run.operations.list name
    """
)


def of_job(request: Any) -> Iterator[tuple[str, str]]:
    """The permissions that the content of a job needs. A job that starts with its creation needs run.jobs.run too."""
    name = getattr(request, "parent", "") or request.job.name
    yield from _of_template(request.job.template.template, name)
    if request.job.start_execution_token or request.job.run_execution_token:
        yield "run.jobs.run", f"{name}/jobs/{request.job_id}" if request.DESCRIPTOR.name == "CreateJobRequest" else name


def of_service(request: Any) -> Iterator[tuple[str, str]]:
    """An update whose mask leaves the template out has no template to check."""
    if request.DESCRIPTOR.name == "UpdateServiceRequest" and not _has_template(request.update_mask.paths):
        return
    name = getattr(request, "parent", "") or request.service.name
    yield from _of_template(request.service.template, name)


FURTHER = {
    "create_job": of_job,
    "update_job": of_job,
    "create_service": of_service,
    "update_service": of_service,
}


def _has_template(paths: Sequence[str]) -> bool:
    return not paths or any(path == "*" or path.partition(".")[0] == "template" for path in paths)


def _of_template(template: Any, name: str) -> Iterator[tuple[str, str]]:
    yield access.acts_as(template.service_account, name.split("/")[1])
    for container in template.containers:
        if match := _IMAGE.match(container.image):
            location, project, repository = match.groups()
            resource = f"projects/{project}/locations/{location}/repositories/{repository}"
            yield "artifactregistry.repositories.downloadArtifacts", resource
