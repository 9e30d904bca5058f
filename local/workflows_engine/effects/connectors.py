"""`googleapis.*` calls: methods of Google's discovery documents, sent as REST; long-running operations are polled.

The documents come from `load`, or from the package google-api-python-client if it is installed. The wait's detail
records the phase of a call, so that after a restart the engine polls the same operation instead of starting another.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import WorkflowError, system_error
from ..interpreter.http_requests import CLOUD_SCOPE, IDEMPOTENT, USER_AGENT, with_query
from ..interpreter.waits import Wait
from ..language import stdlib
from ..values import Value, kind, to_json
from .http import HttpCaller

Document = Mapping[str, Any]
LoadDocument = Callable[[str, str], Document | None]  # by API and version; None if there is no such document
DEFAULT_TIMEOUT = 1800.0  # seconds for a whole call, with the operation that it waits for
MAX_TIMEOUT = 31_536_000.0
REQUEST_TIMEOUT = 1800.0
POLLING = {"initial_delay": 1.0, "multiplier": 1.25, "max_delay": 60.0}
_OPERATION = re.compile(r"(GoogleLongrunning)?Operation\Z")
_HELPERS = ("accessString", "addVersionString")


@dataclass(frozen=True)
class Later:
    """The call is not done: `wait` holds its phase, and is due when the next phase begins."""

    wait: Wait


@dataclass(frozen=True)
class Method:
    """An API method, from its discovery document."""

    call: str
    api: str
    verb: str
    root: str
    path: str
    parameters: Mapping[str, Mapping[str, Any]]
    has_body: bool
    is_long_running: bool
    version_path: str = ""


class Connectors:
    """Performs connector calls. `endpoints`: base URLs that replace Google's, by API name (run, container, …)."""

    def __init__(
        self,
        http: HttpCaller,
        now: Callable[[], float],
        endpoints: Mapping[str, str],
        load: LoadDocument | None = None,
    ) -> None:
        self._http = http
        self._now = now
        self._endpoints = dict(endpoints)
        self._load = load or _installed_document

    def may_repeat(self, wait: Wait, repeatable: Callable[[str], bool]) -> bool:
        """True if sending the request in flight again is harmless: it polls, reads, or its host honours keys."""
        if wait.detail.get("operation") is not None:
            return True
        try:
            method = self._method(_api_call(wait)[0])
        except WorkflowError:
            return True  # the call fails before it sends a request
        return method.verb in IDEMPOTENT or repeatable(self._root(method, {}))

    async def perform(self, wait: Wait, effect_id: str) -> Value | Later:
        """Do the phase of the call that the wait's detail records. Raises WorkflowError."""
        arguments = wait.detail["arguments"]
        params = _connector_params(wait.call, arguments.get("connector_params"))
        remaining = _deadline(wait, params) - self._now()
        if remaining <= 0:
            raise system_error("TimeoutError", f"{wait.call}: the call took longer than {params['timeout']:g} s")
        params["request_timeout"] = min(REQUEST_TIMEOUT, remaining)
        try:
            if (operation := wait.detail.get("operation")) is not None:
                return await self._poll(wait, params, operation, effect_id)
            return await self._call(wait, params, effect_id)
        except WorkflowError as error:
            if (later := self._retry(wait, params, error)) is not None:
                return later
            raise

    def _method(self, call: str) -> Method:
        """The method of a name such as googleapis.run.v2.projects.locations.jobs.run. Raises WorkflowError."""
        parts = call.split(".")
        if parts[0] != "googleapis" or len(parts) < 5:
            raise system_error("SystemError", f"{call} is not emulated; mock it, or call the API with http.*")
        document = self._load(parts[1], parts[2])
        if document is None:
            raise system_error(
                "SystemError",
                f"{call}: no discovery document of {parts[1]} {parts[2]}; "
                "install google-api-python-client, or mock the call",
            )
        return _find(document, call, parts)

    async def _call(self, wait: Wait, params: Mapping[str, Value], effect_id: str) -> Value | Later:
        call, arguments = _api_call(wait)
        method = self._method(call)
        request = self._request(method, arguments, params)
        answer = (await self._http.call(request, effect_id))["body"]
        if wait.call.endswith("accessString"):
            return _secret_text(wait.call, answer)
        if not method.is_long_running or params.get("skip_polling") is True or _is_done(wait.call, answer):
            return _operation_result(wait.call, answer) if method.is_long_running else answer
        delay = params["polling"]["initial_delay"]
        detail = {
            **wait.detail,
            "operation": self._operation_url(method, arguments, answer),
            "delay": delay,
            "polls": 0,
            "tries": 0,
        }
        return self._later(wait, params, detail, delay)

    async def _poll(self, wait: Wait, params: Mapping[str, Value], operation: str, effect_id: str) -> Value | Later:
        detail = wait.detail
        request = _stored_request("GET", operation, None, params)
        polls = detail["polls"] + 1
        answer = (await self._http.call(request, f"{effect_id}-{polls}"))["body"]
        if _is_done(wait.call, answer):
            return _operation_result(wait.call, answer)
        policy = params["polling"]
        delay = min(detail["delay"] * policy["multiplier"], policy["max_delay"])
        detail = {**detail, "delay": delay, "polls": polls, "tries": 0}
        return self._later(wait, params, detail, delay)

    def _later(self, wait: Wait, params: Mapping[str, Value], detail: dict[str, Value], delay: float) -> Later:
        """The next phase after `delay` seconds, or the time-out if it comes before."""
        due = min(self._now() + delay, _deadline(wait, params))
        return Later(replace(wait, detail=detail, due=due))

    def _retry(self, wait: Wait, params: Mapping[str, Value], error: WorkflowError) -> Later | None:
        """Connectors retry without a policy of the workflow: reads by the idempotent policy, writes by the other."""
        tries = wait.detail.get("tries", 0)
        try:
            is_read = wait.detail.get("operation") is not None or self._method(_api_call(wait)[0]).verb == "GET"
        except WorkflowError:
            return None
        predicate = stdlib.default_retry_predicate if is_read else stdlib.default_retry_predicate_non_idempotent
        if tries >= 5 or not predicate(error.value):
            return None
        backoff = stdlib.DEFAULT_BACKOFF
        delay = min(backoff["initial_delay"] * backoff["multiplier"] ** tries, backoff["max_delay"])
        return self._later(wait, params, {**wait.detail, "tries": tries + 1}, delay)

    def _root(self, method: Method, arguments: Mapping[str, Value]) -> str:
        if (override := self._endpoints.get(method.api)) is not None:
            return override.rstrip("/") + "/"
        location = arguments.get("location")
        if method.api == "run" and method.call.split(".")[2] == "v1" and isinstance(location, str):
            return f"https://{location}-run.googleapis.com/"
        return method.root

    def _request(self, method: Method, arguments: Mapping[str, Value], params: Mapping[str, Value]) -> dict[str, Value]:
        given = {name: value for name, value in arguments.items() if name not in ("connector_params", "body")}
        if method.call.split(".")[1:3] == ["run", "v1"]:
            given.pop("location", None)  # `_root` uses it to choose the regional endpoint
        for name in given:
            if name not in method.parameters:
                known = ", ".join(sorted(method.parameters))
                raise system_error("ValueError", f"{method.call}: unknown argument '{name}'; expected {known}, body")
        if "body" in arguments and not method.has_body:
            raise system_error("ValueError", f"{method.call} takes no body")
        path = _expand(method, given)
        query = {name: value for name, value in given.items() if method.parameters[name].get("location") == "query"}
        url = urllib.parse.urljoin(self._root(method, arguments), path)
        if query:
            url = with_query(url, query)
        body = arguments.get("body", {}) if method.has_body else None
        return _stored_request(method.verb, url, body, params)

    def _operation_url(self, method: Method, arguments: Mapping[str, Value], operation: Mapping[str, Value]) -> str:
        root = self._root(method, arguments)
        link = operation.get("selfLink")
        if isinstance(link, str):
            return urllib.parse.urljoin(root, urllib.parse.urlsplit(link).path.lstrip("/"))
        name = operation.get("name")
        if not isinstance(name, str):
            raise system_error("ResponseTypeError", f"{method.call}: the operation has no name")
        if "/" not in name:
            owner = next((str(arguments[key]) for key in ("parent", "name") if key in arguments), "")
            place = re.match(r"projects/[^/]+/(locations|zones)/[^/]+", owner)
            name = f"{place.group() if place else owner}/operations/{name}"
        return urllib.parse.urljoin(root, f"{method.version_path}{name}")


@lru_cache(32)
def _installed_document(api: str, version: str) -> Document | None:
    spec = importlib.util.find_spec("googleapiclient")
    if spec is None or not spec.submodule_search_locations or not re.fullmatch(r"\w+\.\w+", f"{api}.{version}"):
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "discovery_cache" / "documents" / f"{api}.{version}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _find(document: Document, call: str, parts: list[str]) -> Method:
    node: Mapping[str, Any] = document
    for name in parts[3:-1]:
        node = node.get("resources", {}).get(name, {})
    method = node.get("methods", {}).get(parts[-1])
    if method is None:
        raise system_error("SystemError", f"{call}: {parts[1]} {parts[2]} has no such method")
    path = method.get("path", "")
    version = re.match(r"v\d\w*/", path)
    returns_operation = bool(_OPERATION.match(method.get("response", {}).get("$ref", "")))
    return Method(
        call=call,
        api=parts[1],
        verb=method["httpMethod"],
        root=document["rootUrl"],
        path=document.get("servicePath", "") + path,
        parameters={**document.get("parameters", {}), **method.get("parameters", {})},
        has_body="request" in method,
        is_long_running=returns_operation and method["httpMethod"] != "GET",
        version_path=document.get("servicePath", "") + (version.group() if version else ""),
    )


def _expand(method: Method, given: Mapping[str, Value]) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        value = given.get(name)
        if value is None:
            raise system_error("ValueError", f"{method.call}: argument '{name}' is required")
        if isinstance(value, dict | list | bytes):
            raise system_error("TypeError", f"{method.call}: argument '{name}' must be a string; got: {kind(value)}")
        return urllib.parse.quote(str(value), safe="/:" if match.group(1) else "")

    return re.sub(r"\{(\+?)([A-Za-z_]+)\}", fill, method.path)


def _deadline(wait: Wait, params: Mapping[str, Value]) -> float:
    """When the call times out: `timeout` is the duration of the whole call, with its retries and its operation."""
    began: float = wait.detail["began"]
    return began + float(params["timeout"])


def _connector_params(call: str, params: Value) -> dict[str, Value]:
    params = {} if params is None else params
    if type(params) is not dict:
        raise system_error("TypeError", f"{call}: connector_params must be a map; got: {kind(params)}")
    timeout = params.get("timeout")
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    if type(timeout) not in (int, float) or not 0 < timeout <= MAX_TIMEOUT:
        raise system_error(
            "ValueError", f"{call}: connector_params.timeout must be above 0 and at most {MAX_TIMEOUT:g}"
        )
    polling = {**POLLING, **(params.get("polling_policy") or {})}
    scopes = params.get("scopes") or CLOUD_SCOPE
    return {
        "timeout": float(timeout),
        "polling": polling,
        "skip_polling": params.get("skip_polling"),
        "scopes": " ".join(scopes) if isinstance(scopes, list) else scopes,
    }


def _stored_request(verb: str, url: str, body: Value, params: Mapping[str, Value]) -> dict[str, Value]:
    request: dict[str, Value] = {
        "method": verb,
        "url": url,
        "headers": {"User-Agent": USER_AGENT},
        "timeout": params["request_timeout"],
        "auth": ["OAuth2", params["scopes"]],
    }
    if body is not None:
        request["headers"]["Content-Type"] = "application/json"
        request["body"] = base64.b64encode(to_json(body).encode("utf-8", "replace")).decode()
    return request


def _is_done(call: str, operation: Value) -> bool:
    if type(operation) is not dict:
        raise system_error("ResponseTypeError", f"{call}: expected an operation; got: {kind(operation)}")
    if type(operation.get("done", False)) is not bool:
        raise system_error("ResponseTypeError", f"{call}: operation.done must be a boolean")
    return operation.get("done") is True or operation.get("status") == "DONE"


def _operation_result(call: str, operation: Value) -> Value:
    """The response of a done operation. Raises OperationError if the operation failed."""
    if operation.get("error"):
        raise system_error(
            "OperationError",
            f"{call}: the operation failed: {to_json(operation['error'])}",
            operation=operation,
            error=operation["error"],
        )
    return operation.get("response", operation)


def _api_call(wait: Wait) -> tuple[str, dict[str, Value]]:
    """(API method, arguments) behind a call: a connector's helper is short for another method."""
    arguments: dict[str, Value] = dict(wait.detail["arguments"])
    helper = wait.call.rsplit(".", 1)[-1]
    if not wait.call.startswith("googleapis.secretmanager.v1.projects.secrets") or helper not in _HELPERS:
        return wait.call, arguments
    secret = f"projects/{arguments.get('project_id')}/secrets/{arguments.get('secret_id')}"
    if helper == "accessString":
        name = f"{secret}/versions/{arguments.get('version') or 'latest'}"
        return wait.call.replace(".accessString", ".access"), {"name": name}
    data = arguments.get("data")
    if type(data) is not str:
        raise system_error("TypeError", f"{wait.call}: argument 'data' must be a string; got: {kind(data)}")
    payload = {"payload": {"data": base64.b64encode(data.encode("utf-8", "replace")).decode()}}
    return wait.call.replace(".addVersionString", ".addVersion"), {"parent": secret, "body": payload}


def _secret_text(call: str, answer: Value) -> str:
    try:
        return base64.b64decode(answer["payload"]["data"]).decode()
    except (KeyError, TypeError, ValueError) as error:
        raise system_error("ValueError", f"{call}: the secret is not UTF-8 text") from error
