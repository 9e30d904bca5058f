"""Every name that dropforge gives: run ids, cloud resources, labels, objects in the runs bucket.

Names are pure functions of the run and the attempt, so that whoever lost a reply finds the resource by looking.
Limits: Cloud Run service id < 50 characters, job id plus execution token < 63, labels <= 63.
"""

from __future__ import annotations

import hashlib
import re

MANAGED_BY = "managed-by"
RUN_LABEL = "dropforge-run"
ATTEMPT_LABEL = "dropforge-attempt"
EXPIRES_LABEL = "dropforge-expires"
DEPLOYMENT_LABEL = "dropforge-deployment"

SPECS_PREFIX = "specs/"
OPEN_PREFIX = "runs/open/"


def run_id_of_object(bucket: str, name: str, generation: int | str) -> str:
    """The run of one generation of one uploaded spec; the slug is for people, the digest for uniqueness."""
    stem = name.rsplit("/", 1)[-1].removesuffix(".json")
    return f"{_slug(stem)}-{_digest(bucket, name, str(generation))}"


def run_id_of_message(idempotency_key: str) -> str:
    """The run of one request message, by its idempotency key (or, without one, its message id)."""
    return f"request-{_digest('request', idempotency_key)}"


def is_spec_object(name: str) -> bool:
    """Whether an object of the specs bucket is a job spec: `specs/**/*.json`."""
    return name.startswith(SPECS_PREFIX) and name.endswith(".json")


def is_run_id(text: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9-]{0,19}-[0-9a-f]{12}", text) is not None


def training_name(run: str, attempt: int) -> str:
    """The training resource of one attempt: at most 40 characters."""
    return f"df-{run}-a{attempt}"


def endpoint_name(run: str) -> str:
    """The endpoint of a run: every resource that it is made of has this name."""
    return f"df-{run}-serve"


def is_endpoint(resource: str, run: str) -> bool:
    """Whether a resource, by its full name, serves. Its kind does not tell: training has Services as well."""
    return resource.rsplit("/", 1)[-1] == endpoint_name(run)


def training_of(name: str) -> tuple[str, int] | None:
    """The run and the attempt of a training resource, by its short name; None for a name of another make."""
    found = re.fullmatch(r"df-(.+)-a([1-9][0-9]*)", name)
    return (found[1], int(found[2])) if found and is_run_id(found[1]) else None


def deployment_id(runs_bucket: str) -> str:
    """What tells resources of one deployment from another's in the same project: fits a label."""
    return _digest(runs_bucket)


def secret_version(project: str, secret: str) -> str:
    """The full resource name of a secret that a spec names, as `name` or `name:version`."""
    name, _, version = secret.partition(":")
    return f"projects/{project}/secrets/{name}/versions/{version or 'latest'}"


def labels(run: str, user: dict[str, str], **extra: str) -> dict[str, str]:
    """Ownership labels, with the user's own underneath."""
    return {**user, MANAGED_BY: "dropforge", RUN_LABEL: run, **extra}


def open_object(run: str) -> str:
    """A mark that a run is not over, or has left something: what the sweep looks at."""
    return f"{OPEN_PREFIX}{run}"


def record_object(run: str) -> str:
    return f"runs/{run}/record.json"


def spec_object(run: str) -> str:
    return f"runs/{run}/spec.json"


def ledger_object(run: str) -> str:
    return f"runs/{run}/ledger.json"


def cancel_object(run: str) -> str:
    """A request to end a run that came before the run existed."""
    return f"runs/{run}/cancel.json"


def errors_object(run: str) -> str:
    return f"runs/{run}/errors.json"


def report_object(run: str) -> str:
    return f"runs/{run}/report.json"


def machine_object(run: str, attempt: int, name: str) -> str:
    """What a TPU VM leaves of an attempt: startup.log and status.json, as platforms/tpu_vm/startup.sh writes them."""
    return f"runs/{run}/machine/attempt-{attempt}/{name}"


def server_object(run: str, name: str) -> str:
    """What a TPU VM leaves that serves, likewise; its status.json is there only when it failed."""
    return f"runs/{run}/machine/serve/{name}"


def events_prefix(run: str, attempt: int | None = None) -> str:
    return f"runs/{run}/events/" + ("" if attempt is None else f"{attempt:04d}-")


def event_object(run: str, attempt: int, sequence: int, kind: str) -> str:
    """Sorts by attempt, then sequence."""
    return f"{events_prefix(run, attempt)}{sequence:015d}-{kind}.json"


def _slug(text: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:20].strip("-")
    return slug if re.match(r"[a-z]", slug) else f"run-{slug}"[:20].strip("-")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
