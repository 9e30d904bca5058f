"""What stage `rollout` answers its workflow, beside `Pending`."""

from __future__ import annotations

from dropforge.run.record import RunError
from dropforge.stages.answers import Answer, Pending


class Promoted(Answer):
    """The revision gets every request."""

    status = "PROMOTED"
    url: str


class RolledBack(Answer):
    """The rollout has failed: the revision before gets every request, as it did all the time."""

    status = "ROLLED_BACK"
    error: RunError | None


class Suspended(Answer):
    """The endpoint has no instances: its budget is spent."""

    status = "SUSPENDED"


class Retired(Answer):
    """The endpoint does not exist any more."""

    status = "RETIRED"


class Superseded(Answer):
    """Another execution owns the rollout: the calling execution ends without touching anything."""

    status = "SUPERSEDED"
    execution: str | None


ROLLOUT_ANSWERS: tuple[type[Answer], ...] = (Promoted, RolledBack, Suspended, Retired, Superseded, Pending)
