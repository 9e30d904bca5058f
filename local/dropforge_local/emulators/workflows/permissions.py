"""The permission that each method needs: https://cloud.google.com/workflows/docs/access-control (2026-11-23)."""

from __future__ import annotations

from ..kit import access

SEND = "workflows.callbacks.send"
EXECUTIONS = access.table(
    """
    list_executions workflows.executions.list parent
    create_execution workflows.executions.create parent
    get_execution workflows.executions.get name
    cancel_execution workflows.executions.cancel name
    """
)
WORKFLOWS = access.table(
    """
    list_workflows workflows.workflows.list -
    get_workflow workflows.workflows.get name
    create_workflow workflows.workflows.create -
    delete_workflow workflows.workflows.delete name
    update_workflow workflows.workflows.update workflow.name
    list_workflow_revisions workflows.workflows.listRevision name
    """
)
# By the handlers of rest.py and admin.py; the resource is a variable of the path.
REST = access.table(
    f"""
    create workflows.executions.create workflow
    list_executions workflows.executions.list workflow
    trigger_pubsub workflows.executions.create workflow
    get workflows.executions.get execution
    cancel workflows.executions.cancel execution
    callbacks workflows.callbacks.list execution
    callback {SEND} execution
    step_entries workflows.stepEntries.list execution
    step_entry workflows.stepEntries.get execution
    get_operation workflows.operations.get name
    """
)
