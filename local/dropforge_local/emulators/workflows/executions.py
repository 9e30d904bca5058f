"""Workflow Executions v1 over gRPC, and the lists and resources that REST shares with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.cloud.workflows.executions_v1.types import executions as api
from google.protobuf import json_format

from workflows_engine import Engine, ExecutionRecord

from ..kit.paging import Paging, read_token, write_token
from ..kit.rpc import Message, methods
from ..kit.times import rfc3339
from .admin import refusing
from .filter import names_steps, parse_filter, parse_order, sort

# "Max supported value depends on the selected Execution view: it's 1000 for BASIC and 100 for FULL."
PAGING = {False: Paging(default=100, largest=1000), True: Paging(default=100, largest=100)}
SHOWN_SETTINGS = {
    "callLogLevel": "call_log_level",
    "executionHistoryLevel": "history_level",
    "disableConcurrencyQuotaOverflowBuffering": "disable_overflow_buffering",
}
METHODS = methods(
    api,
    """
    ListExecutions() ListExecutionsResponse
    CreateExecution() Execution
    GetExecution() Execution
    CancelExecution() Execution
    """,
)


class Executions:
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
        full = request.view == api.ExecutionView.FULL
        records, token = list_executions(
            self._engine,
            request.parent,
            request.filter,
            request.order_by,
            request.page_size,
            request.page_token,
            full=full,
        )
        return api.ListExecutionsResponse.pb()(
            executions=[_message(record, full=full) for record in records], next_page_token=token
        )

    def cancel_execution(self, request: Message) -> Message:
        return _message(refusing(lambda: self._engine.cancel(request.name)))


def list_executions(
    engine: Engine, workflow: str, filter_: str, order_by: str, page_size: int, page_token: str, *, full: bool
) -> tuple[Sequence[ExecutionRecord], str]:
    """A page of executions and the next page's token. In the default order, reads no further than the page.

    With `full`, as for the view FULL, the page's active executions have their current steps.
    """
    refusing(lambda: engine.get_workflow(workflow))
    size, [start] = PAGING[full].size(page_size), read_token(page_token, [0])
    matches, order = parse_filter(filter_), parse_order(order_by)
    is_default_order = order in ([], [("createTime", True)])
    records: list[ExecutionRecord] = []
    for record in engine.list(workflow, current=names_steps(filter_ + order_by)):
        if matches(record):
            records.append(record)
            if is_default_order and len(records) > start + size:
                break
    if not is_default_order:
        sort(records, order)
    page = [engine.get(record.name) if full else record for record in records[start : start + size]]
    return page, write_token(start + size) if len(records) > start + size else ""


def execution_json(record: ExecutionRecord, *, full: bool = True) -> dict[str, Any]:
    """An execution as REST shows it; the view BASIC leaves out the fields that may be large."""
    shown: dict[str, Any] = {
        "name": record.name,
        "createTime": rfc3339(record.created),
        "state": record.state,
        "workflowRevisionId": record.revision_id,
    }
    if record.started is not None:
        shown["startTime"] = rfc3339(record.started)
        if record.ended is not None:
            shown["duration"] = f"{max(0.0, record.ended - record.started):.9f}s"
    if record.ended is not None:
        shown["endTime"] = rfc3339(record.ended)
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
    for key, name in SHOWN_SETTINGS.items():
        if record.settings.get(name):
            shown[key] = record.settings[name]
    return shown


def _message(record: ExecutionRecord, *, full: bool = True) -> Message:
    shown = execution_json(record, full=full)
    return json_format.ParseDict(shown, api.Execution.pb()(), ignore_unknown_fields=True)
