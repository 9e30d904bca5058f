"""GKE's operation: a message of its own, not a google.longrunning.Operation, with a short name."""

from __future__ import annotations

from typing import Any

from google.cloud import container_v1

from dropforge_local.base.errors import RPC_CODE

from ..kit.operations import Operation
from ..kubernetes.times import timestamp

Message = container_v1.Operation.pb()
Type = container_v1.Operation.Type
Status = container_v1.Operation.Status
STOCKOUT = {
    "code": container_v1.StatusCondition.Code.GCE_STOCKOUT,
    "canonical_code": RPC_CODE["RESOURCE_EXHAUSTED"],
}
LINK = "https://container.googleapis.com/v1"


def operation_message(operation: Operation) -> Any:
    """https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.operations"""
    location = operation.parent.rsplit("/", 1)[1]
    message = Message(
        name=operation.name.rsplit("/", 1)[1],
        operation_type=Type[operation.verb],
        status=Status.DONE if operation.is_done else Status.RUNNING,
        location=location,
        zone=location,
        start_time=timestamp(operation.created),
        end_time=timestamp(operation.ended) if operation.ended is not None else "",
        target_link=f"{LINK}/{operation.target}",
        self_link=f"{LINK}/{operation.name}",
    )
    if operation.error:
        message.error.code, message.error.message = operation.error["code"], operation.error["message"]
        message.status_message = message.error.message
        message.cluster_conditions.add(**STOCKOUT, message=message.error.message)
    return message
