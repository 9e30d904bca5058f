"""Canaries on the whole stack: a new model answers a share of the requests, and is promoted or rolled back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from openai import APIStatusError

from dropforge.endpoints.record import Rollout, RolloutState
from dropforge.run.record import RunState

from .conftest import User
from .named import KINDS, OPERATIONS, Named, is_told
from .test_endpoints import lent, ran

CANARY = {"percent": 50, "for": "1s", "max_error_rate": 0.1, "max_latency_ratio": 100}  # a slow machine decides nothing


CLIENTS = 4
PAUSE_SECONDS = 0.1  # between two questions of a client: without a pause, the clients take every core


@pytest.fixture(params=KINDS)
def named(user: User, request: pytest.FixtureRequest) -> Iterator[Named]:
    with lent(user, request.param) as named:
        yield named


class Clients:
    """Clients that ask the same all the time."""

    def __init__(self, named: Named, text: str = "Hello") -> None:
        self._text = text
        self.answers: list[str] = []  # the revision of each answer, in the order of their ends
        self.refusals: list[int] = []
        self._named = named
        self._client = named.client()
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Clients]:
        with ThreadPoolExecutor(CLIENTS) as threads:
            works = [threads.submit(self._ask) for _ in range(CLIENTS)]
            try:
                yield self
            finally:
                self._stop.set()
            for work in works:
                work.result()

    def _ask(self) -> None:
        messages: Any = [{"role": "user", "content": self._text}]
        while not self._stop.wait(PAUSE_SECONDS):
            try:
                found = self._client.chat.completions.create(model=self._named.name, messages=messages)
                self.answers.append(str(found.system_fingerprint))
            except APIStatusError as error:
                self.refusals.append(error.status_code)


def rolled_back(named: Named, run: str) -> Rollout:
    """The rollout of a run whose canary was bad: the model before serves."""
    record = named.user.wait(run)
    rollout = named.record.rollout(run)
    assert (rollout.state, named.record.stable) == (RolloutState.ROLLED_BACK, 1)
    assert (record.state, record.error) == (RunState.FAILED, rollout.error)
    assert {revision.number for revision in named.record.revisions if revision.paid_since} == {1}
    named.user.until(lambda: named.revisions() == {named.record.revision(1).revision} or named.kind != "gke")
    return rollout


def test_a_good_canary_answers_its_share_and_is_promoted(named: Named) -> None:
    first = named.serves().revision(1).revision
    clients = Clients(named)
    with clients.running():
        after = named.serves(canary=CANARY)
        second = after.revision(2).revision
        named.user.until(lambda: clients.answers[-5:] == [second] * 5)
    assert clients.refusals == []
    assert set(clients.answers) == {first, second}
    rollout = after.rollouts[-1]
    assert rollout.seen is not None
    assert rollout.seen.canary.requests >= 20
    assert rollout.seen.before.requests >= 20
    assert (rollout.seen.canary.errors, after.stable, after.previous) == (0, 2, 1)
    (listed,) = [each for each in json.loads(ran(named.user, "endpoints", "--json")) if each["name"] == named.name]
    assert all(listed["last_hour"][name]["latency_ms"] for name in (first, second))
    for headline in (
        f":arrows_counterclockwise: noop is a canary of endpoint {named.name}: 50 % of the requests",
        f":white_check_mark: noop serves behind endpoint {named.name}",
    ):
        assert is_told(named, rollout.run, headline)


def test_a_canary_that_fails_requests_is_rolled_back_by_itself(named: Named) -> None:
    first = named.serves().revision(1).revision
    clients = Clients(named, f"fail unless {first}")
    with clients.running():
        run = named.put(canary={**CANARY, "for": "1d"})
        rollout = rolled_back(named, run)
        clients.answers.clear()
        named.user.until(lambda: len(clients.answers) >= 20)
    assert set(clients.refusals) == {500}
    assert set(clients.answers) == {first}
    assert rollout.error is not None
    assert rollout.error.error_class == "code"
    assert "requests failed; expected at most 10.00%" in rollout.error.message
    assert is_told(named, run, f":warning: noop was not put behind endpoint {named.name}")
    assert "does not serve" in ran(named.user, "status", run)


def test_a_slow_canary_is_rolled_back_by_itself(named: Named) -> None:
    first = named.serves().revision(1).revision
    clients = Clients(named, f"slow unless {first}")
    with clients.running():
        run = named.put(canary={**CANARY, "max_latency_ratio": 1})
        rollout = rolled_back(named, run)
    assert clients.refusals == []
    assert rollout.error is not None
    assert "95th percentile of latencies" in rollout.error.message


def test_a_rollback_ends_a_canary_and_the_model_before_keeps_every_request(named: Named) -> None:
    """The turn of a canary may last for days: a rollback, and the end of the endpoint, do not wait for it."""
    first = named.serves().revision(1).revision
    run = named.put(canary={**CANARY, "for": "1d"})
    named.reached(run, RolloutState.WATCHING)
    assert "does not serve yet: WATCHING" in ran(named.user, "status", run)
    assert "answers with revision 1" in ran(named.user, "rollback", named.name)
    canary = named.record.rollout(run)
    assert canary.error is not None
    assert (canary.state, canary.error.message) == (
        RolloutState.ROLLED_BACK,
        "a rollback was requested while the model was a canary",
    )
    assert (named.record.stable, named.record.previous) == (1, 0)
    assert named.shares() == {first: 100}
    assert named.user.wait(run).state is RunState.FAILED


def test_a_message_and_the_command_say_whether_a_model_is_a_canary_first(user: User, named: Named) -> None:
    named.serves(region="us-central1")
    run = user.drop(user.spec(serve={"type": named.kind, "ttl": "1h", "region": "us-central1"}))
    assert user.wait(run).state is RunState.SUCCEEDED
    assert "percent" in ran(user, "serve", run, "--as", named.name, "--canary", "percent=90", fails=True)
    assert "for" in ran(user, "serve", run, "--as", named.name, "--canary", "for=soon", fails=True)
    ran(user, "serve", run, "--as", named.name, "--canary", "none")
    assert named.record.rollouts[-1].canary is None
    wanted = named.ask(
        serve={"run": run, "endpoint": named.name, "again": True, "canary": {"percent": 20, "for": "2h"}}
    )
    named.reached(wanted, RolloutState.WATCHING)
    named.user.until(lambda: named.record.rollout(wanted).watched)  # it has its share
    canary = named.record.rollout(wanted).canary
    assert canary is not None
    assert (canary.percent, canary.seconds) == (20, 7200)
    record = named.record
    assert named.shares() == {record.revision(2).revision: 80, record.revision(3).revision: 20}
    assert "answers with revision 2" in ran(user, "rollback", named.name)
    assert "answers with revision 1" in ran(user, "rollback", named.name), "the canary's end keeps the one before"


def test_a_run_that_is_cancelled_while_its_rollout_waits_starts_no_revision(named: Named) -> None:
    named.serves()
    canary = named.put(canary={**CANARY, "for": "1d"})
    named.reached(canary, RolloutState.WATCHING)
    waiting = named.put()
    assert named.reached(waiting, RolloutState.QUEUED).state is RolloutState.QUEUED
    for run in (waiting, canary):
        named.user.publish(OPERATIONS, json.dumps({"cancel": run}).encode())
        assert named.user.wait(run).state is RunState.CANCELLED
    rollout = named.ended(waiting)
    assert (rollout.state, rollout.revision) == (RolloutState.ROLLED_BACK, 0)
    assert rollout.error is not None
    assert rollout.error.error_class == "cancelled"
    assert {revision.run for revision in named.record.revisions}.isdisjoint({waiting})
