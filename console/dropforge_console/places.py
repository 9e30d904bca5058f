"""Why a run trains where it trains: the places of its spec in the order of the attempts, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dropforge.base.errors import ErrorClass
from dropforge.base.figures import usd
from dropforge.run.record import Attempt, Record
from dropforge.spec import JobSpec

from .views import UNKNOWN, Status

NOT_TRIED = Status("not tried", "off", "ring")
HERE = Status("here", "run", "half")
TRAINED = Status("trained here", "good", "tick")


class Place(NamedTuple):
    """A placement of a spec. `price` is for an hour, as the attempts there noted it."""

    where: str
    capacity: str
    price: str
    status: Status
    tries: int


class Placed(NamedTuple):
    """Why the newest attempt is where it is, in a sentence; the machine; and every place of the spec."""

    sentence: str
    machine: str
    places: list[Place]


def placed(record: Record, spec: JobSpec | None) -> Placed | None:
    """Return why a run is where it is; None before the first attempt, and for a spec that cannot be read."""
    if spec is None or not record.attempts:
        return None
    places: Sequence[Any] = spec.target.placements
    found = [_place(place, [a for a in record.attempts if a.placement == index]) for index, place in enumerate(places)]
    return Placed(_sentence(record.attempts, len(places)), _machine(spec), found)


def _machine(spec: JobSpec) -> str:
    found = spec.target.accelerators
    memory = f"{found.memory_gib:,g} GiB of accelerator memory in all"
    return f"{found.count} \N{MULTIPLICATION SIGN} {found.name}, {memory}"


def _place(place: Any, attempts: Sequence[Attempt]) -> Place:
    where = str(getattr(place, "zone", "") or place.region)
    capacity = str(getattr(place, "capacity", "")).replace("_", "-")
    if not attempts:
        return Place(where, capacity, UNKNOWN, NOT_TRIED, 0)
    last = attempts[-1]
    return Place(last.region, capacity, usd(last.usd_per_hour), _status(last), len(attempts))


def _status(last: Attempt) -> Status:
    if last.ended is None:
        return HERE if last.running else Status("waits here", "hold", "sand")
    if last.ending == "success":
        return TRAINED
    return Status(last.ending.lower().replace("_", " "), "off" if last.ending == "cancelled" else "fail", "cross")


def _sentence(attempts: Sequence[Attempt], places: int) -> str:
    """Attempts try the places in order. Only an attempt without capacity moves on to the next place."""
    moves = sum(_moved_on(attempt) for attempt in attempts[:-1])
    before = attempts[-2] if len(attempts) > 1 else None
    if before is None:
        return "The first place of the spec."
    if not _moved_on(before):
        why = str(before.ending or ErrorClass.INFRASTRUCTURE).lower().replace("_", " ")
        return f"Attempt {before.number} ended with {why}: the next attempt tries the same place again."
    rounds = moves // places + 1
    again = f", round {rounds} of the places" if rounds > 1 else ""
    return f"The place before had no capacity ({before.region}): place {attempts[-1].placement + 1} of {places}{again}."


def _moved_on(attempt: Attempt) -> bool:
    return attempt.moves_on
