"""The faults of a seed and their rates. Each kind is off in about half of the seeds, so that each occurs alone, too."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True)
class Faults:
    """Probabilities. The comment of each field says what it is a probability of."""

    refused: float = 0.0  # of a call: answered 429 or 5xx and not executed
    lost: float = 0.0  # of a call: executed, and its reply lost
    late: float = 0.0  # of a write: timed out, and executed later
    stalled: float = 0.0  # of a call: its caller is suspended for minutes
    killed: float = 0.0  # of a function instance: killed between two effects
    skewed: float = 0.0  # of a function instance: its machine's clock is off by a second or two
    duplicated: float = 0.0  # of a message: delivered twice
    delayed: float = 0.0  # of a message: delivered late, after others
    dropped: float = 0.0  # of a job event, or the event of an uploaded spec: never delivered
    forged: float = 0.0  # of a job event: a forged or malformed event comes with it
    stockout: float = 0.0  # of a placement: it has no capacity
    quota: float = 0.0  # of a creation: refused for quota
    slow_start: float = 0.0  # of a resource: minutes until it runs
    preempted: float = 0.0  # of an attempt: preempted with notice
    lost_machine: float = 0.0  # of an attempt: its machine is lost without notice
    silent: float = 0.0  # of an attempt: its container dies, and its platform reports that as little as it can
    unwritten: float = 0.0  # of an attempt on a TPU VM: the script does not write the end down
    code_error: float = 0.0  # of an attempt: fails permanently
    stuck: float = 0.0  # of an attempt: runs without progress
    deleted: float = 0.0  # of a resource: deleted by hand
    slow_end: float = 0.0  # of a deletion: takes minutes
    unready: float = 0.0  # of an endpoint: never answers a request
    restarts: float = 0.0  # of an hour: the engine restarts
    cancelled_execution: float = 0.0  # of a running execution, now and then: cancelled by hand
    doubled_sweep: float = 0.0  # of a sweep: two run at once
    cancels: float = 0.0  # of a run: a user cancels it
    deletes: float = 0.0  # of an uploaded spec: a user deletes it, at once or later
    overwrites: float = 0.0  # of an uploaded spec: a user uploads another spec under its name
    forged_cancels: float = 0.0  # of ids that no run has: a user cancels the id
    slack_down: float = 0.0  # of a Slack message: answered 5xx

    @classmethod
    def drawn(cls, source: random.Random) -> Faults:
        """The faults of a seed."""
        rates = {}
        for field in fields(cls):
            most = _MOST[field.name]
            draw, rate = source.random(), source.random()
            if draw < 0.5:
                rates[field.name] = most * rate
        return cls(**rates)


class Strike(NamedTuple):
    """The only fault of a life: its kind, and the effect that it strikes, counted from 1 over all functions."""

    effect: int
    fault: str


STRIKES = ("killed_before", "killed_after", "refused", "lost", "late", "stalled", "cancel", "restart", "sweep")

_MOST = {
    "refused": 0.06,
    "lost": 0.06,
    "late": 0.04,
    "stalled": 0.01,
    "killed": 0.3,
    "skewed": 0.5,
    "duplicated": 0.4,
    "delayed": 0.4,
    "dropped": 0.5,
    "forged": 0.3,
    "stockout": 0.6,
    "quota": 0.3,
    "slow_start": 0.5,
    "preempted": 0.5,
    "lost_machine": 0.4,
    "silent": 0.2,
    "unwritten": 0.5,
    "code_error": 0.3,
    "stuck": 0.2,
    "deleted": 0.2,
    "slow_end": 0.5,
    "unready": 0.3,
    "restarts": 4.0,
    "cancelled_execution": 0.3,
    "doubled_sweep": 0.5,
    "cancels": 0.6,
    "deletes": 0.6,
    "overwrites": 0.6,
    "forged_cancels": 0.6,
    "slack_down": 0.5,
}
