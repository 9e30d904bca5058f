"""What the page Health shows of Cloud Monitoring: true numbers, or why there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from dropforge.base.clock import Clock, utc_now
from dropforge.base.errors import DropforgeError
from dropforge.cloud.clients import Clients
from dropforge.cloud.context import Cloud
from dropforge_console.health import Background, alerts_status, dead_letters_status
from dropforge_console.monitoring import Alert, DeadLetters, dead_letters, open_alerts
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.emulators.cloudrun.counts import Counts
from dropforge_local.emulators.monitoring import MonitoringEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator

from ..deployments import settings_with

NAMES = ("on-spec-message-dead-letter", "on-job-event-dead-letter")
MISSING = "missing-dead-letter"


class Place:
    """An emulated Pub/Sub with two subscriptions, what Cloud Monitoring says about it, and the cloud of a console."""

    def __init__(self, url: str) -> None:
        self.url = url
        settings = settings_with(project="p", dead_letter_subscriptions=",".join((*NAMES, MISSING)))
        self.cloud = Cloud(settings, Clients({"MONITORING_EMULATOR_HOST": url}), clock=Clock())

    def publish(self, number: int, name: str = NAMES[0]) -> None:
        messages = {"messages": [{"data": "YW4gZXZlbnQ="}] * number}
        requests.post(f"{self.url}/v1/projects/p/topics/{name}:publish", json=messages, timeout=60).raise_for_status()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    def emulators() -> list[Emulator]:
        pubsub = PubSubEmulator(Database(tmp_path / "state.db"), SystemClock())
        for name in NAMES:
            pubsub.create_topic(f"projects/p/topics/{name}")
            pubsub.create_subscription(f"projects/p/subscriptions/{name}", f"projects/p/topics/{name}")
        return [pubsub, MonitoringEmulator(Counts(), pubsub, NAMES)]

    with BackgroundServer(emulators) as server:
        yield Place(server.url)


def test_dead_letters_are_counted_and_none_is_taken_from_its_reader(place: Place) -> None:
    assert [each.messages for each in dead_letters(place.cloud)] == [0, 0, None]
    assert open_alerts(place.cloud) == []
    place.publish(3)
    for _ in range(2):  # a look changes nothing
        waiting, none, missing = dead_letters(place.cloud)
        assert (waiting.subscription, waiting.messages) == (NAMES[0], 3)
        assert waiting.oldest_seconds is not None
        assert (none.messages, none.oldest_seconds) == (0, None)
        assert (missing.messages, missing.oldest_seconds) == (None, None), "an unknown number is not 0"
    (alert,) = open_alerts(place.cloud)
    assert (alert.policy, alert.severity) == ("dropforge dead_letters", "error")
    assert abs(utc_now() - alert.opened) < timedelta(hours=1)


def test_a_refusal_of_cloud_monitoring_is_told_in_its_own_words(place: Place) -> None:
    cloud = Cloud(settings_with(project="p", dead_letter_subscriptions='x") OR ("'), place.cloud.clients, clock=Clock())
    with pytest.raises(DropforgeError, match="Cloud Monitoring answers 501: the filter"):
        dead_letters(cloud)


def test_a_deployment_that_names_no_subscriptions_asks_nothing() -> None:
    assert dead_letters(Cloud(settings_with(), Clients({}), clock=Clock())) == []


@pytest.mark.parametrize(
    ("counts", "word"), [([0, 0], "None"), ([0, None], "Unknown"), ([2, None], "Events wait"), ([], "None")]
)
def test_the_state_of_dead_letters_is_never_better_than_known(counts: list[int | None], word: str) -> None:
    found = [DeadLetters("s", count, None) for count in counts]
    assert looked(lambda: found, dead_letters_status) == word


def test_a_failed_look_is_no_good_state() -> None:
    def fail() -> list[Alert]:
        raise DropforgeError("Cloud Monitoring answers 403: no")

    assert looked(fail, alerts_status) == "Unknown"
    assert looked(lambda: [Alert("a", "", utc_now())], alerts_status) == "Open"
    assert looked(lambda: [], alerts_status) == "None open"


def looked(read: Any, status: Any) -> str:
    """The word of the state after one look in the background."""

    async def look() -> str:
        told = asyncio.Event()
        background = Background[Any](read, timedelta(minutes=1), utc_now, told.set)
        background.look()
        background.look()  # while one runs, no other begins
        await told.wait()
        return str(status(background.latest).word)

    return asyncio.run(look())
