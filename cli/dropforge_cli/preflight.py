"""`dropforge preflight`: ask a project whether specs could run there, before they cost money.

Each answer is a Finding: ok, failed, warning, or not asked. "Not asked" never counts as ok.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import quote

import click

from dropforge.base.errors import InvalidSpec
from dropforge.base.settings import Settings
from dropforge.cloud import google_apis
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.google_apis import Refused
from dropforge.platforms import platform_of
from dropforge.spec import JobSpec
from dropforge.stages.admission import check as check_admission
from dropforge.stages.answers import Finding
from dropforge.stages.preflight import LIMITS, NO, NOT_ASKED, OK, RIGHTS, WARNING, about, accepted, asked

from . import accounts, mends
from .deployment import Deployment, connect
from .display import stdout, table, working
from .options import SPEC_FILE, json_option, spec_bytes, state_option
from .plain import echo_json
from .policy import policy_in_use
from .problems import FAILED
from .specs import read_spec

STYLES = {OK: "green", WARNING: "yellow", NO: "red", NOT_ASKED: "dim"}
# The APIs that every deployment uses, and that by which pods and CI become a service account. Platforms add more.
# terraform/apis.tf enables all of them.
ALWAYS = (
    "artifactregistry", "cloudfunctions", "eventarc", "iamcredentials", "pubsub", "run", "secretmanager", "storage",
    "sts", "workflowexecutions", "workflows",
)  # fmt: skip
# Permissions of the user who runs the command: to see the deployment, and to drop specs.
ON_PROJECT = ("resourcemanager.projects.get", "serviceusage.services.get")
ON_SPECS_BUCKET = ("storage.objects.create", "storage.objects.delete")
ON_RUNS_BUCKET = ("storage.objects.get", "storage.objects.list")
IMAGE = re.compile(
    r"(?P<location>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>[^/]+)/(?P<repository>[^/]+)/(?P<image>[^@]+@.+)"
)


@click.command()
@click.argument("specs", nargs=-1, type=SPEC_FILE, metavar="[SPEC...]")
@json_option
@state_option
def preflight(specs: tuple[Path, ...], as_json: bool, state: str | None) -> None:
    """Ask a deployment whether specs could run there, before they cost money; exit 1 if they could not."""
    deployment = connect(state)
    jobs = {str(path): read_spec(spec_bytes(path), policy_in_use(deployment)) for path in specs}
    with working("asking the deployment"):
        answers = list(findings(deployment, jobs))
    if as_json:
        echo_json([asdict(answer) for answer in answers])
    else:
        _show(answers)
    if any(answer.status == NO for answer in answers):
        raise SystemExit(FAILED)


def findings(deployment: Deployment, specs: dict[str, JobSpec]) -> Iterator[Finding]:
    """Yield the answers about a deployment and about each spec, by its path."""
    settings, cloud = deployment.settings, deployment.context.cloud
    kinds: set[str] = {part.type for spec in specs.values() for part in (spec.target, spec.serve) if part}
    yield from asked("APIs", partial(_services, settings.project, kinds))
    yield from asked("project", partial(_project_permissions, settings.project))
    yield from asked("custom roles", partial(_custom_roles, settings.project, list(specs.values())))
    yield from asked("accounts", partial(_accounts, settings, list(specs.values())))
    for bucket, needed in ((settings.specs_bucket, ON_SPECS_BUCKET), (settings.runs_bucket, ON_RUNS_BUCKET)):
        yield from asked(f"bucket {bucket}", partial(_bucket, cloud, bucket, needed))
    for name, image in [] if deployment.stack else sorted(_images(settings).items()):  # a stack builds its own
        yield from asked(f"image {name}", partial(_image, settings, name, image))
    for name, spec in specs.items():
        yield from asked(f"spec {name}", partial(_admission, deployment, name, spec))
        yield from about(cloud, spec)


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
        yield Finding(NOT_ASKED, what, f"Google does not list {', '.join(unlisted)} for the project", RIGHTS)
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
    """Yield everything that admission would refuse: images, clusters, secrets, sources, data, time, budget."""
    try:
        check_admission(deployment.context.cloud, spec)
        problems = []
    except InvalidSpec as error:
        problems = error.problems
    for problem in problems:
        yield Finding(NO, f"spec {name}", str(problem), mends.of_problem(problem, name, spec, deployment))
    if not problems:
        yield from accepted(deployment.context.cloud, f"spec {name}", spec)


def _show(answers: list[Finding]) -> None:
    out, rows = stdout(), table("", "question", "answer")
    for answer in answers:
        rows.add_row(answer.status, answer.what, answer.message, style=STYLES[answer.status])
    out.print(rows)
    for fix in dict.fromkeys(answer.mend for answer in answers if answer.mend):
        out.print(f"fix: {fix}", soft_wrap=True)
    counts = {status: sum(answer.status == status for answer in answers) for status in STYLES}
    out.print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
