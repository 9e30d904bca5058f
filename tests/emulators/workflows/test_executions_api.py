"""The Executions and Workflows APIs, called by Google's own clients over real sockets."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import google.api_core.exceptions as gexc
import grpc
import pytest
import requests
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import workflows_v1
from google.cloud.workflows import executions_v1
from google.cloud.workflows.executions_v1.services.executions.transports import ExecutionsGrpcTransport
from google.cloud.workflows_v1.services.workflows.transports import WorkflowsGrpcTransport
from tests.patience import PATIENCE_SECONDS, until

PARENT = "projects/test-project/locations/europe-west4"
ECHO = "main:\n  params: [args]\n  steps:\n    - done:\n        return: ${args}\n"
SLEEPER = "- nap:\n    call: sys.sleep\n    args:\n      seconds: 600\n"


@pytest.fixture
def executions(served: Any) -> executions_v1.ExecutionsClient:
    channel = grpc.insecure_channel(served.server.grpc_address)
    return executions_v1.ExecutionsClient(transport=ExecutionsGrpcTransport(channel=channel))


@pytest.fixture
def workflows(served: Any) -> workflows_v1.WorkflowsClient:
    channel = grpc.insecure_channel(served.server.grpc_address)
    return workflows_v1.WorkflowsClient(transport=WorkflowsGrpcTransport(channel=channel))


def finished(client: executions_v1.ExecutionsClient, name: str) -> executions_v1.Execution:
    states = executions_v1.Execution.State
    live = (states.ACTIVE, states.QUEUED)

    def ended() -> executions_v1.Execution | None:
        execution = client.get_execution(name=name, retry=None)
        return execution if execution.state not in live else None

    return until(ended)


def test_an_execution_is_created_and_read_back(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    workflow = served.deploy("echo", ECHO, labels={"team": "search"})
    created = executions.create_execution(
        parent=workflow, execution={"argument": '{"n": 1}', "labels": {"run": "r-1"}}, retry=None
    )
    assert created.state == executions_v1.Execution.State.ACTIVE
    done = finished(executions, created.name)
    assert done.state == executions_v1.Execution.State.SUCCEEDED
    assert json.loads(done.result) == {"n": 1}
    assert dict(done.labels) == {"team": "search", "run": "r-1"}
    assert done.workflow_revision_id.startswith("000001-")
    assert done.status.current_steps[-1].step == "done"


def test_a_failure_has_payload_context_and_stack_trace(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    source = (
        "main:\n  steps:\n    - work:\n        call: inner\ninner:\n  steps:\n    - boom:\n        raise: how odd!\n"
    )
    workflow = served.deploy("failing", source)
    done = finished(executions, executions.create_execution(parent=workflow, retry=None).name)
    assert done.state == executions_v1.Execution.State.FAILED
    assert done.error.payload == '"how odd!"'
    assert done.error.context.startswith('RuntimeError: "how odd!"\nin step "boom", routine "inner", line: 7\n')
    frames = [(element.step, element.routine, element.position.line) for element in done.error.stack_trace.elements]
    assert frames == [("boom", "inner", 7), ("work", "main", 3)]


def test_refusals_are_the_clients_own_exceptions(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    workflow = served.deploy("echo", ECHO)
    with pytest.raises(gexc.NotFound):
        executions.get_execution(name=f"{workflow}/executions/none", retry=None)
    with pytest.raises(gexc.NotFound):
        executions.create_execution(parent=f"{PARENT}/workflows/none", retry=None)
    with pytest.raises(gexc.InvalidArgument, match="not JSON"):
        executions.create_execution(parent=workflow, execution={"argument": "{"}, retry=None)
    with pytest.raises(gexc.InvalidArgument, match="32768"):
        executions.create_execution(parent=workflow, execution={"argument": json.dumps("x" * 40_000)}, retry=None)
    done = finished(executions, executions.create_execution(parent=workflow, retry=None).name)
    with pytest.raises(gexc.FailedPrecondition):
        executions.cancel_execution(name=done.name, retry=None)


def test_cancel_ends_a_sleeping_execution(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    workflow = served.deploy("sleeper", SLEEPER)
    created = executions.create_execution(parent=workflow, retry=None)
    until(lambda: executions.get_execution(name=created.name, retry=None).status.current_steps)
    cancelled = executions.cancel_execution(name=created.name, retry=None)
    assert cancelled.state == executions_v1.Execution.State.CANCELLED
    assert cancelled.end_time is not None


def test_list_filters_orders_and_pages(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    workflow = served.deploy("echo", ECHO)
    names = [
        executions.create_execution(
            parent=workflow, execution={"argument": str(i), "labels": {"n": str(i)}}, retry=None
        ).name
        for i in range(5)
    ]
    for name in names:
        finished(executions, name)
    listed = [execution.name for execution in executions.list_executions(parent=workflow, retry=None)]
    assert listed == names[::-1]

    def matching(text: str) -> list[str]:
        request = {"parent": workflow, "filter": text, "page_size": 2}
        return [execution.name for execution in executions.list_executions(request=request, retry=None)]

    assert matching(f'executionId="{names[2].rsplit("/", 1)[1]}"') == [names[2]]
    assert matching('labels.n="3"') == [names[3]]
    assert matching('state="SUCCEEDED" AND NOT labels.n="0"') == names[:0:-1]
    assert matching('state="FAILED" OR labels.n="1"') == [names[1]]
    with pytest.raises(gexc.InvalidArgument, match="unknown field"):
        matching('colour="red"')
    basic = next(iter(executions.list_executions(parent=workflow, retry=None)))
    assert basic.result == ""
    full = executions.list_executions(request={"parent": workflow, "view": "FULL"}, retry=None)
    assert next(iter(full)).result == "4"


def test_lists_show_the_step_at_which_an_execution_is(served: Any, executions: executions_v1.ExecutionsClient) -> None:
    source = f"main: {{steps: [{{one: {{call: inner}}}}]}}\ninner:\n  steps:\n{textwrap.indent(SLEEPER, '    ')}"
    workflow = served.deploy("sleeper", source)
    name = executions.create_execution(parent=workflow, retry=None).name

    def listed(text: str, view: str = "BASIC") -> list[executions_v1.Execution]:
        request = {"parent": workflow, "filter": text, "view": view}
        return list(executions.list_executions(request=request, retry=None))

    assert [execution.name for execution in until(lambda: listed('stepName="nap" AND state="ACTIVE"'))] == [name]
    assert listed('stepName="done"') == []
    (full,) = listed("", "FULL")
    assert [(step.routine, step.step) for step in full.status.current_steps] == [("inner", "nap")]
    (basic,) = listed("")
    assert not basic.status.current_steps


def test_a_page_has_100_executions_in_view_full_and_1000_in_view_basic(served: Any) -> None:
    workflow = served.deploy("echo", ECHO)
    for _ in range(102):
        served.call(lambda: served.engine.create_execution(workflow))

    def page(**query: Any) -> tuple[int, bool]:
        answer = requests.get(f"{served.url}/v1/{workflow}/executions", params=query, timeout=60).json()
        return len(answer["executions"]), "nextPageToken" in answer

    assert page() == page(view="FULL") == page(view="FULL", pageSize=102) == (100, True)
    assert page(pageSize=101) == (101, True)
    assert page(pageSize=5000) == (102, False)


def test_an_execution_says_whether_it_may_wait_for_a_place(served: Any) -> None:
    url = f"{served.url}/v1/{served.deploy('echo', ECHO)}/executions"
    name = "disableConcurrencyQuotaOverflowBuffering"
    created = requests.post(url, json={name: True}, timeout=60).json()
    assert created[name] is True
    assert name not in requests.post(url, json={}, timeout=60).json()
    listed = requests.get(url, params={"filter": f"{name}=true"}, timeout=60).json()["executions"]
    assert [execution["name"] for execution in listed] == [created["name"]]


def test_workflows_are_deployed_updated_and_deleted(
    served: Any, workflows: workflows_v1.WorkflowsClient, executions: executions_v1.ExecutionsClient
) -> None:
    workflow = workflows_v1.Workflow(source_contents=ECHO, user_env_vars={"TEAM": "search"}, description="echoes")
    made = workflows.create_workflow(
        request={"parent": PARENT, "workflow": workflow, "workflow_id": "made"}, retry=None
    ).result()
    assert made.revision_id.startswith("000001-")
    assert made.state == workflows_v1.Workflow.State.ACTIVE
    with pytest.raises(gexc.AlreadyExists):
        workflows.create_workflow(request={"parent": PARENT, "workflow": workflow, "workflow_id": "made"}, retry=None)
    made.source_contents = '- only:\n    return: ${sys.get_env("TEAM")}\n'
    changed = workflows.update_workflow(
        request={"workflow": made, "update_mask": {"paths": ["source_contents"]}}, retry=None
    ).result()
    assert changed.revision_id.startswith("000002-")
    assert changed.description == "echoes"
    assert (
        json.loads(finished(executions, executions.create_execution(parent=made.name, retry=None).name).result)
        == "search"
    )
    execution = next(iter(executions.list_executions(parent=made.name, retry=None)))
    workflows.delete_workflow(name=made.name, retry=None).result()
    with pytest.raises(gexc.NotFound):
        workflows.get_workflow(name=made.name, retry=None)
    with pytest.raises(gexc.NotFound):
        executions.get_execution(name=execution.name, retry=None)
    again = {"parent": PARENT, "workflow": workflow, "workflow_id": "made"}
    assert workflows.create_workflow(request=again, retry=None).result().revision_id.startswith("000001-")
    assert list(executions.list_executions(parent=made.name, retry=None)) == []


def test_a_service_account_belongs_to_a_revision(
    workflows: workflows_v1.WorkflowsClient, executions: executions_v1.ExecutionsClient
) -> None:
    source = "- who: {return: '${sys.get_env(\"GOOGLE_CLOUD_SERVICE_ACCOUNT_NAME\")}'}\n"
    request = {"parent": PARENT, "workflow": {"source_contents": source}, "workflow_id": "who"}
    made = workflows.create_workflow(request=request, retry=None).result()
    email = "runner@test-project.iam.gserviceaccount.com"
    update = {
        "workflow": {"name": made.name, "service_account": f"projects/test-project/serviceAccounts/{email}"},
        "update_mask": {"paths": ["service_account"]},
    }
    changed = workflows.update_workflow(request=update, retry=None).result()
    assert changed.revision_id.startswith("000002-")
    assert workflows.update_workflow(request=update, retry=None).result().revision_id == changed.revision_id
    old = workflows.get_workflow(request={"name": made.name, "revision_id": made.revision_id}, retry=None)
    assert (old.service_account, changed.service_account) == ("", update["workflow"]["service_account"])
    assert (
        json.loads(finished(executions, executions.create_execution(parent=made.name, retry=None).name).result) == email
    )


def test_the_refusal_of_a_source_has_the_services_words(workflows: workflows_v1.WorkflowsClient) -> None:
    source = "- step1:\n    assign:\n    - varA: Hello\n- step2:\n    return: ${varC + varA}\n"
    request = {"parent": PARENT, "workflow": {"source_contents": source}, "workflow_id": "bad"}
    expected = (
        "failed to build: error in step step2: error evaluating return value: "
        "symbol 'varC' is neither a variable nor a sub-workflow name"
    )
    with pytest.raises(gexc.InvalidArgument, match=expected) as caught:
        workflows.create_workflow(request=request, retry=None)
    assert caught.value.details[0].field_violations[0].field == "source_contents:5:13"


def test_the_rest_clients_speak_to_the_same_state(served: Any) -> None:
    client = workflows_v1.WorkflowsClient(
        transport="rest",
        credentials=AnonymousCredentials(),
        client_options=ClientOptions(api_endpoint=served.url),
    )
    request = {"parent": PARENT, "workflow": {"source_contents": ECHO}, "workflow_id": "rested"}
    assert client.create_workflow(request=request, retry=None).result().name == f"{PARENT}/workflows/rested"
    listed = [workflow.name for workflow in client.list_workflows(parent=PARENT, retry=None)]
    assert listed == [f"{PARENT}/workflows/rested"]
    url = f"{served.url}/v1/{PARENT}/workflows/rested/executions"
    created = requests.post(url, json={"argument": "[1.5, null]"}, timeout=60).json()
    done = until(
        lambda: (e := requests.get(f"{served.url}/v1/{created['name']}", timeout=60).json())["state"] != "ACTIVE" and e
    )
    assert (done["state"], done["result"]) == ("SUCCEEDED", "[1.5,null]")
    assert done["createTime"] <= done["startTime"] <= done["endTime"]
    assert requests.get(url, timeout=60).json()["executions"][0].keys() >= {"name", "state", "workflowRevisionId"}
    assert requests.post(url, json={"colour": "red"}, timeout=60).status_code == 400
    assert requests.post(url, json={"executionHistoryLevel": "LOTS"}, timeout=60).status_code == 400
    assert requests.post(
        url, json={"state": "FAILED", "executionHistoryLevel": "EXECUTION_HISTORY_BASIC"}, timeout=PATIENCE_SECONDS
    ).json()["state"] in ("ACTIVE", "SUCCEEDED")  # fields that only the service sets are ignored
    assert requests.get(f"{served.url}/v1/{created['name']}?view=ALL", timeout=60).status_code == 400


def test_step_entries_list_the_steps_that_ran(served: Any) -> None:
    source = """
main:
  steps:
    - loop:
        for:
          value: i
          range: [1, 2]
          steps:
            - work:
                call: inner
                args: {n: "${i}"}
    - risky:
        try:
          raise: {code: 7}
        except:
          as: e
          steps:
            - keep:
                assign:
                  - code: ${e.code}
inner:
  params: [n]
  steps:
    - back:
        return: ${n}
"""
    workflow = served.deploy("flow", source)
    created = served.call(lambda: served.engine.create_execution(workflow))
    record = served.call(lambda: served.engine.wait(created.name))
    url = f"{served.url}/v1/{record.name}/stepEntries"
    entries = requests.get(url, timeout=60).json()["stepEntries"]
    kinds = [(entry["step"], entry["stepType"], entry["state"]) for entry in entries]
    assert kinds[:4] == [
        ("loop", "STEP_FOR", "STATE_SUCCEEDED"),
        ("loop", "STEP_FOR_ITERATION", "STATE_SUCCEEDED"),
        ("work", "STEP_CALL", "STATE_SUCCEEDED"),
        ("back", "STEP_RETURN", "STATE_SUCCEEDED"),
    ]
    assert [entry["entryId"] for entry in entries] == [str(n + 1) for n in range(len(entries))]
    raised = next(entry for entry in entries if entry["stepType"] == "STEP_RAISE")
    assert (raised["state"], raised["exception"]["payload"]) == ("STATE_FAILED", '{"code":7}')
    assert entries[1]["navigationInfo"] == {"parent": "1", "children": ["3"], "next": "5"}
    assert kinds[-1] == ("keep", "STEP_ASSIGN", "STATE_SUCCEEDED")
    assert requests.get(f"{url}/2", timeout=60).json() == entries[1]

    def listed(**query: str) -> list[str]:
        shown = requests.get(url, params=query, timeout=60).json()["stepEntries"]
        return [entry["entryId"] for entry in shown]

    assert listed(filter='state="FAILED" AND stepType=RAISE') == [raised["entryId"]]
    assert listed(filter="parent=1 AND stepType=FOR_ITERATION", orderBy="entryId desc") == ["5", "2"]
    assert requests.get(url, params={"filter": "colour=red"}, timeout=60).status_code == 400
    assert requests.get(url, params={"orderBy": "colour"}, timeout=60).status_code == 400


def test_callbacks_are_listed(served: Any) -> None:
    source = """
- make: {call: events.create_callback_endpoint, result: callback}
- wait: {call: events.await_callback, args: {callback: "${callback}"}}
"""
    workflow = served.deploy("waiter", source)
    record = served.call(lambda: served.engine.create_execution(workflow))
    url = f"{served.url}/v1/{record.name}/callbacks"
    (listed,) = until(lambda: (c := requests.get(url, timeout=60).json()["callbacks"]) and c[0]["waiters"] == "1" and c)
    assert listed["name"].startswith(f"{record.name}/callbacks/")
    assert listed["method"] == "POST"
    token = {"Authorization": "Bearer t"}
    answered = requests.post(f"{served.url}/v1/{listed['name']}", json={}, headers=token, timeout=60)
    assert answered.status_code == 200
    assert requests.post(f"{url}/none", json={}, headers=token, timeout=60).status_code == 404
