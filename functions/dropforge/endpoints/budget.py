"""The budget of a named endpoint: what it may cost in each day or month."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from dropforge.base.changes import evolve
from dropforge.run.record import Stored
from dropforge.spec.parts import BudgetPeriod

ROUNDING_USD = 1e-6  # sums of floats differ from the price on paper
WARN_AT = 80  # percent


class Budget(Stored):
    """What an endpoint may cost in each period, in US dollars, and what it had cost before the present period.

    `by` is who has set it by a request; "": the spec of a model. It counts from `began`: the beginning of the period
    (UTC), or of the budget. `warned`: people know that WARN_AT percent are spent.
    """

    usd: float
    per: BudgetPeriod
    by: str
    asked: datetime
    began: datetime
    before_usd: float
    warned: bool = False

    def __str__(self) -> str:
        return f"{self.usd:g} USD a {self.per}"

    def in_period(self, began: datetime, cost_usd: float) -> Budget:
        """This budget in the period that began then, when the endpoint had cost so much."""
        return evolve(self, began=began, before_usd=cost_usd, warned=False)

    @property
    def ends(self) -> datetime:
        """When the present period ends."""
        begin = period(self.began, self.per)
        return period(begin + timedelta(days=1 if self.per == "day" else 31), self.per)


def period(time: datetime, per: BudgetPeriod) -> datetime:
    """The beginning of the day or month of a time, in UTC."""
    day = time.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day if per == "day" else day.replace(day=1)
