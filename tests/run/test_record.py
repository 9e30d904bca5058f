from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dropforge.base.errors import Conflict, ErrorClass
from dropforge.money.limits import running_since
from dropforge.run.record import (
    Attempt,
    Endpoint,
    Ledger,
    LedgerEntry,
    Record,
    ResourceState,
    RunError,
    RunState,
    Transition,
)

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def record(state: RunState = RunState.ACCEPTED) -> Record:
    history = [Transition(state=state, time=NOW)]
    return Record(run="job-0123456789ab", name="job", source="gs://b/o#1", state=state, created=NOW, history=history)


def attempt(number: int, usd_per_hour: float | None, seconds: float | None) -> Attempt:
    ended = None if seconds is None else NOW + timedelta(seconds=seconds)
    return Attempt(
        number=number,
        placement=0,
        region="us-central1",
        started=NOW,
        deadline=NOW + timedelta(hours=1),
        usd_per_hour=usd_per_hour,
        ended=ended,
    )


def test_only_an_attempt_that_may_still_run_gets_a_reason_for_its_wait() -> None:
    for state, ended, is_noted in (
        (RunState.PROVISIONING, None, True),
        (RunState.PROVISIONING, 5, False),
        (RunState.TRAINING, None, False),
    ):
        before = record(state).model_copy(update={"attempts": [attempt(1, 1.0, ended)]})
        after = before.with_wait_reason(1, "no GPU is free")
        assert after.attempts[0].wait_reason == ("no GPU is free" if is_noted else "")
        assert (after is before) is not is_noted
        assert after.with_wait_reason(1, "").attempts[0].wait_reason == "", "it runs"


@pytest.mark.parametrize("terminal", [s for s in RunState if s.is_terminal])
@pytest.mark.parametrize("state", list(RunState))
def test_a_terminal_state_is_written_once(terminal: RunState, state: RunState) -> None:
    ended = record(terminal)
    if state is terminal:
        assert ended.entered(state, NOW) is ended
    else:
        with pytest.raises(Conflict, match=f"is {terminal}; it cannot become {state}"):
            ended.entered(state, NOW)


def test_the_end_of_a_run_ends_its_attempts_and_a_late_call_changes_nothing() -> None:
    running = record(RunState.TEARING_DOWN).model_copy(
        update={"attempts": [attempt(1, 1.0, 60), attempt(2, 1.0, None)]}
    )
    cancelled = running.entered(RunState.CANCELLED, NOW + timedelta(seconds=90))
    assert [(a.ended - NOW).total_seconds() for a in cancelled.attempts if a.ended] == [60, 90]
    assert cancelled.with_end(2, RunError(error_class=ErrorClass.PREEMPTED, message="late"), NOW) is cancelled


def test_every_state_is_reachable_and_leads_to_a_terminal_state() -> None:
    reached, frontier = {RunState.ACCEPTED}, [record()]
    while frontier:
        current = frontier.pop()
        following = []
        for state in RunState:
            try:
                following.append(current.entered(state, NOW))
            except Conflict:
                continue
        assert current.state.is_terminal or len(following) > 1, f"{current.state} leads to no terminal state"
        frontier += [r for r in following if r.state not in reached]
        reached |= {r.state for r in following}
    assert reached == set(RunState) - {RunState.REJECTED}


def test_seconds_per_stage_add_up_over_attempts() -> None:
    run = record()
    for seconds, state in [(1, "PROVISIONING"), (3, "TRAINING"), (10, "PROVISIONING"), (11, "TRAINING")]:
        run = run.entered(RunState(state), NOW + timedelta(seconds=seconds))
    assert run.stage_seconds(NOW + timedelta(seconds=20)) == {"ACCEPTED": 1, "PROVISIONING": 3, "TRAINING": 16}


def test_a_terminal_run_spends_no_more_time() -> None:
    run = record().entered(RunState.TEARING_DOWN, NOW + timedelta(seconds=2))
    run = run.entered(RunState.FAILED, NOW + timedelta(seconds=5))
    assert run.stage_seconds(NOW + timedelta(days=1)) == {"ACCEPTED": 2, "TEARING_DOWN": 3}


def test_the_cost_is_the_sum_of_the_attempts_and_unknown_if_a_price_is() -> None:
    known = [attempt(1, 2.0, 1800), attempt(2, 4.0, None)]
    run = record().model_copy(update={"attempts": known})
    assert run.training_cost(NOW + timedelta(minutes=15)) == 1.0  # the second attempt waits for capacity
    assert run.with_running(2, NOW).training_cost(NOW + timedelta(minutes=15)) == 2.0
    repeated = run.with_running(2, NOW + timedelta(minutes=5)).with_running(2, NOW)  # the first stored time stays
    assert repeated.training_cost(NOW + timedelta(minutes=20)) == 2.0
    run = run.model_copy(update={"attempts": [*known, attempt(3, None, 60)]})
    assert run.training_cost(NOW) is None


def test_the_cost_counts_from_the_last_time_at_which_no_machine_ran() -> None:
    """A function that stalled for minutes does not make the machine cheaper that started meanwhile."""
    run = record().model_copy(update={"attempts": [attempt(1, 60.0, None)]})
    assert running_since(run.attempts[-1]) == NOW
    for second in (10, 40, 50, 69):  # two notes are half a minute apart
        run = run.with_waiting(1, NOW + timedelta(seconds=second))
    run = run.with_waiting(1, NOW + timedelta(seconds=20))  # a late call
    assert running_since(run.attempts[-1]) == NOW + timedelta(seconds=40)
    seen = run.with_launch(1, NOW + timedelta(minutes=14)).with_running(1, running_since(run.attempts[-1]))
    assert seen.training_cost(NOW + timedelta(minutes=15, seconds=40)) == 15.0
    assert seen.with_waiting(1, NOW + timedelta(minutes=15)) == seen


@pytest.mark.parametrize(("error_class", "usd"), [("stockout", 0.0), ("quota", 0.0), ("preempted", 1.0)])
def test_an_attempt_that_never_ran_costs_nothing_if_the_cloud_had_no_capacity(error_class: str, usd: float) -> None:
    error = RunError(error_class=ErrorClass(error_class), message="x")
    run = record().model_copy(update={"attempts": [attempt(1, 1.0, None)]})
    assert run.with_end(1, error, NOW + timedelta(hours=1)).training_cost(NOW + timedelta(hours=2)) == usd


def test_an_attempt_whose_deadline_passed_while_it_waited_costs_only_the_time_that_nobody_saw() -> None:
    error = RunError(error_class=ErrorClass.DEADLINE, message="x")
    run = record().model_copy(update={"attempts": [attempt(1, 60.0, None)]})
    run = run.with_waiting(1, NOW + timedelta(minutes=56)).with_end(1, error, NOW + timedelta(hours=1))
    assert run.training_cost(NOW + timedelta(hours=2)) == 4.0


def test_the_cost_of_an_endpoint_counts_all_instances_until_its_expiry() -> None:
    run = record().entered(RunState.PROVISIONING, NOW).entered(RunState.DEPLOYING, NOW)
    assert run.serving_cost(NOW + timedelta(hours=1)) is None
    run = run.model_copy(update={"serving_usd_per_hour": 3.0})
    assert run.serving_cost(NOW + timedelta(hours=1)) == 3.0
    expires = NOW + timedelta(hours=2)
    endpoint = Endpoint(url="u", model="m", service="s", region="r", ready=NOW, expires=expires)
    run = run.model_copy(update={"endpoint": endpoint, "attempts": [attempt(1, 2.0, 1800)]})
    assert run.cost(NOW + timedelta(days=1)) == 7.0


def test_the_ledger_keeps_one_entry_per_resource() -> None:
    entry = LedgerEntry(kind="k", name="n", attempt=1, state=ResourceState.INTENDED, intended=NOW)
    ledger = Ledger(run="r").with_entry(entry).with_entry(entry.model_copy(update={"state": ResourceState.GONE}))
    assert len(ledger.entries) == 1
    assert ledger.remaining() == []


@pytest.mark.parametrize(
    ("name", "kept", "expected"),
    [("df-r-a1", False, False), ("df-r-a1", True, True), ("df-r-serve", False, True), ("df-x-serve", False, False)],
)
def test_an_entry_is_of_the_endpoint_if_it_was_created_or_kept_for_it(name: str, kept: bool, expected: bool) -> None:
    entry = LedgerEntry(kind="k", name=f"x/{name}", attempt=1, state=ResourceState.CREATED, intended=NOW, kept=kept)
    assert entry.is_endpoint("r") is expected
