"""The record of a named endpoint: turns, promotions, rollbacks, and what revisions cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dropforge.base.errors import Conflict, ErrorClass
from dropforge.endpoints.record import EndpointRecord, EndpointState, Kind, Revision, Rollout, RolloutState
from dropforge.run.record import RunError

T0 = datetime(2026, 11, 24, tzinfo=UTC)
HOUR = timedelta(hours=1)
WRONG = RunError(error_class=ErrorClass.PARITY, message="it differs")
URL = "https://e.run.app"


def endpoint() -> EndpointRecord:
    return EndpointRecord(name="e", source="", type="cloud_run", region="us-central1", service="s", created=T0)


def asked(record: EndpointRecord, name: str, kind: Kind = "deploy") -> EndpointRecord:
    return record.with_rollout(Rollout(id=name, kind=kind, who="me", requested=T0, run=name))


def deploying(record: EndpointRecord, name: str, number: int, now: datetime) -> EndpointRecord:
    revision = Revision(number=number, run=name, digest="0", who="me", requested=T0, usd_per_hour=2.0)
    return asked(record, name).began(name, revision, now + HOUR, now)


def promoted(record: EndpointRecord, name: str, number: int, now: datetime) -> EndpointRecord:
    record = deploying(record, name, number, now)
    for state in (RolloutState.CHECKING, RolloutState.SHIFTING):
        record = record.entered(name, state, now)
    return record.promoted(name, URL, now + HOUR, now)


def test_a_promotion_keeps_the_revision_before_for_a_rollback() -> None:
    record = promoted(promoted(endpoint(), "a", 1, T0), "b", 2, T0 + HOUR)
    assert (record.stable, record.previous, record.state) == (2, 1, EndpointState.SERVING)
    back = asked(record, "c", "rollback").returns("c", T0 + 3 * HOUR, T0 + 2 * HOUR)
    back = back.entered("c", RolloutState.SHIFTING, T0 + 2 * HOUR).promoted("c", URL, None, T0 + 2 * HOUR)
    assert (back.stable, back.previous) == (1, 2), "a second rollback returns to the newer model"


def test_a_rollback_during_a_canary_returns_to_the_revision_that_serves() -> None:
    """Not to the one before it, which no user had in mind. Without a canary, nothing is ended."""
    record = promoted(promoted(endpoint(), "a", 1, T0), "b", 2, T0)
    canary = deploying(record, "c", 3, T0).entered("c", RolloutState.CHECKING, T0).watches("c", T0 + HOUR, T0)
    ended, found = canary.without_canary(WRONG, T0)
    assert (found, ended.rollout("c").state, ended.rollout("c").error) == ("c", RolloutState.UNDOING, WRONG)
    undone = ended.undone("c", T0)
    asked_back = undone.with_rollout(Rollout(id="d", kind="rollback", who="me", requested=T0, ends=found))
    back = asked_back.returns("d", T0 + HOUR, T0).shifts("d", T0 + HOUR, T0).promoted("d", URL, None, T0)
    assert (back.stable, back.previous) == (2, 1)
    assert [revision.number for revision in back.revisions if revision.paid_since] == [2]
    assert record.without_canary(WRONG, T0) == (record, "")


def test_a_revision_costs_money_from_its_rollout_until_another_serves() -> None:
    record = promoted(promoted(endpoint(), "a", 1, T0), "b", 2, T0 + HOUR)
    later = T0 + 4 * HOUR
    assert (record.revision(1).cost(later), record.revision(2).cost(later)) == (2.0, 6.0)
    assert record.cost(later) == 8.0
    back = asked(record, "c", "rollback").returns("c", later, later).entered("c", RolloutState.SHIFTING, later)
    back = back.promoted("c", URL, None, later)
    assert back.cost(later + HOUR) == 10.0
    assert (
        asked(back, "d", "retire").entered("d", RolloutState.RETIRING, later).gone("d", later).cost(later + HOUR) == 8.0
    )


def test_a_revision_that_keeps_its_instances_costs_money_until_no_rollback_can_promote_it() -> None:
    record = endpoint()
    for name, number in (("a", 1), ("b", 2), ("c", 3)):
        now = T0 + (number - 1) * HOUR
        begun = deploying(record, name, number, now)
        for state in (RolloutState.CHECKING, RolloutState.SHIFTING):
            begun = begun.entered(name, state, now)
        record = begun.promoted(name, URL, None, now, keeps_instances=True)
    assert [revision.number for revision in record.revisions if revision.paid_since] == [2, 3]
    assert record.revision(1).cost(T0 + 9 * HOUR) == 4.0, "two hours, until revision 3 was promoted"
    back = asked(record, "d", "rollback").returns("d", T0 + 9 * HOUR, T0 + 3 * HOUR)
    undone = back.failed("d", WRONG, T0 + 3 * HOUR).undone("d", T0 + 3 * HOUR, keeps_instances=True)
    assert [revision.number for revision in undone.revisions if revision.paid_since] == [2, 3]
    failed = deploying(undone, "e", 4, T0 + 4 * HOUR).failed("e", WRONG, T0 + 5 * HOUR)
    gone = failed.undone("e", T0 + 5 * HOUR, keeps_instances=True)
    assert [revision.number for revision in gone.revisions if revision.paid_since] == [2, 3]
    assert gone.kept == {revision.revision for revision in gone.revisions if revision.number in (2, 3)}


def test_a_failed_rollout_leaves_the_revision_before_as_it_was() -> None:
    before = promoted(endpoint(), "a", 1, T0)
    failed = deploying(before, "b", 2, T0 + HOUR).failed("b", WRONG, T0 + HOUR)
    assert failed.rollout("b").state is RolloutState.UNDOING
    other = RunError(error_class=ErrorClass.CODE, message="later")
    assert failed.failed("b", other, T0 + HOUR).rollout("b").error == WRONG, "the first error stays"
    undone = failed.undone("b", T0 + HOUR)
    assert (undone.stable, undone.previous, undone.current) == (1, 0, None)
    assert undone.revision(1) == before.revision(1)
    assert undone.revision(2).paid_since is None


def test_a_queued_rollout_that_fails_has_nothing_to_undo() -> None:
    record = asked(endpoint(), "a").failed("a", WRONG, T0)
    assert record.rollout("a").state is RolloutState.ROLLED_BACK


def test_rollouts_take_turns() -> None:
    record = asked(deploying(endpoint(), "a", 1, T0), "b")
    assert record.current == record.rollout("a")
    assert record.failed("a", WRONG, T0).undone("a", T0).current == record.rollout("b")


@pytest.mark.parametrize("late", [RolloutState.CHECKING, RolloutState.SHIFTING, RolloutState.UNDOING])
def test_an_ended_rollout_stays_ended(late: RolloutState) -> None:
    record = promoted(endpoint(), "a", 1, T0)
    with pytest.raises(Conflict, match="PROMOTED; it cannot become"):
        record.entered("a", late, T0)
    assert record.failed("a", WRONG, T0) is record


def test_a_superseded_execution_never_owns_a_rollout_again() -> None:
    record = asked(endpoint(), "a").claimed("a", "first")
    assert record.claimed("a", "second") is record
    assert record.released("a", "second") is record
    released = record.released("a", "first")
    assert released.claimed("a", "first") is released
    assert released.claimed("a", "second").rollout("a").execution == "second"


def test_the_revisions_that_serve_or_may_serve_are_kept_however_many_there_were() -> None:
    record = promoted(promoted(endpoint(), "a", 1, T0), "b", 2, T0)
    for number in range(3, 150):
        name = f"r{number}"
        record = deploying(record, name, number, T0).failed(name, WRONG, T0).undone(name, T0)
    assert (record.revision(1).promoted, record.revision(2).promoted) == (T0, T0)
    assert len(record.revisions) < 110
    assert len(record.rollouts) < 110


def test_a_change_whose_reply_was_lost_is_made_once() -> None:
    """The store makes a change again after the conditional write has failed, which may have been done."""
    later = T0 + timedelta(minutes=1)
    once = deploying(endpoint(), "a", 1, T0)
    revision = once.revision(1)
    assert once.began("a", revision, later + HOUR, later) == once
    served = once.entered("a", RolloutState.CHECKING, T0).shifts("a", T0 + HOUR, T0)
    assert served.shifts("a", T0 + HOUR, later) == served
    ended = served.promoted("a", URL, T0 + HOUR, T0)
    assert ended.promoted("a", URL, T0 + HOUR, later).cost(later) == ended.cost(later)
    assert [each.number for each in ended.revisions] == [1]
