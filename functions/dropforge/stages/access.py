"""The stage access: a run's containers get a token that reaches the objects of their run, and of no other run.

The containers of all runs have the same accounts, which may neither read nor write the runs bucket. A container names
its run and proves it (run/proof.py). It gets the token of this function's account within a Credential Access Boundary,
for at most an hour: Cloud Storage then refuses what the account or the boundary does not allow
(https://cloud.google.com/iam/docs/downscoping-short-lived-credentials).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import NotFound
from dropforge.cloud.classify import classify, client_errors
from dropforge.context import Context
from dropforge.run.artifacts import checkpoint_prefix, model_prefix
from dropforge.run.proof import ACCESS_NAME, is_proved
from dropforge.spec import JobSpec

from .answers import Granted

# Upper bounds: the grants of this function's account (terraform/permissions.yaml) are smaller.
READ_AT_ONCE = 4  # prefixes of a rule: the longest names make an expression of fewer than 2,048 characters
_WRITE, _READ = "inRole:roles/storage.objectUser", "inRole:roles/storage.objectViewer"
_CREATE = "inRole:roles/storage.objectCreator"  # not to replace: a replacement is also a delete
_LOOK = "inRole:roles/storage.bucketViewer"  # the account has only its permission storage.buckets.get
_LISTED = "api.getAttribute('storage.googleapis.com/objectListPrefix','')"


def access(context: Context, run: str, claimed: str, account: str) -> Granted:
    """A token for the containers of a run. `account` is the caller's e-mail: only the trainer's may write the model.

    The answer to the trainer has the spec, too: its token reaches the spec, and this saves a request. Raises NotFound
    for a run that was never accepted, and for a wrong proof; CloudError if Google gives no token.
    """
    key = context.store.key(run)
    if not is_proved(key, ACCESS_NAME, run.encode(), claimed):
        raise NotFound(f"no run {run!r} has the key of this proof; expected the run in DROPFORGE_ACCESS_REQUEST")
    is_trainer = account == context.settings.trainer_service_account
    spec = context.store.spec(run)
    rules = boundary(context.settings.runs_bucket, run, spec, is_trainer=is_trainer)
    try:
        token, seconds = context.cloud.clients.bounded_token(rules)
    except client_errors() as error:
        raise classify(error) from error
    context.log("gave access", stage="access", run=run, account=account)
    granted = Granted(access_token=token, expires_in=seconds)
    return evolve(granted, spec=spec.model_dump(mode="json", by_alias=True)) if is_trainer else granted


def boundary(bucket: str, run: str, spec: JobSpec, *, is_trainer: bool) -> dict[str, Any]:
    """The Credential Access Boundary of a run's containers.

    A training container writes the run's checkpoints, model and machine files, and reads its record and spec, and the
    models of other runs that its spec names. A server reads the model. A server on its own machine also writes the
    machine files. A server creates and reads what the servers of this run have compiled: that is code, so no other
    container reaches it, and no server replaces it.

    The service takes 10 rules, and 2,048 characters in an expression
    (https://cloud.google.com/iam/docs/reference/sts/rest/v1/AccessBoundary, 2026-11-26). No spec needs more: it has a
    model, MAX_SOURCES of data and one of evaluation, and the longest names of READ_AT_ONCE of them fit an expression.
    """
    machine, model, checkpoints = f"{names.MACHINES_PREFIX}{run}/", model_prefix(run), checkpoint_prefix(run)
    kept, sources = names.run_prefix(run), sorted(set(_sources(bucket, spec)))
    if is_trainer:
        writes = _rule(bucket, _WRITE, [machine, model, checkpoints], [model, checkpoints])
        read = [kept, *sources]
        groups = [read[at : at + READ_AT_ONCE] for at in range(0, len(read), READ_AT_ONCE)]
        rules = [writes, *(_rule(bucket, _READ, group, [each for each in group if each != kept]) for group in groups)]
    else:
        compiled = names.cache_prefix(run)
        reads = _rule(bucket, _READ, [model, compiled], [model, compiled])
        rules = [_rule(bucket, _WRITE, [machine], []), reads, _rule(bucket, _CREATE, [compiled], []), _look(bucket)]
    return {"accessBoundary": {"accessBoundaryRules": rules}}


def _rule(bucket: str, permissions: str, prefixes: list[str], listed: list[str]) -> dict[str, Any]:
    """A rule: permissions below `prefixes`, and the prefixes that may be listed. No prefix has a quote.

    Cloud Storage answers that an object is missing only to a caller who may list it. The first terms allow that, too.
    """
    place = f"projects/_/buckets/{bucket}"
    terms = [f"resource.name.startsWith('{place}/objects/{prefix}')" for prefix in prefixes]
    terms += [f"{_LISTED}.startsWith('{prefix}')" for prefix in listed]
    return {
        "availableResource": f"//storage.googleapis.com/{place}",
        "availablePermissions": [permissions],
        "availabilityCondition": {"expression": "||".join(terms)},
    }


def _look(bucket: str) -> dict[str, Any]:
    """A rule: the bucket's metadata, for which vLLM's streamer asks first (runai_model_streamer_gcs/files)."""
    return {
        "availableResource": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "availablePermissions": [_LOOK],
    }


def _sources(bucket: str, spec: JobSpec) -> Iterator[str]:
    """The prefixes of the runs whose models the spec names as its base model or its data."""
    for source in spec.sources.values():
        match = re.match(r"gs://([^/]+)/models/([^/]+)/", source)
        if match and match[1] == bucket and names.is_run_id(match[2]):
            yield model_prefix(match[2])
