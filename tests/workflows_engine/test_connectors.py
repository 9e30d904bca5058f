"""googleapis.* calls by discovery documents: paths, polled operations, errors, helpers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workflows_engine import Engine, HttpRequest, HttpResponse, SqliteDatabase, VirtualClock, drive

from .conftest import duration

FLOW = "projects/p/locations/l/workflows/flow"
NAME = {"name": {"location": "path", "required": True, "type": "string"}}
PARENT = {"parent": {"location": "path", "required": True, "type": "string"}}
DOCUMENTS: dict[str, Any] = {
    "run.v2": {
        "rootUrl": "https://run.googleapis.com/",
        "servicePath": "",
        "resources": {"projects": {"resources": {"locations": {"resources": {"jobs": {"methods": {
            "get": {"httpMethod": "GET", "path": "v2/{+name}", "parameters": NAME, "response": {"$ref": "Job"}},
            "create": {
                "httpMethod": "POST",
                "path": "v2/{+parent}/jobs",
                "parameters": {**PARENT, "jobId": {"location": "query"}, "validateOnly": {"location": "query"}},
                "request": {"$ref": "Job"},
                "response": {"$ref": "GoogleLongrunningOperation"},
            },
        }}}}}}},
    },
    "secretmanager.v1": {
        "rootUrl": "https://secretmanager.googleapis.com/",
        "servicePath": "",
        "resources": {"projects": {"resources": {"secrets": {
            "methods": {"addVersion": {
                "httpMethod": "POST", "path": "v1/{+parent}:addVersion", "parameters": PARENT,
                "request": {}, "response": {},
            }},
            "resources": {"versions": {"methods": {"access": {
                "httpMethod": "GET", "path": "v1/{+name}:access", "parameters": NAME, "response": {},
            }}}},
        }}}},
    },
}  # fmt: skip


class Google:
    """Answers by (method, URL), in order; repeats the last answer."""

    def __init__(self, answers: dict[str, list[tuple[int, Any]]]) -> None:
        self.requests: list[HttpRequest] = []
        self._answers = answers

    async def send(self, request: HttpRequest) -> HttpResponse:
        self.requests.append(request)
        answers = self._answers[f"{request.method} {request.url}"]
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return HttpResponse(status, {"Content-Type": "application/json"}, json.dumps(body).encode())

    async def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Any, float]]:
    def run(source: str, google: Google, *, restart: bool = False, **options: Any) -> tuple[Any, float]:
        async def live() -> tuple[Any, float]:
            clock = VirtualClock()
            database = SqliteDatabase(tmp_path / "x.db")

            def new_engine() -> Engine:
                def discovery(api: str, version: str) -> Any:
                    return DOCUMENTS.get(f"{api}.{version}")

                return Engine(
                    database,
                    clock=clock,
                    http=google,
                    token=lambda kind, scope: f"{kind}-{scope}",
                    discovery=discovery,
                    **options,
                )

            engine = new_engine()
            await engine.start()
            engine.deploy(FLOW, source)
            name = engine.create_execution(FLOW).name
            if restart:
                while not google.requests:
                    await asyncio.sleep(0)
                for _ in range(10):
                    await asyncio.sleep(0)
                await engine.stop()
                engine = new_engine()
                await engine.start()
            done = asyncio.create_task(engine.wait(name))
            await drive(engine, clock, done)
            record = done.result()
            await engine.stop()
            database.close()
            return record, duration(record)

        return asyncio.run(live())

    return run


CREATE = """
- create:
    call: googleapis.run.v2.projects.locations.jobs.create
    args:
      parent: projects/p/locations/l
      jobId: train
      body: {template: {}}
      %s
    result: job
- done: {return: "${job}"}
"""
JOBS = "POST https://run.googleapis.com/v2/projects/p/locations/l/jobs?jobId=train"
OPERATION = "GET https://run.googleapis.com/v2/projects/p/locations/l/operations/o"
STARTED = (200, {"name": "projects/p/locations/l/operations/o", "done": False})
DONE = (200, {"name": "projects/p/locations/l/operations/o", "done": True, "response": {"name": "train"}})


@pytest.mark.parametrize("restart", [False, True])
def test_an_operation_is_polled_with_growing_pauses(run: Any, restart: bool) -> None:
    google = Google({JOBS: [STARTED], OPERATION: [STARTED, STARTED, DONE]})
    record, seconds = run(CREATE % "", google, restart=restart)
    assert json.loads(record.result) == {"name": "train"}
    assert seconds == pytest.approx(1 + 1.25 + 1.5625)
    assert [request.method for request in google.requests] == ["POST", "GET", "GET", "GET"]
    assert google.requests[0].headers["Authorization"] == "Bearer OAuth2-https://www.googleapis.com/auth/cloud-platform"
    assert json.loads(google.requests[0].body or b"") == {"template": {}}


def test_polling_can_be_skipped_and_tuned(run: Any) -> None:
    google = Google({JOBS: [STARTED], OPERATION: [DONE]})
    record, _ = run(CREATE % "connector_params: {skip_polling: true}", google)
    assert json.loads(record.result)["done"] is False
    google = Google({JOBS: [STARTED], OPERATION: [STARTED, DONE]})
    policy = "connector_params: {polling_policy: {initial_delay: 10, multiplier: 3, max_delay: 20}}"
    assert run(CREATE % policy, google)[1] == pytest.approx(30)


@pytest.mark.parametrize(
    ("answers", "tag", "field"),
    [
        (
            {OPERATION: [(200, {"name": "x/o", "done": True, "error": {"code": 9, "message": "no"}})]},
            "OperationError",
            "operation",
        ),
        ({OPERATION: [(200, ["x"])]}, "ResponseTypeError", "message"),
        ({OPERATION: [STARTED]}, "TimeoutError", "message"),
        ({JOBS: [(403, {"error": {"message": "denied"}})]}, "HttpError", "body"),
    ],
)
def test_every_failure_has_its_tag(run: Any, answers: dict[str, Any], tag: str, field: str) -> None:
    google = Google({JOBS: [STARTED], **answers})
    record, _ = run(CREATE % "connector_params: {timeout: 100}", google)
    error = json.loads(record.error["payload"])
    assert error["tags"] == [tag]
    assert field in error


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("timeout", "answers"),
    [(30, {JOBS: [STARTED], OPERATION: [STARTED]}), (3, {JOBS: [(503, {})]}), (3, {JOBS: [(429, {})]})],
)
def test_the_timeout_is_the_duration_of_the_whole_call(run: Any, timeout: int, answers: Any, restart: bool) -> None:
    google = Google(answers)
    record, seconds = run(CREATE % f"connector_params: {{timeout: {timeout}}}", google, restart=restart)
    error = json.loads(record.error["payload"])
    assert error["tags"] == ["TimeoutError"]
    assert f"the call took longer than {timeout} s" in error["message"]
    assert seconds == timeout
    assert google.requests[0].timeout == timeout
    assert 0 < google.requests[-1].timeout < timeout  # a request may not outlast the call


def test_connectors_retry_without_a_policy(run: Any) -> None:
    google = Google({JOBS: [(503, {}), (503, {}), DONE]})
    record, seconds = run(CREATE % "", google)
    assert json.loads(record.result) == {"name": "train"}
    assert seconds == pytest.approx(1 + 1.25)
    google = Google({JOBS: [(502, {}), DONE]})
    assert json.loads(run(CREATE % "", google)[0].error["payload"])["code"] == 502


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("googleapis.run.v2.projects.locations.jobs.get", "{}", "argument 'name' is required"),
        ("googleapis.run.v2.projects.locations.jobs.get", "{name: n, colour: x}", "unknown argument 'colour'"),
        ("googleapis.run.v2.projects.locations.jobs.get", "{name: n, body: {}}", "takes no body"),
        ("googleapis.run.v2.projects.locations.jobs.fly", "{name: n}", "run v2 has no such method"),
        (
            "googleapis.mars.v1.rovers.drive",
            "{name: n}",
            "no discovery document of mars v1; install google-api-python-client",
        ),
        ("gke.create_job", "{}", "gke.create_job is not emulated; mock it"),
    ],
)
def test_the_error_of_a_wrong_call_names_the_reason(run: Any, call: str, arguments: str, message: str) -> None:
    record, _ = run(f"- a: {{call: {call}, args: {arguments}}}\n", Google({}))
    assert message in record.error["context"]


def test_endpoints_can_be_replaced(run: Any) -> None:
    source = """
- a: {call: googleapis.run.v2.projects.locations.jobs.get, args: {name: projects/p/locations/l/jobs/j}, result: r}
- b: {return: '${r.ok}'}
"""
    google = Google({"GET http://127.0.0.1:8/v2/projects/p/locations/l/jobs/j": [(200, {"ok": True})]})
    assert run(source, google, endpoints={"run": "http://127.0.0.1:8"})[0].result == "true"


def test_secret_manager_helpers(run: Any) -> None:
    source = """
- add:
    call: googleapis.secretmanager.v1.projects.secrets.addVersionString
    args: {project_id: p, secret_id: s, data: hé}
- read:
    call: googleapis.secretmanager.v1.projects.secrets.versions.accessString
    args: {project_id: p, secret_id: s}
    result: text
- in_expression:
    return: '${text + googleapis.secretmanager.v1.projects.secrets.versions.accessString("s", "2", "p")}'
"""
    payload = {"payload": {"data": base64.b64encode("hé".encode()).decode()}}
    root = "https://secretmanager.googleapis.com/v1/projects/p/secrets/s"
    google = Google(
        {
            f"POST {root}:addVersion": [(200, {})],
            f"GET {root}/versions/latest:access": [(200, payload)],
            f"GET {root}/versions/2:access": [(200, payload)],
        }
    )
    assert json.loads(run(source, google)[0].result) == "héhé"
    assert json.loads(google.requests[0].body or b"") == payload
