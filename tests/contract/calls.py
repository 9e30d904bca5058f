"""The permissions that the recorded calls of a local stack need, in the terms of terraform/permissions.yaml.

A stack with `record` in its config writes the calls (dropforge_local.base.recording). methods.yaml lists the
permissions that each call needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from dropforge_local.base.recording import INVOCATION
from dropforge_local.stack import deployment as stack

from .configuration import permissions

PLACE = r"projects/[^/]+/locations/[^/:]+"
ZONE = r"/compute/v1/projects/[^/]+/zones/[^/]+"
EXECUTIONS = "google.cloud.workflows.executions.v1.Executions"
STARTED = "workflowexecutions.projects.locations.workflows.executions"
CALLBACK = rf"POST /v1/{PLACE}/workflows/[^/]+/executions/[^/]+/callbacks/[^/]+"
# The path of each API method. Cloud Storage's methods are in _storage_methods.
PATHS = {
    rf"GET /v2/{PLACE}/jobs": "run.projects.locations.jobs.list",
    rf"POST /v2/{PLACE}/jobs": "run.projects.locations.jobs.create",
    rf"GET /v2/{PLACE}/jobs/[^/]+": "run.projects.locations.jobs.get",
    rf"DELETE /v2/{PLACE}/jobs/[^/]+": "run.projects.locations.jobs.delete",
    rf"GET /v2/{PLACE}/jobs/[^/]+/executions": "run.projects.locations.jobs.executions.list",
    rf"GET /v2/{PLACE}/jobs/[^/]+/executions/[^/]+": "run.projects.locations.jobs.executions.get",
    rf"POST /v2/{PLACE}/jobs/[^/]+/executions/[^/]+:cancel": "run.projects.locations.jobs.executions.cancel",
    rf"GET /v2/{PLACE}/jobs/[^/]+/executions/[^/]+/tasks": "run.projects.locations.jobs.executions.tasks.list",
    rf"GET /v2/{PLACE}/operations/[^/]+": "run.projects.locations.operations.get",
    rf"GET /v2/{PLACE}/services": "run.projects.locations.services.list",
    rf"POST /v2/{PLACE}/services": "run.projects.locations.services.create",
    rf"GET /v2/{PLACE}/services/[^/]+": "run.projects.locations.services.get",
    rf"PATCH /v2/{PLACE}/services/[^/]+": "run.projects.locations.services.patch",
    rf"DELETE /v2/{PLACE}/services/[^/]+": "run.projects.locations.services.delete",
    rf"GET /v2/{PLACE}/services/[^/]+/revisions": "run.projects.locations.services.revisions.list",
    rf"DELETE /v2/{PLACE}/services/[^/]+/revisions/[^/]+": "run.projects.locations.services.revisions.delete",
    rf"GET /v1/{PLACE}/clusters": "container.projects.locations.clusters.list",
    rf"POST /v1/{PLACE}/clusters": "container.projects.locations.clusters.create",
    rf"GET /v1/{PLACE}/clusters/[^/]+": "container.projects.locations.clusters.get",
    rf"DELETE /v1/{PLACE}/clusters/[^/]+": "container.projects.locations.clusters.delete",
    rf"GET /v1/{PLACE}/operations/[^/]+": "container.projects.locations.operations.get",
    rf"GET /v2/{PLACE}/acceleratorTypes/[^/]+": "tpu.projects.locations.acceleratorTypes.get",
    rf"GET /v2/{PLACE}/nodes": "tpu.projects.locations.nodes.list",
    rf"POST /v2/{PLACE}/nodes": "tpu.projects.locations.nodes.create",
    rf"GET /v2/{PLACE}/nodes/[^/]+": "tpu.projects.locations.nodes.get",
    rf"DELETE /v2/{PLACE}/nodes/[^/]+": "tpu.projects.locations.nodes.delete",
    rf"GET /v2/{PLACE}/operations": "tpu.projects.locations.operations.list",
    rf"GET /v2/{PLACE}/queuedResources": "tpu.projects.locations.queuedResources.list",
    rf"POST /v2/{PLACE}/queuedResources": "tpu.projects.locations.queuedResources.create",
    rf"GET /v2/{PLACE}/queuedResources/[^/]+": "tpu.projects.locations.queuedResources.get",
    rf"DELETE /v2/{PLACE}/queuedResources/[^/]+": "tpu.projects.locations.queuedResources.delete",
    r"GET /compute/v1/projects/[^/]+/aggregated/disks": "compute.disks.aggregatedList",
    r"GET /compute/v1/projects/[^/]+/aggregated/acceleratorTypes": "compute.acceleratorTypes.aggregatedList",
    r"GET /compute/v1/projects/[^/]+/regions/[^/]+": "compute.regions.get",
    rf"GET {ZONE}/disks": "compute.disks.list",
    rf"POST {ZONE}/disks": "compute.disks.insert",
    rf"GET {ZONE}/disks/[^/]+": "compute.disks.get",
    rf"DELETE {ZONE}/disks/[^/]+": "compute.disks.delete",
    rf"GET {ZONE}/operations/[^/]+": "compute.zoneOperations.get",
    rf"POST {ZONE}/operations/[^/]+/wait": "compute.zoneOperations.wait",
    r"GET /v1/projects/[^/]+/secrets/[^/]+/versions/[^/:]+": "secretmanager.projects.secrets.versions.get",
    r"GET /v1/projects/[^/]+/secrets/[^/]+/versions/[^/:]+:access": "secretmanager.projects.secrets.versions.access",
    r"POST /v1/projects/[^/]+/topics/[^/]+:publish": "pubsub.projects.topics.publish",
    CALLBACK: "a POST to the callback URL of the waiting execution",
    r"/google.pubsub.v1.Publisher/Publish": "pubsub.projects.topics.publish",
    f"/{EXECUTIONS}/CreateExecution": f"{STARTED}.create",
    f"/{EXECUTIONS}/GetExecution": f"{STARTED}.get",
    f"/{EXECUTIONS}/ListExecutions": f"{STARTED}.list",
    r"GET /v3/projects/[^/]+/timeSeries": "monitoring.projects.timeSeries.list",
    r"GET /v3/projects/[^/]+/alerts": "monitoring.projects.alerts.list",
    r"GET /dns/v1/projects/[^/]+/managedZones/[^/]+/rrsets": "dns.resourceRecordSets.list",
    r"POST /dns/v1/projects/[^/]+/managedZones/[^/]+/changes": "dns.changes.create",
    r"GET /dns/v1/projects/[^/]+/managedZones/[^/]+/changes/[^/]+": "dns.changes.get",
    r"POST /v1/traces": "telemetry.v1.traces.post",
    r"invoke": "a POST to the endpoint",
}
EXCHANGE = "POST /v1/token"  # of an account's own token, which needs no permission
# Other services need no permission of Google Cloud.
NO_API = re.compile(rf"POST /(slack|channels)/|GET /dns/_authority|{EXCHANGE}$")
BELOW = {
    "run_objects": re.compile(r"runs/"),
    "endpoint_objects": re.compile(r"endpoints/"),
    "key_objects": re.compile(r"keys/"),
    "event_objects": re.compile(r"runs/[^/]+/events/"),
    "cache_objects": re.compile(r"caches/"),
    "copied_objects": re.compile(r"models/copy--"),
    "lent_objects": re.compile(r"(checkpoints|models|machines)/"),
}
WRITES = {"storage.objects.create", "storage.objects.delete"}
ANYWHERE = ("project", "clusters", "own_clusters", "tpus", "traces")  # scopes that mean the whole project
ENDERS = ("on_spec_message", "sweep", "teardown")  # dropforge.stages.teardown.delete_remaining
WEBHOOKS = {"slack-webhook"}


class Need(NamedTuple):
    """A permission that a call needs, the resource, and the call's method. `on` is "kubernetes" for Kubernetes' API."""

    account: str
    on: str
    permission: str
    method: str


class Grant(NamedTuple):
    account: str
    scope: str
    permission: str


def needs(path: Path) -> set[Need]:
    """Return all needs of the calls that the file records."""
    needed: set[Need] = set()
    for line in path.read_text().splitlines():
        needed.update(_needs_of(json.loads(line)))
    return needed


def apis(path: Path) -> set[str]:
    """Return the APIs of all calls that the file records, such as `run`. An API must be enabled in the project."""
    return {api for line in path.read_text().splitlines() if (api := _api_of(json.loads(line)))}


def grants() -> set[Grant]:
    """Return all grants of permissions.yaml; Kubernetes' verbs as `verb resource`."""
    granted = set()
    for account, held in permissions()["accounts"].items():
        scopes = held["grants"].items()
        granted |= {Grant(account, scope, permission) for scope, names in scopes for permission in names}
        rules = held.get("kubernetes", {}).items()
        granted |= {Grant(account, "kubernetes", f"{verb} {resource}") for resource, verbs in rules for verb in verbs}
    return granted


def covers(grant: Grant, need: Need) -> bool:
    """Return whether the grant meets the need."""
    if (grant.account, grant.permission) != (need.account, need.permission):
        return False
    bucket, _, name = need.on.partition("/")
    if bucket == "runs_bucket" and need.permission in WRITES:
        # The record of a refused write does not name the object.
        return grant.scope in BELOW and (not name or BELOW[grant.scope].match(name) is not None)
    if grant.scope == "readable_objects":
        return bucket == "runs_bucket" and BELOW["key_objects"].match(name) is None
    return grant.scope == bucket or (need.on == "project" and grant.scope in ANYWHERE)


def unmet(needed: Iterable[Need], held: set[Grant]) -> set[Need]:
    return {need for need in needed if not any(covers(grant, need) for grant in held)}


def unused(needed: set[Need], held: set[Grant], accounts: Iterable[str]) -> set[Grant]:
    """Return the grants of these accounts that no call needs.

    ENDERS delete every resource of a ledger with the same code, so a need of one ENDER counts for all. A call to a
    standing cluster counts for an attempt's own cluster, too.
    """
    needed = needed | {need._replace(account=ender) for need in needed if need.account in ENDERS for ender in ENDERS}
    needed = needed | {_in_own_cluster(need) for need in needed if need.on == "kubernetes"}
    candidates = {grant for grant in held if grant.account in accounts}
    return {grant for grant in candidates if not any(covers(grant, need) for need in needed)}


@cache
def methods() -> dict[str, list[str]]:
    """Return the permissions of each method of methods.yaml."""
    pages = yaml.safe_load((Path(__file__).with_name("methods.yaml")).read_text())
    return {method: needed for page in pages for method, needed in page["methods"].items()}


def _needs_of(call: dict[str, Any]) -> Iterator[Need]:
    account = call["caller"]
    if call["call"] == INVOCATION:  # Cloud Run checks the right of the function's caller
        return
    if call["call"].startswith("kubernetes "):
        verb, resource = call["call"].partition(" ")[2], call["resource"]
        if call["cluster"] == stack.CLUSTER:
            yield Need(account, "kubernetes", f"{verb} {resource}", call["call"])
        else:  # a new cluster has no Role yet: IAM decides
            yield _in_own_cluster(Need(account, "kubernetes", f"{verb} {resource}", ""))
        yield Need(account, "project", "container.clusters.connect", "every call of the Kubernetes API")
        return
    if NO_API.match(call["call"]):
        return
    on, *called = _methods_of(call)
    for method in called:
        for permission in methods()[method]:
            for where in _where(permission, on, call):
                yield Need(account, where, permission, method)


def _api_of(call: dict[str, Any]) -> str:
    """Return the API of a call; "" for a call that is none of Google's APIs."""
    if call["call"] == EXCHANGE:
        return "sts"
    if call["call"].startswith("kubernetes "):
        return "container"
    if call["call"] == INVOCATION or NO_API.match(call["call"]):
        return ""
    return {PATHS[CALLBACK]: "workflowexecutions", PATHS["invoke"]: "run"}.get(
        method := _methods_of(call)[1], method.partition(".")[0]
    )


def _in_own_cluster(need: Need) -> Need:
    """The same need where IAM decides (https://cloud.google.com/kubernetes-engine/docs/reference/api-permissions)."""
    verb, _, resource = need.permission.partition(" ")
    group, _, plural = resource.rpartition("/")
    own = {"serviceaccounts": "serviceAccounts", "storageclasses": "storageClasses"}
    is_foreign = "." in group and not group.endswith(".k8s.io")
    collection = "thirdPartyObjects" if is_foreign else own.get(plural, plural)
    return Need(need.account, "project", f"container.{collection}.{verb}", f"{need.permission} (own cluster)")


def _methods_of(call: dict[str, Any]) -> list[str]:
    """Return the resource of a call, its method, and the variants of the method that need more permissions."""
    verb, _, target = call["call"].partition(" ")
    path = urlsplit(target).path
    if "/storage/v1/" in path:
        return _storage_methods(call, verb, path)
    line = f"{verb} {path}" if path else verb
    called = [method for pattern, method in PATHS.items() if re.fullmatch(pattern, line)]
    assert called, f"{call['call']} of {call['caller']} is no method that tests/contract/calls.py knows"
    if "startExecutionToken" in call.get("fields", ()):
        called.append(f"{called[0]} (with startExecutionToken)")
    if called[0].endswith(".services.patch") and "template" in call.get("fields", ()):
        called.append(f"{called[0]} (with a template)")
    if called[0] == "dns.changes.create":
        parts = ("additions" in call["fields"], "deletions" in call["fields"])
        what = {(True, False): "a new record", (True, True): "a changed record", (False, True): "a deleted record"}
        called.append(f"dns.changes.create ({what[parts]})")
    if "dataDisks" in call.get("fields", ()):
        called.append("tpu.projects.locations.nodes.create (with a data disk)")
    return [path + call.get("on", ""), *called]


def _storage_methods(call: dict[str, Any], verb: str, path: str) -> list[str]:
    bucket, _, rest = path.partition("/b/")[2].partition("/")
    name = unquote(rest.removeprefix("o").removeprefix("/"))
    on = f"{_bucket(bucket)}/{name or call.get('object', '')}"
    if not rest:
        variant = ["storage.buckets.get (for its location)"] if call["caller"] == "preflight" else []
        return [on, "storage.buckets.get", *variant]
    if "/upload/" in path:
        match = parse_qs(urlsplit(call["call"].partition(" ")[2]).query).get("ifGenerationMatch")
        replaces = "overwrite" if match != ["0"] else "exists already"
        always = [on, "storage.objects.insert"]
        return always if match == ["0"] and call["status"] != 412 else [*always, f"storage.objects.insert ({replaces})"]
    if not name:
        return [on, "storage.objects.list"]
    if verb == "GET":
        return [on, "storage.objects.get" + (" (missing)" if call["status"] == 404 else "")]
    assert verb == "DELETE", call
    return [on, "storage.objects.delete"]


def _bucket(name: str) -> str:
    return {stack.SPECS_BUCKET: "specs_bucket", stack.RUNS_BUCKET: "runs_bucket"}.get(name, "data_buckets")


def _where(permission: str, on: str, call: dict[str, Any]) -> list[str]:
    """Return the scopes in which the call needs the permission."""
    if permission == "storage.buckets.get" and on.startswith("data_buckets/"):
        return ["data_locations"]
    if permission.startswith("storage."):
        return [on]
    if permission == "iam.serviceAccounts.actAs":
        roles = {address: f"{address.partition('@')[0].rpartition('-')[2]}_account" for address in call["acts_as"]}
        assert roles, call
        return sorted(roles.values())
    if permission.startswith("dns."):
        return ["dns_zone"]
    if permission.startswith("artifactregistry."):
        return ["registry"]
    if permission.startswith("secretmanager."):
        name = on.partition("/secrets/")[2].partition("/")[0]
        others = "webhook_secrets" if name in WEBHOOKS else "training_secrets"
        return ["endpoint_keys" if name == stack.ENDPOINT_KEY_SECRET else others]
    if permission.startswith("pubsub."):
        topic = re.sub(r":publish.*", "", on.rpartition("/topics/")[2])
        return [{stack.RUN_EVENTS: "run_events_topic", stack.JOB_EVENTS: "job_events_topic"}.get(topic, topic)]
    return ["project"]
