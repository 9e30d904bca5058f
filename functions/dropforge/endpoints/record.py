"""The record of a named endpoint: its revisions, its rollouts, and which revision serves.

A revision is the model of one run behind the name, or a list of adapters (shared.py). A rollout is one change of the
endpoint: it deploys a revision, goes back to the one before, or retires the endpoint. Rollouts take turns, in the order
of their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import Conflict, NotFound
from dropforge.platforms.named import Counted
from dropforge.run.origin import Copied
from dropforge.run.record import Parity, RunError, Stored
from dropforge.spec import parts

from .budget import ROUNDING_USD, WARN_AT, Budget, period
from .shared import Adapter, Base

KEPT_ROLLOUTS = 100  # ended ones that a record names
KEPT_REVISIONS = 100


class RolloutState(StrEnum):
    """The state of a rollout. The last four are terminal and written once."""

    QUEUED = "QUEUED"  # another rollout of the endpoint has not ended
    COPYING = "COPYING"  # the files of a model of another deployment are copied
    DEPLOYING = "DEPLOYING"  # the platform starts the revision, which has no share
    CHECKING = "CHECKING"  # the revision is asked for a completion, and compared with its model
    WATCHING = "WATCHING"  # the revision is a canary: it has a share of the requests
    SHIFTING = "SHIFTING"  # the revision gets the requests
    UNDOING = "UNDOING"  # the rollout has failed: the revision before gets every request
    SUSPENDING = "SUSPENDING"  # the budget of the endpoint is spent: its instances are ended
    RETIRING = "RETIRING"  # the endpoint is deleted
    PROMOTED = "PROMOTED"
    ROLLED_BACK = "ROLLED_BACK"
    SUSPENDED = "SUSPENDED"
    RETIRED = "RETIRED"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset({RolloutState.PROMOTED, RolloutState.ROLLED_BACK, RolloutState.SUSPENDED, RolloutState.RETIRED})
_ALLOWED = {
    RolloutState.QUEUED: {
        RolloutState.COPYING,
        RolloutState.DEPLOYING,
        RolloutState.CHECKING,
        RolloutState.SUSPENDING,
        RolloutState.RETIRING,
        RolloutState.ROLLED_BACK,
    },
    RolloutState.COPYING: {RolloutState.DEPLOYING, RolloutState.UNDOING},
    RolloutState.DEPLOYING: {RolloutState.CHECKING, RolloutState.UNDOING},
    RolloutState.CHECKING: {RolloutState.WATCHING, RolloutState.SHIFTING, RolloutState.UNDOING},
    RolloutState.WATCHING: {RolloutState.SHIFTING, RolloutState.UNDOING},
    RolloutState.SHIFTING: {RolloutState.PROMOTED, RolloutState.UNDOING},
    RolloutState.UNDOING: {RolloutState.ROLLED_BACK},
    RolloutState.SUSPENDING: {RolloutState.SUSPENDED},
    RolloutState.RETIRING: {RolloutState.RETIRED},
}
_STOPPABLE = frozenset({RolloutState.COPYING, RolloutState.DEPLOYING, RolloutState.CHECKING, RolloutState.WATCHING})
Kind = Literal["deploy", "rollback", "remove", "suspend", "resume", "retire"]


class EndpointState(StrEnum):
    """The state of a named endpoint."""

    NEW = "NEW"  # no revision was promoted yet
    SERVING = "SERVING"
    SUSPENDED = "SUSPENDED"  # its budget is spent: nothing answers, until the next period or a higher budget
    RETIRED = "RETIRED"


class Revision(Stored):
    """The model of a run behind the name.

    `revision` is the platform's own name, known once it runs. `digest` is the SHA-256 of the model's manifest. `origin`
    is where the model was copied from ("": it is of this deployment); the digest is then that of the manifest there.
    `who` is the source of the request. `adapters` are what a shared endpoint serves; `run` is then one of their runs,
    whose base all of them have. `start` has the seconds of each part of its server's start (run/starts.py).
    `paid_since` is when its instances may have begun to cost money, while they may; `spent_usd` is the most that they
    have cost before.
    """

    number: int
    run: str
    digest: str
    who: str
    requested: datetime
    revision: str = ""
    metrics: dict[str, float | None] = {}
    parity: Parity | None = None
    promoted: datetime | None = None
    usd_per_hour: float | None = None
    paid_since: datetime | None = None
    spent_usd: float = 0.0
    adapters: list[Adapter] = []
    origin: str = ""
    start: dict[str, float] = {}

    @property
    def runs(self) -> list[str]:
        """The runs whose models it serves."""
        return [each.run for each in self.adapters] or [self.run]

    def adapter(self, name: str) -> Adapter | None:
        """The adapter of that name."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def with_adapter(self, name: str, **changes: Any) -> Revision:
        """This revision with changed fields of an adapter."""
        changed = [evolve(each, **changes) if each.name == name else each for each in self.adapters]
        return evolve(self, adapters=changed)

    def cost(self, now: datetime) -> float | None:
        """The most that the revision has cost, in US dollars: as if all instances had run. None: no price is known."""
        if self.usd_per_hour is None:
            return None
        hours = (now - self.paid_since).total_seconds() / 3600 if self.paid_since else 0.0
        return self.spent_usd + self.usd_per_hour * max(0.0, hours)

    def cost_each(self, now: datetime) -> float | None:
        """The most that each of its models has cost: adapters share the cost of a revision equally."""
        cost = self.cost(now)
        return None if cost is None else cost / max(1, len(self.adapters))

    def paid(self, now: datetime) -> Revision:
        """This revision, whose instances may cost money from now on."""
        return self if self.paid_since else evolve(self, paid_since=now)

    def refused(self) -> Revision:
        """This revision, whose instances have not begun to cost money: the cloud has refused the request for them."""
        return evolve(self, paid_since=None)

    def unpaid(self, now: datetime) -> Revision:
        """This revision, which gets no requests from now on."""
        return evolve(self, paid_since=None, spent_usd=self.cost(now) or 0.0)


class Canary(Stored):
    """The share of the requests that a revision gets first, for how long, and how well it must answer them.

    The fields are those of `serve.canary` of a spec.
    """

    percent: int
    seconds: int
    max_error_rate: float
    max_latency_ratio: float


class Seen(Stored):
    """The requests to a canary and to the revision before, since the canary got its share."""

    canary: Counted
    before: Counted


class Rollout(Stored):
    """One change of an endpoint. `revision` is the number of the revision that it promotes; 0 before it began.

    `model` is what it takes from a shared endpoint, by its name. `run` is the run whose model is put there, or taken.

    `copied` is how far the copy of its model is (run/origin.py).

    `moved` is when every request went to the revision, at the latest, and `returned` when every request went back after
    a failure: where platforms need it, the revision that lost the requests then ends its answers.
    `canary` None: every request at once. `watched` is when the revision got its share. `ends` is the id of the canary
    that the request for a rollback has ended: the revision that serves then keeps serving.

    `refused` are the revisions for whose instances the cloud has refused every request so far: they cost nothing.
    """

    id: str
    kind: Kind
    who: str
    requested: datetime
    run: str = ""
    state: RolloutState = RolloutState.QUEUED
    revision: int = 0
    before: int = 0
    execution: str | None = None
    superseded: list[str] = []
    started: datetime | None = None
    deadline: datetime | None = None
    ended: datetime | None = None
    wait_reason: str = ""
    error: RunError | None = None
    canary: Canary | None = None
    watched: datetime | None = None
    moved: datetime | None = None
    returned: datetime | None = None
    seen: Seen | None = None
    ends: str = ""
    refused: list[int] = []
    model: str = ""
    copied: Copied = Copied()

    def entered(self, state: RolloutState, now: datetime) -> Rollout:
        """This rollout in `state`. Raises Conflict if `state` cannot follow the present state."""
        if state is self.state:
            return self
        if state not in _ALLOWED.get(self.state, ()):
            raise Conflict(f"rollout {self.id} is {self.state}; it cannot become {state}")
        ended = {"ended": now, "wait_reason": ""} if state.is_terminal else {}
        return evolve(self, state=state, started=self.started or now, **ended)


class EndpointRecord(Stored):
    """Everything that dropforge knows about a named endpoint.

    `source` is where the specs of its models come from: a topic, or "" for the specs bucket. `type` and `region` never
    change: they are part of the URL. `stable` is the number of the revision that serves, and `previous` of the one that
    a rollback promotes; 0: there is none. `expires` None: the endpoint stays until it is retired. `dropped_usd` is what
    the revisions have cost that this record no longer has. `suspended` is since when the budget allows no instance.
    `base` is what the adapters of a shared endpoint have in common; None for an endpoint with one model.
    """

    name: str
    source: str
    type: str
    region: str
    service: str
    created: datetime
    url: str = ""
    stable: int = 0
    previous: int = 0
    revisions: list[Revision] = []
    rollouts: list[Rollout] = []
    dropped_usd: float = 0.0
    budget: Budget | None = None
    expires: datetime | None = None
    suspended: datetime | None = None
    retired: datetime | None = None
    base: Base | None = None

    @property
    def state(self) -> EndpointState:
        if self.retired:
            return EndpointState.RETIRED
        if self.suspended:
            return EndpointState.SUSPENDED
        return EndpointState.SERVING if self.stable else EndpointState.NEW

    @property
    def base_url(self) -> str:
        """The base URL for clients of the OpenAI API; "" before the first promotion."""
        return f"{self.url}/v1" if self.url else ""

    @property
    def current(self) -> Rollout | None:
        """The rollout whose turn it is; None if every rollout has ended."""
        return next((rollout for rollout in self.rollouts if not rollout.state.is_terminal), None)

    @property
    def serving(self) -> Revision | None:
        """The revision that serves."""
        return self.find_revision(self.stable)

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that a shared endpoint serves; none for an endpoint with one model."""
        return self.serving.adapters if self.serving else []

    def find(self, rollout: str) -> Rollout | None:
        return next((each for each in self.rollouts if each.id == rollout), None)

    def rollout(self, rollout: str) -> Rollout:
        """The rollout with this id. Raises NotFound."""
        if (found := self.find(rollout)) is None:
            raise NotFound(f"endpoint {self.name} has no rollout {rollout}")
        return found

    def find_revision(self, number: int) -> Revision | None:
        return next((revision for revision in self.revisions if revision.number == number), None)

    def revision(self, number: int) -> Revision:
        """The revision with this number. Raises NotFound."""
        if (found := self.find_revision(number)) is None:
            raise NotFound(f"endpoint {self.name} has no revision {number}")
        return found

    @property
    def last(self) -> int:
        """The number of the newest revision; 0: there is none."""
        return max((revision.number for revision in self.revisions), default=0)

    @property
    def paid(self) -> set[int]:
        """The numbers of the revisions whose instances may cost money now."""
        return {revision.number for revision in self.revisions if revision.paid_since}

    @property
    def kept(self) -> set[str]:
        """The cloud's names of the revisions that stay: the one that serves, and the one for a rollback."""
        found = map(self.find_revision, (self.stable, self.previous))
        return {revision.revision for revision in found if revision is not None}

    def cost(self, now: datetime) -> float | None:
        """The most that all revisions have cost, in US dollars; None if a price is unknown."""
        costs = [revision.cost(now) for revision in self.revisions]
        return None if None in costs else round(self.dropped_usd + sum(cost or 0.0 for cost in costs), 6)

    def spent(self, now: datetime) -> float | None:
        """The most that the endpoint has cost in the present period of its budget; None without a budget or a price."""
        cost, current = self.cost(now), self.in_period(now).budget
        return None if cost is None or current is None else max(0.0, cost - current.before_usd)

    def is_spent(self, now: datetime, percent: int = 100) -> bool:
        """Whether so much of the budget is spent."""
        spent = self.spent(now)
        return spent is not None and self.budget is not None and spent >= self.budget.usd * percent / 100 - ROUNDING_USD

    def is_to_warn(self, now: datetime) -> bool:
        """Whether people must hear that WARN_AT percent of the budget are spent."""
        current = self.in_period(now).budget
        return current is not None and not current.warned and self.is_spent(now, WARN_AT)

    def in_period(self, now: datetime) -> EndpointRecord:
        """This record, whose budget counts the present period.

        Each change that ends the costs of a revision comes after this one, so the cost at the period's beginning is
        exact.
        """
        if self.budget is None or (began := period(now, self.budget.per)) <= self.budget.began:
            return self
        return evolve(self, budget=self.budget.in_period(began, self.cost(began) or 0.0))

    def with_budget(self, budget: parts.Budget | None, by: str, now: datetime) -> EndpointRecord:
        """This record with a budget that `by` has set. It counts from now if the budget before had another period."""
        if budget is None:
            return evolve(self, budget=None)
        old = self.in_period(now).budget
        is_kept = old is not None and old.per == budget.per
        began, before = (old.began, old.before_usd) if old is not None and is_kept else (now, self.cost(now) or 0.0)
        wanted = Budget(usd=budget.usd, per=budget.per, by=by, asked=now, began=began, before_usd=before)
        return evolve(self, budget=wanted)

    def with_budget_of_spec(self, budget: parts.Budget | None, now: datetime) -> EndpointRecord:
        """This record with the budget of a spec, unless a request has set one, or the record has it already."""
        old = self.budget
        if budget is None or (old is not None and (old.by or (old.usd, old.per) == (budget.usd, budget.per))):
            return self
        return self.with_budget(budget, "", now)

    def with_warning(self, asked: datetime, now: datetime) -> EndpointRecord:
        """This record after people were warned about the budget that was asked for then."""
        current = self.in_period(now)
        if current.budget is None or current.budget.asked != asked:
            return self
        return evolve(current, budget=evolve(current.budget, warned=True))

    def cost_by_model(self, now: datetime) -> dict[str, float | None]:
        """The most that each model of a shared endpoint has cost, in US dollars; None if a price is unknown."""
        costs: dict[str, list[float | None]] = {}
        for revision in self.revisions:
            for adapter in revision.adapters:
                costs.setdefault(adapter.name, []).append(revision.cost_each(now))
        return {
            name: None if None in each else round(sum(cost or 0.0 for cost in each), 6) for name, each in costs.items()
        }

    def with_rollout(self, rollout: Rollout) -> EndpointRecord:
        """This record with a new rollout at the end, or with a changed one in its place."""
        known = [each.id for each in self.rollouts]
        if rollout.id in known:
            changed = [rollout if each.id == rollout.id else each for each in self.rollouts]
            return evolve(self, rollouts=changed)
        ended = [each for each in self.rollouts if each.state.is_terminal][-KEPT_ROLLOUTS:]
        waiting = [each for each in self.rollouts if not each.state.is_terminal]
        return evolve(self, rollouts=[*ended, *waiting, rollout])

    def with_revision(self, number: int, change: Callable[[Revision], Revision]) -> EndpointRecord:
        """This record with a changed revision."""
        changed = [change(each) if each.number == number else each for each in self.revisions]
        return evolve(self, revisions=changed)

    def with_expiry(self, expires: datetime | None) -> EndpointRecord:
        """This record with another expiry, also of every model of a shared endpoint."""
        revisions = [
            evolve(revision, adapters=[evolve(each, expires=expires) for each in revision.adapters])
            for revision in self.revisions
        ]
        return evolve(self, expires=expires, revisions=revisions)

    def with_seals(self, number: int, name: str, expires: datetime) -> EndpointRecord:
        """This record, in which the adapters of a revision have passed their seals; the one of `name` has an expiry."""

        def passed(revision: Revision) -> Revision:
            sealed = [evolve(each, sealed=True) for each in revision.adapters]
            return evolve(revision, adapters=sealed).with_adapter(name, expires=expires)

        return self.with_revision(number, passed)

    @property
    def copies_to_drop(self) -> list[str]:
        """The runs with copied models that no revision needs, nor a rollout that has not ended."""
        ended = [each.run for each in self.rollouts if each.state.is_terminal]
        kept = {each.run for each in self.revisions if each.number in (self.stable, self.previous)}
        made = dict.fromkeys([*(each.run for each in self.revisions), *ended])
        awaited = {each.run for each in self.rollouts if not each.state.is_terminal}
        return [run for run in made if names.is_copy(run) and run not in kept | awaited]

    def claimed(self, rollout: str, execution: str) -> EndpointRecord:
        """This record, whose rollout `execution` owns if it has no owner. A superseded one never owns it again."""
        found = self.find(rollout)
        if found is None or found.execution or execution in found.superseded or found.state.is_terminal:
            return self
        return self.with_rollout(evolve(found, execution=execution))

    def released(self, rollout: str, execution: str) -> EndpointRecord:
        """This record, whose rollout lost its owner `execution`, which ended before the rollout did."""
        found = self.find(rollout)
        if found is None or found.execution != execution or found.state.is_terminal:
            return self
        superseded = [*found.superseded, execution]
        return self.with_rollout(evolve(found, execution=None, superseded=superseded))

    def entered(self, rollout: str, state: RolloutState, now: datetime) -> EndpointRecord:
        """This record with a rollout in `state`. Raises Conflict if `state` cannot follow its present state."""
        found = self.rollout(rollout)
        return self if found.state is state else self.with_rollout(found.entered(state, now))

    def began(self, rollout: str, revision: Revision, deadline: datetime, now: datetime) -> EndpointRecord:
        """This record with the revision of a rollout that deploys: its instances may cost money from now on.

        A rollout that deploys already stays as it is: the reply about its write may have been lost.
        """
        found = self.rollout(rollout)
        if found.state is RolloutState.DEPLOYING:
            return self
        begun = found.entered(RolloutState.DEPLOYING, now)
        begun = evolve(begun, revision=revision.number, before=self.stable, deadline=deadline, started=now)
        kept = [each for each in self.revisions if each.number in (self.stable, self.previous) or each.paid_since]
        others = [each for each in self.revisions if each not in kept]
        dropped = sum(each.spent_usd for each in others[:-KEPT_REVISIONS])
        revisions = sorted([*kept, *others[-KEPT_REVISIONS:]], key=lambda each: each.number)
        update = {"revisions": [*revisions, revision.paid(now)], "dropped_usd": self.dropped_usd + dropped}
        return evolve(self, **update).with_rollout(begun)

    def with_refusal(self, rollout: str, numbers: set[int], reason: str) -> EndpointRecord:
        """This record, in which the cloud has refused a request of a rollout; the same record if nothing changes.

        `numbers` are the revisions for whose instances it has refused every request so far.
        """
        found = self.rollout(rollout)
        refused = sorted({*found.refused, *numbers})
        if (found.refused, found.wait_reason) == (refused, reason):
            return self
        revisions = [each.refused() if each.number in numbers else each for each in self.revisions]
        noted = evolve(found, refused=refused, wait_reason=reason)
        return evolve(self, revisions=revisions).with_rollout(noted)

    def with_request(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record before a rollout requests instances again, all of whose requests were refused up to now."""
        found = self.rollout(rollout)
        if not found.refused or found.state not in (RolloutState.DEPLOYING, RolloutState.CHECKING):
            return self
        revisions = [each.paid(now) if each.number in found.refused else each for each in self.revisions]
        asked = evolve(found, refused=[])
        return evolve(self, revisions=revisions).with_rollout(asked)

    def copies(self, rollout: str, deadline: datetime, now: datetime) -> EndpointRecord:
        """This record with a rollout that copies its model first; one that copies already stays as it is."""
        found = self.rollout(rollout)
        if found.state is not RolloutState.QUEUED:
            return self
        begun = found.entered(RolloutState.COPYING, now)
        return self.with_rollout(evolve(begun, before=self.stable, deadline=deadline))

    def with_copied(self, rollout: str, copied: Copied) -> EndpointRecord:
        """This record with the progress of the copy of a rollout's model."""
        found = self.rollout(rollout)
        if found.state is not RolloutState.COPYING or found.copied == copied:
            return self
        return self.with_rollout(evolve(found, copied=copied))

    def returns(self, rollout: str, deadline: datetime, now: datetime, keeps_instances: bool = False) -> EndpointRecord:
        """This record with a rollout that goes back to the previous revision, or from a canary to the one that serves.

        A rollout that resumes goes back to the one that serves. With `keeps_instances`, the revision for a rollback
        then has instances, too. Raises NotFound if there is no revision to go back to.
        """
        revision = self.revision(self.back(self.rollout(rollout)))
        begun = self.rollout(rollout).entered(RolloutState.CHECKING, now)
        begun = evolve(begun, revision=revision.number, before=self.stable, deadline=deadline)
        resumed = evolve(self.in_period(now), suspended=None)
        numbers = [revision.number, *([self.previous] if self.suspended and keeps_instances else [])]
        for number in numbers:
            resumed = resumed.with_revision(number, lambda each: each.paid(now))
        return resumed.with_rollout(begun)

    def back(self, rollout: Rollout) -> int:
        """The number of the revision to which a rollback returns; 0: there is none."""
        return self.stable if rollout.ends or rollout.kind == "resume" else self.previous

    def without_canary(self, error: RunError, now: datetime) -> tuple[EndpointRecord, str]:
        """This record after a request has ended the canary, and the rollout of the canary; "" if there is none."""
        current = self.current
        if current is None or current.state is not RolloutState.WATCHING:
            return self, ""
        return self.failed(current.id, error, now), current.id

    def without_rollout(self, error: RunError, now: datetime) -> EndpointRecord:
        """This record, whose present rollout fails unless it moves the requests already."""
        current = self.current
        return self if current is None or current.state not in _STOPPABLE else self.failed(current.id, error, now)

    @property
    def is_stopping(self) -> bool:
        """Whether the endpoint is suspended, or will be."""
        return self.suspended is not None or any(
            rollout.kind == "suspend" and not rollout.state.is_terminal for rollout in self.rollouts
        )

    def watches(self, rollout: str, deadline: datetime, now: datetime) -> EndpointRecord:
        """This record with a rollout whose revision becomes a canary."""
        found = self.rollout(rollout).entered(RolloutState.WATCHING, now)
        return self.with_rollout(evolve(found, deadline=deadline))

    def with_share(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record with the time at which the revision of a rollout got its share; a noted time stays."""
        found = self.rollout(rollout)
        return self.with_rollout(evolve(found, watched=found.watched or now))

    def has_moved(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record with the time at which every request went to the revision of a rollout; a noted time stays."""
        found = self.rollout(rollout)
        return self.with_rollout(evolve(found, moved=found.moved or now))

    def has_returned(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record with the time at which every request went back after a failure; a noted time stays."""
        found = self.rollout(rollout)
        return self.with_rollout(evolve(found, returned=found.returned or now))

    def shifts(self, rollout: str, deadline: datetime, now: datetime) -> EndpointRecord:
        """This record with a rollout whose revision gets every request."""
        found = self.rollout(rollout).entered(RolloutState.SHIFTING, now)
        return self.with_rollout(evolve(found, deadline=deadline, wait_reason=""))

    def promoted(
        self,
        rollout: str,
        url: str,
        expires: datetime | None,
        now: datetime,
        keeps_instances: bool = False,
        keeps_revisions: bool = True,
    ) -> EndpointRecord:
        """This record after the revision of a rollout got every request.

        `keeps_instances`: the revision before keeps its instances, which cost money until it is deleted.
        `keeps_revisions`: a rollback can promote the revision before. A rollout that has ended changes nothing: this
        call was overtaken.
        """
        if self.rollout(rollout).state.is_terminal:
            return self
        new, old = self.rollout(rollout).revision, self.stable
        previous = (old if old != new else self.previous) if keeps_revisions else 0
        paid = {new, previous} if keeps_instances else {new}
        changed = self.paying(paid, now).with_revision(new, lambda each: evolve(each, promoted=now))
        update = {"stable": new, "previous": previous, "url": url, "expires": expires}
        return evolve(changed, **update).entered(rollout, RolloutState.PROMOTED, now)

    def failed(self, rollout: str, error: RunError, now: datetime) -> EndpointRecord:
        """This record with a rollout that failed; the first error stays. A queued one has changed nothing yet."""
        found = self.rollout(rollout)
        if found.state.is_terminal or found.error is not None:
            return self
        state = RolloutState.ROLLED_BACK if found.state is RolloutState.QUEUED else RolloutState.UNDOING
        # The requests may have gone to the revision, though nobody has noted that.
        moved = found.moved or (now if found.state is RolloutState.SHIFTING else None)
        return self.with_rollout(evolve(found, error=error, moved=moved).entered(state, now))

    def undone(self, rollout: str, now: datetime, keeps_instances: bool = False) -> EndpointRecord:
        """This record after a failed rollout was undone: its revision gets no requests.

        `keeps_instances`: the revision for a rollback keeps its instances, which cost money until it is deleted.
        """
        changed = self.entered(rollout, RolloutState.ROLLED_BACK, now)
        paid = {self.stable, self.previous} if keeps_instances else {self.stable}
        number = self.rollout(rollout).revision
        if number in paid:
            return changed
        return changed.in_period(now).with_revision(number, lambda each: each.unpaid(now))

    def paying(self, numbers: set[int], now: datetime) -> EndpointRecord:
        """This record, in which only these revisions may cost money from now on."""
        changed = self.in_period(now)
        for revision in self.revisions:
            if revision.paid_since and revision.number not in numbers:
                changed = changed.with_revision(revision.number, lambda each: each.unpaid(now))
        return changed

    def suspends(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record with a rollout that ends the instances of the endpoint."""
        begun = self.rollout(rollout).entered(RolloutState.SUSPENDING, now)
        return self.with_rollout(evolve(begun, revision=self.stable, before=self.stable))

    def stopped(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record after the instances of the endpoint have ended; an ended rollout changes nothing."""
        if self.rollout(rollout).state.is_terminal:
            return self
        ended = self.paying(set(), now).entered(rollout, RolloutState.SUSPENDED, now)
        return evolve(ended, suspended=now)

    def gone(self, rollout: str, now: datetime) -> EndpointRecord:
        """This record after the endpoint was deleted."""
        changed = self.paying(set(), now).entered(rollout, RolloutState.RETIRED, now)
        update = {"retired": now, "suspended": None, "stable": 0, "previous": 0, "expires": None}
        return evolve(changed, **update)
