"""What people do: they drop specs, drop some twice, send others as messages, and change their minds."""

from __future__ import annotations

import json
from typing import Any

from dropforge import names

from .cloud import SPECS, Cloud
from .trainer import Work
from .world import World

DROPS_SECONDS = 1200.0
TRAINING_USD, ENDPOINT_USD = 2.0, 0.6  # for an hour
_ZONES = ("us-central1", "europe-west4", "us-east4")


class Workload:
    """The users of one seed."""

    def __init__(self, world: World, cloud: Cloud) -> None:
        self.world = world
        self.cloud = cloud
        self.dropped: list[str] = []

    def begin(self) -> None:
        """Plan everything that they will do."""
        for number in range(1 + self.world.random.randrange(4)):
            self._plan(number)

    def begin_one(self) -> None:
        """One run with everything in it: two placements, a preemption, a gate, an endpoint, a budget."""
        spec = {
            **_base("job-0", [{"region": "us-central1"}, {"region": "europe-west4"}]),
            "evaluation": {"gate": {"metric": "exact_match", "min": 0.5}},
            "serve": _endpoint("20m", "20m"),
            "limits": {"max_duration": "40m", "max_attempts": 3, "max_cost_usd": 2.0},
        }
        work = Work(total=300.0, metric=0.9, fates=["preempted"])
        self.world.after(1, lambda: self._drop("specs/job-0.json", json.dumps(spec).encode(), True, spec, work))

    def cancel_all(self) -> None:
        """Somebody asks for the end of every run that was dropped."""
        for run in self.dropped:
            self._cancel(run)

    def _plan(self, number: int) -> None:
        draw = self.world.random
        when = draw.random() * DROPS_SECONDS
        spec, valid = self._spec(number)
        data = json.dumps(spec).encode()
        work = Work(total=draw.uniform(20, 1500), metric=draw.choice((0.9, 0.9, 0.2)))
        if draw.random() < 0.6:
            self.world.after(when, lambda: self._drop(f"specs/job-{number}.json", data, valid, spec, work))
        else:
            key = f"key-{number}"
            times = [when] + [when + draw.random() * 900] * (draw.random() < 0.3)
            for time in times:
                self.world.after(time, lambda: self._request(key, data, valid, spec, work))
            self._perhaps_cancel(names.run_id_of_message(key), when)

    def _drop(self, name: str, data: bytes, valid: bool, spec: dict[str, Any], work: Work) -> None:
        generation = self.cloud.storage.put(SPECS, name, data)
        run = names.run_id_of_object(SPECS, name, generation)
        self.cloud.trainer.work[run] = work
        self.world.fact("dropped", run=run, valid=valid, spec=spec)
        self.dropped.append(run)
        self._perhaps_cancel(run, 0)

    def _request(self, key: str, data: bytes, valid: bool, spec: dict[str, Any], work: Work) -> None:
        run = names.run_id_of_message(key)
        self.cloud.trainer.work.setdefault(run, work)
        self.world.fact("dropped", run=run, valid=valid, spec=spec)
        self.cloud.events.accept("requests", data, {"idempotency_key": key})

    def _perhaps_cancel(self, run: str, when: float) -> None:
        draw, rate = self.world.random.random(), self.world.faults.cancels
        if draw >= rate:
            return
        delay = self.world.random.choice((-60.0, 5.0, 60.0, 600.0, 3000.0)) * self.world.random.random()
        self.world.after(max(0.0, when + delay), lambda: self._cancel(run))

    def _cancel(self, run: str) -> None:
        message = self.cloud.events.accept("requests", json.dumps({"cancel": run}).encode(), {})
        self.world.fact("cancel", run=run, message=message)

    def _spec(self, number: int) -> tuple[dict[str, Any], bool]:
        draw = self.world.random
        regions = draw.sample(_ZONES, 1 + draw.randrange(3))
        placements: list[dict[str, Any]] = [{"region": region} for region in regions]
        if draw.random() < 0.3:
            placements[0]["max_wait"] = "5m"
        spec = _base(f"job-{number}", placements)
        spec["limits"] = {"max_duration": draw.choice(("10m", "20m", "40m")), "max_attempts": 1 + draw.randrange(4)}
        if draw.random() < 0.3:
            spec["limits"]["max_cost_usd"] = draw.choice((0.3, 0.6, 1.0))
        if draw.random() < 0.3:
            spec["evaluation"] = {"gate": {"metric": "exact_match", "min": 0.5}}
        if draw.random() < 0.5:
            spec["serve"] = _endpoint(draw.choice(("20m", "1h")), draw.choice(("5m", "20m")))
        valid = draw.random() >= 0.1
        if not valid:
            spec["epochs"] = 3
        return spec, valid


def _base(name: str, placements: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": name,
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "target": {"type": "cloud_run", "placements": placements, "price_usd_per_hour": TRAINING_USD},
        "serve": None,
        "notify": {"slack": {"webhook_secret": "slack-webhook"}},
    }


def _endpoint(ttl: str, startup_timeout: str) -> dict[str, Any]:
    serve = {"type": "cloud_run", "ttl": ttl, "startup_timeout": startup_timeout}
    return {**serve, "price_usd_per_hour": ENDPOINT_USD}
