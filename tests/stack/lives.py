"""Scripted lives: a spec, the fate of its containers, and requests. `simulate` lives one in the simulation of chaos.

test_same_lives.py lives the same ones on the local stack, with real containers and emulated APIs. A history is what
both tell of a life, without ids, times and amounts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dropforge.base import names
from dropforge.run.record import Record
from dropforge_local.chaos.cloud import OPERATIONS, REQUESTS, RUNS, Cloud
from dropforge_local.chaos.faults import Strike
from dropforge_local.chaos.scheduler import START
from dropforge_local.chaos.specs import clusters
from dropforge_local.chaos.trainer import Work
from dropforge_local.chaos.world import World

from .targets import PARTS, SERVES

# How the simulated container of each attempt ends, by the behaviour of the stack's container; "" succeeds.
FATES: dict[str, list[str]] = {
    "succeed": [""],
    "preempted-once": ["preempted", ""],
    "lost-once": ["killed", ""],
    "fail-code": ["code_error"],
    "hang": ["stuck"],
}
SERVER_OF = {"cloud_run": "cloud_run", "gke": "gke", "ray": "gke", "tpu_vm": "tpu_vm"}
SECONDS = 7200.0  # of a simulated life: no life's script is longer
NOTICES = ("accepted", "started", "ready", "succeeded", "failed", "cancelled", "rejected")


@dataclass(frozen=True, eq=False)  # a life is itself
class Life:
    """A script. `cancel_in`: the state in which a user cancels the run; "" never. `full`: places without capacity.

    A cancel in the state ACCEPTED comes before the spec. The places have capacity once there is a second attempt.
    `server` replaces parts of `serve`, and `changes` parts of `target`.
    """

    target: str
    behave: str = "succeed"
    serves: bool = False
    cancel_in: str = ""
    full: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cancel = f"cancel in {self.cancel_in}" if self.cancel_in else ""
        parts = (self.target, self.behave, "serves" * self.serves, "stockout" * bool(self.full), cancel)
        return ", ".join(part for part in parts if part)

    @property
    def spec(self) -> dict[str, Any]:
        server = SERVER_OF[self.target]
        return {
            "api_version": "dropforge/v1",
            "name": "noop",
            "model": {"source": "owner/tiny-1m"},
            "dataset": {"source": "owner/data"},
            "training": {"adapter": {"type": "none"}},
            "target": {"type": self.target, **PARTS[self.target], **self.changes},
            "serve": {"type": server, **SERVES[server], **self.server} if self.serves else None,
            "labels": {"behave": self.behave},
        }


@dataclass(frozen=True)
class Told:
    """The outcome of a life: the record that it left, its run events and its messages, each in order of time."""

    states: list[str]
    attempts: list[tuple[int, str, str]]  # placement, region, class of the error
    error: str
    endpoint: str
    resources: list[tuple[int, str, str]]  # of the ledger: attempt, name, state
    events: list[str]  # run events
    notices: list[str]  # of Slack
    objects: list[str]  # in the runs bucket, apart from job events and the trainer's files


def simulate(life: Life) -> Told:
    """Live a life in the simulation, without any fault but those of the script."""
    world = _ScriptedWorld(life.full)
    cloud = Cloud(world, clusters([life.target]))
    key = "life"
    run = names.run_id_of_message(key)
    cloud.trainer.work[run] = Work(total=60.0, metric=0.9, fates=list(FATES[life.behave]))

    def send(topic: str, body: object, **attributes: str) -> None:
        cloud.events.accept(topic, json.dumps(body).encode(), attributes)

    def cancel() -> None:
        send(OPERATIONS, {"cancel": run})

    if life.cancel_in == "ACCEPTED":
        world.after(1, cancel)
    elif life.cancel_in:
        _once(cloud, lambda record: bool(record["state"] == life.cancel_in), lambda: world.after(0, cancel))
    _once(cloud, lambda record: len(record["attempts"]) > 1, world.free)
    world.after(60, lambda: send(REQUESTS, life.spec, idempotency_key=key))
    try:
        world.scheduler.run(START + SECONDS)
    finally:
        world.scheduler.close()
    objects = {name: stored.data for name, stored in cloud.storage.objects[RUNS].items()}
    published = [fact.data["event"] for fact in world.history.of("published")]
    texts = [fact.data["text"] for fact in world.history.of("slack")]
    return told(run, objects, [event for event in published if event["run"] == run], texts)


def told(run: str, objects: Mapping[str, bytes], events: Iterable[Mapping[str, Any]], texts: Iterable[str]) -> Told:
    """The history that a run's objects, run events and notices give."""
    record = Record.model_validate_json(objects[names.record_object(run)])
    return Told(
        [transition.state.value for transition in record.history],
        [(each.placement, each.region, each.error.error_class if each.error else "") for each in record.attempts],
        record.error.error_class if record.error else "",
        "" if record.endpoint is None else "ended" if record.endpoint.ended else "serves",
        sorted((each.attempt, _place(each.name, run), each.state.value) for each in record.resources),
        [str(event["state"]) for event in events],
        [next((word for word in NOTICES if f" {word}" in text), text) for text in texts],
        sorted(_objects(record, objects)),
    )


def _objects(record: Record, found: Iterable[str]) -> set[str]:
    """The objects of the control plane about a run, and the key of its day."""
    others = {names.day_key_object(record.key_day): "keys/days/DAY"}
    about = (name for name in found if _is_of_control_plane(name))
    return {
        others.get(name, name.replace(record.run, "RUN"))
        for name in about
        if name in others or not name.startswith(names.KEYS_PREFIX)
    }


class _ScriptedWorld(World):
    """A world without faults; the places in `full` have no capacity until `free`."""

    def __init__(self, full: tuple[str, ...]) -> None:
        super().__init__(0, Strike(0, ""))
        self._full = full

    def lasts(self, fault: str, probability: float) -> bool:
        return fault.rsplit(" ", 1)[-1] in self._full

    def free(self) -> None:
        self._full = ()


def _once(cloud: Cloud, is_due: Callable[[dict[str, Any]], bool], act: Callable[[], None]) -> None:
    """Act when a record is written that is due, once."""
    pass_on, waits = cloud.storage.uploaded, [True]

    def uploaded(bucket: str, name: str, generation: int, size: int) -> None:
        pass_on(bucket, name, generation, size)
        if waits and name.endswith("/record.json") and is_due(json.loads(cloud.storage.get(bucket, name).data)):
            waits.clear()
            act()

    cloud.storage.uploaded = uploaded


def _is_of_control_plane(name: str) -> bool:
    return not re.search(r"/events/|^checkpoints/|^models/|^machines/|startup\.log", name)


def _place(name: str, run: str) -> str:
    """The name of a resource without the project, the run's id and the cluster."""
    short = re.sub(r"projects/[^/]+", "projects/P", name.replace(run, "RUN"))
    return re.sub(r"clusters/[^/]+", "clusters/C", short)
