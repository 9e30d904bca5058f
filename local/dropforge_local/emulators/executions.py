"""Workflow Executions v1 (gRPC and REST), its callbacks and step entries, and Workflows v1, over the engine's state.

The Python client speaks gRPC and knows fewer fields than REST does; gcloud and the callbacks' senders speak REST.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc
from aiohttp import web
from google.cloud.workflows.executions_v1.types import executions as api
from google.protobuf import json_format

from dropforge_local.base.errors import ApiError
from workflows_engine import Engine, ExecutionRecord, from_json, parse_body, read_entries, step_entry, to_json

from . import workflows_admin
from .execution_filter import field_of, parse_filter, parse_order
from .kit import rpc
from .kit.rpc import Message, Method, Service
from .workflows_admin import refusing

WORKFLOW = r"/v1/{workflow:projects/[^/]+/locations/[^/]+/workflows/[^/:]+}"
EXECUTION = r"/v1/{execution:projects/[^/]+/locations/[^/]+/workflows/[^/]+/executions/[^/:]+}"
MAX_PAGE = 1000
DEFAULT_PAGE = 100


class WorkflowsEmulator:
    """The two APIs of Cloud Workflows. The engine starts and stops with it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._admin = workflows_admin.service(engine)
        self._services = (
            Service("google.cloud.workflows.executions.v1.Executions", _METHODS, _Executions(engine)),
            self._admin,
        )

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        rest = _Rest(self.engine)
        return [
            web.post(f"{WORKFLOW}/executions", rest.create),
            web.get(f"{WORKFLOW}/executions", rest.list_executions, allow_head=False),
            web.post(f"{WORKFLOW}:triggerPubsubExecution", rest.trigger_pubsub),
            web.get(EXECUTION, rest.get, allow_head=False),
            web.post(f"{EXECUTION}:cancel", rest.cancel),
            web.get(f"{EXECUTION}/callbacks", rest.callbacks, allow_head=False),
            web.route("*", f"{EXECUTION}/callbacks/{{ref}}", rest.callback),
            web.get(f"{EXECUTION}/stepEntries", rest.step_entries, allow_head=False),
            web.get(f"{EXECUTION}/stepEntries/{{entry}}", rest.step_entry, allow_head=False),
            *workflows_admin.routes(self._admin),
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers(self._services)

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()


def timestamp(seconds: float) -> str:
    """RFC 3339 with microseconds, as the API writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def execution_json(record: ExecutionRecord, *, full: bool = True) -> dict[str, Any]:
    """An execution as REST shows it; BASIC leaves out what may be large."""
    shown: dict[str, Any] = {
        "name": record.name,
        "createTime": timestamp(record.created),
        "state": record.state,
        "workflowRevisionId": record.revision_id,
    }
    if record.started is not None:
        shown["startTime"] = timestamp(record.started)
        if record.ended is not None:
            shown["duration"] = f"{max(0.0, record.ended - record.started):.9f}s"
    if record.ended is not None:
        shown["endTime"] = timestamp(record.ended)
    if not full:
        return shown
    if record.argument != "null":
        shown["argument"] = record.argument
    if record.result is not None:
        shown["result"] = record.result
    if record.error is not None:
        shown["error"] = dict(record.error)
    if record.labels:
        shown["labels"] = dict(record.labels)
    if record.current_steps:
        shown["status"] = {"currentSteps": [dict(step) for step in record.current_steps]}
    for key, name in (("callLogLevel", "call_log_level"), ("executionHistoryLevel", "history_level")):
        if record.settings.get(name):
            shown[key] = record.settings[name]
    return shown


def _list(
    engine: Engine, workflow: str, filter_: str, order_by: str, page_size: int, page_token: str
) -> tuple[list[ExecutionRecord], str]:
    """A page of executions and the next page's token."""
    if page_size < 0:
        raise ApiError("INVALID_ARGUMENT", f"page_size {page_size} is negative")
    try:
        start = int(base64.urlsafe_b64decode(page_token)) if page_token else 0
    except (ValueError, binascii.Error) as error:
        raise ApiError("INVALID_ARGUMENT", f"page_token {page_token!r} is not one of ours") from error
    matches, order = parse_filter(filter_), parse_order(order_by)
    size = min(page_size or DEFAULT_PAGE, MAX_PAGE)
    found: list[ExecutionRecord] = []
    in_order = order == [("createTime", True)]
    for record in engine.list(workflow):
        if matches(record):
            found.append(record)
            if in_order and len(found) > start + size:
                break
    for name, descending in reversed([] if in_order else order):
        found.sort(key=lambda record: field_of(record, name), reverse=descending)  # used at once
    token = base64.urlsafe_b64encode(str(start + size).encode()).decode() if len(found) > start + size else ""
    return found[start : start + size], token


class _Executions:
    """google.cloud.workflows.executions.v1.Executions by the API's own messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def create_execution(self, request: Message) -> Message:
        execution = request.execution
        level = api.Execution.CallLogLevel(execution.call_log_level).name if execution.call_log_level else ""
        return _message(
            refusing(
                lambda: self._engine.create_execution(
                    request.parent, execution.argument, labels=dict(execution.labels), call_log_level=level
                )
            )
        )

    def get_execution(self, request: Message) -> Message:
        record = refusing(lambda: self._engine.get(request.name))
        return _message(record, full=request.view != api.ExecutionView.BASIC)

    def list_executions(self, request: Message) -> Message:
        refusing(lambda: self._engine.get_workflow(request.parent))
        records, token = _list(
            self._engine, request.parent, request.filter, request.order_by, request.page_size, request.page_token
        )
        full = request.view == api.ExecutionView.FULL
        return api.ListExecutionsResponse.pb()(
            executions=[_message(record, full=full) for record in records], next_page_token=token
        )

    def cancel_execution(self, request: Message) -> Message:
        return _message(refusing(lambda: self._engine.cancel(request.name)))


_METHODS = (
    Method("ListExecutions", api.ListExecutionsRequest.pb(), api.ListExecutionsResponse.pb()),
    Method("CreateExecution", api.CreateExecutionRequest.pb(), api.Execution.pb()),
    Method("GetExecution", api.GetExecutionRequest.pb(), api.Execution.pb()),
    Method("CancelExecution", api.CancelExecutionRequest.pb(), api.Execution.pb()),
)


def _message(record: ExecutionRecord, *, full: bool = True) -> Message:
    shown = execution_json(record, full=full)
    return json_format.ParseDict(shown, api.Execution.pb()(), ignore_unknown_fields=True)


# Fields of an Execution that a request may hold and the service ignores.
_OUTPUT_ONLY = (
    "name",
    "createTime",
    "startTime",
    "endTime",
    "duration",
    "state",
    "result",
    "error",
    "workflowRevisionId",
    "status",
    "stateError",
)
_VIEWS = ("", "EXECUTION_VIEW_UNSPECIFIED", "BASIC", "FULL")


class _Rest:
    """workflowexecutions.googleapis.com/v1 over HTTP."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def create(self, request: web.Request) -> web.Response:
        body = await _body(request)
        known = (
            "argument",
            "labels",
            "callLogLevel",
            "executionHistoryLevel",
            "disableConcurrencyQuotaOverflowBuffering",
        )
        for name in body:
            if name not in known and name not in _OUTPUT_ONLY:
                raise ApiError(
                    "INVALID_ARGUMENT", f"unknown field {name!r} in Execution; settable are {', '.join(known)}"
                )
        argument, labels = body.get("argument", ""), body.get("labels") or {}
        if not isinstance(argument, str) or not isinstance(labels, dict):
            raise ApiError("INVALID_ARGUMENT", "argument must be a string that holds JSON, labels a map of strings")
        return _create(
            lambda: self._engine.create_execution(
                request.match_info["workflow"],
                argument,
                labels=labels,
                call_log_level=str(body.get("callLogLevel") or ""),
                history_level=str(body.get("executionHistoryLevel") or ""),
                disable_overflow_buffering=body.get("disableConcurrencyQuotaOverflowBuffering") is True,
            )
        )

    async def trigger_pubsub(self, request: web.Request) -> web.Response:
        """A Pub/Sub push of Eventarc's older kind: the message becomes the argument; never queued."""
        body = await _body(request)
        event = {"message": body.get("message"), "subscription": body.get("subscription")}
        argument = to_json(event)
        return _create(
            lambda: self._engine.create_execution(
                request.match_info["workflow"], argument, disable_overflow_buffering=True
            )
        )

    async def list_executions(self, request: web.Request) -> web.Response:
        workflow, query = request.match_info["workflow"], request.query
        refusing(lambda: self._engine.get_workflow(workflow))
        try:
            size = int(query.get("pageSize", "0"))
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", f"pageSize {query['pageSize']!r} is not a number") from error
        records, token = _list(
            self._engine,
            workflow,
            query.get("filter", ""),
            query.get("orderBy", ""),
            size,
            query.get("pageToken", ""),
        )
        full = _view(request) == "FULL"
        shown: dict[str, Any] = {"executions": [execution_json(record, full=full) for record in records]}
        return web.json_response({**shown, **({"nextPageToken": token} if token else {})})

    async def get(self, request: web.Request) -> web.Response:
        record = refusing(lambda: self._engine.get(request.match_info["execution"]))
        return web.json_response(execution_json(record, full=_view(request) != "BASIC"))

    async def cancel(self, request: web.Request) -> web.Response:
        record = refusing(lambda: self._engine.cancel(request.match_info["execution"]))
        return web.json_response(execution_json(record))

    async def callbacks(self, request: web.Request) -> web.Response:
        execution = request.match_info["execution"]
        endpoints = refusing(lambda: self._engine.list_callbacks(execution))
        shown = [
            {"name": f"{execution}/callbacks/{ref}", "method": method, "waiters": str(int(waiting))}
            for ref, method, waiting in endpoints
        ]
        return web.json_response({"callbacks": shown})

    async def callback(self, request: web.Request) -> web.Response:
        """Somebody calls an endpoint that a workflow made."""
        body = await request.read()
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        status = await self._engine.deliver_callback(
            request.match_info["execution"],
            request.match_info["ref"],
            request.method,
            headers,
            _query(request),
            parse_body(body, request.headers.get("Content-Type", "")),
            request.path_qs,
        )
        return _callback_answer(status, request)

    async def step_entries(self, request: web.Request) -> web.Response:
        entries = self._entries(request)
        query = request.query
        try:
            size, skip = int(query.get("pageSize") or 0), int(query.get("skip") or 0)
            start = skip + (int(query["pageToken"]) if query.get("pageToken") else 0)
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", "pageSize, skip and pageToken must be numbers") from error
        if query.get("orderBy", "").strip().endswith("desc"):
            entries = entries[::-1]
        end = start + (size or 100)
        shown: dict[str, Any] = {"stepEntries": entries[start:end], "totalSize": len(entries)}
        if end < len(entries):
            shown["nextPageToken"] = str(end)
        return web.json_response(shown)

    async def step_entry(self, request: web.Request) -> web.Response:
        number = request.match_info["entry"]
        for entry in self._entries(request):
            if entry["entryId"] == number:
                return web.json_response(entry)
        raise ApiError("NOT_FOUND", f"step entry {number!r} not found")

    def _entries(self, request: web.Request) -> list[dict[str, Any]]:
        execution = request.match_info["execution"]
        record, events, program = refusing(lambda: self._engine.history(execution))
        return [step_entry(entry, execution, timestamp) for entry in read_entries(events, program, record.state)]


def _view(request: web.Request) -> str:
    view = request.query.get("view", "")
    if view not in _VIEWS:
        raise ApiError("INVALID_ARGUMENT", f"view {view!r} is none of {', '.join(_VIEWS[1:])}")
    return view


def _create(create: Callable[[], ExecutionRecord]) -> web.Response:
    return web.json_response(execution_json(refusing(create)))


def _callback_answer(status: int, request: web.Request) -> web.Response:
    refusals = {
        401: ("UNAUTHENTICATED", "a callback needs an OAuth2 token: Authorization: Bearer TOKEN"),
        403: ("PERMISSION_DENIED", "workflows.callbacks.send is not granted to the caller"),
        404: ("NOT_FOUND", "no such callback; it may belong to an execution that has ended"),
        405: ("INVALID_ARGUMENT", f"the callback does not take {request.method}"),
        429: ("RESOURCE_EXHAUSTED", "the callback holds a request that its execution has not taken yet"),
    }
    if status == 200:
        return web.json_response({})
    name, message = refusals[status]
    return web.json_response({"error": {"code": status, "message": message, "status": name}}, status=status)


def _query(request: web.Request) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for name in request.query:
        values = request.query.getall(name)
        query[name] = values[0] if len(values) == 1 else values
    return query


async def _body(request: web.Request) -> Mapping[str, Any]:
    text = await request.read()
    try:
        body = from_json(text.decode()) if text.strip() else {}
    except ValueError as error:
        raise ApiError("INVALID_ARGUMENT", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("INVALID_ARGUMENT", "the body must be a JSON object")
    return body
