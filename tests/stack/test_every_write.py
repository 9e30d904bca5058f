"""Whole runs whose stages die before and after each write and each request: nothing is lost or doubled.

The tests call the stages as the workflow does, and again after each death. The cloud is the stack's.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from kubernetes.client.rest import RESTClientObject
from slack_sdk.webhook import WebhookClient
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names
from dropforge.base.errors import RetryLater
from dropforge.run.record import Outcome, RunError, RunState
from dropforge.run.store import RunStore
from dropforge.stages import submit

from ..deployments import clients
from ..stage_calls import cancel, deploy, inspect, provision, submit_message, teardown
from .conftest import User
from .targets import SERVES
from .test_runs import assert_clean, states

ME = "the-execution-of-this-test"
URL = "http://127.0.0.1:1/callback"
CHANGES = ("POST", "PUT", "PATCH", "DELETE")


class Killed(BaseException):
    """Simulates SIGKILL inside one process: no handler in dropforge catches it."""


class Deaths:
    """Kills the caller of each distinct effect: before the effect on its first call, after it on its second call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.calls: Counter[str] = Counter()

    def around(self, owner: Any, name: str, effect_of: Callable[..., str]) -> None:
        """Kill around each call of `owner.name`; `effect_of` returns the effect of a call, or "" for no effect."""
        original = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            key = effect_of(*args, **kwargs)
            if not key:
                return original(*args, **kwargs)
            self.calls[key] += 1
            if self.calls[key] == 1:
                raise Killed(key)
            answer = original(*args, **kwargs)
            if self.calls[key] == 2:
                raise Killed(key)
            return answer

        self._patch.setattr(owner, name, deadly)

    def creates(self, run: str) -> list[str]:
        """Return the distinct create requests for a run. A path with a colon is another verb, not a create."""
        return [
            key for key in self.calls if key.startswith("POST ") and run in key and ":" not in key.partition("?")[0]
        ]


def change_of(_: Any, method: str, url: str, *args: Any, **kwargs: Any) -> str:
    """Return the effect of a REST request, or "" for reads and for objects (RunStore._write covers objects)."""
    path = urlsplit(url).path
    if method.upper() not in CHANGES or path.startswith(("/upload/", "/storage/", "/callback")):
        return ""
    body = kwargs.get("body") or kwargs.get("json") or kwargs.get("data") or ""
    return f"{method.upper()} {path}?{kwargs.get('params') or ''} {body if method.upper() == 'POST' else ''}"


def write_of(_: Any, name: str, data: bytes, *__: Any) -> str:
    """Return the effect of a write of an object. Each call of a stage writes another random key for a new run."""
    return f"write {name} {'' if name.startswith('keys/') else _without_times(data)}"


class Executions:
    """Records the runs to start; starts no execution."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, cloud: Any, run: str) -> str:
        self.started.append(run)
        return ME

    def find(self, cloud: Any, run: str, since: Any) -> str | None:
        return ME if run in self.started else None


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Deaths:
    deaths = Deaths(monkeypatch)
    executions = Executions()
    monkeypatch.setattr(submit, "START_SECONDS", 0)
    monkeypatch.setattr("dropforge.stages.await_.decide.REPORT_SECONDS", 0)
    monkeypatch.setattr(submit, "start_execution", executions.start)
    monkeypatch.setattr(submit, "find_execution", executions.find)
    deaths.around(submit, "start_execution", lambda _, run: f"start {run}")
    deaths.around(RunStore, "_write", write_of)
    deaths.around(requests.Session, "request", change_of)
    deaths.around(RESTClientObject, "request", change_of)
    deaths.around(type(clients.publisher()), "publish", lambda *_, **event: f"publish {event.get('ce-id')}")
    deaths.around(WebhookClient, "send", lambda _, text, blocks, **options: f"slack {blocks[-1]}")
    return deaths


def call_until_final(stage: Callable[..., Any], *args: Any) -> Any:
    """Call a stage again after each death and while its answer is not final; return its final answer."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = stage(*args)
        except (Killed, RetryLater):
            continue
        if not isinstance(answer, dict) or answer["status"] not in ("PENDING", "WAITING"):
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{stage} has no final answer")


def execute(run: str) -> None:
    """Call the stages of a whole run in the order of workflows/run.workflows.yaml."""
    outcome = train(run)
    if outcome["status"] == "SUCCEEDED" and outcome["serve"]:
        outcome = call_until_final(deploy, run, ME)
    status = {"READY": "SUCCEEDED"}.get(outcome["status"], outcome["status"])
    error = RunError.model_validate(outcome["error"]) if outcome.get("error") else None
    end = partial(teardown, outcome=Outcome(state=RunState(status), error=error))
    assert call_until_final(end, run, ME, "run", status == "SUCCEEDED") == {"status": "ENDED", "state": status}


def train(run: str) -> dict[str, Any]:
    attempt = 1
    while True:
        result: dict[str, Any] = call_until_final(provision, run, ME, attempt, URL)
        if result["status"] == "RUNNING":
            result = call_until_final(inspect, run, ME, attempt, URL)
        if not result.get("retry"):
            return result
        call_until_final(teardown, run, ME, 1, True)
        attempt += 1


@pytest.mark.parametrize(
    ("behave", "end", "attempts"),
    [
        ("silent", RunState.SUCCEEDED, 1),
        ("exit-65", RunState.FAILED, 1),
        ("preempted-once", RunState.SUCCEEDED, 2),
    ],
)
def test_a_run_survives_death_at_every_write(
    user: User, deaths: Deaths, target: dict[str, Any], behave: str, end: RunState, attempts: int
) -> None:
    kind = target["type"]
    serve = {"type": kind, **SERVES[kind]} if behave == "silent" and kind in SERVES else None
    key = f"every-write-{time.time_ns()}"
    spec = user.spec(behave, target=target, serve=serve, limits={"max_attempts": 2})
    run = call_until_final(submit_message, json.dumps(spec).encode(), key).run
    execute(run)
    record = user.store.record(run)
    assert record.state is end, record.error
    assert len(record.attempts) == attempts
    assert all(a.ended for a in record.attempts)
    assert Counter(states(record)).most_common(1)[0][1] <= attempts
    assert user.store.read(names.report_object(run))
    if serve:
        call_until_final(cancel, run)
    assert_clean(user, run)
    ended = user.store.record(run).endpoint
    assert (ended is not None and ended.ended is not None) is bool(serve)
    entries = user.store.ledger(run).entries
    # A queued resource creates its node without a request of dropforge.
    assert attempts + bool(serve) <= len(deaths.creates(run)) <= len(entries)
    # Time passes with each death, so a repeated stage sometimes has another effect than the killed call.
    unrepeated = [key for key, times in deaths.calls.items() if times < 2]
    assert len(unrepeated) <= len(deaths.calls) // 10, unrepeated
    told = user.slack(run, str(end).lower())
    assert min(told.count(told[0]), told.count(told[-1])) >= 2, (
        "a call that died after its notice sends the notice again"
    )


def _without_times(data: bytes) -> str:
    """Return the data without times, seconds and costs: two writes of the same change differ only in these."""
    return re.sub(rb'"[0-9-]{10}T[0-9:.]+Z"|[0-9.]*\.[0-9]+(e-[0-9]+)?', b"", data).decode()
