"""A request for the model of another deployment: what must hold, and the run that stands for its copy here.

Nothing is written before every check has passed. The run has trained nothing: it has the spec of the other run, as this
deployment serves it, and the key with which this deployment proves the copy. The rollout copies the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from pydantic import JsonValue

from dropforge.base import names
from dropforge.base.errors import ErrorClass, InvalidSpec, Malformed, NotFound, SpecProblem
from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.cloud.classify import classify, client_errors
from dropforge.context import Context
from dropforge.endpoints.record import Revision
from dropforge.money.limits import most_usd
from dropforge.run.events import Request
from dropforge.run.index import about
from dropforge.run.origin import Origin, bucket_and_run, find_origin, keep_origin, read_other, read_other_record
from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.spec import JobSpec, parse_spec
from dropforge.spec.parse import MAX_SPEC_BYTES
from dropforge.spec.policy import policy_of
from dropforge.stages.ceiling import policy_problems, with_defaults

from .requests import UNFIT, Refused

T = TypeVar("T")
PAGE = "docs/endpoints.md#models-of-another-deployment"
# Of the other run's spec. Its channels, secrets and limits are of its own deployment.
KEPT = ("$schema", "api_version", "name", "model", "dataset", "training", "target", "evaluation", "labels")
SERVED = ("/serve", "/labels", "/model/trust_remote_code")  # what a spec that trains nothing can break


class Unreadable(Refused):
    """The caller may not read the bucket of the other deployment."""


class Model(NamedTuple):
    """The model of another deployment, and the spec by which this deployment serves it."""

    origin: Origin
    spec: JobSpec


def is_elsewhere(settings: Settings, run: str) -> bool:
    """Whether a text names the model of another deployment, rather than a run of this one."""
    named = bucket_and_run(run)
    return run.startswith("gs://") and (named is None or named[0] != settings.runs_bucket)


def why_not_here(uri: str, settings: Settings) -> str:
    """Why no model is served from a URI, as far as settings say; "" if models of its bucket are."""
    if (found := bucket_and_run(uri)) is None:
        return f"{cut(uri, 120)!r} is not a model of a run; expected gs://RUNS-BUCKET/models/RUN"
    if found[0] not in settings.other_buckets:
        allowed = ", ".join(settings.other_buckets) or "none"
        return f"this deployment serves no models of bucket {found[0]}; its model_buckets are: {allowed}"
    return ""


def rights(bucket: str) -> str:
    """How an operator gives the functions the right to read the bucket of another deployment."""
    return (
        f"`make deploy` with model_buckets grants roles/storage.objectViewer on gs://{bucket} to the accounts of the "
        f"functions on_spec_message and rollout: {PAGE}"
    )


def find_model(context: Context, uri: str, endpoint: str, changes: dict[str, JsonValue]) -> Model:
    """The model at a URI. `changes` are fields of `serve` that differ from the spec of its run. Raises Refused."""
    if problem := why_not_here(uri, context.settings):
        raise Refused(problem, f"an operator can add a bucket to Terraform's model_buckets: {PAGE}")
    found = bucket_and_run(uri)
    assert found is not None, "it has a bucket"
    bucket, run = found
    client = context.cloud.clients.storage()

    def look() -> Model:
        record = read_other_record(client, bucket, run)
        if record.error is not None and record.error.error_class in UNFIT:
            raise Refused(f"the model at {uri} cannot be served: {record.error.message}")
        origin = find_origin(client, bucket, run)
        return Model(origin, _spec_here(context.settings, uri, _spec_there(client, bucket, record), endpoint, changes))

    return _asked(look, bucket)


def _spec_there(client: Any, bucket: str, record: Record) -> bytes:
    """The accepted spec of a run of another deployment: in its record, or in an object of its own."""
    if record.spec is not None:
        return json.dumps(record.spec).encode()
    return read_other(client, bucket, names.spec_object(record.run), MAX_SPEC_BYTES)


def is_copy_of(context: Context, model: Model, revision: Revision) -> bool:
    """Whether a revision is a copy of a model that is served as a request wants it."""
    is_same = (revision.origin, revision.digest) == (model.origin.uri, model.origin.digest)
    return is_same and context.store.spec(revision.run) == model.spec


def add_run(context: Context, model: Model, run: str, request: Request) -> Record:
    """The run that stands for the copy of a model. A repeated request changes nothing."""
    store, now, spec = context.store, context.now(), model.spec
    keep_origin(store, run, model.origin)
    store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode())
    number, region = model.origin.manifest.attempt, next(iter(context.platforms.target(spec.target.type).regions(spec)))
    trained = {"started": now, "ended": now, "deadline": now, "usd_per_hour": 0.0}  # it costs nothing here
    record = Record(
        run=run,
        name=spec.name,
        source=redact(f"topic {request.topic} message {request.key} {model.origin.uri}"),
        topic=request.topic,
        origin=model.origin.uri,
        state=RunState.SUCCEEDED,
        created=now,
        submitter=request.by,
        history=[Transition(state=RunState.SUCCEEDED, time=now)],
        attempts=[Attempt(number=number, placement=0, region=region, **trained)],
        metrics=model.origin.manifest.metrics,
        resources=[],
        about=about(spec, most_usd(spec)),
    )
    store.create(store.with_key(record))
    return store.record(run)


def _asked(look: Callable[[], T], bucket: str) -> T:
    """The result of `look`, which reads the bucket. Raises Refused, and CloudError for an error that may pass."""
    try:
        return look()
    except (NotFound, Malformed) as problem:
        raise Refused(str(problem), PAGE) from None
    except client_errors() as error:
        found = classify(error)
        if found.error_class is ErrorClass.TRANSIENT:
            raise found from error
        raise Unreadable(f"gs://{bucket} may not be read: {cut(found.message, 300)}", rights(bucket)) from None


def _spec_here(settings: Settings, uri: str, text: bytes, endpoint: str, changes: dict[str, JsonValue]) -> JobSpec:
    """The spec of a run of another deployment, as this deployment serves its model. Raises Refused."""
    try:
        given = json.loads(text)
        serve = given.get("serve") or {}
        if serve.get("share") or changes.get("share"):
            raise Refused(
                f"the model at {uri} is an adapter that shares an endpoint: it is served by its own deployment"
            )
        if not serve and not changes:
            raise Refused(f"the spec of {uri} has no `serve`", f"say how it is served, by `with`: {PAGE}")
        document = {key: given[key] for key in KEPT if key in given}
        document["serve"] = {**serve, "budget": None, **changes, "endpoint": endpoint}
        spec = with_defaults(parse_spec(json.dumps(document).encode()), policy_of(settings.policy))
    except InvalidSpec as invalid:
        raise Refused(_told(uri, invalid.problems), PAGE) from None
    except (ValueError, AttributeError, RecursionError):
        raise Refused(f"the spec of {uri} is not a job spec", PAGE) from None
    if problems := list(_problems(spec, settings)):
        raise Refused(_told(uri, problems), PAGE)
    return spec


def _problems(spec: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
    """The problems of a spec that this deployment would serve. The spec's target trains nothing here."""
    assert spec.serve is not None, "it was given"
    yield from (each for each in policy_problems(spec, policy_of(settings.policy)) if each.pointer.startswith(SERVED))
    yield from spec.serve.missing(spec, settings)
    yield from spec.serve.machine_problems(spec)


def _told(uri: str, problems: list[SpecProblem]) -> str:
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    return f"the model at {uri} cannot be served here: {problems[0]}{more}"
