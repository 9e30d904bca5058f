"""The faults of a seed and their rates. Each kind is off in about half of the seeds, so that each occurs alone, too."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


def _up_to(most: float) -> Any:
    """A probability, 0 unless drawn; a seed draws at most this."""
    return field(default=0.0, metadata={"most": most})


@dataclass(frozen=True)
class Faults:
    """Probabilities. The comment of each field says what it is a probability of."""

    refused: float = _up_to(0.06)  # of a call: answered 429 or 5xx and not executed
    lost: float = _up_to(0.06)  # of a call: executed, and its reply lost
    late: float = _up_to(0.04)  # of a write: timed out, and executed later
    stalled: float = _up_to(0.01)  # of a call: its caller is suspended for minutes
    killed: float = _up_to(0.3)  # of a function instance: killed between two effects
    skewed: float = _up_to(0.5)  # of a function instance: its machine's clock is off by a second or two
    duplicated: float = _up_to(0.4)  # of a message: delivered twice
    delayed: float = _up_to(0.4)  # of a message: delivered late, after others
    dropped: float = _up_to(0.5)  # of a job event, or the event of an uploaded spec: never delivered
    forged: float = _up_to(0.3)  # of a job event: a forged or malformed event comes with it
    stockout: float = _up_to(0.6)  # of a placement: it has no capacity
    quota: float = _up_to(0.3)  # of a creation: refused for quota
    slow_start: float = _up_to(0.5)  # of a resource: minutes until it runs
    preempted: float = _up_to(0.5)  # of an attempt: preempted with notice
    lost_machine: float = _up_to(0.4)  # of an attempt: its machine is lost without notice
    silent: float = _up_to(0.2)  # of an attempt: its container dies, and its platform reports that as little as it can
    unwritten: float = _up_to(0.5)  # of an attempt on a TPU VM: the script does not write the end down
    code_error: float = _up_to(0.3)  # of an attempt: fails permanently
    stuck: float = _up_to(0.2)  # of an attempt: runs without progress
    deleted: float = _up_to(0.2)  # of a resource: deleted by hand
    slow_end: float = _up_to(0.5)  # of a deletion: takes minutes
    unready: float = _up_to(0.3)  # of an endpoint: never answers a request
    restarts: float = _up_to(4.0)  # of an hour: the engine restarts
    cancelled_execution: float = _up_to(0.3)  # of a running execution, now and then: cancelled by hand
    doubled_sweep: float = _up_to(0.5)  # of a sweep: two run at once
    cancels: float = _up_to(0.6)  # of a run: a user cancels it
    deletes: float = _up_to(0.6)  # of an uploaded spec: a user deletes it, at once or later
    overwrites: float = _up_to(0.6)  # of an uploaded spec: a user uploads another spec under its name
    forged_cancels: float = _up_to(0.6)  # of ids that no run has: a user cancels the id
    slack_down: float = _up_to(0.5)  # of a Slack message: answered 5xx
    sudden: float = _up_to(0.5)  # of an attempt: it ends within a second of its start

    @classmethod
    def drawn(cls, source: random.Random) -> Faults:
        """The faults of a seed."""
        rates = {}
        for fault in fields(cls):
            draw, rate = source.random(), source.random()
            if draw < 0.5:
                rates[fault.name] = fault.metadata["most"] * rate
        return cls(**rates)


class Strike(NamedTuple):
    """The only fault of a life: its kind, and the effect that it strikes, counted from 1 over all functions."""

    effect: int
    fault: str


STRIKES = ("killed_before", "killed_after", "refused", "lost", "late", "stalled", "cancel", "restart", "sweep")
