"""What provision does for an attempt that has ended, waits too long, or is called late."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.platforms.training import Waits
from dropforge.run.record import Attempt, RunState
from dropforge.stages.provision import provision

from ..platforms.shared import ME
from .test_promises import MINUTE, NOW, RUN, SETTINGS, Place

HOUR = timedelta(hours=1)
DAY = {"limits": {"max_duration": "6h"}, "serve": None}


def attempt(minutes: float, **fields: Any) -> Attempt:
    """An attempt that began so many minutes ago and may last for hours."""
    times = {"started": NOW - minutes * MINUTE, "deadline": NOW + 3 * HOUR}
    return Attempt(number=1, placement=0, region="us-central1", usd_per_hour=10, **{**times, **fields})


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED])
def test_a_late_call_for_a_run_that_is_over_gets_no_outcome(state: RunState) -> None:
    """With an outcome, the execution would tear down and end the run again."""
    place = Place(state, attempts=[attempt(30, ended=NOW)])
    before = place.record
    assert provision(place.context, RUN, ME, 1).status == "SUPERSEDED"
    assert (place.record, place.platform.asked) == (before, [])


@pytest.mark.parametrize(("max_wait", "seconds"), [("20m", 1200), (None, None)])
def test_an_attempt_keeps_how_long_it_may_wait_for_capacity(max_wait: str | None, seconds: int | None) -> None:
    placement = {"zone": "us-west4-a", "capacity": "spot", "max_wait": max_wait}
    target = {"type": "tpu_vm", "placements": [placement], "price_usd_per_hour": 10}
    spec = {**DAY, "target": target, "training": {"adapter": {"type": "none"}}}
    place = Place(RunState.ACCEPTED, spec, attempts=[])
    assert provision(place.context, RUN, ME, 1).status == "RUNNING"
    assert [each.max_wait_seconds for each in place.record.attempts] == [seconds]


def test_an_attempt_that_has_succeeded_is_not_launched_again() -> None:
    """`inspect` reports the success again, so the run goes on."""
    place = Place(spec=DAY, attempts=[attempt(30, ended=NOW)])
    assert provision(place.context, RUN, ME, 1).status == "RUNNING"
    assert place.platform.asked == []


@pytest.mark.parametrize(("minutes", "status"), [(1, "PENDING"), (40, "FAILED")])
def test_an_attempt_that_is_not_launched_in_time_ends_for_lack_of_capacity(minutes: float, status: str) -> None:
    assert minutes == 1 or minutes * 60 > SETTINGS.provision_deadline_seconds
    place = Place(RunState.PROVISIONING, DAY, attempts=[attempt(minutes)])
    place.platform.provision = lambda *_: Waits("the cluster is created")  # type: ignore[method-assign]
    assert provision(place.context, RUN, ME, 1).status == status
    error = place.record.attempts[-1].error
    assert (error and error.error_class) == (ErrorClass.STOCKOUT if status == "FAILED" else None)


def test_an_attempt_waits_up_to_the_moment_at_which_the_cloud_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that starts while the cloud answers costs money from its start."""
    place, now = Place(RunState.PROVISIONING, DAY, attempts=[attempt(30)]), [NOW]

    def answer_late(*_: Any) -> Waits:
        now[0] += 5 * MINUTE
        return Waits("no capacity")

    def clock() -> datetime:
        return now[0]

    monkeypatch.setattr(place.context.cloud.clock, "now", clock)
    monkeypatch.setattr(place.platform, "provision", answer_late)
    provision(place.context, RUN, ME, 1)
    assert place.record.attempts[-1].waiting == NOW
