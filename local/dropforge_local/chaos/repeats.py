"""Clients that repeat what they have sent, and the rule about it: the same wish again costs nothing.

A client that lost a reply uploads the same bytes again, at once or later, and a publisher sends its message again. Some
users upload the spec with other bytes, or ask for another run. All draws are of a source of their own.
"""

from __future__ import annotations

import hashlib
import json
import random
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from dropforge.base import names

from .cloud import OPERATIONS, REQUESTS, SPECS, Cloud
from .history import History
from .lives import TERMINAL, Life
from .trainer import Work
from .workload import Workload
from .world import World

JOIN_SECONDS = 600.0  # docs/limits.md: how long after its end a run still has the same request
SKEW_SECONDS = 5.0  # clocks differ
MOST_REPEATS = 3  # of an upload or a message
# After the first: at once, before anybody has read the first, while the run works, and after its end.
REPEATED_AFTER = (0.0, 0.3, 5.0, 60.0, 600.0, 3000.0, 7200.0)
KINDS = ("same", "same", "same", "again", "changed")
Item = tuple[dict[str, Any], bool, Work]  # a spec, whether it is valid, and the training of its run


class RepeatCloud(Cloud):
    """The simulated cloud whose events have digests and metadata, as Cloud Storage's have."""

    def __init__(self, world: World, clusters: tuple[str, ...] = (), policy: str = "") -> None:
        super().__init__(world, clusters, policy)
        self._told: dict[int, dict[str, Any]] = {}  # what the events of a generation tell

    def _uploaded(self, bucket: str, name: str, generation: int, size: int) -> None:
        if bucket == SPECS:
            stored = self.storage.get(bucket, name)
            digest = b64encode(hashlib.md5(stored.data, usedforsecurity=False).digest()).decode()
            self._told[generation] = {"md5Hash": digest, "metadata": stored.metadata}
        super()._uploaded(bucket, name, generation, size)

    def _data(self, bucket: str, name: str, generation: int, size: int) -> dict[str, Any]:
        return {**super()._data(bucket, name, generation, size), **self._told[generation]}


class Repeating(Workload):
    """The users of one seed, who also repeat what they have sent."""

    def __init__(self, world: World, cloud: Cloud, targets: Sequence[str]) -> None:
        super().__init__(world, cloud, targets)
        self._own = random.Random(f"{world.history.seed} repeats")

    def _drop(self, name: str, spec: dict[str, Any], valid: bool, work: Work) -> None:
        super()._drop(name, spec, valid, work)
        self._intends(self.dropped[-1], name, json.dumps(spec).encode())
        for delay, kind in self._plans():
            self.world.after(delay, partial(self._upload_again, name, (spec, valid, work), kind))

    def _request(self, key: str, spec: dict[str, Any], valid: bool, work: Work) -> None:
        super()._request(key, spec, valid, work)
        self._send((spec, valid, work), "")
        for delay, kind in self._plans():
            self.world.after(delay, partial(self._send, (spec, valid, work), kind))

    def _plans(self) -> Iterator[tuple[float, str]]:
        """When and how something is sent again."""
        for _ in range(self._own.randrange(MOST_REPEATS + 1)):
            yield self._own.choice(REPEATED_AFTER) * self._own.uniform(0.5, 1.0), self._own.choice(KINDS)

    def _form(self, spec: dict[str, Any], kind: str) -> tuple[bytes, str]:
        """The bytes of a repetition, and what it says to get another run."""
        space = " " * self.world.id() if kind == "changed" else ""
        return json.dumps(spec).encode() + space.encode(), str(self.world.id()) if kind == "again" else ""

    def _upload_again(self, name: str, item: Item, kind: str) -> None:
        """Upload a spec again, if it is still there: whoever has deleted it wants no run."""
        spec, valid, work = item
        present = self.cloud.storage.find(SPECS, name)
        if present is None or present.data.strip() != json.dumps(spec).encode() or self.world.now >= self.world.calm:
            return
        data, again = self._form(spec, kind)
        self.world.fact("withdrawn", run=_run_of(name, present.generation), how="repeated")
        metadata = {names.AGAIN: again} if again else None
        generation = self.cloud.storage.put(SPECS, name, data, metadata=metadata)
        run = _run_of(name, generation)
        self.cloud.trainer.work[run] = replace(work, fates=[*work.fates])
        about = {"object": name, "generation": str(generation)}
        self.world.fact("dropped", run=run, valid=valid, spec=spec, **about)
        self._intends(run, name, data, again)
        self._perhaps_end(run)

    def _send(self, item: Item, kind: str) -> None:
        """Send a spec in a message without a key."""
        spec, valid, work = item
        data, again = self._form(spec, kind)
        message = self.cloud.events.accept(REQUESTS, data, {names.AGAIN: again} if again else {})
        run = names.run_id_of_message(message)
        self.cloud.trainer.work[run] = replace(work, fates=[*work.fates])
        self.world.fact("dropped", run=run, valid=valid, spec=spec)
        self._intends(run, f"topic {REQUESTS}", data, again)
        self._perhaps_end(run)

    def _perhaps_end(self, run: str) -> None:
        """A user may cancel a run by the id of the repetition."""
        if self._own.random() < self.world.faults.cancels:
            self.world.after(self._own.choice(REPEATED_AFTER), partial(self._cancel, run, OPERATIONS))

    def _intends(self, run: str, place: str, data: bytes, again: str = "") -> None:
        wanted = [place, again, hashlib.sha256(data).hexdigest()]
        self.world.fact("intent", run=run, wanted="\0".join(wanted))


def _run_of(name: str, generation: int) -> str:
    return names.run_id_of_object(SPECS, name, generation)


def one_intent(history: History, lives: Mapping[str, Life]) -> Iterator[tuple[float, str]]:
    """The same request has one run while it works, and for ten minutes after it. A repetition is answered by its run.

    Whoever has cancelled a run and asks again gets another run.
    """
    wishes: dict[str, list[str]] = {}
    for fact in history.of("intent"):
        wishes.setdefault(fact.data["wanted"], []).append(fact.data["run"])
    for runs in wishes.values():
        own = [lives[run] for run in runs]
        made = sorted((life for life in own if life.creations), key=lambda life: life.creations[0].index)
        for earlier, later in combinations(made, 2):
            yield from _made_twice(earlier, later)
        for life in own:
            if life.joined is not None and not life.records:
                yield from _joined_well(life, lives, runs)


def _made_twice(earlier: Life, later: Life) -> Iterator[tuple[float, str]]:
    """A request that was refused, or cancelled before a function read it, costs nothing, and none joins it."""
    began, refused = later.creations[0], ("CANCELLED", "REJECTED")
    record = earlier.record_at(began.index) or {"state": "REJECTED"}
    if began.value["state"] in refused or record["state"] in refused or record["cancel_requested"]:
        return
    over = earlier.over
    if over is None or over.index > began.index or began.time - over.time < JOIN_SECONDS - SKEW_SECONDS:
        yield began.time, f"run {later.run} was made for the request of run {earlier.run}, which was {record['state']}"


def _joined_well(life: Life, lives: Mapping[str, Life], runs: Sequence[str]) -> Iterator[tuple[float, str]]:
    """It has joined a run of the same request; a cancel by its id has reached that run."""
    joined = life.joined
    assert joined is not None, "the caller has looked"
    run = joined.value["event"]["run"]
    if run not in runs:
        yield joined.time, f"the request of {life.run} joined run {run}, which has another request"
        return
    for cancel in life.cancels:
        handled = life.handled.get(cancel.value["message"])
        if handled is None or cancel.value["how"] != "message":
            continue
        record = lives[run].record_at(max(handled.index, joined.index)) or {"state": "REJECTED"}
        is_ending = record["state"] in TERMINAL or record["state"] == "TEARING_DOWN"
        if not is_ending and not record["cancel_requested"]:
            yield handled.time, f"the cancel of {life.run} did not reach run {run}, which it had joined"
