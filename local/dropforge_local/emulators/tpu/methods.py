"""The methods of the Cloud TPU API v2, with their google.api.http rules.

Operations and locations are services of their own over gRPC. Over REST, Cloud Run has the same paths: the names of the
operations differ, and TPUs are in zones.
"""

from __future__ import annotations

from typing import Any

from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from ..kit import rpc

Operation = operations_pb2.Operation
PROJECT = "projects/*"
LOCATION = "projects/*/locations/*"
ZONE = "projects/*/locations/[a-z]+-[a-z]+[0-9]+-[a-z]"
NODE = f"{LOCATION}/nodes/*"
QUEUED = f"{LOCATION}/queuedResources/*"
OPERATION = f"{ZONE}/operations/operation-*"


def _method(name: str, response: Any, *http: str) -> rpc.Method:
    request = getattr(tpu_v2, f"{name}Request").pb()
    return rpc.Method(name, request, response, http)


NODE_MESSAGE, QUEUED_MESSAGE = tpu_v2.Node.pb(), tpu_v2.QueuedResource.pb()
METHODS = (
    _method("ListNodes", tpu_v2.ListNodesResponse.pb(), f"GET /v2/{{parent={LOCATION}}}/nodes"),
    _method("GetNode", NODE_MESSAGE, f"GET /v2/{{name={NODE}}}"),
    _method("CreateNode", Operation, f"POST /v2/{{parent={LOCATION}}}/nodes node"),
    _method("DeleteNode", Operation, f"DELETE /v2/{{name={NODE}}}"),
    _method("StopNode", Operation, f"POST /v2/{{name={NODE}}}:stop *"),
    _method("StartNode", Operation, f"POST /v2/{{name={NODE}}}:start *"),
    _method(
        "ListQueuedResources",
        tpu_v2.ListQueuedResourcesResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/queuedResources",
    ),
    _method("GetQueuedResource", QUEUED_MESSAGE, f"GET /v2/{{name={QUEUED}}}"),
    _method("CreateQueuedResource", Operation, f"POST /v2/{{parent={LOCATION}}}/queuedResources queued_resource"),
    _method("DeleteQueuedResource", Operation, f"DELETE /v2/{{name={QUEUED}}}"),
    _method(
        "ListAcceleratorTypes",
        tpu_v2.ListAcceleratorTypesResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/acceleratorTypes",
    ),
    _method("GetAcceleratorType", tpu_v2.AcceleratorType.pb(), f"GET /v2/{{name={LOCATION}/acceleratorTypes/*}}"),
    _method(
        "ListRuntimeVersions",
        tpu_v2.ListRuntimeVersionsResponse.pb(),
        f"GET /v2/{{parent={LOCATION}}}/runtimeVersions",
    ),
    _method("GetRuntimeVersion", tpu_v2.RuntimeVersion.pb(), f"GET /v2/{{name={LOCATION}/runtimeVersions/*}}"),
)
OPERATION_METHODS = (
    rpc.Method("GetOperation", operations_pb2.GetOperationRequest, Operation, (f"GET /v2/{{name={OPERATION}}}",)),
    rpc.Method(
        "ListOperations",
        operations_pb2.ListOperationsRequest,
        operations_pb2.ListOperationsResponse,
        (f"GET /v2/{{name={ZONE}}}/operations",),
    ),
    rpc.Method(
        "DeleteOperation",
        operations_pb2.DeleteOperationRequest,
        empty_pb2.Empty,
        (f"DELETE /v2/{{name={OPERATION}}}",),
    ),
)
LOCATION_METHODS = (
    rpc.Method(
        "ListLocations",
        locations_pb2.ListLocationsRequest,
        locations_pb2.ListLocationsResponse,
        (f"GET /v2/{{name={PROJECT}}}/locations",),
    ),
    rpc.Method("GetLocation", locations_pb2.GetLocationRequest, locations_pb2.Location, (f"GET /v2/{{name={ZONE}}}",)),
)
