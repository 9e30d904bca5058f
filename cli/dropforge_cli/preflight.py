"""`dropforge preflight`: ask a project whether specs could run there, before they cost money.

Each answer is a Finding: ok, failed, warning, or not asked. "Not asked" never counts as ok.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import click

from dropforge.base.errors import InvalidSpec
from dropforge.base.redact import cut
from dropforge.base.settings import Settings
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.money import short_endpoint
from dropforge.platforms import get_target, platform_of
from dropforge.spec import JobSpec
from dropforge.spec.demand import Demand, Quota
from dropforge.stages.admission import check as check_admission

from . import accounts, google_apis, mends, quotas
from .columns import column_problems
from .deployment import Deployment, connect
from .display import stdout, table
from .google_apis import NotAsked, Refused
from .options import SPEC_FILE, json_option, state_option
from .plain import echo_json
from .policy import policy_in_use
from .problems import FAILED
from .specs import read_spec

OK, WARNING, NO, NOT_ASKED = "ok", "warning", "failed", "not asked"
STYLES = {OK: "green", WARNING: "yellow", NO: "red", NOT_ASKED: "dim"}
LIMITS, ENDPOINT_COST = "docs/cli.md#preflight", "docs/limits.md#the-cost-of-an-endpoint"
# The APIs that every deployment uses. Platforms add more. terraform/apis.tf enables all of them.
ALWAYS = (
    "artifactregistry", "cloudfunctions", "eventarc", "pubsub", "run", "secretmanager", "storage",
    "workflowexecutions", "workflows",
)  # fmt: skip
# Permissions of the user who runs the command: to see the deployment, and to drop specs.
ON_PROJECT = ("resourcemanager.projects.get", "serviceusage.services.get")
ON_SPECS_BUCKET = ("storage.objects.create", "storage.objects.delete")
ON_RUNS_BUCKET = ("storage.objects.get", "storage.objects.list")
IMAGE = re.compile(
    r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<repository>[^/]+)/(?P<image>[^@]+@.+)"
)


class Finding(NamedTuple):
    """One answer. `mend` is the fix if the answer is not ok.

    It is a command, a section of a page, or Google's page of quotas.
    """

    status: str
    what: str
    message: str
    mend: str = ""


@click.command()
@click.argument("specs", nargs=-1, type=SPEC_FILE, metavar="[SPEC...]")
@json_option
@state_option
def preflight(specs: tuple[Path, ...], as_json: bool, state: str | None) -> None:
    """Ask a deployment whether specs could run there, before they cost money; exit 1 if they could not."""
    deployment = connect(state)
    jobs = {path.name: read_spec(path, policy_in_use(deployment)) for path in specs}
    answers = list(findings(deployment, jobs))
    if as_json:
        echo_json([answer._asdict() for answer in answers])
    else:
        _show(answers)
    if any(answer.status == NO for answer in answers):
        raise SystemExit(FAILED)


def findings(deployment: Deployment, specs: dict[str, JobSpec]) -> Iterator[Finding]:
    """Yield the answers about a deployment and about each spec, by name."""
    settings, cloud = deployment.settings, deployment.context.cloud
    kinds: set[str] = {part.type for spec in specs.values() for part in (spec.target, spec.serve) if part}
    yield from _asked("APIs", lambda: _services(settings.project, kinds))
    yield from _asked("project", lambda: _project_permissions(settings.project))
    yield from _asked("custom roles", lambda: _custom_roles(settings.project, list(specs.values())))
    yield from _asked("accounts", lambda: _accounts(settings, list(specs.values())))
    for bucket, needed in ((settings.specs_bucket, ON_SPECS_BUCKET), (settings.runs_bucket, ON_RUNS_BUCKET)):
        yield from _asked(f"bucket {bucket}", lambda bucket=bucket, needed=needed: _bucket(cloud, bucket, needed))  # type: ignore[misc]
    for name, image in [] if deployment.stack else sorted(_images(settings).items()):  # a stack builds its own
        yield from _asked(f"image {name}", lambda name=name, image=image: _image(settings, name, image))  # type: ignore[misc]
    for name, spec in specs.items():
        yield from _asked(f"spec {name}", lambda name=name, spec=spec: _admission(deployment, name, spec))  # type: ignore[misc]
        for wanted in demands(spec):
            if wanted.listed_by == "tpu":
                what = f"{wanted.name} in {wanted.place}"
                yield from _asked(what, lambda wanted=wanted: _tpu_type(cloud, wanted))  # type: ignore[misc]
            elif wanted.listed_by == "compute":
                yield from _asked(f"{wanted}", lambda wanted=wanted: _gpu_region(settings.project, wanted))  # type: ignore[misc]
            yield from _asked(f"quota for {wanted}", lambda wanted=wanted: _quota(settings.project, wanted))  # type: ignore[misc]
        yield from _asked(f"spec {name}: data", lambda spec=spec: _locations(cloud, spec))  # type: ignore[misc]


def demands(spec: JobSpec) -> list[Demand]:
    """Return the accelerators that a spec may request, without duplicates."""
    serving = spec.serve.demands(spec) if spec.serve else ()
    return list({_key(demand): demand for demand in (*spec.target.demands(), *serving)}.values())


def _key(demand: Demand) -> tuple[str, ...]:
    """Return the key of a demand. The same quota at the same place counts demands with one key."""
    quota = demand.quota.id if demand.quota else demand.unknown
    return demand.name, str(demand.number), demand.place, quota, demand.listed_by


def _region(place: str) -> str:
    return place if place[-1].isdigit() else place.rpartition("-")[0]  # a zone's name ends with a letter


def _asked(what: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the answers of `ask`. A refusal is an answer too, and a missing answer is never ok."""
    try:
        return list(ask())
    except NotAsked as error:
        return [Finding(NOT_ASKED, what, str(error), LIMITS)]
    except Refused as error:
        return [Finding(NO, what, f"Google answered {error.status}: {error}", mends.RIGHTS)]
    except client_errors() as error:
        if getattr(error, "code", None) == 501:
            return [Finding(NOT_ASKED, what, "the local stack does not emulate it", LIMITS)]
        return [Finding(NO, what, cut(str(error), 300), mends.RIGHTS)]


def _services(project: str, kinds: set[str]) -> Iterator[Finding]:
    """https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchGet (at most 30 names)"""
    wanted = sorted({*ALWAYS, *(name for kind in kinds for name in platform_of(kind).services)})
    names = [f"projects/{project}/services/{name}.googleapis.com" for name in wanted]
    answer = google_apis.get("serviceusage", f"v1/projects/{project}/services:batchGet", names=names)
    states = {service["name"].rpartition("/")[2]: service.get("state") for service in answer.get("services", ())}
    for name in wanted:
        api = f"{name}.googleapis.com"
        if states.get(api) == "ENABLED":
            yield Finding(OK, "APIs", f"{api} is enabled")
        else:
            mend = f"gcloud services enable {api} --project={project}"
            yield Finding(NO, "APIs", f"{api} is {str(states.get(api, 'unknown')).lower()}", mend)


def _project_permissions(project: str) -> Iterator[Finding]:
    """https://cloud.google.com/resource-manager/reference/rest/v1/projects/testIamPermissions"""
    path, body = f"v1/projects/{project}:testIamPermissions", {"permissions": list(ON_PROJECT)}
    held = google_apis.post("cloudresourcemanager", path, body).get("permissions", ())
    mend = (
        f"gcloud projects add-iam-policy-binding {project} --role=roles/viewer "
        '--member="user:$(gcloud config get-value account)"'
    )
    yield _held(f"project {project}", ON_PROJECT, held, mend)


def _custom_roles(project: str, specs: list[JobSpec]) -> Iterator[Finding]:
    """terraform/ puts every permission into custom roles; Google supports most permissions there, but not all."""
    levels, what = accounts.support_levels(project), "custom roles"
    permissions = sorted({use.permission for use in accounts.needed(specs)})
    mend = (
        f"gcloud iam list-testable-permissions //cloudresourcemanager.googleapis.com/projects/{project} "
        "--filter=customRolesSupportLevel=NOT_SUPPORTED"
    )
    for level, status in (("NOT_SUPPORTED", NO), ("TESTING", WARNING)):
        if found := [name for name in permissions if levels.get(name) == level]:
            yield Finding(status, what, f"{level} in custom roles: {', '.join(found)}", mend)
    if unlisted := [name for name in permissions if name not in levels]:
        yield Finding(NOT_ASKED, what, f"Google does not list {', '.join(unlisted)} for the project", mends.RIGHTS)
    if supported := [name for name in permissions if levels.get(name) == "SUPPORTED"]:
        yield Finding(OK, what, f"{len(supported)} permissions are SUPPORTED in custom roles")


def _accounts(settings: Settings, specs: list[JobSpec]) -> Iterator[Finding]:
    for use in accounts.needed(specs):
        what, state = f"account {use.account}", accounts.state(settings, use)
        if state == "CAN_ACCESS":
            yield Finding(OK, what, f"the account has {use.permission} on {use.scope}")
        elif state == "CANNOT_ACCESS":
            message = f"the account lacks {use.permission} on {use.scope}"
            yield Finding(NO, what, message, mends.make("deploy", settings))
        else:
            message = f"{use.permission} on {use.scope}: {state}; run this command as a security reviewer"
            yield Finding(NOT_ASKED, what, message, LIMITS)


def _bucket(cloud: Cloud, name: str, needed: tuple[str, ...]) -> Iterator[Finding]:
    from google.api_core.exceptions import NotFound

    try:
        held = cloud.clients.storage().bucket(name).test_iam_permissions(list(needed), timeout=TIMEOUT_SECONDS)
    except NotFound:
        yield Finding(NO, f"bucket {name}", "the bucket does not exist", mends.make("deploy", cloud.settings))
        return
    yield _held(f"bucket {name}", needed, held, "docs/deploy.md#choices")


def _held(what: str, needed: Iterable[str], held: Iterable[str], mend: str) -> Finding:
    missing = sorted(set(needed) - set(held))
    if missing:
        return Finding(NO, what, f"you lack {', '.join(missing)}", mend)
    return Finding(OK, what, "you have every permission")


def _images(settings: Settings) -> dict[str, str]:
    return {name: value for name, value in vars(settings).items() if name.endswith("_image") and value}


def _image(settings: Settings, name: str, uri: str) -> Iterator[Finding]:
    """https://cloud.google.com/artifact-registry/docs/reference/rest/v1/projects.locations.repositories.dockerImages/get"""
    match, what = IMAGE.fullmatch(uri), f"image {name}"
    if match is None or "@sha256:" not in uri:
        message = f"{uri} is not a digest in Artifact Registry, so the image can change"
        yield Finding(WARNING, what, message, mends.make_images(settings))
        return
    parent = f"v1/projects/{match['project']}/locations/{match['location']}/repositories/{match['repository']}"
    try:
        google_apis.get("artifactregistry", f"{parent}/dockerImages/{quote(match['image'], safe='@:')}")
    except Refused as error:
        if error.status != 404:
            raise
        yield Finding(NO, what, f"{uri} does not exist", mends.make_images(settings))
    else:
        yield Finding(OK, what, "the digest exists")


def _admission(deployment: Deployment, name: str, spec: JobSpec) -> Iterator[Finding]:
    """Yield everything that admission would refuse (images, clusters, secrets, sources, time, budget), and columns."""
    try:
        check_admission(deployment.context.cloud, spec)
        problems = column_problems(spec, deployment.clients)
    except InvalidSpec as error:
        problems = error.problems
    for problem in problems:
        yield Finding(NO, f"spec {name}", str(problem), mends.of_problem(problem, name, spec, deployment))
    if not problems:
        yield Finding(OK, f"spec {name}", "the spec would be accepted; its secrets and sources exist")
        if note := short_endpoint(spec):
            yield Finding(
                WARNING, f"spec {name}", f"{note}; raise limits.max_cost_usd, or shorten serve.ttl", ENDPOINT_COST
            )


def _gpu_region(project: str, wanted: Demand) -> Iterator[Finding]:
    """https://cloud.google.com/compute/docs/reference/rest/v1/acceleratorTypes/aggregatedList"""
    path = f"compute/v1/projects/{project}/aggregated/acceleratorTypes"
    offered = google_apis.get("compute", path, filter=f"name={wanted.name}")
    zones = {
        place.rpartition("/")[2] for place, kinds in offered.get("items", {}).items() if kinds.get("acceleratorTypes")
    }
    if any(zone.startswith(f"{wanted.place}-") for zone in zones):
        yield Finding(OK, f"{wanted}", "the region has such GPUs")
    else:
        mend = f"gcloud compute accelerator-types list --filter=name={wanted.name} --project={project}"
        yield Finding(NO, f"{wanted}", f"{wanted.place} has no {wanted.name}", mend)


def _quota(project: str, wanted: Demand) -> Iterator[Finding]:
    """Compare a demand with its quota. The usage is known only of quotas that Compute Engine lists with a region."""
    if wanted.quota is None:
        raise NotAsked(wanted.unknown)
    what, quota = f"quota for {wanted}", wanted.quota
    mend = f"https://console.cloud.google.com/iam-admin/quotas?project={project}"
    listed = _compute_quota(project, wanted.place, quota) if wanted.listed_by == "compute" else None
    limit, usage = listed or (quotas.limit(project, quota), 0.0)
    if limit is None:
        yield Finding(WARNING, what, f"{quota.id} has no value there, which may mean 0", mend)
        return
    message = f"{quota.id} allows {limit:g}" + (f", of which {usage:g} are in use" if usage else "")
    is_free = limit - usage >= wanted.number
    status = OK if is_free else WARNING if limit >= wanted.number else NO
    yield Finding(status, what, message, "" if is_free else mend)


def _compute_quota(project: str, region: str, quota: Quota) -> tuple[float, float] | None:
    """Return (limit, usage), or None if it is not listed. https://cloud.google.com/compute/docs/reference/rest/v1/regions/get"""
    listed = google_apis.get("compute", f"compute/v1/projects/{project}/regions/{region}").get("quotas", ())
    metric = quota.id.removesuffix("-per-project-region").replace("-", "_")
    return next(
        ((float(entry["limit"]), float(entry.get("usage", 0))) for entry in listed if entry["metric"] == metric), None
    )


def _tpu_type(cloud: Cloud, wanted: Demand) -> Iterator[Finding]:
    from google.api_core.exceptions import NotFound

    project = cloud.settings.project
    name = f"projects/{project}/locations/{wanted.place}/acceleratorTypes/{wanted.name}"
    what = f"{wanted.name} in {wanted.place}"
    try:
        cloud.clients.tpu().get_accelerator_type(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        mend = f"gcloud compute tpus accelerator-types list --zone={wanted.place} --project={project}"
        yield Finding(NO, what, "the zone has no such TPU VM", mend)
    else:
        yield Finding(OK, what, "the zone has such TPU VMs")


def _locations(cloud: Cloud, spec: JobSpec) -> Iterator[Finding]:
    """Compare the places of the buckets with the places of training. A read across regions is slow and costs money."""
    regions = {_region(place) for place in get_target(spec.target.type).regions(spec)}
    uris = (spec.model.source, getattr(spec.dataset, "source", ""))  # a synthetic data set has no source
    sources = [uri.split("/")[2] for uri in uris if uri.startswith("gs://")]
    for name in dict.fromkeys([cloud.settings.runs_bucket, *sources]):
        bucket = cloud.clients.storage().get_bucket(name, timeout=TIMEOUT_SECONDS)
        place, what = str(bucket.location).lower(), f"bucket {name}"
        far = sorted(region for region in regions if bucket.location_type == "region" and place != region)
        if far:
            message = (
                f"the bucket is in {place}, and the run may train in {', '.join(far)}: reads across regions cost "
                f"money; prefer placements in {place}"
            )
            yield Finding(WARNING, what, message, mends.PAGES["target"])
        else:
            yield Finding(OK, what, f"the bucket is in {place}")


def _show(answers: list[Finding]) -> None:
    out, rows = stdout(), table("", "question", "answer")
    for answer in answers:
        rows.add_row(answer.status, answer.what, answer.message, style=STYLES[answer.status])
    out.print(rows)
    for fix in dict.fromkeys(answer.mend for answer in answers if answer.mend):
        out.print(f"fix: {fix}", soft_wrap=True)
    counts = {status: sum(answer.status == status for answer in answers) for status in STYLES}
    out.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
