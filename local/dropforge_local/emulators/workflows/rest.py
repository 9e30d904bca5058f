"""Workflow Executions v1 over REST, with the methods that gRPC lacks: callbacks, step entries, Pub/Sub triggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dropforge_local.base.errors import ApiError
from workflows_engine import Engine, ExecutionRecord, from_json, parse_body, read_entries, step_entry, to_json

from ..kit.paging import Paging
from ..kit.routing import Call, Reply, Route
from ..kit.times import rfc3339
from .admin import refusing
from .executions import execution_json, list_executions
from .filter import ENTRY_FIELDS, parse_entry_filter, parse_order, sort

WORKFLOW = "/v1/{workflow=projects/*/locations/*/workflows/*}"
EXECUTION = "/v1/{execution=projects/*/locations/*/workflows/*/executions/*}"
STEP_ENTRIES = Paging(default=100, largest=1000)
SETTABLE = ("argument", "labels", "callLogLevel", "executionHistoryLevel", "disableConcurrencyQuotaOverflowBuffering")
# Fields of an Execution that a request may hold and the service ignores.
OUTPUT_ONLY = (
    "name", "createTime", "startTime", "endTime", "duration", "state", "result", "error", "workflowRevisionId",
    "status", "stateError",
)  # fmt: skip
VIEWS = ("", "EXECUTION_VIEW_UNSPECIFIED", "BASIC", "FULL")
CALLBACK_REFUSALS = {
    401: ("UNAUTHENTICATED", "a callback needs an OAuth2 token: Authorization: Bearer TOKEN"),
    403: ("PERMISSION_DENIED", "workflows.callbacks.send is not granted to the caller"),
    404: ("NOT_FOUND", "no such callback; it may belong to an execution that has ended"),
    405: ("INVALID_ARGUMENT", "the callback does not take {method}"),
    429: ("RESOURCE_EXHAUSTED", "the callback holds a request that its execution has not taken yet"),
}


class Rest:
    """workflowexecutions.googleapis.com/v1 over HTTP."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [
            Route("POST", f"{WORKFLOW}/executions", self.create),
            Route("GET", f"{WORKFLOW}/executions", self.list_executions),
            Route("POST", f"{WORKFLOW}:triggerPubsubExecution", self.trigger_pubsub),
            Route("GET", EXECUTION, self.get),
            Route("POST", f"{EXECUTION}:cancel", self.cancel),
            Route("GET", f"{EXECUTION}/callbacks", self.callbacks),
            Route("*", f"{EXECUTION}/callbacks/{{ref}}", self.callback),
            Route("GET", f"{EXECUTION}/stepEntries", self.step_entries),
            Route("GET", f"{EXECUTION}/stepEntries/{{entry}}", self.step_entry),
        ]

    def create(self, call: Call) -> dict[str, Any]:
        body = call.json()
        for name in body:
            if name not in SETTABLE and name not in OUTPUT_ONLY:
                raise ApiError(
                    "INVALID_ARGUMENT", f"unknown field {name!r} in Execution; settable are {', '.join(SETTABLE)}"
                )
        argument, labels = body.get("argument", ""), body.get("labels") or {}
        if not isinstance(argument, str) or not isinstance(labels, dict):
            raise ApiError("INVALID_ARGUMENT", "argument must be a string that holds JSON, labels a map of strings")
        return _shown(
            lambda: self._engine.create_execution(
                call.names["workflow"],
                argument,
                labels=labels,
                call_log_level=str(body.get("callLogLevel") or ""),
                history_level=str(body.get("executionHistoryLevel") or ""),
                disable_overflow_buffering=body.get("disableConcurrencyQuotaOverflowBuffering") is True,
            )
        )

    def trigger_pubsub(self, call: Call) -> dict[str, Any]:
        """A Pub/Sub push of Eventarc's older kind: the message becomes the argument. The execution is never queued."""
        call.json()
        body: Any = from_json(call.body.decode() or "{}")  # converts integers beyond 64 bits to doubles
        argument = to_json({"message": body.get("message"), "subscription": body.get("subscription")})
        return _shown(
            lambda: self._engine.create_execution(call.names["workflow"], argument, disable_overflow_buffering=True)
        )

    def list_executions(self, call: Call) -> dict[str, Any]:
        full = _view(call) == "FULL"
        records, token = list_executions(
            self._engine,
            call.names["workflow"],
            call.text("filter"),
            call.text("orderBy"),
            call.number("pageSize"),
            call.text("pageToken"),
            full=full,
        )
        shown: dict[str, Any] = {"executions": [execution_json(record, full=full) for record in records]}
        return {**shown, "nextPageToken": token} if token else shown

    def get(self, call: Call) -> dict[str, Any]:
        record = refusing(lambda: self._engine.get(call.names["execution"]))
        return execution_json(record, full=_view(call) != "BASIC")

    def cancel(self, call: Call) -> dict[str, Any]:
        return _shown(lambda: self._engine.cancel(call.names["execution"]))

    def callbacks(self, call: Call) -> dict[str, Any]:
        execution = call.names["execution"]
        endpoints = refusing(lambda: self._engine.list_callbacks(execution))
        shown = [
            {"name": f"{execution}/callbacks/{ref}", "method": method, "waiters": str(int(waiting))}
            for ref, method, waiting in endpoints
        ]
        return {"callbacks": shown}

    async def callback(self, call: Call) -> Reply:
        """A request to an endpoint that a workflow created."""
        assert call.request is not None, "workflows have no batches"
        headers: dict[str, str] = {}
        for name, value in call.headers.items():
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        status = await self._engine.deliver_callback(
            call.names["execution"],
            call.names["ref"],
            call.method,
            headers,
            _query(call),
            parse_body(call.body, call.headers.get("Content-Type", "")),
            call.request.path_qs,
        )
        if status == 200:
            return Reply({})
        name, message = CALLBACK_REFUSALS[status]
        return Reply({"error": {"code": status, "message": message.format(method=call.method), "status": name}}, status)

    def step_entries(self, call: Call) -> dict[str, Any]:
        order, matches = parse_order(call.text("orderBy"), ENTRY_FIELDS), parse_entry_filter(call.text("filter"))
        entries = list(filter(matches, self._entries(call)))
        sort(entries, order, ENTRY_FIELDS)
        size, skip = call.number("pageSize"), call.number("skip")
        page, token = STEP_ENTRIES.page(entries, size, call.text("pageToken"), skip)
        shown: dict[str, Any] = {"stepEntries": page, "totalSize": len(entries)}
        return {**shown, "nextPageToken": token} if token else shown

    def step_entry(self, call: Call) -> dict[str, Any]:
        number = call.names["entry"]
        for entry in self._entries(call):
            if entry["entryId"] == number:
                return entry
        raise ApiError("NOT_FOUND", f"step entry {number!r} not found")

    def _entries(self, call: Call) -> list[dict[str, Any]]:
        execution = call.names["execution"]
        record, events, program = refusing(lambda: self._engine.history(execution))
        return [step_entry(entry, execution, rfc3339) for entry in read_entries(events, program, record.state)]


def _shown(work: Callable[[], ExecutionRecord]) -> dict[str, Any]:
    return execution_json(refusing(work))


def _view(call: Call) -> str:
    view = call.text("view")
    if view not in VIEWS:
        raise ApiError("INVALID_ARGUMENT", f"view {view!r} is none of {', '.join(VIEWS[1:])}")
    return view


def _query(call: Call) -> dict[str, Any]:
    query: dict[str, Any] = {}
    for name in call.query:
        values = call.query.getall(name)
        query[name] = values[0] if len(values) == 1 else values
    return query
