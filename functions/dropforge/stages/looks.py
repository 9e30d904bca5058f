"""How soon a stage looks again at something that Google creates or deletes. The run's callback can end the wait."""

from __future__ import annotations

from datetime import datetime

SHORTEST_SECONDS, LONGEST_SECONDS = 2.0, 30.0
GROWTH = 3  # a wait is this many times the time waited so far
REASON_SECONDS = 10.0  # until the first look at why an attempt does not run yet
SHORTEST_TURN_SECONDS, LONGEST_TURN_SECONDS = 5.0, 300.0
TURNS = 20  # between two looks at what waits for its turn: the time waited so far divided by this number
PART = 8  # near the end, a look is late by at most the usual time divided by this number


def next_look(waited_seconds: float, usual_seconds: float) -> float:
    """Seconds until the next look at something that has been under way for `waited_seconds`.

    The first looks are soon, because the local stack and most failures take seconds. If the work takes longer
    than usual, the looks become rarer.
    """
    enough = max(usual_seconds, waited_seconds) / PART
    return max(SHORTEST_SECONDS, min(GROWTH * waited_seconds, enough, LONGEST_SECONDS))


def next_look_since(began: datetime, now: datetime, usual_seconds: float, ends: datetime | None = None) -> float:
    """Seconds until the next look at something that has been under way since `began`.

    It may last until `ends`, so the look is not later than that: what fails there costs money until the look.
    """
    look = next_look((now - began).total_seconds(), usual_seconds)
    return look if ends is None else min(look, (ends - now).total_seconds())


def next_turn(waited_seconds: float, shortest_seconds: float = SHORTEST_TURN_SECONDS) -> float:
    """Seconds until the next look at whether the turn of a run or a rollout has come, by the time waited so far.

    Others may take days, and Cloud Workflows ends an execution after 100,000 steps
    (https://cloud.google.com/workflows/quotas).
    """
    return max(shortest_seconds, min(waited_seconds / TURNS, LONGEST_TURN_SECONDS))


def next_reason(waited_seconds: float) -> float:
    """Seconds until the next look at why an attempt does not run yet: its reason is at most half as old as its wait."""
    return max(REASON_SECONDS, waited_seconds)
