"""Deletions of a run's resources that are refused, take several looks, or never end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.cloud.listing import Listed
from dropforge.run.record import ResourceState, RunState
from dropforge.stages.deletion import delete_remaining, note_endpoint_ended
from dropforge.stages.sweep.orphans import PATIENCE_SECONDS, Deletions, Orphan, delete_orphans

from ..deployments import intend
from .test_promises import JOB, MINUTE, NOW, RUN, Place, endpoint

KIND = "run.googleapis.com/Job"
SECOND = f"{JOB}-b"


def test_a_refused_deletion_is_reported_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    place, deleted = Place(), list[str]()
    for name in (JOB, SECOND):
        intend(place.store, RUN, KIND, name, 1)

    def refuse_the_first(cloud: object, kind: str, name: str) -> bool:
        if name == JOB:
            raise CloudError(ErrorClass.PERMISSION, "no")
        deleted.append(name)
        return True

    monkeypatch.setattr(place.platform, "teardown", refuse_the_first)
    with pytest.raises(CloudError, match="no"):
        delete_remaining(place.context, RUN)
    assert deleted == [SECOND]
    assert [entry.name for entry in place.store.ledger(RUN).remaining()] == [JOB]


@pytest.mark.parametrize("first", [JOB, SECOND])
def test_a_refusal_for_good_is_told_before_one_for_a_quota(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    for name in (JOB, SECOND):
        intend(place.store, RUN, KIND, name, 1)

    def refuse(cloud: object, kind: str, name: str) -> bool:
        if name == first:
            raise OverQuota(ErrorClass.QUOTA, "too many requests per minute")
        raise CloudError(ErrorClass.PERMISSION, "no role")

    monkeypatch.setattr(place.platform, "teardown", refuse)
    with pytest.raises(CloudError, match="no role"):
        delete_remaining(place.context, RUN)


def test_a_resource_that_was_created_again_is_deleted_with_what_needs_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that had stalled creates the first resource after the ledger says that it is gone; it has the second."""
    place, existing = Place(), {JOB, SECOND}
    for name in (JOB, SECOND):
        intend(place.store, RUN, KIND, name, 1)
    place.store.note(RUN, [JOB], ResourceState.GONE)

    def delete(cloud: object, kind: str, name: str) -> bool:
        if name == SECOND and JOB not in existing:
            existing.discard(SECOND)
        is_gone = name not in existing
        existing.difference_update({JOB} & {name})
        return is_gone

    monkeypatch.setattr(place.platform, "teardown", delete)
    answers = [{entry.name for entry in delete_remaining(place.context, RUN)} for _ in range(2)]
    assert answers == [{JOB, SECOND}, set()]
    assert place.store.ledger(RUN).remaining() == []


def test_an_attempt_that_is_gone_is_not_looked_at_again() -> None:
    place = Place()
    intend(place.store, RUN, KIND, JOB, 1)
    place.store.note(RUN, [JOB], ResourceState.GONE)
    intend(place.store, RUN, KIND, SECOND, 2)
    assert delete_remaining(place.context, RUN) == []
    assert place.platform.asked == [f"teardown {SECOND}"]


def test_the_end_of_an_endpoint_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later sweep finds nothing again, and the endpoint must not cost more by that."""
    served = endpoint(NOW + 60 * MINUTE)
    place = Place(RunState.SUCCEEDED, endpoint=served)
    note_endpoint_ended(place.context, RUN)
    monkeypatch.setattr(place.context.cloud.clock, "now", lambda: NOW + timedelta(hours=1))
    note_endpoint_ended(place.context, RUN)
    assert place.record.endpoint is not None
    assert place.record.endpoint.ended == NOW


def sweep(answers: Iterator[bool], monkeypatch: pytest.MonkeyPatch) -> tuple[Deletions, float]:
    """What a sweep does with a resource whose deletion answers so, and how long it takes in seconds."""
    place, seconds = Place(RunState.FAILED), [0.0]

    def pause(duration: float) -> None:
        seconds[0] += duration
        assert seconds[0] < 10 * PATIENCE_SECONDS, "the sweep does not end"

    monkeypatch.setattr(place.context.cloud.clock, "sleep", pause)
    monkeypatch.setattr(place.context.cloud.clock, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(place.platform, "teardown", lambda *_: next(answers, False))
    orphan = Orphan(Listed(KIND, JOB, names.labels(RUN, {}), NOW), "left by a run that is over")
    return delete_orphans(place.context, [orphan]), seconds[0]


def test_a_sweep_waits_for_a_deletion_that_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    deletions, _ = sweep(iter([False, False, True]), monkeypatch)
    assert ([each.name for each in deletions.gone], deletions.pending) == ([JOB], [])


def test_a_sweep_does_not_wait_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    deletions, seconds = sweep(iter([]), monkeypatch)
    assert ([each.name for each in deletions.pending], deletions.gone) == ([JOB], [])
    assert seconds < 2 * PATIENCE_SECONDS
