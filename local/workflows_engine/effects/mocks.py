"""Canned answers for a workflow's calls, so that a test of the workflow needs no services.

A mock file is a list of rules (or a map with `calls`). The first rule that fits a call answers the call:

    - call: http.post                 # the function's name; * matches any text
      step: advance                   # the step's name (optional)
      where: {url: "*/provision"}     # arguments, texts with * (optional); `body.x` reaches into the body
      responses:                      # in this order; `times: 2` or `times: always` repeats a response
        - body: {status: PENDING}     # http.*: body, code, headers; a code of 400 or more is an HttpError
          times: 2
        - raise: {tags: [ConnectionError], message: reset}
          delay: 3                    # seconds before the answer
        - return: {code: 200, body: {status: RUNNING}, headers: {}}   # the call's whole value

A rule without `responses` is itself a response that repeats always. `events.await_callback` takes `body` (and
`headers`, `query`, `method`) or `timeout: true`. A call that no rule fits ends the execution with an error that names
the call.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import DeployError, InvalidArgument, WorkflowError
from ..interpreter.answers import callback_value
from ..interpreter.waits import Wait
from ..language.source import Node, load
from ..limits import Limits
from ..values import NotJson, Value, to_json
from .http import check_status, request_body

Now = Callable[[], float]
SleepUntil = Callable[[float], Awaitable[None]]


class Mocks(Protocol):
    """Answers waits in the place of services; the engine asks it before it performs an effect."""

    async def answer(self, wait: Wait, now: Now, sleep_until: SleepUntil) -> tuple[bool, Value]:
        """(True, value) to answer the wait, (False, None) to leave it to the engine.

        Raises WorkflowError to answer with an error.
        """


@dataclass
class Recorded:
    """A call that the mocks answered: for assertions in tests."""

    call: str
    step: str
    arguments: Mapping[str, Value]


@dataclass
class _Response:
    kind: str  # value, error, http, callback, timeout
    value: Value
    delay: float
    times: int


@dataclass
class _Rule:
    call: str
    step: str
    where: Mapping[str, Value]
    responses: Sequence[_Response]
    given: int = 0

    def fits(self, wait: Wait, arguments: Mapping[str, Value]) -> bool:
        if not fnmatch.fnmatchcase(wait.call, self.call) or not fnmatch.fnmatchcase(wait.step, self.step):
            return False
        return all(_matches(_reach(arguments, name), pattern) for name, pattern in self.where.items())

    def next(self) -> _Response | None:
        given, self.given = self.given, self.given + 1
        for response in self.responses:
            if given < response.times:
                return response
            given -= response.times
        return None


class ScriptedMocks:
    """Answers by the rules of a mock file, given as text or as a value. `calls` records the answered calls in order."""

    def __init__(self, rules: str | Sequence[Mapping[str, Value]]) -> None:
        self.calls: list[Recorded] = []
        value = _parsed(rules) if isinstance(rules, str) else rules
        if isinstance(value, Mapping):
            value = value.get("calls")
        if not isinstance(value, Sequence):
            raise InvalidArgument("a mock file must be a list of rules, or a map with 'calls'")
        self._rules = [_rule(rule, number) for number, rule in enumerate(value, 1)]

    async def answer(self, wait: Wait, now: Now, sleep_until: SleepUntil) -> tuple[bool, Value]:
        arguments = _arguments(wait)
        rule = next((rule for rule in self._rules if rule.fits(wait, arguments)), None)
        if rule is None and wait.kind == "callback":
            return False, None
        self.calls.append(Recorded(wait.call, wait.step, arguments))
        response = rule.next() if rule is not None else None
        if response is None:
            raise _unanswered(wait, arguments, exhausted=rule is not None)
        if response.delay:
            await sleep_until(now() + response.delay)
        if response.kind == "timeout":
            return False, None
        if response.kind == "error":
            raise _error(response.value)
        if response.kind == "http":
            return True, check_status(response.value)
        if response.kind == "callback":
            return True, _callback(response.value, now())
        return True, response.value


def _unanswered(wait: Wait, arguments: Mapping[str, Value], *, exhausted: bool) -> WorkflowError:
    try:
        shown = to_json(arguments)
    except NotJson:
        shown = str(arguments)
    reason = "the mock's responses are used up" if exhausted else "no mock answers"
    text = f"SystemError: {reason}: {wait.call} in step {wait.step!r} with {shown[:500]}"
    return WorkflowError({"message": text, "tags": ["SystemError"]}, context=text, catchable=False)


def _arguments(wait: Wait) -> Mapping[str, Value]:
    """A call's arguments as the workflow gave them; of an HTTP call, the request."""
    if wait.kind == "connector":
        arguments: Mapping[str, Value] = wait.detail["arguments"]
        return arguments
    if wait.kind != "http":
        return wait.detail
    return {**wait.detail, "body": request_body(wait.detail)}


def _reach(arguments: Mapping[str, Value], name: str) -> Value:
    value: Value = arguments
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _matches(value: Value, pattern: Value) -> bool:
    if isinstance(pattern, str) and isinstance(value, str):
        return fnmatch.fnmatchcase(value, pattern)
    if isinstance(pattern, dict) and isinstance(value, dict):
        return all(_matches(value.get(key), item) for key, item in pattern.items())
    return bool(value == pattern)


_RULE_KEYS = {"call", "step", "where", "responses"}
_HTTP_KEYS = {"body", "code", "headers"}
_CALLBACK_KEYS = {"body", "headers", "query", "method"}


def _rule(rule: Any, number: int) -> _Rule:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("call"), str):
        raise InvalidArgument(
            f"mock rule {number} must be a map with 'call'; got: {json.dumps(rule, default=str)[:200]}"
        )
    call = rule["call"]
    if "responses" in rule:
        if unknown := set(rule) - _RULE_KEYS:
            raise InvalidArgument(f"mock rule {number}: unexpected {sorted(unknown)} beside 'responses'")
        responses = [_response(call, response, f"rule {number}", 1) for response in rule["responses"]]
    else:
        alone = {key: value for key, value in rule.items() if key not in _RULE_KEYS}
        responses = [_response(call, alone, f"rule {number}", 2**62)]
    return _Rule(call, str(rule.get("step", "*")), rule.get("where") or {}, responses)


def _response(call: str, response: Any, where: str, times: int) -> _Response:
    if not isinstance(response, Mapping):
        raise InvalidArgument(f"mock {where}: a response must be a map; got: {response!r}")
    parts = dict(response)
    delay = float(parts.pop("delay", 0))
    count = parts.pop("times", times)
    count = 2**62 if count == "always" else int(count)
    if set(parts) == {"return"}:
        return _Response("value", parts["return"], delay, count)
    if set(parts) == {"raise"}:
        return _Response("error", parts["raise"], delay, count)
    if call.startswith("http.") and set(parts) <= _HTTP_KEYS:
        return _Response("http", {"code": 200, "headers": {}, "body": None, **parts}, delay, count)
    if call == "events.await_callback" and parts == {"timeout": True}:
        return _Response("timeout", None, delay, count)
    if call == "events.await_callback" and set(parts) <= _CALLBACK_KEYS:
        return _Response("callback", parts, delay, count)
    raise InvalidArgument(
        f"mock {where} for {call}: {sorted(parts)} is not a response; expected return, raise, or body, code, headers"
    )


def _error(value: Value) -> WorkflowError:
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        return WorkflowError(value, context=value["message"])
    return WorkflowError(value, context=None)


def _callback(parts: Mapping[str, Value], now: float) -> Value:
    return callback_value(
        parts.get("method", "POST"), parts.get("headers", {}), parts.get("query", {}), parts.get("body"), "/mock", now
    )


def _parsed(text: str) -> Any:
    try:
        return _plain(load(text, max_bytes=2**24, max_nodes=Limits().nodes))
    except DeployError as error:
        raise InvalidArgument(f"mock file: {error.problems[0]}") from error


def _plain(node: Node) -> Any:
    if node.kind == "list":
        return [_plain(item) for item in node.value]
    if node.kind == "map":
        return {key: _plain(value) for key, _, value in node.items()}
    return node.value
