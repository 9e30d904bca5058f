"""The simulation of chaos and the emulated APIs of the local stack agree: a scripted life has the same history in both.

The lives share a stack and live at the same time. Each difference is a defect of the simulation, of an emulator, or of
a script.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge.base import names

from .conftest import User
from .lives import Life, Told, simulate, told
from .targets import PARTS
from .test_runs import run_events

# Lives whose first placement has no capacity. No other life that lives meanwhile uses these regions and accelerators.
FULL_FIRST = (
    Life(
        "cloud_run",
        full=("europe-west4",),
        changes={"placements": [{"region": "europe-west4", "max_wait": "2s"}, {"region": "us-central1"}]},
    ),
    Life(
        "tpu_vm",
        full=("us-central1-a",),
        changes={"placements": [{"zone": "us-central1-a", "max_wait": "2s"}, {"zone": "us-west4-a"}]},
    ),
)
ON_GKE = [{"region": "us-central1", "max_wait": "2s"}, {"region": "us-central1", "capacity": "spot"}]
GKE_FULL_FIRST = Life("gke", full=("us-central1",), changes={"accelerator": "nvidia-h100-80gb", "placements": ON_GKE})
RAY_FULL_FIRST = Life("ray", full=("us-central1",), changes={"placements": ON_GKE})
# The switch `stockout` of each emulator. On GKE it names accelerators.
STOCKOUTS = {"cloudrun": ["europe-west4"], "tpu": ["us-central1-a"], "kubernetes": ["nvidia-h100-80gb"]}
RAY_STOCKOUT = [PARTS["ray"]["accelerator"]]
POLL_SECONDS = 0.5  # short against what a life does in a state, and long against a read of all records
NOWHERE = {"placements": [{"zone": "us-central1-a"}]}
LIVES = (
    *(Life(target, "preempted-once", serves=True, cancel_in="SUCCEEDED") for target in PARTS),
    *(Life(target, "lost-once") for target in PARTS),
    *(Life(target, "fail-code") for target in PARTS),
    *(Life(target, "hang", cancel_in="TRAINING") for target in PARTS),
    *FULL_FIRST,
    GKE_FULL_FIRST,
    Life("cloud_run", cancel_in="ACCEPTED"),
    Life("tpu_vm", cancel_in="PROVISIONING", full=("us-central1-a",), changes=NOWHERE),
    Life("tpu_vm", serves=True, cancel_in="DEPLOYING", full=("us-central1-a",), server={"zone": "us-central1-a"}),
)
# The teardown of this life takes seconds, so that the cancel arrives meanwhile.
LAST = Life("cloud_run", cancel_in="TEARING_DOWN")
SLOW = {"fail_next": {"method": "delete_job", "delay_seconds": 3}}


@pytest.fixture
def switch(user: User) -> Iterator[Callable[..., None]]:
    """Yield a function that sets switches of an emulator; unset them after the test."""

    def switch(api: str, **body: Any) -> None:
        requests.post(f"{user.info.http}/_local/{api}/faults", json=body, timeout=60).raise_for_status()

    yield switch
    for api in STOCKOUTS:
        switch(api, stockout=[], fail_next=[])


def test_the_simulation_and_the_stack_tell_the_same_history(user: User, switch: Callable[..., None]) -> None:
    for api, full in STOCKOUTS.items():
        switch(api, stockout=full)
    with run_events(user) as pull:
        stack = Stack(user, pull)
        for life in LIVES:
            stack.begin(life)
        stack.finish(partial(_free, switch))
        switch("cloudrun", **SLOW)
        switch("kubernetes", stockout=RAY_STOCKOUT)
        for life in (LAST, RAY_FULL_FIRST):
            stack.begin(life)
        stack.finish(partial(_free, switch))
        lived = stack.histories()
    different = [
        f"{life}: {part}: simulated {simulated}, lived {getattr(lived[life], part)}"
        for life in stack.runs
        for part, simulated in vars(simulate(life)).items()
        if simulated != getattr(lived[life], part)
    ]
    assert different == [], "\n".join(different)
    assert [user.resources(run) for run in stack.runs.values()] == [[]] * len(stack.runs)


def _free(switch: Callable[..., None], life: Life) -> None:
    """A life with a second attempt finds capacity on GKE."""
    if life in (GKE_FULL_FIRST, RAY_FULL_FIRST):
        switch("kubernetes", stockout=[])


class Stack:
    """The lives on the stack, by the runs that live them."""

    def __init__(self, user: User, pull: Callable[[], Iterator[tuple[str, dict[str, Any]]]]) -> None:
        self.user = user
        self.runs: dict[Life, str] = {}
        self._pull = pull
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._cancelled: set[str] = set()
        self._retried: set[str] = set()

    def begin(self, life: Life) -> None:
        """Send the requests of a life's beginning."""
        key = f"life-{time.time_ns()}-{life}"
        run = self.runs[life] = names.run_id_of_message(key)
        if life.cancel_in == "ACCEPTED":
            self._cancel(run)
            self.user.until(lambda: list(self.user.store.names(names.cancel_object(run))))
        self.user.publish("dropforge-requests", json.dumps(life.spec).encode(), idempotency_key=key)

    def finish(self, retried: Callable[[Life], None]) -> None:
        """Send the requests that are due until all lives are over; call `retried` for second attempts."""
        living, deadline = dict(self.runs), time.monotonic() + PATIENCE_SECONDS
        while living := {life: run for life, run in living.items() if not self._go_on(life, run, retried)}:
            assert time.monotonic() < deadline, [str(life) for life in living]
            time.sleep(POLL_SECONDS)

    def _go_on(self, life: Life, run: str, retried: Callable[[Life], None]) -> bool:
        record = self.user.store.find(run)
        if record is None:
            return False
        if record.state == life.cancel_in and run not in self._cancelled:
            self._cancel(run)
        if len(record.attempts) > 1 and run not in self._retried:
            self._retried.add(run)
            retried(life)
        serves = record.endpoint is not None and record.endpoint.ended is None
        return record.state.is_terminal and not serves

    def _cancel(self, run: str) -> None:
        self._cancelled.add(run)
        self.user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())

    def histories(self) -> dict[Life, Told]:
        """Return the outcome of each life, once the last run events and messages have arrived."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            for _, event in self._pull():
                self._events[event["run"]].append(event)
            messages = requests.get(f"{self.user.info.http}/slack/messages", timeout=60).json()["messages"]
            texts = [(json.dumps(message["payload"]), message["payload"]["text"]) for message in messages]
            histories = {
                life: told(run, self._objects(run), self._ordered(run), [text for whole, text in texts if run in whole])
                for life, run in self.runs.items()
            }
            if all(
                {each.states[-1]} <= {*each.events} & {*map(str.upper, each.notices)} for each in histories.values()
            ):
                return histories
            assert time.monotonic() < deadline, histories
            time.sleep(POLL_SECONDS)

    def _ordered(self, run: str) -> list[dict[str, Any]]:
        return sorted(self._events[run], key=lambda event: str(event["time"]))

    def _objects(self, run: str) -> dict[str, bytes]:
        """The names of all objects of a run, with the content of those that a history needs."""
        found = [
            name
            for prefix in (f"runs/{run}/", names.open_object(run), names.KEYS_PREFIX)
            for name in self.user.store.names(prefix)
        ]
        record = names.record_object(run)
        return {name: self.user.store.read(name).data if name == record else b"" for name in found}
