"""The rule about runs at the same time: it reads the records of all runs, and who holds a place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from .history import Fact, History
from .lives import TERMINAL, Life, seconds_of

OBJECT = "runs/places.json"


def places_are_kept(history: History, lives: Iterable[Life]) -> Iterator[tuple[float, str]]:
    """No more runs than the limit hold a place. Who waits gets one, in the order of submission. All are given back."""
    limit = next((fact.data["runs"] for fact in history.of("limit")), None)
    if limit is None:
        return
    lives = [life for life in lives if life.records]
    yield from _too_many(lives, limit)
    for life in lives:
        if life.last["attempts"] and not life.last["placed"]:
            yield life.end.time, f"run {life.run} has attempts, but never got a place"
        if life.last["queued"]:
            yield life.end.time, f"run {life.run} waits for a place, although it is {life.last['state']}"
    writes = [fact for fact in history.of("write") if fact.data["name"] == OBJECT]
    for before, after in pairwise(writes):
        yield from _overtakes(before, after)
    if writes and (kept := [entry["run"] for entry in _entries(writes[-1], "holding", "waiting")]):
        yield writes[-1].time, f"{', '.join(kept)} hold or wait for a place after the end of all runs"


def _too_many(lives: list[Life], limit: int) -> Iterator[tuple[float, str]]:
    """The moments at which the records of more runs than the limit say that they hold a place."""
    changes = []
    for life in lives:
        began = next((record for record in life.records if record.value["placed"]), None)
        over = next((record for record in life.records if record.value["state"] in TERMINAL), life.end)
        if began is not None:
            changes += [(began.index, 1, began.time), (over.index, -1, over.time)]
    holding = 0
    for _, change, time in sorted(changes):
        holding += change
        if holding > limit:
            yield time, f"{holding} runs hold a place; the policy has {limit}"


def _overtakes(before: Fact, after: Fact) -> Iterator[tuple[float, str]]:
    """The runs that got a place before a run that waits and was submitted earlier."""
    held = {entry["run"] for entry in _entries(before, "holding")}
    for entry in _entries(after, "holding"):
        earlier = [other for other in _entries(after, "waiting") if _order(other) < _order(entry)]
        if entry["run"] not in held and earlier:
            yield after.time, f"run {entry['run']} got a place before {earlier[0]['run']}, which was submitted earlier"


def _entries(write: Fact, *lists: str) -> list[dict[str, Any]]:
    return [entry for name in lists for entry in write.data["content"][name]]


def _order(entry: dict[str, Any]) -> tuple[float, str]:
    return seconds_of(entry["created"]), entry["run"]
