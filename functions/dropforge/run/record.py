"""A run's state, record and ledger. store.py keeps record and ledger in the runs bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import Conflict, ErrorClass
from dropforge.base.redact import cut

from .events import Told

Limit = Literal["max_duration", "max_cost_usd"]  # fields of a spec's `limits`
END_TOLD = "end"  # the notice key of a record whose end was announced
WAITING_SECONDS = 30  # between two notes that an attempt waits
MAX_REASON = 500  # characters of a reason for waiting: a cloud's text, which may be of any length
KEPT_IDS = 100  # superseded executions that a record names: calls of older executions have ended


class RunState(StrEnum):
    """The state of a run. The last four states are terminal and written once."""

    ACCEPTED = "ACCEPTED"
    PROVISIONING = "PROVISIONING"
    TRAINING = "TRAINING"
    DEPLOYING = "DEPLOYING"
    TEARING_DOWN = "TEARING_DOWN"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    REJECTED = "REJECTED"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.REJECTED})
_ALLOWED = {
    RunState.ACCEPTED: {RunState.PROVISIONING, RunState.TEARING_DOWN, RunState.CANCELLED},
    RunState.PROVISIONING: {RunState.TRAINING, RunState.DEPLOYING, RunState.TEARING_DOWN},
    RunState.TRAINING: {RunState.PROVISIONING, RunState.DEPLOYING, RunState.TEARING_DOWN},
    RunState.DEPLOYING: {RunState.TEARING_DOWN},
    RunState.TEARING_DOWN: {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED},
}


class Stored(BaseModel):
    """Base class of stored documents. Unknown fields are errors, so that the document of a newer version is noticed."""

    model_config = ConfigDict(extra="forbid")


class RunError(Stored):
    """Why a run failed, for people: the cause, the class of the failure, and a hint for the next step."""

    error_class: ErrorClass
    message: Told
    hint: Told = ""


class Transition(Stored):
    """A state that the run entered, and the time."""

    state: RunState
    time: datetime
    attempt: int = 0


class Attempt(Stored):
    """One launch of the training.

    `limit` names the limit that decides the deadline. `launched`: when a call first saw the resources, if that took
    longer than WAITING_SECONDS; the wait for capacity begins then. `waiting`: when a call last saw no running machine.
    `wait_reason`: why no machine ran, in the cloud's own words; it stays if the attempt ends before it runs.
    `refused`: the cloud has refused every request for its machines so far, so nothing was created.
    `running`: the earliest time at which the machine may have started; the cost counts from then.
    `seen`: when a call first saw all machines running, unless the container reported its start. The time without
    progress (`limits.stuck_after`) counts from then.
    """

    number: int
    placement: int
    region: str
    started: datetime
    deadline: datetime
    limit: Limit = "max_duration"
    usd_per_hour: float | None = None
    max_wait_seconds: int | None = None
    launched: datetime | None = None
    waiting: datetime | None = None
    refused: bool = False
    running: datetime | None = None
    seen: datetime | None = None
    ended: datetime | None = None
    error: RunError | None = None
    cancelled: bool = False  # a user ended the run, and with it the attempt
    wait_reason: str = ""

    @property
    def ending(self) -> str:
        """How the attempt ended: "success", "cancelled" or the class of its error; "" while it has not ended."""
        if self.ended is None:
            return ""
        if self.error is not None:
            return str(self.error.error_class)
        return "cancelled" if self.cancelled else "success"

    @property
    def moves_on(self) -> bool:
        """Whether the next attempt uses the next placement: this one had no machine, for lack of machines or not."""
        return self.error is not None and (self.error.error_class.moves_on or self.refused)

    def is_noted_waiting(self, at: datetime) -> bool:
        """Whether the wait is noted up to about that time. A running or ended attempt needs no note."""
        noted = (self.waiting or self.started) + timedelta(seconds=WAITING_SECONDS)
        return self.running is not None or self.ended is not None or at < noted

    def cost(self, now: datetime) -> float | None:
        """US dollars so far, at the price that the record noted at the attempt's start; None if the price is unknown.

        Waiting for capacity costs nothing, nor does a refusal. If an attempt ended before it was seen running, and not
        for lack of capacity, its machine may have run since the attempt was last seen waiting.
        """
        if self.usd_per_hour is None:
            return None
        waited = self.ended is None or self.refused or self.moves_on
        if self.running is None and waited:
            return 0.0
        spent = (self.ended or now) - (self.running or self.waiting or self.started)
        return self.usd_per_hour * max(0.0, spent.total_seconds()) / 3600


class Endpoint(Stored):
    """The served model. `start` has the seconds of each part of its server's start (run/starts.py)."""

    url: str
    model: str
    service: str
    region: str
    ready: datetime
    expires: datetime
    limit: Literal["ttl", "max_cost_usd"] = "ttl"  # the limit that decides the expiry
    ended: datetime | None = None
    start: dict[str, float] = {}

    @property
    def base_url(self) -> str:
        """The base URL for clients of the OpenAI API."""
        return f"{self.url}/v1"


class Parity(Stored):
    """The comparison of an endpoint with the seal of its model (run/seal.py).

    `rows` and `tokens` are compared so far; `divergence` is their mean, `limit` its bound and `floor` the noise of
    another attention kernel, all in nats. `farthest` is the token that diverges most, by `farthest_divergence`. `ties`
    counts near-ties in which the endpoint chose the other token. `links` has what the container measured at the export.
    `reason` says why a model is unsealed.
    """

    state: Literal["checking", "sealed", "unsealed", "failed"]
    reason: str = ""
    rows: int = 0
    tokens: int = 0
    ties: int = 0
    divergence: float = 0.0
    farthest: str = ""
    farthest_divergence: float = -1.0
    limit: float | None = None
    floor: float | None = None
    links: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        return self.state != "checking"


class Tone(StrEnum):
    """How a channel marks a notice."""

    WARNING = "warning"
    NEWS = "news"  # something has begun, or has ended as a user wanted
    SUCCESS = "success"


class Notice(NamedTuple):
    """A message to people about a run that continues, sent once. `key` is unique within the run.

    `actions` are commands to copy, by what they do, and `cost` says what it is about costs; empty: those of the run.
    """

    key: str
    headline: str
    text: str
    tone: Tone = Tone.WARNING
    actions: dict[str, str] = {}
    cost: str = ""


class Queued(Stored):
    """The wait of an accepted run: a rule of the policy, and the run's number among those that wait for this rule."""

    rule: str
    place: int
    since: datetime


class About(Stored):
    """The part of a spec that lists of runs show.

    `metric` is the metric of its gate, or "". `most_usd` is the maximum cost, at the prices of the acceptance; None if
    a price is unknown.
    """

    target: str
    model: str
    labels: dict[str, str] = {}
    metric: str = ""
    most_usd: float | None = None


class Outcome(Stored):
    """How a run ends once its resources are deleted: decided before the teardown begins."""

    state: RunState
    error: RunError | None = None


class ResourceState(StrEnum):
    INTENDED = "intended"  # the create call follows; the resource may exist
    CREATED = "created"  # a call saw that the resource exists
    GONE = "gone"  # a call saw, after the deletion, that the resource does not exist


class LedgerEntry(Stored):
    """A cloud resource of a run. `name` is the full resource name; `kind` decides which platform deletes it.

    `kept`: the resource was created to train, and serves now.
    """

    kind: str
    name: str
    attempt: int
    state: ResourceState
    intended: datetime
    created: datetime | None = None
    gone: datetime | None = None
    kept: bool = False

    def is_endpoint(self, run: str) -> bool:
        """Whether the resource is part of the run's endpoint."""
        return self.kept or names.is_endpoint(self.name, run)


class Ledger(Stored):
    """Every resource that a run ever intended to create; an entry is written before the create call.

    It is part of the run's record.
    """

    run: str
    entries: list[LedgerEntry] = []

    def find(self, name: str) -> LedgerEntry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def remaining(self) -> list[LedgerEntry]:
        return [entry for entry in self.entries if entry.state is not ResourceState.GONE]

    def up_to(self, attempt: int) -> Ledger:
        """This ledger without the resources of later attempts."""
        return evolve(self, entries=[entry for entry in self.entries if entry.attempt <= attempt])

    def with_entry(self, entry: LedgerEntry) -> Ledger:
        others = [e for e in self.entries if e.name != entry.name]
        return evolve(self, entries=[*others, entry])

    def with_intents(self, resources: Iterable[tuple[str, str]], attempt: int, now: datetime) -> Ledger:
        """This ledger with the intent to create resources, by kind and name, that it does not have or that are gone."""
        ledger = self
        for kind, name in resources:
            known = ledger.find(name)
            if known is None or known.state is ResourceState.GONE:
                state = ResourceState.INTENDED
                entry = LedgerEntry(kind=kind, name=name, attempt=attempt, state=state, intended=now)
                ledger = ledger.with_entry(entry)
        return ledger

    def with_state(self, names: Iterable[str], state: ResourceState, now: datetime) -> Ledger:
        """This ledger with the note that resources were seen to exist (CREATED), or seen not to exist (GONE)."""
        ledger, field = self, "created" if state is ResourceState.CREATED else "gone"
        for name in names:
            entry = ledger.find(name)
            if entry is not None and entry.state not in (state, ResourceState.GONE):
                ledger = ledger.with_entry(evolve(entry, state=state, **{field: now}))
        return ledger

    def with_created(self, attempt: int, now: datetime) -> Ledger:
        """This ledger with the note that the resources of an attempt were seen to exist."""
        return self.with_state([e.name for e in self.entries if e.attempt == attempt], ResourceState.CREATED, now)

    def with_kept(self, names: Iterable[str]) -> Ledger:
        """This ledger with the note that training resources serve from now on."""
        ledger = self
        for name in names:
            entry = ledger.find(name)
            if entry is not None and not entry.kept:
                ledger = ledger.with_entry(evolve(entry, kept=True))
        return ledger


# The fields of a spec that end a run, by the class of its error.
_ENDING_FIELDS = {
    ErrorClass.BUDGET: "limits.max_cost_usd",
    ErrorClass.DEADLINE: "limits.max_duration",
    ErrorClass.STUCK: "limits.stuck_after",
    ErrorClass.GATE: "evaluation.gate",
    ErrorClass.PARITY: "the parity check",
}


class Cause(NamedTuple):
    """Who or what requests the end of a run: in words, and the person if the console names one."""

    text: str = ""
    person: str = ""


class Source(Stored):
    """The origin of the request for a run.

    `text` says it to people. `topic` is the topic of a message, "" for the specs bucket; `submitter` is who dropped the
    spec in the console, "" where no console says who.
    """

    text: Told
    topic: str = ""
    submitter: str = ""


class Record(Stored):
    """Everything that dropforge knows about a run. `history` starts with ACCEPTED, or with a terminal state."""

    run: str
    name: str
    source: str  # where the request came from, for people
    state: RunState
    created: datetime
    history: list[Transition]
    topic: str = ""  # of the request; "": the run is from the specs bucket
    origin: str = ""  # the address of the model that was copied from another deployment; "": the run trained
    execution: str | None = None
    superseded: list[str] = []
    callback_url: str | None = None
    cancel_requested: datetime | None = None
    cancelled_by: str = ""  # who requested it in the console; "": no console says who
    cancel_cause: str = ""  # who or what requested it, for people: a person, a message and its topic, a deleted object
    submitter: str = ""  # who dropped the spec in the console; "": no console says who
    attempts: list[Attempt] = []
    metrics: dict[str, float | None] = {}
    endpoint: Endpoint | None = None
    endpoint_wait_reason: str = ""  # why the endpoint is not ready yet, in the cloud's own words
    endpoint_refused: bool = False  # the cloud has refused every request for the endpoint so far
    endpoint_asked: datetime | None = None  # when the endpoint was requested again after refusals
    parity: Parity | None = None
    outcome: Outcome | None = None
    queued: Queued | None = None
    placed: datetime | None = None  # when the run got a place, if the policy limits the number of runs or their money
    serving_usd_per_hour: float | None = None  # for the maximum number of instances
    error: RunError | None = None
    problems: list[dict[str, JsonValue]] = []
    notices: list[str] = []
    resources: list[LedgerEntry] = []  # the ledger
    about: About | None = None  # None: the run was never accepted
    spec: dict[str, JsonValue] | None = None  # the accepted spec; None: it is an object of its own
    # The day of the key from which the run's key derives (run/proof.py); "": the run was never accepted.
    key_day: str = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")

    @property
    def ended_by(self) -> str:
        """Who or what has ended the run or its endpoint, or ends it now; "" if it ended by itself, and before its end.

        A limit or a check is named by its field of the spec.
        """
        if self.cancel_requested is not None:
            return self.cancel_cause
        error = self.error or (self.outcome.error if self.outcome else None)
        return "" if error is None else _ENDING_FIELDS.get(error.error_class, "")

    @property
    def attempt(self) -> int:
        """The number of the latest attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def wait_reason(self) -> str:
        """Why the attempt that is opened, or the endpoint that is created, does not run yet; "" if nothing waits.

        Of a finished run: what its last attempt, or its endpoint, waited for when the run ended.
        """
        if self.endpoint is not None or not self.attempts:
            return ""
        return self.endpoint_wait_reason or self.attempts[-1].wait_reason

    @property
    def serving_began(self) -> datetime | None:
        """The earliest time at which the endpoint may exist; None without one, or if every request was refused."""
        if self.endpoint_refused:
            return None
        return self.endpoint_asked or next((t.time for t in self.history if t.state is RunState.DEPLOYING), None)

    @property
    def began(self) -> datetime:
        """When the time of `limits.max_duration` began: waiting for a place does not count."""
        return self.placed or self.created

    @property
    def ledger(self) -> Ledger:
        return Ledger(run=self.run, entries=self.resources)

    def with_ledger(self, change: Callable[[Ledger], Ledger]) -> Record:
        """This record with a changed ledger; the same record if nothing changes."""
        ledger = self.ledger
        changed = change(ledger)
        return self if changed is ledger else evolve(self, resources=changed.entries)

    def entered(self, state: RunState, now: datetime) -> Record:
        """This record in `state`. Entering the present state changes nothing; a terminal state ends every attempt.

        Raises Conflict if `state` cannot follow the present state, which is above all the case for a terminal state.
        """
        if state is self.state:
            return self
        if state not in _ALLOWED.get(self.state, ()):
            raise Conflict(f"run {self.run} is {self.state}; it cannot become {state}")
        moved = Transition(state=state, time=now, attempt=self.attempt)
        attempts = self.attempts
        if state.is_terminal:  # an attempt may still be open, after a cancel for example; its resources are deleted
            attempts = [a if a.ended else self._stopped(a, now) for a in attempts]
        changes = {"state": state, "history": [*self.history, moved], "attempts": attempts, "queued": None}
        return evolve(self, **changes)

    def claimed(self, execution: str) -> Record:
        """This record, owned by `execution` if it has no owner. A superseded execution never owns the run again."""
        if self.execution is not None or execution in self.superseded or self.state.is_terminal:
            return self
        return evolve(self, execution=execution)

    def released(self, execution: str) -> Record:
        """This record without its owner `execution`, which ended before the run did."""
        if self.execution != execution or self.state.is_terminal:
            return self
        return evolve(self, execution=None, superseded=[*self.superseded, execution][-KEPT_IDS:])

    def with_callback(self, execution: str, url: str) -> Record:
        """This record with the callback of the execution that owns it."""
        if self.execution != execution or self.state.is_terminal or self.callback_url == url:
            return self
        return evolve(self, callback_url=url)

    def with_wait(self, rule: str, place: int, now: datetime) -> Record:
        """This record of an accepted run with what it waits for."""
        if self.state is not RunState.ACCEPTED or (
            self.queued and (self.queued.rule, self.queued.place) == (rule, place)
        ):
            return self
        since = self.queued.since if self.queued else now
        return evolve(self, queued=Queued(rule=rule, place=place, since=since))

    def with_place(self, now: datetime) -> Record:
        """This record of an accepted run that got a place; a noted time stays."""
        if self.state is not RunState.ACCEPTED or self.placed:
            return self
        return evolve(self, queued=None, placed=now)

    def with_notice(self, key: str) -> Record:
        """This record with the note that a notice was sent."""
        return self if key in self.notices else evolve(self, notices=[*self.notices, key])

    def with_end(self, attempt: int, error: RunError | None, now: datetime) -> Record:
        """This record with the end of an attempt. The first noted end stays; a terminal record does not change."""
        return self._with_attempt(attempt, lambda a: evolve(a, ended=a.ended or now, error=a.error or error))

    def with_stop(self, attempt: int, now: datetime) -> Record:
        """This record with the end of an attempt that neither succeeded nor failed: its run ends."""
        return self._with_attempt(attempt, lambda a: a if a.ended else self._stopped(a, now))

    def _stopped(self, attempt: Attempt, now: datetime) -> Attempt:
        """An open attempt as its run ends: by a cancel, or with the error of the run."""
        if self.cancel_requested is not None:
            return evolve(attempt, ended=now, cancelled=True)
        error = self.error or (self.outcome.error if self.outcome else None)
        return evolve(attempt, ended=now, error=error)

    def with_launch(self, attempt: int, now: datetime) -> Record:
        """This record with the time at which an attempt's resources were seen to exist; a noted time stays."""
        return self._with_attempt(attempt, lambda a: evolve(a, launched=a.launched or now))

    def with_waiting(self, attempt: int, at: datetime) -> Record:
        """This record with the last time at which an attempt was seen without a running machine."""
        return self._with_attempt(attempt, lambda a: a if a.is_noted_waiting(at) else evolve(a, waiting=at))

    def with_request(self, attempt: int, at: datetime, deadline: datetime, limit: Limit) -> Record:
        """This record before another request for an attempt's machines, all of which were refused up to `at`."""
        changes = {"refused": False, "waiting": at, "deadline": deadline, "limit": limit}
        return self._with_attempt(attempt, lambda a: evolve(a, **changes))

    def with_refusal(self, attempt: int) -> Record:
        """This record with the note that every request for an attempt's machines was refused so far."""
        return self._with_attempt(attempt, lambda a: a if a.running or a.ended else evolve(a, refused=True))

    def with_endpoint_request(self, at: datetime) -> Record:
        """This record before another request for the endpoint, if all of them were refused up to `at`."""
        if not self.endpoint_refused or self.state.is_terminal:
            return self
        return evolve(self, endpoint_refused=False, endpoint_asked=at)

    def with_endpoint_refusal(self) -> Record:
        """This record with the note that every request for the endpoint was refused so far."""
        if self.state is not RunState.DEPLOYING or self.endpoint is not None:
            return self
        return evolve(self, endpoint_refused=True)

    def with_wait_reason(self, attempt: int, reason: str) -> Record:
        """This record with why an attempt does not run yet ("": it runs); the same record if it has the reason."""
        kept = cut(reason, MAX_REASON)
        changes = [a for a in self.attempts if a.number == attempt and a.wait_reason != kept]
        is_late = bool(kept) and (self.state is not RunState.PROVISIONING or any(a.ended for a in changes))
        if not changes or is_late:
            return self
        return self._with_attempt(attempt, lambda a: evolve(a, wait_reason=kept))

    def with_endpoint_wait_reason(self, reason: str) -> Record:
        """This record with why its endpoint is not ready yet; the same record if it has the reason."""
        kept = cut(reason, MAX_REASON)
        if self.state is not RunState.DEPLOYING or self.endpoint is not None or kept == self.endpoint_wait_reason:
            return self
        return evolve(self, endpoint_wait_reason=kept)

    def with_running(self, attempt: int, since: datetime) -> Record:
        """This record with the earliest time at which an attempt may have run; a noted time stays."""
        return self._with_attempt(attempt, lambda a: evolve(a, running=a.running or since))

    def with_seen(self, attempt: int, now: datetime) -> Record:
        """This record with the time at which an attempt was seen running; a noted time stays."""
        return self._with_attempt(attempt, lambda a: evolve(a, seen=a.seen or now))

    def _with_attempt(self, number: int, change: Callable[[Attempt], Attempt]) -> Record:
        if self.state.is_terminal:  # the call is late
            return self
        attempts = [change(a) if a.number == number else a for a in self.attempts]
        return evolve(self, attempts=attempts)

    def stage_seconds(self, now: datetime) -> dict[str, float]:
        """Seconds spent in each state so far, in the order in which the run first entered them."""
        spent: dict[str, float] = {}
        ends = [*[t.time for t in self.history[1:]], self.history[-1].time if self.state.is_terminal else now]
        for transition, end in zip(self.history, ends, strict=True):
            if not transition.state.is_terminal:
                spent[transition.state] = spent.get(transition.state, 0.0) + (end - transition.time).total_seconds()
        return spent

    def training_cost(self, now: datetime) -> float | None:
        """US dollars that the attempts have cost so far; None if a price is unknown."""
        costs = [attempt.cost(now) for attempt in self.attempts]
        return None if None in costs else round(sum(cost or 0.0 for cost in costs), 6)

    def cost(self, now: datetime) -> float | None:
        """The most that training and endpoint have cost so far, in US dollars; None if a price is unknown."""
        training, serving = self.training_cost(now), self.serving_cost(now)
        return None if training is None or serving is None else round(training + serving, 6)

    def hourly_cost(self, now: datetime) -> float | None:
        """The most that training and endpoint cost per hour now, in US dollars; None if a price is unknown."""
        prices = [a.usd_per_hour for a in self.attempts if a.running and not a.ended]
        prices += [self.serving_usd_per_hour] if self.is_serving(now) else []
        return None if None in prices else sum(price or 0.0 for price in prices)

    def is_serving(self, now: datetime) -> bool:
        """Whether the endpoint costs money now: it is being created, or it has neither ended nor expired."""
        if self.endpoint is not None:
            return self.endpoint.ended is None and now < self.endpoint.expires
        return self.serving_began is not None and not self.state.is_terminal

    def serving_cost(self, now: datetime) -> float | None:
        """The most that the endpoint has cost so far, in US dollars: as if all its instances had run all the time.

        None if the price is unknown; 0 if there was no endpoint, also because every request for one was refused.
        """
        began = self.serving_began
        if began is None:
            return 0.0
        if self.serving_usd_per_hour is None:
            return None
        if self.endpoint is not None:
            ended = self.endpoint.ended or min(now, self.endpoint.expires)
        else:
            ended = self.history[-1].time if self.state.is_terminal else now
        return round(self.serving_usd_per_hour * max(0.0, (ended - began).total_seconds()) / 3600, 6)
