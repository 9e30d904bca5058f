"""Every entry point of dropforge, in the order of a run's life. The upload of the functions' source is this folder.

Events (`on_*`) are CloudEvents: a return acknowledges the event, an exception has it delivered again. Stages are HTTP
functions that the workflow calls repeatedly: each call advances a run by one step and answers a small JSON object.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import flask
import functions_framework

from dropforge.base.errors import CloudError, Conflict, ErrorClass, Malformed, NotFound
from dropforge.base.names import is_spec_object
from dropforge.base.redact import cut
from dropforge.context import Context, process_context
from dropforge.run.events import pubsub_message, request_message, uploaded_object
from dropforge.run.proof import PROOF
from dropforge.spec.request import CHANGES, kind_of
from dropforge.stages import calls
from dropforge.stages.access import access as give_access
from dropforge.stages.answers import Answer
from dropforge.stages.ask import ask as lend
from dropforge.stages.await_.inspect import inspect as inspect_run
from dropforge.stages.await_.job_events import receive_job_event
from dropforge.stages.cancel import cancel_deleted, cancel_requested
from dropforge.stages.deploy import deploy as deploy_run
from dropforge.stages.preflight import preflight as preflight_spec
from dropforge.stages.provision import provision as provision_run
from dropforge.stages.rollout.advance import advance as advance_rollout
from dropforge.stages.rollout.messages import change_endpoint
from dropforge.stages.submit import ignore_object, json_of, submit_message, submit_object, submit_uri
from dropforge.stages.sweep.sweep import sweep as sweep_all
from dropforge.stages.teardown import teardown as teardown_run

T = TypeVar("T")
C = TypeVar("C", bound=calls.Call)
MAX_REQUEST_BYTES = 1 << 20  # the workflow's requests have a few KB

# Made on the first call of the process, and kept. A simulation gives its copy of this module another function.
context: Callable[[], Context] = cache(process_context)


@functions_framework.cloud_event
def on_spec_uploaded(event: Any) -> None:
    """Cloud Storage `finalized` in the specs bucket."""
    upload = _read(uploaded_object, event, "submit")
    if upload and is_spec_object(upload.name):
        submit_object(
            context(), upload.bucket, upload.name, str(upload.generation), upload.size, upload.again, upload.md5
        )
    elif upload:
        ignore_object(context(), upload.bucket, upload.name, str(upload.generation))


@functions_framework.cloud_event
def on_spec_deleted(event: Any) -> None:
    """Cloud Storage `deleted` in the specs bucket; also sent for an overwritten object."""
    upload = _read(uploaded_object, event, "submit")
    if upload and is_spec_object(upload.name):
        cancel_deleted(context(), upload.bucket, upload.name, str(upload.generation), upload.md5)


@functions_framework.cloud_event
def on_spec_message(event: Any) -> None:
    """Pub/Sub message on a requests topic or the operations topic: a spec, or another request (spec/request.py)."""
    settings = context().settings
    message = _read(
        lambda data: request_message(data, event["source"], settings.console_topic, settings.operations_topic),
        event,
        "submit",
    )
    if message is None:
        return
    data, request = message
    content = json_of(data)
    kind = kind_of(content)
    if kind == "cancel":
        cancel_requested(context(), content["cancel"], request)
    elif kind == "spec_uri":
        submit_uri(context(), str(content["spec_uri"]), request)
    elif kind in CHANGES:
        change_endpoint(context(), content, request)
    else:
        submit_message(context(), data, request)


@functions_framework.cloud_event
def on_job_event(event: Any) -> None:
    """Pub/Sub message on the job-events topic, from a training container."""
    if message := _read(pubsub_message, event, "await"):
        data, attributes, _ = message
        receive_job_event(context(), data, attributes.get(PROOF))


@functions_framework.http
def provision(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, attempt, callback_url} → RUNNING | PENDING | SUCCEEDED | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "provision", calls.OfAttempt, lambda call: partial(provision_run, **call.arguments))


@functions_framework.http
def access(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, proof}, called by the containers of the run → GRANTED"""
    return _stage(
        request,
        "access",
        calls.Access,
        lambda call: partial(give_access, run=call.run, claimed=call.proof, account=_account(request)),
    )


@functions_framework.http
def inspect(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, attempt, callback_url} → WAITING | SUCCEEDED | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "await", calls.OfAttempt, lambda call: partial(inspect_run, **call.arguments))


@functions_framework.http
def deploy(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution} → READY | PENDING | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "deploy", calls.OfRun, lambda call: partial(deploy_run, **call.arguments))


@functions_framework.http
def teardown(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, scope, keep_endpoint, outcome?} → GONE | ENDED | PENDING | SUPERSEDED"""
    return _stage(request, "teardown", calls.Teardown, lambda call: partial(teardown_run, **call.arguments))


@functions_framework.http
def rollout(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{endpoint, rollout, execution} → PROMOTED | ROLLED_BACK | SUSPENDED | RETIRED | PENDING | SUPERSEDED"""
    return _stage(request, "rollout", calls.Rollout, lambda call: partial(advance_rollout, **call.arguments))


@functions_framework.http
def ask(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{of}, called by the console → LENT"""
    return _stage(request, "ask", calls.Ask, lambda call: partial(lend, of=call.of))


@functions_framework.http
def preflight(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{spec}, called by the console; `spec` is the text of a spec → CHECKED"""
    return _stage(request, "preflight", calls.Preflight, lambda call: partial(preflight_spec, text=call.spec))


@functions_framework.http
def sweep(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """Called by Cloud Scheduler → SWEPT"""
    return _stage(request, "sweep", calls.Sweep, lambda _: sweep_all)


def _read(read: Callable[[Any], T], event: Any, stage: str) -> T | None:
    """The content of an event; None if it is malformed: then it is acknowledged, because a repeat would be the same."""
    try:
        return read(event.data)
    except ValueError as error:
        context().log("malformed event", stage=stage, severity="ERROR", problem=cut(str(error), 500))
        return None


def _stage(
    request: flask.Request, stage: str, body: type[C], work_of: Callable[[C], Callable[[Context], Answer]]
) -> flask.typing.ResponseReturnValue:
    """Run a stage and answer JSON: 400 for a malformed request, 404 for an unknown run, 503 for a temporary failure.

    The workflow retries 503 and 500 and gives up on 400, so only a malformed request may be answered with 400.
    """
    data = request.get_data()
    if len(data) > MAX_REQUEST_BYTES:
        return {"error": f"the body of {stage} is larger than {MAX_REQUEST_BYTES} bytes"}, 400
    try:
        call = calls.read_call(body, data)
        work = work_of(call)
    except ValueError as error:
        context().log("malformed request", stage=stage, severity="ERROR", problem=str(error))
        return {"error": f"malformed request to {stage}: {error}"}, 400
    try:
        return work(context()).to_json()
    except NotFound as error:
        return {"error": str(error)}, 404
    except (CloudError, Conflict, Malformed) as error:
        is_transient = isinstance(error, CloudError) and error.error_class is ErrorClass.TRANSIENT
        is_temporary = isinstance(error, Conflict) or is_transient
        context().log(str(error), stage=stage, run=str(getattr(call, "run", "")), severity="WARNING")
        return {"error": str(error)}, 503 if is_temporary else 500


def _account(request: flask.Request) -> str:
    """The e-mail of the account that calls; "" for an identity token without it. Raises ValueError.

    The platform has verified the token before, and may have removed its signature
    (https://cloud.google.com/run/docs/troubleshooting#signature-removed). It verifies X-Serverless-Authorization
    instead, where a caller sends it, and then passes on any Authorization: such a request proves no account.
    """
    if "X-Serverless-Authorization" in request.headers:
        raise ValueError("the request has X-Serverless-Authorization; expected the identity token in Authorization")
    parts = request.headers.get("Authorization", "").split(".")
    if len(parts) != 3:
        raise ValueError("the request has no identity token")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=="))
    except RecursionError:
        claims = None
    if not isinstance(claims, dict):
        raise ValueError("the claims of the identity token are no JSON object")
    return str(claims.get("email", ""))
