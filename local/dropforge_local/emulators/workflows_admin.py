"""Workflows v1: deploying, reading and deleting workflows. Operations are done when they are answered."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web
from google.cloud.workflows_v1.types import workflows as api
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2, json_format, timestamp_pb2

from dropforge_local.base.errors import ApiError
from workflows_engine import DeployError, Engine, EngineError, Revision, WorkflowRecord

from .kit import rpc
from .kit.rpc import Message, Method, Service

T = TypeVar("T")
Workflow = api.Workflow.pb()
Operation = operations_pb2.Operation
OPERATION_PREFIX = "operation-workflows-"
_PARENT = "projects/*/locations/*"
_NAME = f"{_PARENT}/workflows/*"
_SETTINGS = ("description", "service_account", "crypto_key_name", "call_log_level", "execution_history_level")

METHODS = (
    Method(
        "ListWorkflows",
        api.ListWorkflowsRequest.pb(),
        api.ListWorkflowsResponse.pb(),
        (f"GET /v1/{{parent={_PARENT}}}/workflows",),
    ),
    Method("GetWorkflow", api.GetWorkflowRequest.pb(), Workflow, (f"GET /v1/{{name={_NAME}}}",)),
    Method(
        "CreateWorkflow",
        api.CreateWorkflowRequest.pb(),
        Operation,
        (f"POST /v1/{{parent={_PARENT}}}/workflows workflow",),
    ),
    Method("DeleteWorkflow", api.DeleteWorkflowRequest.pb(), Operation, (f"DELETE /v1/{{name={_NAME}}}",)),
    Method(
        "UpdateWorkflow",
        api.UpdateWorkflowRequest.pb(),
        Operation,
        (f"PATCH /v1/{{workflow.name={_NAME}}} workflow",),
    ),
    Method(
        "ListWorkflowRevisions",
        api.ListWorkflowRevisionsRequest.pb(),
        api.ListWorkflowRevisionsResponse.pb(),
        (f"GET /v1/{{name={_NAME}}}:listRevisions",),
    ),
)


def service(engine: Engine) -> Service:
    return Service("google.cloud.workflows.v1.Workflows", METHODS, _Workflows(engine))


def routes(service_: Service) -> list[web.AbstractRouteDef]:
    """REST routes, with the operations that gcloud asks for after a deployment."""
    workflows: _Workflows = service_.implementation  # type: ignore[assignment]
    path = rf"/v1/{{name:projects/[^/]+/locations/[^/]+/operations/{OPERATION_PREFIX}[^/:]+}}"
    return [*rpc.routes([service_]), web.get(path, workflows.get_operation, allow_head=False)]


def refusing(call: Callable[[], T]) -> T:
    """Call the engine; its refusals become the API's."""
    try:
        return call()
    except DeployError as error:
        violations = [
            {"field": f"source_contents:{problem.line}:{problem.column}", "description": str(problem)}
            for problem in error.problems
        ]
        detail = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
        raise ApiError("INVALID_ARGUMENT", str(error), [detail]) from error
    except EngineError as error:
        raise ApiError(error.status, str(error)) from error


class _Workflows:
    """google.cloud.workflows.v1.Workflows by the API's own messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._operations: dict[str, Message] = {}

    def list_workflows(self, request: Message) -> Message:
        records = self._engine.list_workflows(request.parent)
        start = int(request.page_token) if request.page_token.isdigit() else 0
        size = request.page_size if 0 < request.page_size <= 1000 else 500
        token = str(start + size) if start + size < len(records) else ""
        return api.ListWorkflowsResponse.pb()(
            workflows=[_workflow(record) for record in records[start : start + size]], next_page_token=token
        )

    def get_workflow(self, request: Message) -> Message:
        record = refusing(lambda: self._engine.get_workflow(request.name))
        if not request.revision_id:
            return _workflow(record)
        for revision in self._engine.list_revisions(request.name):
            if revision.revision_id == request.revision_id:
                return _workflow(record, revision)
        raise ApiError("NOT_FOUND", f"revision {request.revision_id!r} of {request.name!r} not found")

    def create_workflow(self, request: Message) -> Message:
        name = f"{request.parent}/workflows/{request.workflow_id}"
        if any(record.name == name for record in self._engine.list_workflows(request.parent)):
            raise ApiError("ALREADY_EXISTS", f"workflow {name!r} already exists")
        return self._deploy("create", name, request.workflow)

    def update_workflow(self, request: Message) -> Message:
        name = request.workflow.name
        old = _workflow(refusing(lambda: self._engine.get_workflow(name)))
        changed = Workflow()
        changed.CopyFrom(old)
        paths = list(request.update_mask.paths) or [field.name for field, _ in request.workflow.ListFields()]
        for path in paths:
            if path in ("name", "*"):
                continue
            if path not in Workflow.DESCRIPTOR.fields_by_name:
                raise ApiError("INVALID_ARGUMENT", f"update_mask: Workflow has no field {path!r}")
            changed.ClearField(path)
            _copy_field(request.workflow, changed, path)
        return self._deploy("update", name, changed)

    def delete_workflow(self, request: Message) -> Message:
        refusing(lambda: self._engine.delete_workflow(request.name))
        return self._operation("delete", request.name, empty_pb2.Empty())

    def list_workflow_revisions(self, request: Message) -> Message:
        record = refusing(lambda: self._engine.get_workflow(request.name))
        revisions = self._engine.list_revisions(request.name)
        return api.ListWorkflowRevisionsResponse.pb()(workflows=[_workflow(record, revision) for revision in revisions])

    async def get_operation(self, request: web.Request) -> web.Response:
        operation = self._operations.get(request.match_info["name"])
        if operation is None:
            raise ApiError("NOT_FOUND", f"operation {request.match_info['name']!r} not found")
        return web.json_response(json_format.MessageToDict(operation))

    def _deploy(self, verb: str, name: str, workflow: Message) -> Message:
        settings = {key: getattr(workflow, key) for key in _SETTINGS if getattr(workflow, key)}
        for key, enum in (
            ("call_log_level", api.Workflow.CallLogLevel),
            ("execution_history_level", api.ExecutionHistoryLevel),
        ):
            if key in settings:
                settings[key] = enum(settings[key]).name
        if "execution_history_level" in settings:
            settings["history_level"] = settings["execution_history_level"]
        refusing(
            lambda: self._engine.deploy(
                name,
                workflow.source_contents,
                env=dict(workflow.user_env_vars),
                labels=dict(workflow.labels),
                settings=settings,
            )
        )
        return self._operation(verb, name, _workflow(self._engine.get_workflow(name)))

    def _operation(self, verb: str, target: str, response: Message) -> Message:
        location = target.split("/workflows/")[0]
        operation = Operation(name=f"{location}/operations/{OPERATION_PREFIX}{uuid.uuid4()}", done=True)
        now = _time(self._engine.now())
        metadata = api.OperationMetadata.pb()(create_time=now, end_time=now, target=target, verb=verb, api_version="v1")
        operation.metadata.Pack(metadata)
        packed = any_pb2.Any()
        packed.Pack(response)
        operation.response.CopyFrom(packed)
        self._operations[operation.name] = operation
        while len(self._operations) > 1000:
            self._operations.pop(next(iter(self._operations)))
        return operation


def _workflow(record: WorkflowRecord, revision: Revision | None = None) -> Message:
    revision = revision or record.revision
    settings: dict[str, Any] = {key: value for key, value in record.settings.items() if key in _SETTINGS}
    for key, enum in (
        ("call_log_level", api.Workflow.CallLogLevel),
        ("execution_history_level", api.ExecutionHistoryLevel),
    ):
        if key in settings:
            settings[key] = int(enum[settings[key]])
    return Workflow(
        name=record.name,
        state=int(api.Workflow.State.ACTIVE),
        revision_id=revision.revision_id,
        create_time=_time(record.created),
        update_time=_time(record.updated),
        revision_create_time=_time(revision.created),
        labels=dict(record.labels),
        source_contents=revision.source,
        user_env_vars=dict(revision.environment),
        **settings,
    )


def _copy_field(source: Message, target: Message, name: str) -> None:
    value = getattr(source, name)
    if hasattr(value, "items"):
        getattr(target, name).update(value)
    else:
        setattr(target, name, value)


def _time(seconds: float) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
