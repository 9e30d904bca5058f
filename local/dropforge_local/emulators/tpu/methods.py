"""The methods of the Cloud TPU API v2, with their google.api.http rules.

Operations and locations are services of their own over gRPC. Over REST, Cloud Run has the same paths: the names of the
operations differ, and TPUs are in zones.
"""

from __future__ import annotations

from google.cloud import tpu_v2
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2

from ..kit.rpc import methods

PROJECT = "projects/*"
LOCATION = "projects/*/locations/*"
ZONE = "projects/*/locations/[a-z]+-[a-z]+[0-9]+-[a-z]"
NODE = f"{LOCATION}/nodes/*"
QUEUED = f"{LOCATION}/queuedResources/*"
OPERATION = f"{ZONE}/operations/operation-*"

METHODS = methods(
    tpu_v2,
    f"""
    ListNodes() ListNodesResponse GET /v2/{{parent={LOCATION}}}/nodes
    GetNode() Node GET /v2/{{name={NODE}}}
    CreateNode() Operation POST /v2/{{parent={LOCATION}}}/nodes node
    DeleteNode() Operation DELETE /v2/{{name={NODE}}}
    StopNode() Operation POST /v2/{{name={NODE}}}:stop *
    StartNode() Operation POST /v2/{{name={NODE}}}:start *
    ListQueuedResources() ListQueuedResourcesResponse GET /v2/{{parent={LOCATION}}}/queuedResources
    GetQueuedResource() QueuedResource GET /v2/{{name={QUEUED}}}
    CreateQueuedResource() Operation POST /v2/{{parent={LOCATION}}}/queuedResources queued_resource
    DeleteQueuedResource() Operation DELETE /v2/{{name={QUEUED}}}
    ListAcceleratorTypes() ListAcceleratorTypesResponse GET /v2/{{parent={LOCATION}}}/acceleratorTypes
    GetAcceleratorType() AcceleratorType GET /v2/{{name={LOCATION}/acceleratorTypes/*}}
    ListRuntimeVersions() ListRuntimeVersionsResponse GET /v2/{{parent={LOCATION}}}/runtimeVersions
    GetRuntimeVersion() RuntimeVersion GET /v2/{{name={LOCATION}/runtimeVersions/*}}
    """,
)
OPERATION_METHODS = methods(
    operations_pb2,
    f"""
    GetOperation() Operation GET /v2/{{name={OPERATION}}}
    ListOperations() ListOperationsResponse GET /v2/{{name={ZONE}}}/operations
    DeleteOperation() Empty DELETE /v2/{{name={OPERATION}}}
    """,
)
LOCATION_METHODS = methods(
    locations_pb2,
    f"""
    ListLocations() ListLocationsResponse GET /v2/{{name={PROJECT}}}/locations
    GetLocation() Location GET /v2/{{name={ZONE}}}
    """,
)
# `gcloud compute tpus locations|accelerator-types list` use version 1, whose answers are a part of these.
LISTS_V1 = (
    *methods(
        tpu_v2,
        f"ListAcceleratorTypes() ListAcceleratorTypesResponse GET /v1/{{parent={LOCATION}}}/acceleratorTypes",
    ),
    *methods(locations_pb2, f"ListLocations() ListLocationsResponse GET /v1/{{name={PROJECT}}}/locations"),
)
# `gcloud compute tpus versions list`: the same list under another name.
VERSIONS_V1 = methods(
    tpu_v2, f"ListRuntimeVersions() ListRuntimeVersionsResponse GET /v1/{{parent={LOCATION}}}/tensorflowVersions"
)
