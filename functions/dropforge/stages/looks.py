"""How soon a stage looks again at something that Google creates or deletes. The run's callback can end the wait."""

from __future__ import annotations

from datetime import datetime

SHORTEST_SECONDS, LONGEST_SECONDS = 2.0, 30.0
GROWTH = 3  # a wait is this many times the time waited so far
REASON_SECONDS = 10.0  # until the first look at why an attempt does not run yet
PART = 8  # at the end, a look is late by this part of the usual time at most


def next_look(waited_seconds: float, usual_seconds: float) -> float:
    """Seconds until the next look at something that has been under way for `waited_seconds`.

    The first looks are soon, because the local stack and most failures take seconds. What takes longer than usual is
    looked at less and less often.
    """
    enough = max(usual_seconds, waited_seconds) / PART
    return max(SHORTEST_SECONDS, min(GROWTH * waited_seconds, enough, LONGEST_SECONDS))


def next_look_since(began: datetime, now: datetime, usual_seconds: float) -> float:
    """Seconds until the next look at something that has been under way since `began`."""
    return next_look((now - began).total_seconds(), usual_seconds)


def next_reason(waited_seconds: float) -> float:
    """Seconds until the next look at why an attempt does not run yet: its reason is at most half as old as its wait."""
    return max(REASON_SECONDS, waited_seconds)
