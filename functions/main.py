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
from dropforge.base.names import is_endpoint_name, is_run_id, is_spec_object
from dropforge.base.redact import cut
from dropforge.context import Context, process_context
from dropforge.run.events import pubsub_message, request_message, uploaded_object
from dropforge.run.proof import PROOF
from dropforge.run.record import Outcome
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
from dropforge.stages.rollout.messages import change_endpoint, is_change
from dropforge.stages.submit import ignore_object, json_of, submit_message, submit_object, submit_uri
from dropforge.stages.sweep.sweep import sweep as sweep_all
from dropforge.stages.teardown import Scope
from dropforge.stages.teardown import teardown as teardown_run

T = TypeVar("T")
MAX_REQUEST_BYTES = 1 << 20  # the workflow's requests have a few KB
MOST_ATTEMPTS = 1000

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
    """Pub/Sub message on a requests topic or the operations topic: a spec, {"spec_uri": ...}, {"cancel": run}, or a
    change of a named endpoint (stages/rollout/messages.py)."""
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
    if not isinstance(content, dict):
        submit_message(context(), data, request)
    elif set(content) == {"cancel"}:
        cancel_requested(context(), content["cancel"], request)
    elif set(content) == {"spec_uri"}:
        submit_uri(context(), str(content["spec_uri"]), request)
    elif is_change(content):
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
    return _stage(
        request,
        "provision",
        lambda body: partial(
            provision_run, **_caller(body), attempt=_attempt(body), callback_url=str(body["callback_url"])
        ),
    )


@functions_framework.http
def access(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, proof}, called by the containers of the run → GRANTED"""
    return _stage(
        request,
        "access",
        lambda body: partial(give_access, run=_run(body), claimed=str(body["proof"]), account=_account(request)),
    )


@functions_framework.http
def inspect(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, attempt, callback_url} → WAITING | SUCCEEDED | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(
        request,
        "await",
        lambda body: partial(
            inspect_run, **_caller(body), attempt=_attempt(body), callback_url=str(body["callback_url"])
        ),
    )


@functions_framework.http
def deploy(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution} → READY | PENDING | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "deploy", lambda body: partial(deploy_run, **_caller(body)))


@functions_framework.http
def teardown(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, scope, keep_endpoint, outcome?} → GONE | ENDED | PENDING | SUPERSEDED"""
    return _stage(
        request,
        "teardown",
        lambda body: partial(
            teardown_run,
            **_caller(body),
            scope=_scope(body),
            keep_endpoint=_one_of((False, True), body, "keep_endpoint"),
            outcome=_outcome(body.get("outcome")),
        ),
    )


@functions_framework.http
def rollout(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{endpoint, rollout, execution} → PROMOTED | ROLLED_BACK | SUSPENDED | RETIRED | PENDING | SUPERSEDED"""
    return _stage(request, "rollout", lambda body: partial(advance_rollout, **_rollout(body)))


@functions_framework.http
def ask(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{of}, called by the console → LENT"""
    return _stage(request, "ask", lambda body: partial(lend, of=_asked(body)))


@functions_framework.http
def preflight(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{spec}, called by the console; `spec` is the text of a spec → CHECKED"""
    return _stage(request, "preflight", lambda body: partial(preflight_spec, text=_text(body)))


@functions_framework.http
def sweep(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """Called by Cloud Scheduler → SWEPT"""
    return _stage(request, "sweep", lambda _: sweep_all)


def _read(read: Callable[[Any], T], event: Any, stage: str) -> T | None:
    """The content of an event; None if it is malformed: then it is acknowledged, because a repeat would be the same."""
    try:
        return read(event.data)
    except ValueError as error:
        context().log("malformed event", stage=stage, severity="ERROR", problem=cut(str(error), 500))
        return None


def _stage(
    request: flask.Request, stage: str, read: Callable[[dict[str, Any]], Callable[[Context], Answer]]
) -> flask.typing.ResponseReturnValue:
    """Run a stage and answer JSON: 400 for a malformed request, 404 for an unknown run, 503 for a temporary failure.

    The workflow retries 503 and 500 and gives up on 400, so only a malformed request may be answered with 400.
    """
    if len(request.get_data()) > MAX_REQUEST_BYTES:
        return {"error": f"the body of {stage} is larger than {MAX_REQUEST_BYTES} bytes"}, 400
    try:
        body = request.get_json(silent=True)
    except RecursionError:  # the JSON is nested more deeply than Python's parser allows
        body = None
    if not isinstance(body, dict):
        return {"error": f"expected a JSON object as the body of {stage}"}, 400
    try:
        work = read(body)
    except (KeyError, TypeError, ValueError) as error:
        context().log("malformed request", stage=stage, severity="ERROR", problem=repr(error))
        return {"error": f"malformed request to {stage}: {error!r}"}, 400
    try:
        return work(context()).to_json()
    except NotFound as error:
        return {"error": str(error)}, 404
    except (CloudError, Conflict, Malformed) as error:
        is_transient = isinstance(error, CloudError) and error.error_class is ErrorClass.TRANSIENT
        is_temporary = isinstance(error, Conflict) or is_transient
        context().log(str(error), stage=stage, run=str(body.get("run", "")), severity="WARNING")
        return {"error": str(error)}, 503 if is_temporary else 500


def _caller(body: dict[str, Any]) -> dict[str, Any]:
    """The run, and the execution that calls, as arguments of a stage. Raises KeyError or ValueError."""
    run, execution = _run(body), body["execution"]
    if not isinstance(execution, str) or not execution:
        raise ValueError(f"execution is {execution!r}; expected the id of a workflow execution")
    return {"run": run, "execution": execution}


def _run(body: dict[str, Any]) -> str:
    """The id of a run. Raises KeyError or ValueError."""
    run = body["run"]
    if not isinstance(run, str) or not is_run_id(run):
        raise ValueError(f"run is {cut(repr(run), 80)}; expected a run id")
    return run


def _asked(body: dict[str, Any]) -> str:
    """A run, or a named endpoint. Raises KeyError or ValueError."""
    of = body["of"]
    if not isinstance(of, str) or not (is_run_id(of) or is_endpoint_name(of)):
        raise ValueError(f"of is {cut(repr(of), 80)}; expected a run id, or the name of an endpoint")
    return of


def _text(body: dict[str, Any]) -> str:
    """The text of a spec. Raises KeyError or ValueError."""
    text = body["spec"]
    if not isinstance(text, str):
        raise ValueError(f"spec is {cut(repr(text), 80)}; expected the text of a spec, as a string")
    return text


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


def _rollout(body: dict[str, Any]) -> dict[str, Any]:
    """The endpoint, the rollout, and the execution that calls, as arguments of a stage.

    Raises KeyError or ValueError.
    """
    endpoint, rollout, execution = body["endpoint"], body["rollout"], body["execution"]
    if not isinstance(endpoint, str) or not is_endpoint_name(endpoint):
        raise ValueError(f"endpoint is {endpoint!r}; expected the name of an endpoint")
    if not isinstance(rollout, str) or not is_run_id(rollout):
        raise ValueError(f"rollout is {rollout!r}; expected the id of a rollout")
    if not isinstance(execution, str) or not execution:
        raise ValueError(f"execution is {execution!r}; expected the id of a workflow execution")
    return {"endpoint": endpoint, "rollout": rollout, "execution": execution}


def _attempt(body: dict[str, Any]) -> int:
    """The number of an attempt. Raises KeyError or ValueError, also for the Infinity that Python reads in JSON."""
    attempt = body["attempt"]
    if type(attempt) is not int or not 0 <= attempt <= MOST_ATTEMPTS:
        raise ValueError(f"attempt is {cut(repr(attempt), 80)}; expected a whole number from 0 to {MOST_ATTEMPTS}")
    return attempt


def _scope(body: dict[str, Any]) -> Scope:
    """What a teardown deletes: the number of an attempt, or "run". Raises KeyError or ValueError."""
    scope = body["scope"]
    if scope == "run":
        return "run"
    if type(scope) is not int:
        raise ValueError(f"scope is {cut(repr(scope), 80)}; expected run, or the number of an attempt")
    return _attempt({"attempt": scope})


def _one_of(expected: tuple[T, ...], body: dict[str, Any], name: str) -> T:
    """The field `name`, which must be one of the expected values and of the same type. Raises ValueError."""
    given = body[name]
    for value in expected:
        if type(given) is type(value) and given == value:
            return value
    raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, expected))}")


def _outcome(value: Any) -> Outcome | None:
    return None if value is None else Outcome.model_validate(value)
