"""Focused lives: one run that can succeed and serve, and one fault or request that strikes it in a chosen state.

The wild faults of a seed end most runs before they reach an endpoint. A focused seed has one aim. The seeds go through
all aims in turn, so the next aim is always one of those that were tried least often.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from .cloud import Cloud
from .faults import STRIKES, Strike
from .history import History
from .world import World

STATES = ("ACCEPTED", "PROVISIONING", "TRAINING", "DEPLOYING", "TEARING_DOWN", "SUCCEEDED")
FAULTS = (*STRIKES, "delete", "execution")  # also: a user deletes the spec; a user cancels the execution
LAST_EFFECT = 60  # after the state began; most strikes hit one of the first effects
DELAYS_SECONDS = (0.0, 1.0, 10.0, 60.0, 600.0)  # of a request that arrives between two calls, at most
SHOWN = 12


class Aim(NamedTuple):
    """A fault or request, the target of the run that it strikes, and the state in which the run is struck."""

    target: str
    state: str
    fault: str


def aims(targets: Sequence[str]) -> list[Aim]:
    """Every aim on these targets, in an order that mixes them."""
    every = [Aim(*parts) for parts in product(sorted(targets), STATES, FAULTS)]
    random.Random(0).shuffle(every)
    return every


def arm(world: World, cloud: Cloud, aim: Aim) -> None:
    """Strike once the record is first in the state of the aim: at one of the next effects, or some time later."""
    pass_on, is_armed = cloud.storage.uploaded, False

    def watch(bucket: str, name: str, generation: int, size: int) -> None:
        nonlocal is_armed
        pass_on(bucket, name, generation, size)
        if is_armed or not name.endswith("/record.json") or world.now >= world.calm:
            return
        if json.loads(cloud.storage.get(bucket, name).data)["state"] == aim.state:
            is_armed = True
            _strike_soon(world, aim)

    cloud.storage.uploaded = watch


def cell_of(history: History) -> Aim | None:
    """The fault that struck the run of a focused life, and the run's state at that moment. None if no fault struck."""
    target, state = "", ""
    for fact in history.facts:
        if fact.kind == "dropped":
            target = fact.data["spec"]["target"]["type"]
        elif fact.kind == "write" and fact.data["name"].endswith("/record.json"):
            state = fact.data["content"]["state"]
        elif fact.kind == "struck":
            return Aim(target, state, fact.data["fault"])
    return None


def serves(history: History) -> bool:
    """Whether the run of a focused life had an endpoint."""
    records = [fact.data["content"] for fact in history.of("write") if fact.data["name"].endswith("/record.json")]
    return any(record["endpoint"] for record in records)


def coverage(cells: Iterable[Aim | None], targets: Sequence[str]) -> str:
    """How many cells (target, state, fault) were struck, and those that never were."""
    struck, wanted = Counter(cells), aims(targets)
    never = sorted(aim for aim in wanted if aim not in struck)
    shown = "".join(f"\n  never struck: {', '.join(aim)}" for aim in never[:SHOWN])
    more = f"\n  and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
    return f"{len(wanted) - len(never)} of {len(wanted)} cells (target, state, fault) were struck{shown}{more}"


def _strike_soon(world: World, aim: Aim) -> None:
    draw = world.random
    if aim.fault in world.actions and draw.random() < 0.5:
        world.after(draw.choice(DELAYS_SECONDS) * draw.random(), lambda: world.act(aim.fault))
    else:
        world.strike = Strike(world.effects + 1 + int(LAST_EFFECT * draw.random() ** 2), aim.fault)
