"""The methods of the Cloud TPU API v2, with their google.api.http rules.

Operations and locations are services of their own over gRPC. Over REST, Cloud Run has the same paths: the names of the
operations differ, and TPUs are in zones.
"""

from __future__ import annotations

from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2

from ..kit.rpc import method

PROJECT = "projects/*"
LOCATION = "projects/*/locations/*"
ZONE = "projects/*/locations/[a-z]+-[a-z]+[0-9]+-[a-z]"
NODE = f"{LOCATION}/nodes/*"
QUEUED = f"{LOCATION}/queuedResources/*"
OPERATION = f"{ZONE}/operations/operation-*"

METHODS = tuple(
    method(tpu_v2, name, response, rule)
    for name, response, rule in (
        ("ListNodes", "ListNodesResponse", f"GET /v2/{{parent={LOCATION}}}/nodes"),
        ("GetNode", "Node", f"GET /v2/{{name={NODE}}}"),
        ("CreateNode", "Operation", f"POST /v2/{{parent={LOCATION}}}/nodes node"),
        ("DeleteNode", "Operation", f"DELETE /v2/{{name={NODE}}}"),
        ("StopNode", "Operation", f"POST /v2/{{name={NODE}}}:stop *"),
        ("StartNode", "Operation", f"POST /v2/{{name={NODE}}}:start *"),
        ("ListQueuedResources", "ListQueuedResourcesResponse", f"GET /v2/{{parent={LOCATION}}}/queuedResources"),
        ("GetQueuedResource", "QueuedResource", f"GET /v2/{{name={QUEUED}}}"),
        ("CreateQueuedResource", "Operation", f"POST /v2/{{parent={LOCATION}}}/queuedResources queued_resource"),
        ("DeleteQueuedResource", "Operation", f"DELETE /v2/{{name={QUEUED}}}"),
        ("ListAcceleratorTypes", "ListAcceleratorTypesResponse", f"GET /v2/{{parent={LOCATION}}}/acceleratorTypes"),
        ("GetAcceleratorType", "AcceleratorType", f"GET /v2/{{name={LOCATION}/acceleratorTypes/*}}"),
        ("ListRuntimeVersions", "ListRuntimeVersionsResponse", f"GET /v2/{{parent={LOCATION}}}/runtimeVersions"),
        ("GetRuntimeVersion", "RuntimeVersion", f"GET /v2/{{name={LOCATION}/runtimeVersions/*}}"),
    )
)
OPERATION_METHODS = tuple(
    method(operations_pb2, name, response, rule)
    for name, response, rule in (
        ("GetOperation", "Operation", f"GET /v2/{{name={OPERATION}}}"),
        ("ListOperations", "ListOperationsResponse", f"GET /v2/{{name={ZONE}}}/operations"),
        ("DeleteOperation", "Empty", f"DELETE /v2/{{name={OPERATION}}}"),
    )
)
LOCATION_METHODS = tuple(
    method(locations_pb2, name, response, rule)
    for name, response, rule in (
        ("ListLocations", "ListLocationsResponse", f"GET /v2/{{name={PROJECT}}}/locations"),
        ("GetLocation", "Location", f"GET /v2/{{name={ZONE}}}"),
    )
)
