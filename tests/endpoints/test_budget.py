"""The budget of a named endpoint: what counts, in which period, and who may change it."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta

import pytest

from dropforge.endpoints.budget import period
from dropforge.endpoints.record import KEPT_REVISIONS, EndpointRecord, EndpointState, Rollout, RolloutState
from dropforge.spec import parse_spec, parts
from dropforge.spec.parts import BudgetPeriod
from dropforge.stages.admission import endpoint_budget_problems

from .test_record import HOUR, T0, WRONG, asked, deploying, endpoint, promoted

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
USD_PER_HOUR = 2.0  # of a revision of test_record.py
DAILY = parts.Budget(usd=10, per="day")


def serving(budget: parts.Budget = DAILY, now: datetime = T0) -> EndpointRecord:
    return promoted(endpoint().with_budget(budget, "me", now), "a", 1, now)


def suspended(record: EndpointRecord, now: datetime) -> EndpointRecord:
    wanted = record.with_rollout(Rollout(id="s", kind="suspend", who="me", requested=now))
    return wanted.suspends("s", now).stopped("s", now)


def resumed(record: EndpointRecord, now: datetime) -> EndpointRecord:
    wanted = record.with_rollout(Rollout(id=f"r{now}", kind="resume", who="me", requested=now))
    back = wanted.returns(f"r{now}", now + HOUR, now)
    return back.shifts(f"r{now}", now + HOUR, now).promoted(f"r{now}", "u", None, now)


def test_a_day_begins_at_midnight_utc_and_a_month_on_its_first_day() -> None:
    time = datetime(2026, 2, 28, 23, 59, tzinfo=UTC)
    assert (period(time, "day"), period(time, "month")) == (
        time.replace(hour=0, minute=0),
        datetime(2026, 2, 1, tzinfo=UTC),
    )
    elsewhere = datetime.fromisoformat("2026-03-01T01:00:00+05:00")
    assert period(elsewhere, "day") == datetime(2026, 2, 28, tzinfo=UTC)
    monthly = serving(parts.Budget(usd=1, per="month"), datetime(2026, 1, 31, 5, tzinfo=UTC)).budget
    assert monthly is not None
    assert monthly.ends == datetime(2026, 2, 1, tzinfo=UTC)
    daily = serving(now=datetime(2026, 12, 31, 5, tzinfo=UTC)).budget
    assert daily is not None
    assert daily.ends == datetime(2027, 1, 1, tzinfo=UTC)


def test_a_budget_counts_its_own_period_only() -> None:
    record = serving()
    assert [record.spent(T0 + hours * HOUR) for hours in (1, 4, 23)] == [2.0, 8.0, 46.0]
    assert [record.is_spent(T0 + hours * HOUR) for hours in (4, 5)] == [False, True]
    assert record.spent(T0 + DAY + HOUR) == 2.0, "the day before counts no more"
    stopped = suspended(record, T0 + 5 * HOUR)
    assert (stopped.state, stopped.spent(T0 + 20 * HOUR)) == (EndpointState.SUSPENDED, 10.0)
    assert not stopped.is_spent(T0 + DAY)
    again = resumed(stopped, T0 + DAY + HOUR)
    assert (again.state, again.stable, again.spent(T0 + DAY + 3 * HOUR)) == (EndpointState.SERVING, 1, 4.0)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_resumed_endpoint_pays_for_every_revision_that_has_instances(keeps: bool) -> None:
    stopped = suspended(promoted(serving(), "b", 2, T0), T0 + HOUR)
    assert [revision.number for revision in stopped.revisions if revision.paid_since] == []
    wanted = stopped.with_rollout(Rollout(id="r", kind="resume", who="me", requested=T0))
    back = wanted.returns("r", T0 + HOUR, T0, keeps)
    assert (back.suspended, back.rollout("r").revision) == (None, 2)
    assert [revision.number for revision in back.revisions if revision.paid_since] == ([1, 2] if keeps else [2])


def test_people_are_warned_once_in_a_period_and_again_of_another_budget() -> None:
    record = serving()
    assert [record.is_to_warn(T0 + 3.9 * HOUR), record.is_to_warn(T0 + 4 * HOUR)] == [False, True]
    assert record.budget is not None
    warned = record.with_warning(record.budget.asked, T0 + 4 * HOUR)
    assert not warned.is_to_warn(T0 + 5 * HOUR)
    assert warned.is_to_warn(T0 + DAY + 4 * HOUR)
    higher = warned.with_budget(parts.Budget(usd=20, per="day"), "me", T0 + 5 * HOUR)
    assert higher.is_to_warn(T0 + 8 * HOUR)
    assert higher.with_warning(record.budget.asked, T0 + 8 * HOUR) is higher, "a warning about the budget before"


def test_another_budget_of_the_same_period_counts_what_is_spent() -> None:
    record = serving()
    assert record.with_budget(parts.Budget(usd=5, per="day"), "me", T0 + 3 * HOUR).is_spent(T0 + 3 * HOUR)
    monthly = record.with_budget(parts.Budget(usd=5, per="month"), "me", T0 + 3 * HOUR)
    assert monthly.spent(T0 + 4 * HOUR) == 2.0, "what was spent before that in the month is not known"
    assert record.with_budget(None, "me", T0 + 9 * HOUR).spent(T0 + 9 * HOUR) is None


def test_a_spec_changes_a_budget_unless_a_request_has_set_it() -> None:
    other = parts.Budget(usd=99, per="month")
    assert serving().with_budget_of_spec(other, T0).budget == serving().budget
    of_spec = endpoint().with_budget_of_spec(DAILY, T0)
    assert of_spec.with_budget_of_spec(None, T0 + HOUR) is of_spec
    assert of_spec.with_budget_of_spec(DAILY, T0 + HOUR) is of_spec
    changed = of_spec.with_budget_of_spec(other, T0 + HOUR).budget
    assert changed is not None
    assert (changed.usd, changed.per) == (99, "month")


def test_what_dropped_revisions_have_cost_still_counts() -> None:
    record = serving(parts.Budget(usd=1000, per="month"))
    for number in range(2, KEPT_REVISIONS + 20):
        name, now = f"r{number}", T0 + number * timedelta(minutes=1)
        begun = deploying(record, name, number, now)
        record = begun.failed(name, WRONG, now).undone(name, now + timedelta(minutes=1))
    hours = (
        KEPT_REVISIONS + 18 + KEPT_REVISIONS + 20
    ) / 60  # of the failed ones a minute each, and of the one that serves
    assert len(record.revisions) < KEPT_REVISIONS + 5
    assert record.spent(T0 + (KEPT_REVISIONS + 20) * timedelta(minutes=1)) == pytest.approx(hours * USD_PER_HOUR)


def test_only_a_rollout_that_has_not_moved_requests_is_stopped() -> None:
    checking = deploying(serving(), "b", 2, T0).entered("b", RolloutState.CHECKING, T0)
    assert checking.without_rollout(WRONG, T0).rollout("b").state is RolloutState.UNDOING
    shifting = checking.entered("b", RolloutState.SHIFTING, T0)
    assert shifting.without_rollout(WRONG, T0) is shifting
    queued = asked(serving(), "c")
    assert queued.without_rollout(WRONG, T0) is queued


@pytest.mark.parametrize("per", ["day", "month"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_spent_is_exact_whatever_changes_at_a_period_s_end(seed: int, per: BudgetPeriod) -> None:
    """Random promotions, failures, suspensions and resumptions, against a sum by minutes."""

    def end_of(began: datetime) -> datetime:
        return period(began + timedelta(days=1 if per == "day" else 31), per)

    draw, now = random.Random(seed), T0
    record = serving(parts.Budget(usd=1e6, per=per))
    spent, end = 0.0, end_of(period(now, per))
    for number in range(2, 60):
        paid = sum(revision.paid_since is not None for revision in record.revisions)
        minutes = draw.choice((1, 60, 600, 1440, 5000))
        for _ in range(minutes):
            now += MINUTE
            if now == end:
                spent, end = 0.0, end_of(now)
            else:
                spent += paid * USD_PER_HOUR / 60
        name = f"r{number}"
        if record.suspended:
            record = resumed(record, now)
        elif draw.random() < 0.3:
            record = suspended(record, now)
            record = record.model_copy(update={"rollouts": []})
        elif draw.random() < 0.5:
            record = promoted(record, name, number, now)
        else:
            record = deploying(record, name, number, now).failed(name, WRONG, now).undone(name, now)
        assert record.spent(now) == pytest.approx(spent, abs=1e-3), (number, now)


@pytest.mark.parametrize(
    ("price", "usd", "expected"),
    [(6.0, 1.0, []), (6.0, 0.9, ["the budget is too small"]), (None, 50.0, ["the budget cannot be enforced"])],
)
def test_a_budget_that_cannot_be_kept_is_refused(price: float | None, usd: float, expected: list[str]) -> None:
    """It must pay for ten minutes. The price of this machine on GKE is not in the catalog."""
    serve = {"type": "gke", "region": "us-central1", "endpoint": "e", "budget": {"usd": usd, "per": "day"}}
    spec = {
        "api_version": "dropforge/v1",
        "name": "tiny",
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "training": {"adapter": {"type": "lora"}},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": {**serve, "price_usd_per_hour": price},
    }
    assert [found.message for found in endpoint_budget_problems(parse_spec(json.dumps(spec).encode()))] == expected
