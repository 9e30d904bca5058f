"""The methods of Cloud Run v2, with their google.api.http rules."""

from __future__ import annotations

from typing import Any

from google.cloud import run_v2
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from ..kit import rpc

Operation = operations_pb2.Operation
LOCATION = "projects/*/locations/*"
# Cloud TPU has the same operation paths on the same port. The names of this API's operations have a prefix, and its
# lists of operations are in regions: a region ends in a digit, a zone does not.
REGION = "projects/*/locations/*[0-9]"
JOB = f"{LOCATION}/jobs/*"
EXECUTION = f"{JOB}/executions/*"
SERVICE = f"{LOCATION}/services/*"
OPERATION = f"{LOCATION}/operations/run-*"


def _method(name: str, response: Any, rule: str) -> rpc.Method:
    return rpc.Method(name, getattr(run_v2, f"{name}Request").pb(), response, (rule,))


def _operation(name: str, rule: str, response: Any = Operation) -> rpc.Method:
    return rpc.Method(name, getattr(operations_pb2, f"{name}Request"), response, (rule,))


METHODS = (
    _method("CreateJob", Operation, f"POST /v2/{{parent={LOCATION}}}/jobs job"),
    _method("ListJobs", run_v2.ListJobsResponse.pb(), f"GET /v2/{{parent={LOCATION}}}/jobs"),
    _method("GetJob", run_v2.Job.pb(), f"GET /v2/{{name={JOB}}}"),
    _method("UpdateJob", Operation, f"PATCH /v2/{{job.name={JOB}}} job"),
    _method("DeleteJob", Operation, f"DELETE /v2/{{name={JOB}}}"),
    _method("RunJob", Operation, f"POST /v2/{{name={JOB}}}:run *"),
    _method("ListExecutions", run_v2.ListExecutionsResponse.pb(), f"GET /v2/{{parent={JOB}}}/executions"),
    _method("GetExecution", run_v2.Execution.pb(), f"GET /v2/{{name={EXECUTION}}}"),
    _method("CancelExecution", Operation, f"POST /v2/{{name={EXECUTION}}}:cancel *"),
    _method("DeleteExecution", Operation, f"DELETE /v2/{{name={EXECUTION}}}"),
    _method("ListTasks", run_v2.ListTasksResponse.pb(), f"GET /v2/{{parent={EXECUTION}}}/tasks"),
    _method("GetTask", run_v2.Task.pb(), f"GET /v2/{{name={EXECUTION}/tasks/*}}"),
    _method("CreateService", Operation, f"POST /v2/{{parent={LOCATION}}}/services service"),
    _method("ListServices", run_v2.ListServicesResponse.pb(), f"GET /v2/{{parent={LOCATION}}}/services"),
    _method("GetService", run_v2.Service.pb(), f"GET /v2/{{name={SERVICE}}}"),
    _method("UpdateService", Operation, f"PATCH /v2/{{service.name={SERVICE}}} service"),
    _method("DeleteService", Operation, f"DELETE /v2/{{name={SERVICE}}}"),
    _method("ListRevisions", run_v2.ListRevisionsResponse.pb(), f"GET /v2/{{parent={SERVICE}}}/revisions"),
    _method("GetRevision", run_v2.Revision.pb(), f"GET /v2/{{name={SERVICE}/revisions/*}}"),
    _operation("GetOperation", f"GET /v2/{{name={OPERATION}}}"),
    _operation("DeleteOperation", f"DELETE /v2/{{name={OPERATION}}}", empty_pb2.Empty),
    _operation("WaitOperation", f"POST /v2/{{name={OPERATION}}}:wait *"),
    _operation("ListOperations", f"GET /v2/{{name={REGION}}}/operations", operations_pb2.ListOperationsResponse),
)
