"""The actions of users: drop specs, drop some twice, send some as messages, and cancel, delete and overwrite."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from dropforge.base import names

from . import specs
from .cloud import OPERATIONS, REQUESTS, SPECS, TEAM_REQUESTS, Cloud
from .trainer import Work
from .world import World

DROPS_SECONDS = 1200.0
# When a user deletes a spec: at once, while the run waits for capacity, while it trains, and after its end.
REGRETS_SECONDS = (0.0, 1.0, 60.0, 600.0, 3000.0, 7200.0)
# Last digits of the seeds whose specs ask for progress notices, and whose runs others try to cancel. Kept seeds that
# revealed a defect end in other digits.
WATCHED = (2, 3, 7, 8)
# A malformed run id, and a well-formed id that no run has.
FORGED = ("nobody-0123456789ab", "request-000000000000", "../../specs", "", "None", "job-0")


class Workload:
    """The users of one seed, and the targets of their specs."""

    def __init__(self, world: World, cloud: Cloud, targets: Sequence[str]) -> None:
        self.world = world
        self.cloud = cloud
        self.targets = targets
        self.dropped: list[str] = []
        self.objects: list[tuple[str, int]] = []  # the specs of the dropped runs: name and generation

    def begin(self) -> None:
        """Plan all actions of the users."""
        draw = self.world.random
        for number in range(1 + draw.randrange(4)):
            self._plan(number)
        for run in FORGED:
            if draw.random() < self.world.faults.forged_cancels:
                self.world.after(draw.random() * 2 * DROPS_SECONDS, partial(self._forge_cancel, run))

    def begin_single(self) -> None:
        """Plan one run with a full spec and a preemption."""
        self.begin_alone(specs.whole(self.targets[0]), Work(total=300.0, metric=0.9, fates=["preempted"]))

    def begin_alone(self, spec: dict[str, Any], work: Work) -> None:
        """Plan one run of this spec, with this training."""
        self.world.after(1, lambda: self._drop("specs/only.json", spec, True, work))

    def begin_focused(self) -> None:
        """Plan one run that has the time and the money to serve. Its first attempt may be stuck or lose its machine."""
        draw = self.world.random
        fate = draw.choice(("", "", "preempted", "lost_machine", "silent", "stuck"))
        spec = specs.servable(draw, self.targets[0], is_watched=fate == "stuck")
        work = Work(total=draw.uniform(20, 600), metric=0.9, reports=fate == "stuck", fates=[fate, ""])
        self.world.after(1, lambda: self._drop("specs/job-0.json", spec, True, work))

    def delete_all(self) -> None:
        """A user deletes every spec."""
        for run, (name, generation) in zip(self.dropped, self.objects, strict=True):
            self._delete(name, generation, run)

    def begin_pair(self) -> None:
        """Plan two runs with full specs, at the same time."""
        for number in range(2):
            work, name = Work(total=300.0, metric=0.9), f"specs/job-{number}.json"
            self.world.after(1 + number, partial(self._drop, name, specs.whole(self.targets[0]), True, work))

    def cancel_all(self) -> None:
        """A user cancels every run."""
        for run in self.dropped:
            self._cancel(run, OPERATIONS)

    def _plan(self, number: int) -> None:
        draw = self.world.random
        when = draw.random() * DROPS_SECONDS
        spec, valid = self._spec(number)
        work = self._work(spec)
        if draw.random() < 0.6:
            self.world.after(when, lambda: self._drop(f"specs/job-{number}.json", spec, valid, work))
        else:
            key = f"key-{number}"
            times = [when] + [when + draw.random() * 900] * (draw.random() < 0.3)
            for time in times:
                self.world.after(time, lambda: self._request(key, spec, valid, work))
            self._perhaps_cancel(names.run_id_of_message(key), REQUESTS, when)

    def _drop(self, name: str, spec: dict[str, Any], valid: bool, work: Work) -> None:
        generation = self.cloud.storage.put(SPECS, name, json.dumps(spec).encode())
        run = names.run_id_of_object(SPECS, name, generation)
        self.cloud.trainer.work[run] = work
        self.world.fact("dropped", run=run, valid=valid, spec=spec, object=name, generation=str(generation))
        self.dropped.append(run)
        self.objects.append((name, generation))
        self._perhaps_cancel(run, OPERATIONS, 0)
        draw, faults = self.world.random, self.world.faults
        delay = draw.choice(REGRETS_SECONDS) * draw.random()
        if draw.random() < faults.deletes:
            self.world.after(delay, lambda: self._delete(name, generation, run))
        elif draw.random() < faults.overwrites:
            self.world.after(delay, lambda: self._overwrite(name, generation, run))

    def _delete(self, name: str, generation: int, run: str) -> None:
        """Delete a spec, unless it was deleted or overwritten before."""
        if self._is_there(name, generation):
            self.world.fact("withdrawn", run=run, how="deleted")
            self.world.fact("cancel", run=run, message=f"deleted {generation}", how="deleted")
            self.cloud.storage.remove(SPECS, name)

    def _overwrite(self, name: str, generation: int, run: str) -> None:
        """Drop another spec under the same name. That is another run, which needs time to end."""
        if self.world.now < self.world.calm and self._is_there(name, generation):
            number = int(name.removeprefix("specs/job-").removesuffix(".json"))
            self.world.fact("withdrawn", run=run, how="overwritten")
            spec, valid = self._spec(number)
            self._drop(name, spec, valid, self._work(spec))

    def _is_there(self, name: str, generation: int) -> bool:
        stored = self.cloud.storage.objects[SPECS].get(name)
        return stored is not None and stored.generation == generation

    def _request(self, key: str, spec: dict[str, Any], valid: bool, work: Work) -> None:
        run = names.run_id_of_message(key)
        self.cloud.trainer.work.setdefault(run, work)
        self.world.fact("dropped", run=run, valid=valid, spec=spec)
        self.cloud.events.accept(REQUESTS, json.dumps(spec).encode(), {"idempotency_key": key})

    def _perhaps_cancel(self, run: str, topic: str, when: float) -> None:
        """Cancel a run through this topic, and in some seeds through the topic of another source."""
        if self.world.history.seed % 10 in WATCHED:
            own = random.Random(f"{self.world.history.seed} {run}")
            foreign = own.choice([other for other in (REQUESTS, TEAM_REQUESTS) if other != topic])
            self.world.after(max(0.0, when + own.uniform(-60, 3000)), partial(self._forge_cancel, run, foreign))
        draw, rate = self.world.random.random(), self.world.faults.cancels
        if draw >= rate:
            return
        delay = self.world.random.choice((-60.0, 5.0, 60.0, 600.0, 3000.0)) * self.world.random.random()
        self.world.after(max(0.0, when + delay), lambda: self._cancel(run, topic))

    def _cancel(self, run: str, topic: str) -> None:
        message = self.cloud.events.accept(topic, json.dumps({"cancel": run}).encode(), {})
        self.world.fact("cancel", run=run, message=message, how="message")

    def _forge_cancel(self, run: str, topic: str = REQUESTS) -> None:
        """Cancel a run that does not exist, or that is not of the source of the request."""
        message = self.cloud.events.accept(topic, json.dumps({"cancel": run}).encode(), {})
        self.world.fact("forged", run=run, message=message)

    def _spec(self, number: int) -> tuple[dict[str, Any], bool]:
        draw = self.world.random
        spec, valid = specs.drawn(draw, f"job-{number}", draw.choice(self.targets))
        if self.world.history.seed % 10 in WATCHED:
            spec["limits"] |= specs.stuck_limits(random.Random(json.dumps(spec)))
        return spec, valid

    def _work(self, spec: dict[str, Any]) -> Work:
        """The training of a run. It reports progress if the spec asks for notices about stuck attempts."""
        draw, reports = self.world.random, "stuck_after" in spec["limits"]
        return Work(total=draw.uniform(20, 2400), metric=draw.choice((0.9, 0.9, 0.2)), reports=reports)
