"""Every entry point of dropforge, in the order of a run's life. This folder is what is uploaded as their source.

Events (`on_*`) are CloudEvents: to return is to acknowledge, to raise is to have it delivered again. Stages are HTTP
functions that the workflow calls, and calls again: each advances its run by one step and answers a small JSON map.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import flask
import functions_framework

from dropforge.cancel import cancel
from dropforge.deploy import deploy as deploy_run
from dropforge.errors import CloudError, Conflict, ErrorClass, NotFound
from dropforge.events import pubsub_message
from dropforge.inspect import inspect as inspect_run
from dropforge.job_events import receive_job_event
from dropforge.log import log
from dropforge.names import is_run_id, is_spec_object
from dropforge.notify import notify as notify_run
from dropforge.provision import provision as provision_run
from dropforge.runs import RunError, RunState
from dropforge.submit import submit_message, submit_object, submit_uri
from dropforge.sweep import sweep as sweep_all
from dropforge.teardown import teardown as teardown_run


@functions_framework.cloud_event
def on_spec_uploaded(event: Any) -> None:
    """Cloud Storage `finalized` in the specs bucket."""
    data = event.data
    if is_spec_object(data["name"]):
        submit_object(data["bucket"], data["name"], str(data["generation"]), int(data.get("size", 0)))


@functions_framework.cloud_event
def on_spec_message(event: Any) -> None:
    """Pub/Sub message on the requests topic: a spec, {"spec_uri": ...} or {"cancel": run}."""
    data, attributes, message_id = pubsub_message(event.data)
    key = attributes.get("idempotency_key") or message_id
    request = _request_of(data)
    if set(request) == {"cancel"}:
        cancel(str(request["cancel"]))
    elif set(request) == {"spec_uri"}:
        submit_uri(str(request["spec_uri"]), key)
    else:
        submit_message(data, key)


@functions_framework.cloud_event
def on_job_event(event: Any) -> None:
    """Pub/Sub message on the job-events topic, from a training container."""
    receive_job_event(pubsub_message(event.data)[0])


@functions_framework.http
def provision(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, attempt} → RUNNING | PENDING | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "provision", lambda body: provision_run(_run(body), body["execution"], int(body["attempt"])))


@functions_framework.http
def inspect(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, attempt, callback_url} → WAITING | SUCCEEDED | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(
        request,
        "await",
        lambda body: inspect_run(_run(body), body["execution"], int(body["attempt"]), body["callback_url"]),
    )


@functions_framework.http
def deploy(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution} → READY | PENDING | FAILED | CANCELLED | SUPERSEDED"""
    return _stage(request, "deploy", lambda body: deploy_run(_run(body), body["execution"]))


@functions_framework.http
def notify(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, state, error?} → NOTIFIED | SUPERSEDED"""
    return _stage(
        request,
        "notify",
        lambda body: notify_run(_run(body), body["execution"], RunState(body["state"]), _error(body.get("error"))),
    )


@functions_framework.http
def teardown(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """{run, execution, scope, keep_endpoint} → GONE | PENDING | SUPERSEDED"""
    return _stage(
        request,
        "teardown",
        lambda body: teardown_run(_run(body), body["execution"], body["scope"], bool(body["keep_endpoint"])),
    )


@functions_framework.http
def sweep(request: flask.Request) -> flask.typing.ResponseReturnValue:
    """Called by Cloud Scheduler → SWEPT"""
    return _stage(request, "sweep", lambda _: sweep_all())


def _stage(
    request: flask.Request, stage: str, work: Callable[[dict[str, Any]], dict[str, Any]]
) -> flask.typing.ResponseReturnValue:
    """Run a stage. Bad requests are 400, unknown runs 404, what may pass 503, which the workflow tries again."""
    body = request.get_json(silent=True)
    if not isinstance(body, dict):
        return {"error": f"expected a JSON object as the body of {stage}"}, 400
    try:
        return work(body)
    except NotFound as error:
        return {"error": str(error)}, 404
    except (KeyError, TypeError, ValueError) as error:
        log("malformed request", stage=stage, severity="ERROR", problem=repr(error))
        return {"error": f"malformed request to {stage}: {error!r}"}, 400
    except (CloudError, Conflict) as error:
        transient = isinstance(error, Conflict) or error.error_class is ErrorClass.TRANSIENT
        log(str(error), stage=stage, run=str(body.get("run", "")), severity="WARNING")
        return {"error": str(error)}, 503 if transient else 500


def _run(body: dict[str, Any]) -> str:
    run = body["run"]
    if not isinstance(run, str) or not is_run_id(run):
        raise ValueError(f"run is {run!r}; expected a run id")
    return run


def _error(value: Any) -> RunError | None:
    return None if value is None else RunError.model_validate(value)


def _request_of(data: bytes) -> dict[str, Any]:
    """The request as a map; what is none of ours is left to `submit`, which says what is wrong with it."""
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}
