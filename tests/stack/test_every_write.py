"""Death before and after every single thing that a stage does to the world, in whole runs: nothing is lost or doubled.

The stages are called here as the workflow calls them, again after each death; the cloud is the stack's.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from kubernetes.client.rest import RESTClientObject
from slack_sdk.webhook import WebhookClient

from dropforge.base import names
from dropforge.base.errors import RetryLater
from dropforge.run.record import RunError, RunState
from dropforge.run.store import RunStore
from dropforge.stages import submit

from ..deployments import clients
from ..stage_calls import cancel, deploy, inspect, notify, provision, submit_message, teardown
from .conftest import User
from .targets import SERVES
from .test_runs import assert_clean, states

ME = "the-execution-of-this-test"
URL = "http://127.0.0.1:1/callback"
CHANGES = ("POST", "PUT", "PATCH", "DELETE")


class Killed(BaseException):
    """SIGKILL, as far as one process can play it: no handler of ours catches it."""


class Deaths:
    """Kills whoever does a thing for the first time before it is done, and for the second time after it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.seen: Counter[str] = Counter()

    def around(self, owner: Any, name: str, what: Callable[..., str]) -> None:
        """Kill around each call of `owner.name`; `what` says which are the same, "" which change nothing."""
        done = getattr(owner, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            key = what(*args, **kwargs)
            if not key:
                return done(*args, **kwargs)
            self.seen[key] += 1
            if self.seen[key] == 1:
                raise Killed(key)
            answer = done(*args, **kwargs)
            if self.seen[key] == 2:
                raise Killed(key)
            return answer

        self._patch.setattr(owner, name, deadly)

    def creates(self, run: str) -> list[str]:
        """The creating calls that were made for a run, each counted once. Paths with a colon are other verbs."""
        return [key for key in self.seen if key.startswith("POST ") and run in key and ":" not in key.partition("?")[0]]


def change_of(_: Any, method: str, url: str, *args: Any, **kwargs: Any) -> str:
    """Which change of the cloud a request of any REST client is; objects in buckets are watched at the store."""
    path = urlsplit(url).path
    if method.upper() not in CHANGES or path.startswith(("/upload/", "/storage/", "/callback")):
        return ""
    body = kwargs.get("body") or kwargs.get("json") or kwargs.get("data") or ""
    return f"{method.upper()} {path}?{kwargs.get('params') or ''} {body if method.upper() == 'POST' else ''}"


class Executions:
    """Starts nothing, remembers what it was asked to start."""

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
    monkeypatch.setattr("dropforge.stages.await_.inspect.REPORT_SECONDS", 0)
    monkeypatch.setattr(submit, "start_execution", executions.start)
    monkeypatch.setattr(submit, "find_execution", executions.find)
    deaths.around(submit, "start_execution", lambda _, run: f"start {run}")
    deaths.around(RunStore, "_write", lambda _, name, data, *__: f"write {name} {_without_times(data)}")
    deaths.around(requests.Session, "request", change_of)
    deaths.around(RESTClientObject, "request", change_of)
    deaths.around(type(clients.publisher()), "publish", lambda *_, **event: f"publish {event.get('ce-id')}")
    deaths.around(WebhookClient, "send", lambda _, text, blocks: f"tell {blocks[-1]}")
    return deaths


def again(stage: Callable[..., Any], *args: Any) -> Any:
    """The answer of a stage that is called again after each death and each "call again"."""
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline:
        try:
            answer = stage(*args)
        except (Killed, RetryLater):
            continue
        if not isinstance(answer, dict) or answer["status"] not in ("PENDING", "WAITING", "UNTOLD"):
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{stage.__name__} came to no end")


def live(run: str) -> None:
    """A whole run, as workflows/run.workflows.yaml has it."""
    outcome = train(run)
    if outcome["status"] == "SUCCEEDED" and outcome["serve"]:
        outcome = again(deploy, run, ME)
    status = {"READY": "SUCCEEDED"}.get(outcome["status"], outcome["status"])
    gone = again(teardown, run, ME, "run", status == "SUCCEEDED")
    if status == "SUCCEEDED" and gone["cancelled"]:
        status = "CANCELLED"
    error = RunError.model_validate(outcome["error"]) if outcome.get("error") else None
    assert again(notify, run, ME, RunState(status), error)["status"] == "NOTIFIED"


def train(run: str) -> dict[str, Any]:
    attempt = 1
    while True:
        result: dict[str, Any] = again(provision, run, ME, attempt)
        if result["status"] == "RUNNING":
            result = again(inspect, run, ME, attempt, URL)
        if not result.get("retry"):
            return result
        again(teardown, run, ME, "attempt", True)
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
    run = again(submit_message, json.dumps(spec).encode(), key).run
    live(run)
    record = user.store.record(run)
    assert record.state is end, record.error
    assert len(record.attempts) == attempts
    assert all(a.ended for a in record.attempts)
    assert Counter(states(record)).most_common(1)[0][1] <= attempts
    assert user.store.read(names.report_object(run))
    if serve:
        again(cancel, run)
    assert_clean(user, run)
    ended = user.store.record(run).endpoint
    assert (ended is not None and ended.ended is not None) is bool(serve)
    made = user.store.ledger(run).entries
    assert attempts + bool(serve) <= len(deaths.creates(run)) <= len(made)  # a queued resource makes its node
    # After a death time has passed: now and then what is done next is not what was about to be done.
    once = [key for key, times in deaths.seen.items() if times < 2]
    assert len(once) <= len(deaths.seen) // 10, once
    assert len(user.slack(run, str(end).lower())) >= 2 * 3


def _without_times(data: bytes) -> str:
    """What two writes of the same thing share: no times, nor the seconds and the costs that grow with them."""
    return re.sub(rb'"[0-9-]{10}T[0-9:.]+Z"|[0-9.]*\.[0-9]+(e-[0-9]+)?', b"", data).decode()
