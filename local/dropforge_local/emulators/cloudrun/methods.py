"""The methods of Cloud Run v2, with their google.api.http rules."""

from __future__ import annotations

from google.cloud import run_v2
from google.longrunning import operations_pb2

from ..kit.rpc import method

LOCATION = "projects/*/locations/*"
# Cloud TPU has the same operation paths on the same port. The names of this API's operations have a prefix, and its
# lists of operations are in regions: a region ends in a digit, a zone does not.
REGION = "projects/*/locations/*[0-9]"
JOB = f"{LOCATION}/jobs/*"
EXECUTION = f"{JOB}/executions/*"
SERVICE = f"{LOCATION}/services/*"
OPERATION = f"{LOCATION}/operations/run-*"

METHODS = (
    *(
        method(run_v2, name, response, rule)
        for name, response, rule in (
            ("CreateJob", "Operation", f"POST /v2/{{parent={LOCATION}}}/jobs job"),
            ("ListJobs", "ListJobsResponse", f"GET /v2/{{parent={LOCATION}}}/jobs"),
            ("GetJob", "Job", f"GET /v2/{{name={JOB}}}"),
            ("UpdateJob", "Operation", f"PATCH /v2/{{job.name={JOB}}} job"),
            ("DeleteJob", "Operation", f"DELETE /v2/{{name={JOB}}}"),
            ("RunJob", "Operation", f"POST /v2/{{name={JOB}}}:run *"),
            ("ListExecutions", "ListExecutionsResponse", f"GET /v2/{{parent={JOB}}}/executions"),
            ("GetExecution", "Execution", f"GET /v2/{{name={EXECUTION}}}"),
            ("CancelExecution", "Operation", f"POST /v2/{{name={EXECUTION}}}:cancel *"),
            ("DeleteExecution", "Operation", f"DELETE /v2/{{name={EXECUTION}}}"),
            ("ListTasks", "ListTasksResponse", f"GET /v2/{{parent={EXECUTION}}}/tasks"),
            ("GetTask", "Task", f"GET /v2/{{name={EXECUTION}/tasks/*}}"),
            ("CreateService", "Operation", f"POST /v2/{{parent={LOCATION}}}/services service"),
            ("ListServices", "ListServicesResponse", f"GET /v2/{{parent={LOCATION}}}/services"),
            ("GetService", "Service", f"GET /v2/{{name={SERVICE}}}"),
            ("UpdateService", "Operation", f"PATCH /v2/{{service.name={SERVICE}}} service"),
            ("DeleteService", "Operation", f"DELETE /v2/{{name={SERVICE}}}"),
            ("ListRevisions", "ListRevisionsResponse", f"GET /v2/{{parent={SERVICE}}}/revisions"),
            ("GetRevision", "Revision", f"GET /v2/{{name={SERVICE}/revisions/*}}"),
        )
    ),
    *(
        method(operations_pb2, name, response, rule)
        for name, response, rule in (
            ("GetOperation", "Operation", f"GET /v2/{{name={OPERATION}}}"),
            ("DeleteOperation", "Empty", f"DELETE /v2/{{name={OPERATION}}}"),
            ("WaitOperation", "Operation", f"POST /v2/{{name={OPERATION}}}:wait *"),
            ("ListOperations", "ListOperationsResponse", f"GET /v2/{{name={REGION}}}/operations"),
        )
    ),
)
