"""What is seen of a canary decides: it is good, bad, or not known."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.endpoints.record import Canary, Seen
from dropforge.platforms.named import Counted
from dropforge.stages.rollout.canary import LEAST_REQUESTS, has_passed, patience

CANARY = Canary(percent=10, seconds=1800, max_error_rate=0.05, max_latency_ratio=2.0)
EARLY, DUE = timedelta(minutes=5), timedelta(minutes=30)
LATE = DUE + patience(CANARY)


def counted(requests: int = 100, errors: int = 0, latency_ms: float | None = 100.0) -> Counted:
    return Counted(requests=requests, errors=errors, latency_ms=latency_ms)


FEW = counted(LEAST_REQUESTS - 1)
GOOD = [
    Seen(canary=counted(), before=counted()),
    Seen(canary=counted(errors=5), before=counted()),  # as many as may fail
    Seen(canary=counted(errors=20), before=counted(errors=20)),  # whatever it is, it is not the new model
    Seen(canary=counted(latency_ms=200.0), before=counted()),
    Seen(canary=counted(LEAST_REQUESTS), before=counted(LEAST_REQUESTS)),
]
BAD = [
    (Seen(canary=counted(errors=6), before=counted()), "6 of its 100 requests failed"),
    (Seen(canary=counted(errors=21), before=counted(errors=20)), "21 of its 100 requests failed"),
    (Seen(canary=counted(errors=6), before=Counted()), "6 of its 100 requests failed"),
]
UNKNOWN = [
    (Seen(canary=Counted(), before=Counted()), "it got 0 and the revision before got 0"),
    (Seen(canary=FEW, before=counted()), "it got 19 of at least 20 requests"),
    (Seen(canary=counted(), before=FEW), "the revision before got 19"),
    (Seen(canary=FEW.model_copy(update={"errors": 19}), before=counted()), "it got 19"),  # a few failures prove nothing
]


@pytest.mark.parametrize("seen", GOOD)
def test_a_good_canary_passes_at_the_end_of_its_time(seen: Seen) -> None:
    assert not has_passed(CANARY, seen, EARLY)
    assert has_passed(CANARY, seen, DUE)
    assert has_passed(CANARY, seen, LATE)


@pytest.mark.parametrize(("seen", "why"), BAD)
def test_a_bad_canary_is_refused_at_once(seen: Seen, why: str) -> None:
    for lasted in (EARLY, DUE, LATE):
        with pytest.raises(CloudError) as refused:
            has_passed(CANARY, seen, lasted)
        assert refused.value.error_class is ErrorClass.CODE
        assert why in refused.value.message


def test_a_slow_canary_is_refused_at_the_end_of_its_time() -> None:
    """Its first requests may start an instance, or fill a cache."""
    slow = Seen(canary=counted(latency_ms=201.0), before=counted())
    assert not has_passed(CANARY, slow, EARLY)
    with pytest.raises(CloudError) as refused:
        has_passed(CANARY, slow, DUE)
    assert "its 95th percentile of latencies was 201 ms; expected at most 2 times" in refused.value.message
    assert not has_passed(CANARY, slow.model_copy(update={"before": FEW}), DUE), "there is nothing to compare it with"


@pytest.mark.parametrize(("seen", "why"), UNKNOWN)
def test_a_canary_that_nobody_asks_is_neither_promoted_nor_kept_for_ever(seen: Seen, why: str) -> None:
    assert not has_passed(CANARY, seen, DUE)
    assert not has_passed(CANARY, seen, LATE - timedelta(seconds=1))
    with pytest.raises(CloudError) as refused:
        has_passed(CANARY, seen, LATE)
    assert refused.value.error_class is ErrorClass.DEADLINE
    assert why in refused.value.message


def test_a_short_canary_waits_for_counts_that_are_late() -> None:
    short = CANARY.model_copy(update={"seconds": 60})
    unseen = Seen(canary=Counted(), before=Counted())
    assert not has_passed(short, unseen, timedelta(minutes=10))
    with pytest.raises(CloudError):
        has_passed(short, unseen, timedelta(minutes=11))
