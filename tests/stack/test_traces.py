"""The trace of a real run: what the emulated Telemetry API, which reads protobuf, has taken."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest
import requests

from dropforge.base import names
from dropforge.run.record import Record, RunState
from dropforge.stages.sweep import lost_work

from ..stage_calls import sweep
from .conftest import User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def spans(user: User, run: str, name: str = "run") -> list[dict[str, Any]]:
    """Wait until the receiver has a span of this name; return the spans of the run's trace."""

    def sent() -> list[dict[str, Any]]:
        url = f"{user.info.http}/telemetry/traces/{names.trace_id(run)}"
        listed: list[dict[str, Any]] = requests.get(url, timeout=60).json()["spans"]
        return listed

    user.until(lambda: any(span["name"] == name for span in sent()))
    return sent()


def nanoseconds(time: datetime) -> int:
    return int(time.timestamp()) * 10**9 + time.microsecond * 1000


def check_tree(record: Record, sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Check what holds for the trace of every finished run; return the root."""
    [root] = [span for span in sent if not span["parentSpanId"]]
    known = {span["spanId"] for span in sent}
    assert len(known) == len(sent), "a span was sent twice"
    assert {span["parentSpanId"] for span in sent} - known == {""}
    assert (root["start"], root["end"]) == (nanoseconds(record.created), nanoseconds(record.history[-1].time))
    stated = {state.lower().replace("_", " ") for state in RunState}
    states = sorted((s for s in sent if s["name"] in stated and s["parentSpanId"] == root["spanId"]), key=by_start)
    assert [span["name"] for span in states] == [
        entered.state.lower().replace("_", " ") for entered in record.history[:-1]
    ]
    assert (states[0]["start"], states[-1]["end"]) == (root["start"], root["end"])
    assert all(one["end"] == other["start"] for one, other in itertools.pairwise(states))
    return root


def by_start(span: dict[str, Any]) -> tuple[int, int]:
    return span["start"], span["end"]


def named(sent: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return sorted((span for span in sent if span["name"] == name), key=by_start)


def test_a_run_sends_one_trace_and_its_endpoint_the_rest(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_work, "LATE_FOR", timedelta(0))  # no other function works on this run
    run = user.drop(user.spec(serve={"type": "cloud_run", "ttl": "1h"}))
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED, record
    sent = spans(user, run)
    root = check_tree(record, sent)
    assert root["status"] == {}
    assert root["attributes"]["dropforge.run.id"] == run
    assert root["resource"]["gcp.project_id"] == user.settings.project
    [attempt] = named(sent, "attempt")
    phases = [s for s in sent if s["parentSpanId"] == attempt["spanId"]]
    assert [s["name"] for s in sorted(phases, key=by_start)] == ["launch", "prepare", "train", "finish"]
    assert sum(s["end"] - s["start"] for s in phases) == attempt["end"] - attempt["start"]
    assert named(sent, "endpoint") == []
    user.publish("dropforge-operations", f'{{"cancel": "{run}"}}'.encode())
    user.wait_for(run, lambda r: r.endpoint is not None and r.endpoint.ended is not None)
    sweep()
    later = spans(user, run, "endpoint")[len(sent) :]
    assert {s["name"] for s in later} == {"endpoint", "resource"}
    assert all(s["parentSpanId"] == root["spanId"] and s["end"] > root["end"] for s in later)


def test_a_run_that_retries_and_fails_says_so_in_each_attempt(user: User) -> None:
    run = user.drop(user.spec("preempted", limits={"max_attempts": 2}))
    record = user.wait(run)
    assert record.state is RunState.FAILED, record
    assert record.error is not None
    sent = spans(user, run)
    root = check_tree(record, sent)
    assert root["status"]["code"] == "STATUS_CODE_ERROR"
    assert root["attributes"]["error.type"] == record.error.error_class
    attempts = named(sent, "attempt")
    assert [s["attributes"]["dropforge.attempt"] for s in attempts] == [a.number for a in record.attempts]
    assert all(s["status"]["code"] == "STATUS_CODE_ERROR" for s in attempts)


def test_a_cancelled_run_has_a_trace_without_an_error(user: User) -> None:
    run = user.drop(user.spec("hang"))
    user.wait(run, "TRAINING")
    user.publish("dropforge-operations", f'{{"cancel": "{run}"}}'.encode())
    record = user.wait(run)
    assert record.state is RunState.CANCELLED
    sent = spans(user, run)
    root = check_tree(record, sent)
    assert root["status"] == {}
    [attempt] = named(sent, "attempt")
    assert attempt["attributes"]["dropforge.attempt.ending"] == "cancelled"
    [resource] = named(sent, "resource")
    assert resource["attributes"]["cloud.resource_id"].startswith("projects/")


def test_a_receiver_that_is_down_delays_the_trace_only(user: User) -> None:
    user.post("telemetry/_fail", {"count": 2, "status": 503})
    run = user.drop(user.spec())
    record = user.wait(run)
    assert record.state is RunState.SUCCEEDED
    assert user.slack(run, "succeeded")[-1].endswith("succeeded")
    check_tree(record, spans(user, run))
    user.until(lambda: all(e.state.name == "SUCCEEDED" for e in user.executions(run)))
    headlines = user.slack(run, "succeeded")
    assert [headline.endswith("succeeded") for headline in headlines].count(True) == 1
