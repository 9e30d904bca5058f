"""The stage preflight: could a spec run in this deployment? It asks for the quotas, the places and the data.

`dropforge preflight` asks with the credentials of a person, and asks more about the project. The function `preflight`
asks for the console, whose account may read neither quotas nor secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dropforge.base.errors import InvalidSpec
from dropforge.base.redact import cut
from dropforge.cloud import google_apis
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.google_apis import NotAsked, Refused
from dropforge.context import Context
from dropforge.money.limits import short_endpoint
from dropforge.platforms import get_target, quotas
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.demand import Demand, Quota
from dropforge.spec.policy import policy_of

from .admission import check, data_reports
from .answers import Checked, Finding
from .ceiling import with_defaults

OK, WARNING, NO, NOT_ASKED = "ok", "warning", "failed", "not asked"
LIMITS, ENDPOINT_COST = "docs/cli.md#preflight", "docs/limits.md#the-cost-of-an-endpoint"
DATA = "docs/data-formats.md#check-your-data"
RIGHTS, TARGETS = "docs/security.md#who-may-do-what", "docs/targets.md"


def preflight(context: Context, text: str) -> Checked:
    """The answers about a spec, which is JSON. Raises BrokenPolicy if the deployment's policy cannot be read."""
    context.log("asked about a spec", stage="preflight")
    try:
        spec = with_defaults(parse_spec(text.encode()), policy_of(context.settings.policy))
    except (InvalidSpec, UnicodeEncodeError) as error:
        problems = map(str, error.problems) if isinstance(error, InvalidSpec) else ["the text is not Unicode"]
        return Checked(findings=[Finding(NO, "spec", problem) for problem in problems])
    admission = asked("spec", partial(_accepted, context.cloud, spec))
    return Checked(findings=[*admission, *about(context.cloud, spec)])


def about(cloud: Cloud, spec: JobSpec) -> Iterator[Finding]:
    """Yield the answers about a spec that would be accepted: its accelerators, their quotas, and its data."""
    project = cloud.settings.project
    for wanted in demands(spec):
        if wanted.listed_by == "tpu":
            yield from asked(f"{wanted.name} in {wanted.place}", partial(_tpu_type, cloud, wanted))
        elif wanted.listed_by == "compute":
            yield from asked(f"{wanted}", partial(_gpu_region, project, wanted))
        yield from asked(f"quota for {wanted}", partial(_quota, project, wanted))
    yield from asked("data", partial(_locations, cloud, spec))


def accepted(cloud: Cloud, what: str, spec: JobSpec) -> Iterator[Finding]:
    """Yield the answers about a spec in which admission has found no problem, with the verdict on its first rows."""
    yield Finding(OK, what, "the spec would be accepted; its secrets and sources exist")
    if note := short_endpoint(spec):
        message = f"{note}; raise limits.max_cost_usd, or shorten serve.ttl"
        yield Finding(WARNING, what, message, ENDPOINT_COST)
    for report in data_reports(cloud, spec):
        yield Finding(WARNING if report.is_faulty else OK, "data", report.verdict, DATA if report.is_faulty else "")


def _accepted(cloud: Cloud, spec: JobSpec) -> Iterator[Finding]:
    try:
        check(cloud, spec)
    except InvalidSpec as error:
        yield from (Finding(NO, "spec", str(problem)) for problem in error.problems)
    else:
        yield from accepted(cloud, "spec", spec)


def demands(spec: JobSpec) -> list[Demand]:
    """Return the accelerators that a spec may request, each with the CPU and memory beside it, without duplicates."""
    serving = spec.serve.demands(spec) if spec.serve else ()
    wanted = [each for demand in (*spec.target.demands(), *serving) for each in (demand, *demand.beside)]
    return list({_key(demand): demand for demand in wanted}.values())


def _key(demand: Demand) -> tuple[str, ...]:
    """Return the key of a demand. The same quota at the same place counts demands with one key."""
    quota = demand.quota.id if demand.quota else demand.unknown
    return demand.name, str(demand.number), demand.place, quota, demand.listed_by


def _region(place: str) -> str:
    return place if place[-1].isdigit() else place.rpartition("-")[0]  # a zone's name ends with a letter


def asked(what: str, ask: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the answers of `ask`. A refusal is an answer too, and a missing answer is never ok."""
    try:
        return list(ask())
    except NotAsked as error:
        return [Finding(NOT_ASKED, what, str(error), LIMITS)]
    except Refused as error:
        return [Finding(NO, what, f"Google answered {error.status}: {error}", RIGHTS)]
    except client_errors() as error:
        if getattr(error, "code", None) == 501:
            return [Finding(NOT_ASKED, what, "the local stack does not emulate it", LIMITS)]
        return [Finding(NO, what, cut(str(error), 300), RIGHTS)]


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
    sources = [uri.split("/")[2] for uri in spec.sources.values() if uri.startswith("gs://")]
    for name in dict.fromkeys([cloud.settings.runs_bucket, *sources]):
        bucket = cloud.clients.storage().lookup_bucket(name, timeout=TIMEOUT_SECONDS)
        if bucket is None:
            continue  # admission names a source's bucket that does not exist
        place, what = str(bucket.location).lower(), f"bucket {name}"
        far = sorted(region for region in regions if bucket.location_type == "region" and place != region)
        if far:
            message = (
                f"the bucket is in {place}, and the run may train in {', '.join(far)}: reads across regions cost "
                f"money; prefer placements in {place}"
            )
            yield Finding(WARNING, what, message, TARGETS)
        else:
            yield Finding(OK, what, f"the bucket is in {place}")
