"""Workflows v1: deploying, reading and deleting workflows. An operation is done in the answer that returns it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from google.cloud.workflows_v1.types import workflows as api
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format

from dropforge_local.base.errors import ApiError
from workflows_engine import DeployError, Engine, EngineError, Revision, WorkflowRecord

from ..kit.paging import Paging
from ..kit.routing import Call, Route
from ..kit.rpc import Message, methods
from ..kit.times import timestamp

T = TypeVar("T")
Workflow = api.Workflow.pb()
Operation = operations_pb2.Operation
KEPT_OPERATIONS = 1000
PAGING = Paging(default=500, largest=1000)
SETTINGS = ("description", "crypto_key_name", "call_log_level", "execution_history_level")
ENUMS: dict[str, Any] = {
    "call_log_level": api.Workflow.CallLogLevel,
    "execution_history_level": api.ExecutionHistoryLevel,
}


METHODS = methods(
    api,
    """
ListWorkflows() ListWorkflowsResponse GET /v1/{parent=projects/*/locations/*}/workflows
GetWorkflow() Workflow GET /v1/{name=projects/*/locations/*/workflows/*}
CreateWorkflow() Operation POST /v1/{parent=projects/*/locations/*}/workflows workflow
DeleteWorkflow() Operation DELETE /v1/{name=projects/*/locations/*/workflows/*}
UpdateWorkflow() Operation PATCH /v1/{workflow.name=projects/*/locations/*/workflows/*} workflow
ListWorkflowRevisions() ListWorkflowRevisionsResponse GET /v1/{name=projects/*/locations/*/workflows/*}:listRevisions
    """,
)


def refusing(call: Callable[[], T]) -> T:
    """Call the engine; turn its refusals into refusals of the API."""
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


class Workflows:
    """google.cloud.workflows.v1.Workflows by the API's own messages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._operations: dict[str, Message] = {}

    def routes(self) -> list[Route]:
        """The operations that gcloud reads after a deployment. GKE's have the same path, and names `operation-*`."""
        return [Route("GET", "/v1/{name=projects/*/locations/*/operations/*}", self.get_operation)]

    def list_workflows(self, request: Message) -> Message:
        records = self._engine.list_workflows(request.parent)
        page, token = PAGING.page(records, request.page_size, request.page_token)
        return api.ListWorkflowsResponse.pb()(workflows=map(_workflow, page), next_page_token=token)

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

    def get_operation(self, call: Call) -> dict[str, Any]:
        name = call.names["name"]
        if name not in self._operations:
            raise ApiError("NOT_FOUND", f"operation {name!r} not found")
        shown: dict[str, Any] = json_format.MessageToDict(self._operations[name])
        return shown

    def _deploy(self, verb: str, name: str, workflow: Message) -> Message:
        settings = {key: getattr(workflow, key) for key in SETTINGS if getattr(workflow, key)}
        settings |= {key: enum(settings[key]).name for key, enum in ENUMS.items() if key in settings}
        if "execution_history_level" in settings:
            settings["history_level"] = settings["execution_history_level"]
        refusing(
            lambda: self._engine.deploy(
                name,
                workflow.source_contents,
                env=dict(workflow.user_env_vars),
                labels=dict(workflow.labels),
                settings=settings,
                service_account=workflow.service_account,
            )
        )
        return self._operation(verb, name, _workflow(self._engine.get_workflow(name)))

    def _operation(self, verb: str, target: str, response: Message) -> Message:
        location = target.split("/workflows/")[0]
        operation = Operation(name=f"{location}/operations/workflows-{uuid.uuid4()}", done=True)
        now = timestamp(self._engine.now())
        metadata = api.OperationMetadata.pb()(create_time=now, end_time=now, target=target, verb=verb, api_version="v1")
        operation.metadata.Pack(metadata)
        operation.response.Pack(response)
        self._operations[operation.name] = operation
        while len(self._operations) > KEPT_OPERATIONS:
            self._operations.pop(next(iter(self._operations)))
        return operation


def _workflow(record: WorkflowRecord, revision: Revision | None = None) -> Message:
    revision = revision or record.revision
    settings: dict[str, Any] = {key: value for key, value in record.settings.items() if key in SETTINGS}
    settings |= {key: int(enum[settings[key]]) for key, enum in ENUMS.items() if key in settings}
    return Workflow(
        name=record.name,
        state=int(api.Workflow.State.ACTIVE),
        revision_id=revision.revision_id,
        create_time=timestamp(record.created),
        update_time=timestamp(record.updated),
        revision_create_time=timestamp(revision.created),
        labels=dict(record.labels),
        source_contents=revision.source,
        service_account=revision.service_account,
        user_env_vars=dict(revision.environment),
        **settings,
    )


def _copy_field(source: Message, target: Message, name: str) -> None:
    value = getattr(source, name)
    if hasattr(value, "items"):
        getattr(target, name).update(value)
    else:
        setattr(target, name, value)
