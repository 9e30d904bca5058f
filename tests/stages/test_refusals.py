"""What a refused request for machines, or for an endpoint, does: its reason, its cost, the next placement."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.platforms.prices import HourlyPrice
from dropforge.run.record import Attempt, Record, RunState
from dropforge.run.summary import Summary
from dropforge.stages.deploy import deploy
from dropforge.stages.provision import REFUSED_SECONDS, provision

from ..platforms.shared import ME
from .test_promises import MINUTE, NOW, RUN, Place

WORDS = "The service is currently unavailable."
REFUSED = CloudError(ErrorClass.TRANSIENT, WORDS, did_nothing=True)
LOST = CloudError(ErrorClass.TRANSIENT, "Deadline Exceeded")
TRAINS = {"limits": {"max_duration": "6h"}, "serve": None}
TWO = {
    **TRAINS,
    "target": {
        "type": "cloud_run",
        "placements": [{"region": "us-central1"}, {"region": "europe-west4"}],
        "price_usd_per_hour": 10,
    },
}


class Clock:
    """The time of a place, which a test moves."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOW
        monkeypatch.setattr(place.context.cloud.clock, "now", lambda: self.now)

    def forward(self, **times: float) -> None:
        self.now += timedelta(**times)


def waiting_place(spec: dict[str, Any] = TRAINS, minutes: float = 1, **fields: Any) -> Place:
    """A run whose attempt began so many minutes ago; with `refused`, every request of it was refused."""
    began = NOW - minutes * MINUTE
    attempt = Attempt(
        number=1,
        placement=0,
        region="us-central1",
        usd_per_hour=10,
        **{"started": began, "deadline": NOW + 180 * MINUTE, **fields},
    )
    place = Place(RunState.PROVISIONING, spec, attempts=[attempt])
    place.platform.regions = lambda spec: [each.region for each in spec.target.placements]  # type: ignore[method-assign]
    return place


def answers(place: Place, error: CloudError | None) -> None:
    """From now on, the platform answers a request with the error."""

    def answer(*_: Any) -> Any:
        if error is not None:
            raise error

    place.platform.provision = place.platform.deploy = answer  # type: ignore[method-assign,assignment]


def ask(place: Place) -> str:
    """Ask for the attempt; what comes of it."""
    try:
        return provision(place.context, RUN, ME, 1).status
    except CloudError as error:
        return str(error.error_class)


def stopped(record: Record, now: datetime) -> Record:
    """The record of the run after a cancel."""
    ended = record.model_copy(update={"cancel_requested": now}).entered(RunState.TEARING_DOWN, now)
    return ended.entered(RunState.CANCELLED, now)


def test_a_refusal_is_the_reason_for_the_wait_before_it_is_raised() -> None:
    place = waiting_place(refused=True)
    answers(place, REFUSED)
    assert ask(place) == "transient"
    assert place.record.wait_reason == WORDS


def test_people_are_told_of_ten_minutes_of_refusals() -> None:
    place = waiting_place(minutes=11, refused=True)
    answers(place, REFUSED)
    ask(place)
    assert place.record.notices == ["waits-a1"]
    assert WORDS in json.dumps(place.events)


def test_an_attempt_whose_every_request_was_refused_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(RunState.ACCEPTED, TRAINS, attempts=[])
    clock = Clock(place, monkeypatch)
    answers(place, REFUSED)
    for _ in range(4):
        assert ask(place) == "transient"
        clock.forward(seconds=20)
    ended = stopped(place.record, clock.now)
    assert ended.cost(clock.now) == Summary.of(ended).cost(clock.now) == 0


def test_after_a_lost_answer_the_cost_counts_from_the_last_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(RunState.ACCEPTED, TRAINS, attempts=[])
    clock = Clock(place, monkeypatch)
    answers(place, REFUSED)
    ask(place)
    clock.forward(seconds=30)  # nothing exists until then
    answers(place, LOST)
    ask(place)
    clock.forward(minutes=3)
    answers(place, REFUSED)  # that says nothing about the request before it
    ask(place)
    clock.forward(minutes=3)
    assert place.record.attempts[-1].refused is False
    assert stopped(place.record, clock.now).cost(clock.now) == pytest.approx(10 * 6 / 60)


def test_a_wait_for_a_quota_that_is_cancelled_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(RunState.ACCEPTED, TRAINS, attempts=[])
    clock = Clock(place, monkeypatch)
    answers(place, OverQuota(ErrorClass.QUOTA, "no quota"))
    for _ in range(3):
        assert ask(place) == "PENDING"
        clock.forward(minutes=1)
    assert stopped(place.record, clock.now).cost(clock.now) == 0
    assert place.record.wait_reason == "no quota"


@pytest.mark.parametrize(
    ("spec", "refused", "error", "status"),
    [
        (TWO, True, REFUSED, "FAILED"),
        (TWO, False, REFUSED, "transient"),  # an earlier request may have had an effect
        (TWO, True, LOST, "transient"),
        (TRAINS, True, REFUSED, "transient"),  # there is no other placement
    ],
)
def test_temporary_refusals_of_five_minutes_move_on_where_there_is_another_placement(
    spec: dict[str, Any], refused: bool, error: CloudError, status: str
) -> None:
    for seconds, expected in ((REFUSED_SECONDS - 60, "transient"), (REFUSED_SECONDS + 60, status)):
        place = waiting_place(spec, minutes=seconds / 60, refused=refused)
        answers(place, error)
        assert ask(place) == expected
    if status == "FAILED":
        assert place.record.attempts[-1].error.error_class is ErrorClass.TRANSIENT  # type: ignore[union-attr]
        answers(place, None)
        assert provision(place.context, RUN, ME, 2).status == "RUNNING"
        assert [attempt.region for attempt in place.record.attempts] == ["us-central1", "europe-west4"]


def test_an_attempt_at_another_placement_costs_the_price_of_that_placement() -> None:
    place = waiting_place(TWO, minutes=REFUSED_SECONDS / 60 + 1, refused=True)
    place.platform.price = lambda *asked: HourlyPrice((10.0, 25.0)[asked[1]], None, "a test")  # type: ignore[method-assign]
    answers(place, REFUSED)
    assert ask(place) == "FAILED"
    answers(place, None)
    provision(place.context, RUN, ME, 2)
    assert [attempt.usd_per_hour for attempt in place.record.attempts] == [10, 25]


def test_a_run_that_never_had_a_machine_does_not_end_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handed input ghost_budget: 170 USD an hour, a budget of 3 USD, every create refused."""
    target = {"type": "cloud_run", "placements": [{"region": "us-central1"}], "price_usd_per_hour": 170}
    spec = {"limits": {"max_duration": "6h", "max_cost_usd": 3}, "serve": None, "target": target}
    place = Place(RunState.ACCEPTED, spec, attempts=[])
    place.platform.price = lambda *_: HourlyPrice(170.0, None, "a test")  # type: ignore[method-assign]
    clock = Clock(place, monkeypatch)
    answers(place, REFUSED)
    classes, number = [], 1
    for _ in range(400):
        try:
            answer = provision(place.context, RUN, ME, number).to_json()
        except CloudError:
            answer = {}
        clock.forward(seconds=60)
        if answer.get("status") == "FAILED":
            classes.append(answer["error"]["error_class"])
            if not answer["retry"]:
                break
            number += 1
    assert classes == ["transient"] * 4
    assert place.record.training_cost(clock.now) == 0


def test_the_money_of_an_attempt_counts_from_the_request_that_succeeds() -> None:
    spec = {"limits": {"max_duration": "6h", "max_cost_usd": 5}, "serve": None}
    place = waiting_place(spec, minutes=20, refused=True, deadline=NOW - 5 * MINUTE, limit="max_cost_usd")
    answers(place, None)
    assert ask(place) == "RUNNING"
    assert place.record.attempts[-1].deadline == NOW + 30 * MINUTE  # 5 USD at 10 USD an hour


def deploying_place(**fields: Any) -> Place:
    """A trained run whose endpoint costs 10 USD an hour, and is requested since a minute ago."""
    trained = Attempt(
        number=1, placement=0, region="us-central1", started=NOW - 9 * MINUTE, deadline=NOW, ended=NOW, usd_per_hour=0
    )
    limits = {"limits": {"max_duration": "6h", "max_cost_usd": 5}}
    return Place(RunState.DEPLOYING, limits, attempts=[trained], serving_usd_per_hour=10.0, **fields)


def ask_for_endpoint(place: Place) -> str:
    try:
        return deploy(place.context, RUN, ME).status
    except CloudError as error:
        return str(error.error_class)


def test_an_endpoint_whose_every_request_was_refused_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place = deploying_place(endpoint_refused=True)
    clock = Clock(place, monkeypatch)
    answers(place, REFUSED)
    for _ in range(15):
        assert ask_for_endpoint(place) == "transient"
        clock.forward(minutes=1)
        assert place.record.cost(clock.now) == Summary.of(place.record).cost(clock.now) == 0
    assert place.record.wait_reason == WORDS
    clock.forward(minutes=20)  # startup_timeout is over; the budget would have paid for 30 minutes
    assert deploy(place.context, RUN, ME).to_json()["error"]["error_class"] == "transient"
    assert place.record.cost(clock.now) == 0


def test_an_endpoint_costs_from_the_request_that_may_have_created_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place = deploying_place(endpoint_refused=True)
    clock = Clock(place, monkeypatch)
    answers(place, REFUSED)
    ask_for_endpoint(place)
    clock.forward(minutes=4)
    answers(place, LOST)
    ask_for_endpoint(place)
    clock.forward(minutes=6)
    answers(place, REFUSED)
    ask_for_endpoint(place)
    assert place.record.cost(clock.now) == Summary.of(place.record).cost(clock.now) == 1.0
