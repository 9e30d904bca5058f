"""The methods of Cloud Run v2, with their google.api.http rules."""

from __future__ import annotations

from google.cloud import run_v2
from google.longrunning import operations_pb2

from ..kit.rpc import methods

LOCATION = "projects/*/locations/*"
# Cloud TPU has the same operation paths on the same ports. The names of this API's operations have a prefix, and its
# lists of operations are in regions: a region ends in a digit, a zone does not.
REGION = "projects/*/locations/*[0-9]"
JOB = f"{LOCATION}/jobs/*"
EXECUTION = f"{JOB}/executions/*"
SERVICE = f"{LOCATION}/services/*"
OPERATION = f"{LOCATION}/operations/run-*"

RESOURCE_METHODS = methods(
    run_v2,
    f"""
    CreateJob() Operation POST /v2/{{parent={LOCATION}}}/jobs job
    ListJobs() ListJobsResponse GET /v2/{{parent={LOCATION}}}/jobs
    GetJob() Job GET /v2/{{name={JOB}}}
    UpdateJob() Operation PATCH /v2/{{job.name={JOB}}} job
    DeleteJob() Operation DELETE /v2/{{name={JOB}}}
    RunJob() Operation POST /v2/{{name={JOB}}}:run *
    ListExecutions() ListExecutionsResponse GET /v2/{{parent={JOB}}}/executions
    GetExecution() Execution GET /v2/{{name={EXECUTION}}}
    CancelExecution() Operation POST /v2/{{name={EXECUTION}}}:cancel *
    DeleteExecution() Operation DELETE /v2/{{name={EXECUTION}}}
    ListTasks() ListTasksResponse GET /v2/{{parent={EXECUTION}}}/tasks
    GetTask() Task GET /v2/{{name={EXECUTION}/tasks/*}}
    CreateService() Operation POST /v2/{{parent={LOCATION}}}/services service
    ListServices() ListServicesResponse GET /v2/{{parent={LOCATION}}}/services
    GetService() Service GET /v2/{{name={SERVICE}}}
    UpdateService() Operation PATCH /v2/{{service.name={SERVICE}}} service
    DeleteService() Operation DELETE /v2/{{name={SERVICE}}}
    ListRevisions() ListRevisionsResponse GET /v2/{{parent={SERVICE}}}/revisions
    GetRevision() Revision GET /v2/{{name={SERVICE}/revisions/*}}
    DeleteRevision() Operation DELETE /v2/{{name={SERVICE}/revisions/*}}
    """,
)
OPERATION_METHODS = methods(
    operations_pb2,
    f"""
    GetOperation() Operation GET /v2/{{name={OPERATION}}}
    DeleteOperation() Empty DELETE /v2/{{name={OPERATION}}}
    WaitOperation() Operation POST /v2/{{name={OPERATION}}}:wait *
    ListOperations() ListOperationsResponse GET /v2/{{name={REGION}}}/operations
    """,
)
METHODS = (*RESOURCE_METHODS, *OPERATION_METHODS)
# The gRPC service of each resource, which ends the names of its methods: GetJob, ListJobs and RunJob are of Jobs.
SERVICES = {
    f"google.cloud.run.v2.{kind}s": tuple(m for m in RESOURCE_METHODS if m.name.removesuffix("s").endswith(kind))
    for kind in ("Job", "Execution", "Task", "Service", "Revision")
}
