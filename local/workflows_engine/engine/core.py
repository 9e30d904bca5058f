"""What the engine's parts share: database, lease, clock, limits, and the inbox of the next round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..clock import Clock
from ..database import Database
from ..lease import Lease
from ..limits import Limits
from ..store import Store
from .inbox import Inbox


class Core:
    """`earliest` is a lower bound of the engine's time: the latest time in the database."""

    def __init__(self, db: Database, clock: Clock, limits: Limits) -> None:
        self.db = db
        self.store = Store(db)
        self.lease = Lease(db)
        self.clock = clock
        self.limits = limits
        self.inbox = Inbox()
        self.earliest = 0.0

    def now(self) -> float:
        """The clock's time, but never before the latest time in the database."""
        return max(self.clock.now(), self.earliest)

    @contextmanager
    def owned_transaction(self) -> Iterator[None]:
        """A transaction that raises LeaseLost if another engine has taken over the database."""
        with self.db.transaction():
            self.lease.check()
            yield
