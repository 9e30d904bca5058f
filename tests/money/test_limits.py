"""Retries by class, budget and time: the remaining budget, the warnings, and the check for a stuck attempt."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.base.errors import ErrorClass
from dropforge.money.limits import (
    MIN_ATTEMPT_SECONDS,
    due,
    endpoint_expiry,
    seconds_to_warning,
    serving_price,
    short_endpoint,
)
from dropforge.platforms import get_target
from dropforge.platforms.training import Phase, Status
from dropforge.run.events import Started
from dropforge.run.record import Attempt, Record, RunError, RunState, Transition
from dropforge.run.series import Kept, Progress, Series
from dropforge.run.store import RunStore, Versioned
from dropforge.spec import JobSpec, parse_spec
from dropforge.stages.admission import budget_problems
from dropforge.stages.await_.decide import Heard, Report
from dropforge.stages.await_.inspect import _note_running, _stuck
from dropforge.stages.deploy import _enter, _too_late
from dropforge.stages.provision import _open_attempt, pause_seconds
from dropforge.stages.retries import retry_or_fail

from ..deployments import SETTINGS, context_with

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
CONTEXT = context_with()
RUN = "r-0123456789ab"
RUNNING = Status(Phase.RUNNING)


def spec(limits: dict[str, Any], placements: int = 1, serve: dict[str, Any] | None = None, price: float = 1) -> JobSpec:
    where = [{"region": region} for region in ("us-central1", "europe-west4", "us-east4")[:placements]]
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "a/b"},
        "dataset": {"source": "a/b"},
        "serve": serve,
        "target": {"type": "cloud_run", "placements": where, "price_usd_per_hour": price},
        "limits": limits,
    }
    return JobSpec.model_validate_json(json.dumps(document))


def record(*ends: str, hours: float = 1, usd: float = 1) -> Record:
    """Return a run with an attempt for each class in `ends`, which ran for `hours`; "" stands for a running attempt."""
    attempts, now = [], NOW
    for number, end in enumerate(ends, 1):
        error = RunError(error_class=ErrorClass(end), message="x") if end else None
        after = now + timedelta(hours=hours)
        times = {
            "started": now,
            "running": now,
            "seen": now,
            "ended": after if end else None,
            "deadline": NOW + timedelta(days=1),
        }
        attempts.append(Attempt(number=number, placement=0, region="r", usd_per_hour=usd, error=error, **times))
        now = after
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    state = RunState.TRAINING
    return Record(run=RUN, name="n", source="s", state=state, created=NOW, history=history, attempts=attempts)


@pytest.mark.parametrize(
    ("ends", "limits", "retry"),
    [
        (["preempted"] * 10, {}, True),
        (["preempted"] * 11, {}, False),
        (["preempted"] * 9 + ["infrastructure"] * 3, {}, True),  # each class has its own count
        (["preempted"] * 9 + ["infrastructure"] * 4, {}, False),
        (["preempted"], {"retry": {"preempted": 0}}, False),
        (["preempted"] * 3, {"max_attempts": 3}, False),  # the limit for all classes together
        (["code"], {}, False),
        (["code"], {"retry": {"code": 1}}, True),
        (["preempted", "code", "code"], {"retry": {"code": 1}}, False),
        (["out_of_memory"], {}, False),
        (["data"], {"retry": {"code": 5, "transient": 5}}, False),
        (["stuck"], {}, True),  # once
        (["stuck"] * 2, {}, False),
        (["stuck"] * 2, {"retry": {"stuck": 2}}, True),
        (["stuck"], {"on_stuck": "notify"}, False),
        (["stuck"], {"on_stuck": "fail"}, False),
    ],
)
def test_the_class_and_the_spec_decide_about_another_attempt(
    ends: list[str], limits: dict[str, Any], retry: bool
) -> None:
    run = record(*ends)
    failure = run.attempts[-1].error
    assert failure is not None
    answer = retry_or_fail(run, spec(limits), failure, NOW).to_json()
    assert (answer["status"], answer["retry"]) == ("FAILED", retry)
    if not retry and len(ends) > 1:
        assert "limits." in answer["error"]["message"], "the message must name the limit"


@pytest.mark.parametrize(
    ("waited", "attempts", "retry"),
    [
        (0, 20, False),
        (9, 20, False),  # the remaining budget is too small for another start
        (11, 20, True),
        (90, 20, True),
        (90, 1, False),
        (None, 20, False),  # no inspection saw it run: it may have run from the start
    ],
)
def test_the_wait_for_capacity_does_not_count_against_the_budget(
    waited: int | None, attempts: int, retry: bool
) -> None:
    """20 USD at 10 USD per hour pay for two hours. An attempt that waited for capacity ends before it uses them up."""
    job = spec({"max_cost_usd": 20, "max_duration": "9h", "max_attempts": attempts}, price=10)
    attempt = _open_attempt(CONTEXT, record(), 1, job, NOW)
    assert attempt is not None
    assert (attempt.limit, attempt.deadline) == ("max_cost_usd", NOW + timedelta(hours=2))
    run = record().model_copy(update={"attempts": [attempt]})
    if waited is not None:
        run = run.with_running(1, NOW + timedelta(minutes=waited))
    failure = RunError(error_class=ErrorClass.BUDGET, message="x")
    run = run.with_end(1, failure, attempt.deadline)
    answer = retry_or_fail(run, job, failure, attempt.deadline).to_json()
    assert (answer["status"], answer["retry"]) == ("FAILED", retry)
    if retry:
        following = _open_attempt(CONTEXT, run, 2, job, attempt.deadline)
        assert following is not None
        allowed = (following.deadline - following.started).total_seconds()
        assert allowed == pytest.approx((waited or 0) * 60, abs=1)


def test_a_node_that_waits_for_other_nodes_counts_against_the_budget() -> None:
    attempt = _open_attempt(CONTEXT, record(), 1, spec({}, price=10), NOW - timedelta(hours=1))
    assert attempt is not None
    run = record().model_copy(update={"attempts": [attempt]}).with_waiting(1, NOW - timedelta(minutes=2))
    context = context_with(now=NOW)
    vars(context)["store"] = Mock(RunStore, update=lambda _, change: change(run))
    stockout = RunError(error_class=ErrorClass.STOCKOUT, message="x")
    for is_paid, cost in ((False, 0.0), (True, 5.0)):
        noted = _note_running(context, run, Status(Phase.PENDING, is_paid=is_paid), NOW)
        ended = noted.with_end(1, stockout, NOW + timedelta(minutes=28))
        assert ended.training_cost(NOW + timedelta(hours=9)) == cost


@pytest.mark.parametrize(
    ("ends", "placements", "minutes"),
    [
        (["stockout"], 1, 1),
        (["stockout"], 2, 0),  # another placement is left
        (["stockout", "quota"], 2, 1),
        (["stockout"] * 3, 1, 4),  # the pause doubles after each round
        (["stockout"] * 8, 1, 10),  # the pause has an upper limit
        (["stockout", "preempted"], 1, 0),
        ([], 1, 0),
    ],
)
def test_the_run_pauses_after_every_placement_has_refused(ends: list[str], placements: int, minutes: int) -> None:
    job, run = spec({}, placements), record(*ends)
    ended = run.attempts[-1].ended if ends else NOW
    assert ended is not None
    assert pause_seconds(run, job, SETTINGS, ended) == minutes * 60
    assert pause_seconds(run, job, SETTINGS, ended + timedelta(minutes=minutes)) == 0


money = st.floats(0.01, 100)


@given(money, money, money, st.integers(1, 4), st.floats(0, 1))
def test_training_and_endpoint_together_cost_no_more_than_the_budget(
    budget: float, price: float, serving: float, instances: int, share: float
) -> None:
    serve = {"type": "cloud_run", "max_instances": instances, "price_usd_per_hour": serving, "ttl": "30d"}
    job = spec({"max_cost_usd": budget, "max_duration": "12h"}, serve=serve, price=price)
    run = record()
    attempt = _open_attempt(CONTEXT, run, 1, job, NOW)
    assert (attempt is None) == bool(budget_problems(job)), "a spec is accepted exactly if its first attempt can start"
    if attempt is None:
        return
    ended = NOW + (attempt.deadline - NOW) * share
    run = run.model_copy(update={"attempts": [attempt], "serving_usd_per_hour": serving * instances})
    run = run.with_running(1, NOW).with_end(1, None, ended)
    expires = endpoint_expiry(run, job, ended)
    hours = (expires - ended).total_seconds() / 3600
    assert hours * 3600 > MIN_ATTEMPT_SECONDS, "the endpoint gets a part of the budget"
    assert (run.training_cost(ended) or 0) + hours * serving * instances <= budget + 1e-5


def test_a_kept_machine_costs_what_it_costs_where_it_trained() -> None:
    """Before the training nobody knows where that will be: the highest price counts."""
    zones = ["us-central1-a", "europe-west4-b"]
    job = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "a/b"},
        "dataset": {"source": "a/b"},
        "training": {"adapter": {"type": "none"}},
        "target": {"type": "tpu_vm", "placements": [{"zone": zone} for zone in zones]},
        "serve": {"type": "training_vm", "ttl": "1h"},
    }
    kept = JobSpec.model_validate_json(json.dumps(job))
    first, second = (get_target("tpu_vm").price(kept, index).usd_per_hour for index in (0, 1))
    assert (first, second) == (9.6, 12.48)
    assert serving_price(kept).usd_per_hour == 12.48
    for placement, hourly in enumerate((first, second)):
        trained = record("")
        attempt = trained.attempts[0].model_copy(update={"placement": placement})
        trained = trained.model_copy(update={"attempts": [attempt], "execution": "e"})
        assert _enter(trained, "e", kept, NOW).serving_usd_per_hour == hourly


def test_a_budget_needs_the_price_of_the_endpoint_too() -> None:
    serve = {"type": "gke", "accelerator": "nvidia-l4", "cluster": "c", "region": "us-central1"}
    [problem] = budget_problems(spec({"max_cost_usd": 100}, serve=serve))
    assert problem.pointer == "/limits/max_cost_usd"
    assert "serve.price_usd_per_hour" in str(problem.expected)
    assert budget_problems(spec({"max_cost_usd": 100}, serve={**serve, "price_usd_per_hour": 1})) == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.json")), ids=lambda path: path.stem)
def test_the_budget_of_every_example_pays_for_the_ttl_of_its_endpoint(path: Path) -> None:
    assert short_endpoint(parse_spec(path.read_bytes())) == ""


def test_the_note_about_an_early_end_of_the_endpoint_names_time_and_sufficient_budget() -> None:
    serve = {"type": "cloud_run", "max_instances": 2, "price_usd_per_hour": 1.5, "ttl": "24h", "startup_timeout": "30m"}
    limits = {"max_duration": "2h", "max_cost_usd": 30}
    assert short_endpoint(spec(limits, serve=serve, price=3)) == (
        "the budget of 30 USD may end the endpoint before its ttl of 24h: it pays for 10.0 h of the endpoint, all 2 "
        "instances of which count as running all the time, or 8.0 h when training takes all of its 2h; 79.50 USD pay "
        "for all of it"
    )
    assert short_endpoint(spec({**limits, "max_cost_usd": 79.5}, serve=serve, price=3)) == ""
    short = short_endpoint(spec({**limits, "max_cost_usd": 6.5}, serve=serve, price=3))
    assert "2.2 h of the endpoint" in short
    assert "or 10 min when training takes all" in short  # the budget reserves this time for the endpoint
    for unbounded in (spec({}, serve=serve), spec(limits), spec({}, price=3)):
        assert short_endpoint(unbounded) == ""


@given(money, money, money, st.integers(1, 4), st.booleans())
def test_without_a_note_the_endpoint_has_its_whole_ttl(
    budget: float, price: float, serving: float, instances: int, raised: bool
) -> None:
    """This holds after the longest and most expensive training, and also with the budget that the note requests."""
    serve = {"type": "cloud_run", "max_instances": instances, "price_usd_per_hour": serving, "ttl": "5h"}
    job = spec({"max_cost_usd": budget, "max_duration": "2h"}, serve=serve, price=price)
    if raised and (note := short_endpoint(job)):
        sufficient = note.rpartition("; ")[2].split(" USD")[0]
        job = spec({"max_cost_usd": float(sufficient), "max_duration": "2h"}, serve=serve, price=price)
        assert short_endpoint(job) == ""
    attempt = _open_attempt(CONTEXT, record(), 1, job, NOW)
    if attempt is None:
        assert short_endpoint(job)
        return
    run = record().model_copy(update={"attempts": [attempt], "serving_usd_per_hour": serving * instances})
    run = run.with_running(1, NOW).with_end(1, None, attempt.deadline)
    lasts = (endpoint_expiry(run, job, attempt.deadline) - attempt.deadline).total_seconds()
    if not short_endpoint(job):
        assert math.isclose(lasts, (5 * 60 + 20) * 60, abs_tol=2)


def test_each_warning_is_sent_once_and_in_time() -> None:
    job, run = spec({"max_cost_usd": 10, "max_duration": "10h"}), record("", usd=1)
    hours = [0, 4.9, 5, 6, 7.9, 8, 9]
    warnings: list[tuple[float, str]] = []
    for hour in hours:
        now = NOW + timedelta(hours=hour)
        for notice in due(run, job, now):
            warnings.append((hour, notice.key))
            run = run.with_notice(notice.key)
        seconds = seconds_to_warning(run, job, now)
        assert seconds == pytest.approx(min((h - hour) * 3600 for h in (5, 8, 1e9) if h > hour), rel=1e-3) or hour >= 8
    assert warnings == [(5, "budget-50"), (8, "budget-80"), (8, "time-80")]


def test_an_endpoint_that_is_ready_too_late_has_the_class_of_the_limit_that_ended_its_time() -> None:
    for limits, error_class in (({}, ErrorClass.DEADLINE), ({"max_cost_usd": 10}, ErrorClass.BUDGET)):
        error = _too_late(spec(limits), NOW).error
        assert error is not None
        assert error.error_class is error_class


def test_a_warning_that_is_due_within_a_second_is_waited_for() -> None:
    job, run = spec({"max_duration": "10h"}), record("", usd=1)
    at = NOW + timedelta(hours=8)
    assert seconds_to_warning(run, job, at - timedelta(seconds=0.5)) == 0.5
    assert seconds_to_warning(run, job, at) == math.inf


def test_a_missed_warning_is_not_sent_after_a_later_warning() -> None:
    job, run = spec({"max_cost_usd": 10, "max_duration": "12h"}), record("", usd=1)
    assert [notice.key for notice in due(run, job, NOW + timedelta(hours=9))] == ["budget-80"]


@pytest.mark.parametrize(
    ("ago", "points", "stuck"),
    [
        (11, 6, True),  # between two steps: the pace of the training is known
        (9, 6, False),
        (11, 1, False),  # one point measures nothing
        (61, 1, True),
    ],
)
def test_of_a_series_the_time_counts_at_which_the_present_step_was_reached(ago: int, points: int, stuck: bool) -> None:
    """By the bucket's clock: the trainer's is a day ahead here. The same step again is no progress.

    Nobody has seen the machine run, and its event of the start is lost (chaos seed 1900248).
    """
    now = NOW + timedelta(hours=2)
    ahead = now + timedelta(days=1)
    events: Any = Events({})
    context = context_with(now=now)
    vars(context)["store"] = events
    series = Series(run=RUN, attempt=1, began=ahead - timedelta(minutes=ago + 1), written=ahead)
    for index in range(points):
        time = ahead - timedelta(minutes=ago, seconds=10 * (points - 1 - index))
        series.add(Progress(attempt=1, time=time, step=2 + index, total_steps=9))
    for repeated in (5, 0):
        time = ahead - timedelta(minutes=repeated)
        series.add(Progress(attempt=1, time=time, step=1 + points, total_steps=9))
    unseen = record("")
    unseen.attempts[0] = unseen.attempts[0].model_copy(update={"seen": None})
    problem = _stuck(context, unseen, spec({}), RUNNING, Heard(series=Kept(series, 1, now)))
    assert (problem is not None) is stuck
    assert problem is None or f"at step {1 + points} of 9" in problem.message


class Events:
    """A store that holds the events of checkpoints by name and counts the reads."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = steps
        self.reads = 0

    def read(self, name: str) -> Versioned:
        self.reads += 1
        event = {"type": "checkpoint", "run": RUN, "attempt": 1, "sequence": 1, "time": NOW.isoformat(), "uri": "u"}
        return Versioned(json.dumps({**event, "step": self.steps[name]}).encode(), 1)


@pytest.mark.parametrize(
    ("steps", "cloud", "stuck"),
    [
        ({}, RUNNING, True),  # the trainer has reported no step
        ({100: 1, 70: 2}, RUNNING, True),  # no event for more than an hour
        ({100: 1, 70: 2, 10: 3}, RUNNING, False),
        ({100: 7, 70: 7, 10: 7, 1: 7}, RUNNING, True),  # it repeats the same step
        ({20: 1, 10: 1}, RUNNING, False),  # the training began less than an hour ago
        ({100: 1}, Status(Phase.PENDING), False),
        ({100: 1}, Status(Phase.FAILED), False),
        ({100: 1}, None, False),
    ],
)
def test_an_attempt_is_stuck_if_it_runs_in_the_cloud_without_progress(
    steps: dict[int, int], cloud: Status | None, stuck: bool
) -> None:
    """`steps` maps the minutes since a report to the reported step; the attempt has run for two hours."""
    now = NOW + timedelta(hours=2)
    events: Any = Events({f"{minutes}": step for minutes, step in steps.items()})
    context = context_with(now=now)
    vars(context)["store"] = events
    heard = Heard(progress=[(f"{minutes}", now - timedelta(minutes=minutes)) for minutes in steps])
    problem = _stuck(context, record(""), spec({}), cloud, heard)
    assert (problem is not None) is stuck
    assert events.reads <= 2
    assert _stuck(context, record(""), spec({"stuck_after": "3h"}), cloud, heard) is None
    begun = Started(run=RUN, attempt=1, sequence=1, time=now, resumed_step=0)
    waited = record("")  # its first machine waited for the other machine
    waited.attempts[0] = waited.attempts[0].model_copy(update={"seen": now - timedelta(minutes=30)})
    assert _stuck(context, waited, spec({}), cloud, Heard()) is None
    restarted = Heard([Report(begun, now - timedelta(minutes=30))], heard.progress)
    assert _stuck(context, record(""), spec({}), cloud, restarted) is None
