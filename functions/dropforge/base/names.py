"""All names that dropforge gives: run ids, cloud resources, labels, objects in the runs bucket.

A name is a pure function of the run and the attempt: a caller that lost a reply can still find the resource.
Limits: Cloud Run service id < 50 characters, job id plus execution token < 63, labels <= 63.
"""

from __future__ import annotations

import hashlib
import re

MANAGED_BY = "managed-by"
OWN_LABELS = "dropforge-"  # how all others begin
RUN_LABEL = "dropforge-run"
ATTEMPT_LABEL = "dropforge-attempt"
EXPIRES_LABEL = "dropforge-expires"
DEPLOYMENT_LABEL = "dropforge-deployment"
ENDPOINT_LABEL = "dropforge-endpoint"
ROLLOUT_LABEL = "dropforge-rollout"

RESERVED_ENDPOINTS = frozenset({"latest"})  # the command line's word for the newest run

SHARED_PREFIX = "shared-"  # of the names of endpoints that dropforge chooses

SPECS_PREFIX = "specs/"
# If the deployment has a console, only its account may create objects below this prefix (terraform/console.tf).
CONSOLE_SPECS_PREFIX = "specs/console/"
SUBMITTER = "submitter"  # the metadata of an object there: the e-mail address of the person who dropped the spec
AGAIN = "again"  # the metadata of a spec, or the attribute of a message, that asks for another run of the same spec
OPEN_PREFIX = "runs/open/"
ENDPOINTS_PREFIX = "endpoints/"
# Containers write below these prefixes of the runs bucket; below `runs/` only functions write (terraform/iam.tf).
MACHINES_PREFIX = "machines/"
# Servers create objects below this prefix, and nobody replaces them (containers/serve_vllm/compiled.py).
CACHES_PREFIX = "caches/"
# Only functions read and write below this prefix.
KEYS_PREFIX = "keys/"
# Of the ids of runs whose model was copied from another deployment. No spec and no message has such a run id: `_slug`
# leaves no two dashes in a row. So the function that copies may write below models/copy-- alone (terraform/iam.tf).
COPY_PREFIX = "copy--"


def parse_gs_uri(uri: str) -> tuple[str, str]:
    """`gs://bucket/a/b` as ("bucket", "a/b"). Raises ValueError."""
    match = re.fullmatch(r"gs://([^/]+)/?(.*)", uri, re.DOTALL)
    if match is None:
        raise ValueError(f"{uri!r} is not a Cloud Storage URI; expected gs://bucket/path")
    return match[1], match[2]


def run_id_of_object(bucket: str, name: str, generation: int | str) -> str:
    """The run id of a generation of an uploaded spec; people read the slug, the digest makes the id unique."""
    stem = name.rsplit("/", 1)[-1].removesuffix(".json")
    return f"{_slug(stem)}-{_digest(bucket, name, str(generation))}"


def run_id_of_message(idempotency_key: str, topic: str = "") -> str:
    """The run id of a request message, from its idempotency key or, without a key, from its message id.

    `topic` is "" for the deployment's first requests topic. The same key on another topic is another run.
    """
    return f"request-{_digest('topic', topic, idempotency_key) if topic else _digest('request', idempotency_key)}"


def copy_id(rollout: str) -> str:
    """The id of the run that a rollout makes for the model of another deployment: each rollout has its own copy."""
    return f"{COPY_PREFIX}{_digest('copy', rollout)}"


def is_copy(run: str) -> bool:
    """Whether a run trained nothing: its model was copied from another deployment."""
    return run.startswith(COPY_PREFIX)


def is_spec_object(name: str) -> bool:
    """Whether an object of the specs bucket is a job spec: `specs/**/*.json`."""
    return name.startswith(SPECS_PREFIX) and name.endswith(".json")


def is_email(text: str) -> bool:
    """Whether a text can be the e-mail address of a person or of an account, as identities are named."""
    return len(text) <= 254 and re.fullmatch(r"[^\s@<>\x00-\x1f\x7f]+@[A-Za-z0-9.-]+", text) is not None


def is_run_id(text: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9-]{0,19}-[0-9a-f]{12}", text) is not None


def training_name(run: str, attempt: int) -> str:
    """The name of an attempt's training resource: at most 40 characters."""
    return f"df-{run}-a{attempt}"


def endpoint_name(run: str) -> str:
    """The short name of all resources of a run's endpoint."""
    return f"df-{run}-serve"


def is_endpoint(resource: str, run: str) -> bool:
    """Whether a resource is part of the endpoint, by its full name: training has Services, too."""
    return resource.rsplit("/", 1)[-1] == endpoint_name(run)


def is_endpoint_name(text: str) -> bool:
    """Whether a named endpoint may have this name. It must not look like a run id: commands take both."""
    is_name = re.fullmatch(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?", text) is not None
    return is_name and text not in RESERVED_ENDPOINTS and not is_run_id(text)


def named_endpoint(endpoint: str) -> str:
    """The short name of the service of a named endpoint: with a tag (`revision_tag`), it has at most 46 characters."""
    return f"df-ep-{endpoint}"


def shared_endpoint(*parts: str) -> str:
    """The name of a shared endpoint that no spec has named. It is no run id, whose digest is longer."""
    return f"{SHARED_PREFIX}{_digest(*parts)[:10]}"


def revision_tag(number: int) -> str:
    """The traffic tag of a revision of a named endpoint."""
    return f"r{number}"


def named_revision(endpoint: str, number: int) -> str:
    """The short name of all resources of a revision of a named endpoint, where the cloud gives revisions no names.

    It does not begin as `named_endpoint` does: endpoint `a-r1` is not revision 1 of endpoint `a`.
    """
    return f"df-r{number}-{endpoint}"


def revision_number(resource: str, endpoint: str) -> int | None:
    """The number of the revision that a resource is part of, by its full name; None for another resource."""
    match = re.fullmatch(rf"df-r([1-9][0-9]*)-{re.escape(endpoint)}", resource.rsplit("/", 1)[-1])
    return int(match[1]) if match else None


def is_of_endpoint(resource: str, endpoint: str) -> bool:
    """Whether a resource is part of a named endpoint, by its full name."""
    is_service = resource.endswith(f"/{named_endpoint(endpoint)}")
    return is_service or revision_number(resource, endpoint) is not None


def rollout_id(topic: str, idempotency_key: str) -> str:
    """The id of the rollout that a message requests. The rollout of a run has the run's id."""
    return f"rollout-{_digest('rollout', topic, idempotency_key)}"


def endpoint_object(endpoint: str) -> str:
    return f"{ENDPOINTS_PREFIX}{endpoint}/record.json"


def endpoint_of_object(name: str) -> str:
    """The named endpoint whose record an object is; "" for another object."""
    match = re.fullmatch(rf"{ENDPOINTS_PREFIX}([^/]+)/record\.json", name)
    return match[1] if match and is_endpoint_name(match[1]) else ""


def is_of_run(resource: str, run: str) -> bool:
    """Whether a resource is the run's own, by its full name. KubeRay adds suffixes to its names."""
    return resource.rsplit("/", 1)[-1].startswith((f"df-{run}-a", endpoint_name(run)))


def training_of(name: str) -> tuple[str, int] | None:
    """The run and the attempt in the short name of a training resource; None for any other name."""
    match = re.fullmatch(r"df-(.+)-a([1-9][0-9]*)", name)
    return (match[1], int(match[2])) if match and is_run_id(match[1]) else None


def deployment_id(runs_bucket: str) -> str:
    """The label value that tells the deployments of a project apart."""
    return _digest(runs_bucket)


def secret_version(project: str, secret: str) -> str:
    """The full resource name of a secret in a spec: `name` or `name:version`."""
    name, _, version = secret.partition(":")
    return f"projects/{project}/secrets/{name}/versions/{version or 'latest'}"


def is_own_label(key: str) -> bool:
    """Whether only dropforge sets a label: the sweep finds and ends resources by such labels."""
    return key == MANAGED_BY or key.startswith(OWN_LABELS)


def labels(run: str, user: dict[str, str], **extra: str) -> dict[str, str]:
    """Ownership labels on top of the user's labels."""
    return {**user, MANAGED_BY: "dropforge", RUN_LABEL: run, **extra}


def open_object(run: str) -> str:
    """The open mark of a run: the run has not ended, or resources remain. The sweep looks at marked runs."""
    return f"{OPEN_PREFIX}{run}"


def run_prefix(run: str) -> str:
    """The prefix of the objects that the control plane keeps about a run."""
    return f"runs/{run}/"


def record_object(run: str) -> str:
    return f"runs/{run}/record.json"


def day_key_object(day: str) -> str:
    """The key of a day, such as 2026-11-27: the keys of the runs that were accepted on this day derive from it."""
    return f"{KEYS_PREFIX}days/{day}"


def run_of_object(name: str) -> str:
    """The run in the name of a record or a spec."""
    return name.removeprefix("runs/").partition("/")[0]


def spec_object(run: str) -> str:
    return f"runs/{run}/spec.json"


def cancel_object(run: str, topic: str = "") -> str:
    """A cancel request that arrived before the run existed: of an operator, or of another publisher of a topic."""
    return f"runs/{run}/cancel-{topic}.json" if topic else f"runs/{run}/cancel.json"


def intent_object(digest: str) -> str:
    """Which run a request has (run/intents.py)."""
    return f"runs/intents/{digest}.json"


def joined_object(run: str) -> str:
    """Which run a repeated request has joined; `run` is the id of the run that the request would have become."""
    return f"runs/{run}/joined.json"


def origin_object(run: str) -> str:
    """Where the model of a run was copied from (run/origin.py)."""
    return f"runs/{run}/origin.json"


def errors_object(run: str) -> str:
    return f"runs/{run}/errors.json"


def report_object(run: str) -> str:
    return f"runs/{run}/report.json"


def slack_object(run: str) -> str:
    """The Slack thread of a run: the channel and the `ts` of the first message (tell/slack.py)."""
    return f"runs/{run}/slack.json"


def machine_object(run: str, attempt: int, name: str) -> str:
    """A file of a training TPU VM: startup.log or status.json, written by platforms/tpu_vm/startup.sh."""
    return f"{MACHINES_PREFIX}{run}/attempt-{attempt}/{name}"


def server_object(run: str, name: str) -> str:
    """The same for a serving TPU VM; its status.json exists only after a failure."""
    return f"{MACHINES_PREFIX}{run}/serve/{name}"


def cache_prefix(run: str) -> str:
    """The prefix of the code that servers of a run have compiled."""
    return f"{CACHES_PREFIX}{run}/"


def cache_object(run: str, key: str) -> str:
    return f"{cache_prefix(run)}{key}.zip"


def events_prefix(run: str, attempt: int | None = None) -> str:
    return f"runs/{run}/events/" + ("" if attempt is None else f"{attempt:04d}-")


def event_object(run: str, attempt: int, sequence: int, kind: str) -> str:
    """The object of a job event. The names sort by attempt, then by sequence."""
    return f"{events_prefix(run, attempt)}{sequence:015d}-{kind}.json"


def trace_id(run: str) -> str:
    """The id of a run's trace: 16 bytes in hex (https://www.w3.org/TR/trace-context/#trace-id)."""
    return hashlib.sha256(f"trace\0{run}".encode()).hexdigest()[:32]


def span_id(run: str, path: str) -> str:
    """The id of a span of a run's trace, by its path: 8 bytes in hex. A span that is sent again has the same id."""
    return hashlib.sha256(f"span\0{run}\0{path}".encode()).hexdigest()[:16]


def _slug(text: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:20].strip("-")
    return slug if re.match(r"[a-z]", slug) else ("run-" + slug)[:20].strip("-")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
