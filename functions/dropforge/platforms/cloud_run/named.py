"""Named endpoints on Cloud Run: one service, whose traffic moves between revisions by their names.

No call names a revision in the template: the name would stay there, and later updates would be refused
(https://github.com/googleapis/google-cloud-python/issues/11870). Only a tag without a share follows the latest
revision. Every update carries the service's etag.
API: https://cloud.google.com/run/docs/reference/rest/v2/projects.locations.services
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.classify import classify, classify_create, classify_first_look, client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.platforms.named import (
    Candidate,
    Counted,
    Fence,
    NamedServer,
    Reached,
    RevisionGone,
    Share,
    check_owner,
    no_fence,
    owner_labels,
    revision_labels,
)
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Waits

from .counting import counted
from .preview import with_launch_stage
from .serve import KIND, LOOK_SECONDS, READY_WAIT_SECONDS, CloudRunService, deployment_failure, revision_template
from .spec import CloudRunServe

BY_NAME = "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION"
LATEST = "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST"
Json = dict[str, Any]


class NamedService(NamedServer):
    """See `NamedServer` for the contract of each verb."""

    keeps_instances = False  # without a share, a revision scales to zero
    keeps_revisions = True

    def drain_seconds(self, cloud: Cloud) -> int:
        return 0

    def region(self, deployment: Deployment) -> str:
        return CloudRunService().region(deployment)

    def service_name(self, deployment: Deployment, existing: str = "") -> str:
        parent = f"projects/{deployment.settings.project}/locations/{self.region(deployment)}"
        return f"{parent}/services/{names.named_endpoint(deployment.endpoint)}"

    def why_whole(self, service: str) -> str:
        return ""

    def deploy(
        self, cloud: Cloud, candidate: Candidate, shares: list[Share], fence: Fence = no_fence
    ) -> Reached | Waits:
        name = self.service_name(candidate.deployment)
        try:
            service = _find(cloud, name)
        except client_errors() as error:
            raise classify_first_look(error) from error
        try:
            if service is None:  # the first revision; or somebody has deleted the service, and nothing serves
                _create(cloud, name, service_request(candidate, []))
            else:
                check_owner(service.name, service.labels, cloud.settings, candidate.endpoint)
                if not _is_of(service, candidate):
                    _update(cloud, service, service_request(candidate, _present(cloud, name, shares)), fence)
            return _wait(cloud, name, lambda found: _reached(found, candidate)) or _waits(cloud, name)
        except client_errors() as error:
            raise classify(error) from error

    def find(self, cloud: Cloud, service: str, number: int) -> Reached | None:
        try:
            found = _find(cloud, service)
        except client_errors() as error:
            raise classify(error) from error
        return _tagged(found, number) if found is not None else None

    def is_lost(self, cloud: Cloud, service: str, revision: str) -> bool:
        return False

    def resources(self, service: str, revision: str) -> list[str]:
        return [service]

    def shift(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        try:
            found = cloud.clients.run_services().get_service(name=service, timeout=TIMEOUT_SECONDS)
            traffic = [_target(share) for share in _present(cloud, service, shares)]
            if _listed(found.traffic) != _listed_json(traffic):
                _update(cloud, found, {"traffic": traffic}, fence)
            return bool(_wait(cloud, service, lambda now: _listed(now.traffic_statuses) == _listed_json(traffic)))
        except client_errors() as error:
            raise classify(error) from error

    def counted(self, cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
        try:
            return counted(cloud, service, since)
        except client_errors() as error:
            raise classify(error) from error

    def prune(self, cloud: Cloud, service: str, kept: set[str], last: int) -> None:
        # Revisions have no numbers here. Cloud Run itself refuses to delete the revision of a rollout that has begun.
        from google.api_core.exceptions import GoogleAPICallError

        revisions = cloud.clients.run_revisions()
        try:
            for revision in revisions.list_revisions(parent=service, timeout=TIMEOUT_SECONDS):
                if revision.name.rpartition("/")[2] not in kept:
                    _delete_revision(cloud, revision.name)
        except GoogleAPICallError as error:
            cloud.log(f"revisions of {service} are not pruned: {error.message}", stage="rollout", severity="WARNING")

    def suspend(self, cloud: Cloud, service: str, shares: list[Share], fence: Fence = no_fence) -> bool:
        stopped: Json = {"scalingMode": "MANUAL", "manualInstanceCount": 0}
        try:
            if (found := _find(cloud, service)) is None:
                return True
            if not _is_stopped(found):
                # Requests to a tag without a share would start an instance: only the revision that serves has a tag.
                made_by = _made_by(cloud, service)
                traffic = [_target(share) for share in shares if share.revision in made_by]
                _update(cloud, found, {"scaling": stopped, **({"traffic": traffic} if traffic else {})}, fence)
            return bool(_wait(cloud, service, lambda now: _is_settled(now) and _is_stopped(now)))
        except client_errors() as error:
            raise classify(error) from error

    def resume(self, cloud: Cloud, service: str, candidates: list[Candidate], fence: Fence = no_fence) -> bool:
        serve = candidates[0].deployment.spec.serve
        assert isinstance(serve, CloudRunServe), "the declaration gives this endpoint only specs of its type"
        # The end of manual scaling needs both: https://cloud.google.com/run/docs/configuring/services/manual-scaling
        limits = {"minInstanceCount": serve.min_instances, "maxInstanceCount": serve.max_instances}
        try:
            if (found := _find(cloud, service)) is None:
                hint = "the next rollout creates it again"
                raise CloudError(ErrorClass.CONFIG, f"{service} does not exist any more", hint)
            if _is_stopped(found):
                _update(cloud, found, {"scaling": {"scalingMode": "AUTOMATIC", **limits}}, fence)
            return bool(_wait(cloud, service, lambda now: _is_settled(now) and not _is_stopped(now)))
        except client_errors() as error:
            raise classify(error) from error

    def delete(self, cloud: Cloud, service: str) -> bool:
        return CloudRunService().teardown(cloud, KIND, service)


def service_request(candidate: Candidate, shares: list[Share]) -> Json:
    """The service with the candidate's template, as JSON. The candidate has a tag, and a share only if it is alone."""
    deployment = candidate.deployment
    serve = deployment.spec.serve
    assert isinstance(serve, CloudRunServe), "the declaration gives this endpoint only specs of its type"
    owner = owner_labels(deployment.settings, candidate.endpoint)
    own = {"type": LATEST, "percent": 0 if shares else 100, "tag": names.revision_tag(candidate.number)}
    service = {
        "labels": owner,
        "ingress": "INGRESS_TRAFFIC_ALL",
        # The service's minimum follows the shares. A minimum of the revision would keep a GPU for the tag alone.
        "scaling": {"minInstanceCount": serve.min_instances},
        "template": revision_template(deployment, revision_labels(candidate), min_instances=0),
        "traffic": [*map(_target, shares), own],
    }
    return with_launch_stage(service)


def _target(share: Share) -> Json:
    tag = names.revision_tag(share.number)
    return {"type": BY_NAME, "revision": share.revision, "percent": share.percent, "tag": tag}


def _made_by(cloud: Cloud, service: str) -> dict[str, str]:
    """The id of the rollout that made each revision of a service, by the revision's short name."""
    listed = cloud.clients.run_revisions().list_revisions(parent=service, timeout=TIMEOUT_SECONDS)
    return {each.name.rpartition("/")[2]: each.labels.get(names.ROLLOUT_LABEL, "") for each in listed}


def _present(cloud: Cloud, service: str, shares: list[Share]) -> list[Share]:
    """The shares without those of no percent whose revisions somebody has deleted: Cloud Run refuses their names.

    Raises RevisionGone for a deleted revision with a percent. Cloud Run would name it only in the operation.
    """
    made_by = _made_by(cloud, service)
    if gone := [share.revision for share in shares if share.percent and share.revision not in made_by]:
        message = f"revision {gone[0]} of {service} does not exist any more"
        raise RevisionGone(message, left=frozenset(made_by.values()))
    return [share for share in shares if share.revision in made_by]


def _find(cloud: Cloud, name: str) -> Any:
    from google.api_core.exceptions import NotFound

    try:
        return cloud.clients.run_services().get_service(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None


def _create(cloud: Cloud, name: str, wanted: Json) -> None:
    from google.api_core.exceptions import Conflict

    parent, _, service_id = name.rpartition("/services/")
    try:
        cloud.clients.run_services().create_service(
            parent=parent, service=_message(wanted), service_id=service_id, timeout=TIMEOUT_SECONDS
        )
    except Conflict:
        return  # an earlier create whose reply was lost; the next call checks the owner
    except client_errors() as error:
        raise classify_create(error) from error


def _update(cloud: Cloud, service: Any, fields: Json, fence: Fence) -> None:
    """Replace these fields of a service. A service that another caller has changed meanwhile stays as it is."""
    from google.api_core.exceptions import Conflict

    fence()
    changed = _message({"name": service.name, "etag": service.etag, **fields})
    paths = ["launch_stage" if field == "launchStage" else field for field in fields]
    request = {"service": changed, "update_mask": {"paths": paths}}
    try:
        cloud.clients.run_services().update_service(request=request, timeout=TIMEOUT_SECONDS)
    except Conflict:
        return  # ABORTED: the caller looks again
    except client_errors() as error:
        raise classify_create(error) from error


def _message(service: Json) -> Any:
    from google.cloud import run_v2

    return run_v2.Service.from_json(json.dumps(service), ignore_unknown_fields=False)


def _wait(cloud: Cloud, name: str, look: Callable[[Any], Any]) -> Any:
    """Look at a service until `look` finds something; the last finding."""
    deadline = cloud.clock.monotonic() + READY_WAIT_SECONDS
    while not (found := look(cloud.clients.run_services().get_service(name=name, timeout=TIMEOUT_SECONDS))):
        if cloud.clock.monotonic() >= deadline:
            break
        cloud.clock.sleep(LOOK_SECONDS)
    return found


def _waits(cloud: Cloud, name: str) -> Waits:
    service = cloud.clients.run_services().get_service(name=name, timeout=TIMEOUT_SECONDS)
    return Waits(service.terminal_condition.message or "Cloud Run creates the revision and starts its container")


def _is_stopped(service: Any) -> bool:
    """Whether a service is disabled: https://cloud.google.com/run/docs/managing/services#disable."""
    from google.cloud import run_v2

    scaling = service.scaling
    return bool(scaling.scaling_mode == run_v2.ServiceScaling.ScalingMode.MANUAL and not scaling.manual_instance_count)


def _is_settled(service: Any) -> bool:
    return not service.reconciling and service.observed_generation == service.generation


def _is_of(service: Any, candidate: Candidate) -> bool:
    return bool(service.template.labels.get(names.ROLLOUT_LABEL) == candidate.rollout)


def _reached(service: Any, candidate: Candidate) -> Reached | None:
    """The candidate's revision once it is ready; None while it is not. Raises CloudError if it has failed."""
    from google.cloud import run_v2

    if service.reconciling or not _is_of(service, candidate):
        return None
    # A failed deployment never becomes the observed generation, so only success checks the generation.
    if service.terminal_condition.state == run_v2.Condition.State.CONDITION_FAILED:
        raise deployment_failure(service.terminal_condition.message)
    return _tagged(service, candidate.number) if _is_settled(service) else None


def _tagged(service: Any, number: int) -> Reached | None:
    tag = names.revision_tag(number)
    found = next((status for status in service.traffic_statuses if status.tag == tag and status.uri), None)
    if found is None:
        return None
    revision = found.revision or service.latest_ready_revision.rpartition("/")[2]
    return Reached(revision, found.uri, service.uri)


def _listed(targets: Any) -> set[tuple[str, int, str]]:
    return {(target.revision, target.percent, target.tag) for target in targets}


def _listed_json(traffic: list[Json]) -> set[tuple[str, int, str]]:
    return {(target["revision"], target["percent"], target["tag"]) for target in traffic}


def _delete_revision(cloud: Cloud, name: str) -> None:
    """Begin the deletion of a revision. Cloud Run refuses the latest one, which a later rollout replaces."""
    from google.api_core.exceptions import BadRequest, Conflict, NotFound

    try:
        cloud.clients.run_revisions().delete_revision(name=name, timeout=TIMEOUT_SECONDS)
    except (BadRequest, Conflict, NotFound):
        return
