"""Whether a history keeps dropforge's promises. Nothing but the history is read: not the code, and not the cloud.

Each rule is a function of one `Life`, what the history says of one run; it yields what is wrong, in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from .history import Fact, History

TERMINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"})
FINAL_CLASSES = frozenset({"config", "data", "permission", "out_of_memory", "deadline", "gate", "code", "cancelled"})
CHECK_SECONDS = 300.0  # Settings.check_interval_seconds
SWEEPS_SECONDS = 2 * 600.0  # what exists without an owner is gone by the second sweep
SLACK_SECONDS = 30.0  # clocks differ by seconds, and a task ends some seconds after it was told to
# What a function may answer 500 with: faults of the cloud, and its own wish to be called again.
EXPECTED_ERRORS = frozenset(
    {
        "RetryLater",
        "Conflict",
        "CloudError",
        "ServiceUnavailable",
        "DeadlineExceeded",
        "ConnectionError",
        "ReadTimeout",
        "ResourceExhausted",
    }
)


class Problem(NamedTuple):
    """A broken promise: which rule, of which run, when, and how."""

    rule: str
    run: str
    time: float
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.run or 'the cloud'}: {self.text}"


@dataclass(frozen=True)
class At:
    """Something at a place in the history: its index and time."""

    index: int
    time: float
    value: Any


@dataclass
class Machine:
    """A cloud resource from `created` to `gone`; indices and times of the history, None while it exists."""

    name: str
    labels: dict[str, str]
    created: At
    late: bool
    running: float | None = None
    ended: float | None = None
    gone: At | None = None

    @property
    def is_endpoint(self) -> bool:
        return self.name.endswith("-serve")

    def exists_at(self, index: int) -> bool:
        return self.created.index < index and (self.gone is None or self.gone.index > index)


@dataclass
class Life:
    """Everything that a history says of one run."""

    run: str
    end: At
    calm: float
    dropped: list[At] = field(default_factory=list)
    creations: list[At] = field(default_factory=list)
    records: list[At] = field(default_factory=list)
    ledgers: list[At] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    executions: dict[str, At] = field(default_factory=dict)
    ended: dict[str, At] = field(default_factory=dict)
    published: list[At] = field(default_factory=list)
    slack: list[At] = field(default_factory=list)
    cancels: list[At] = field(default_factory=list)
    handled: dict[str, At] = field(default_factory=dict)
    publish_faults: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.dropped[0].value["spec"]) if self.dropped else {}

    @property
    def valid(self) -> bool:
        return bool(self.dropped and self.dropped[0].value["valid"])

    @property
    def last(self) -> dict[str, Any]:
        return dict(self.records[-1].value) if self.records else {}

    @property
    def over(self) -> At | None:
        """When the run became terminal."""
        return next((found for found in self.records if found.value["state"] in TERMINAL), None)

    def record_at(self, index: int) -> dict[str, Any] | None:
        return next((found.value for found in reversed(self.records) if found.index < index), None)

    def entry_at(self, index: int, name: str) -> dict[str, Any] | None:
        """What the ledger said of a resource."""
        ledger = next((found.value for found in reversed(self.ledgers) if found.index < index), None)
        return next((entry for entry in ledger["entries"] if entry["name"] == name), None) if ledger else None

    def is_stray(self, machine: Machine) -> bool:
        """It came after it was seen to be gone, or when the run was over: by a request that had been given up."""
        entry = self.entry_at(machine.created.index, machine.name)
        return machine.late or (entry is not None and entry["state"] == "gone")


Rule = Callable[[Life], Iterator[tuple[float, str]]]


def check(history: History) -> list[Problem]:
    """Every promise that the history breaks; none for a good one."""
    lives, problems = _read(history), []
    for life in lives.values():
        for rule in RULES:
            problems += [Problem(rule.__name__, life.run, time, text) for time, text in rule(life)]
    problems += _defects(history)
    return sorted(problems, key=lambda problem: problem.time)


def one_run(life: Life) -> Iterator[tuple[float, str]]:
    """A spec, however often it is delivered, is one record; and there is no record without a spec."""
    if life.records and not life.dropped:
        yield life.records[0].time, "a record, and nobody dropped its spec"
    if life.dropped and not life.records:
        yield life.end.time, "its spec was dropped, and there is no record"
    if len(life.creations) > 1:
        yield life.creations[1].time, "its record was created twice"
    if life.records and life.dropped:
        first = life.records[0].value["history"][0]["state"]
        if first != ("ACCEPTED" if life.valid else "REJECTED"):
            yield life.records[0].time, f"its spec is {'valid' if life.valid else 'invalid'}, and it was {first}"


def ends(life: Life) -> Iterator[tuple[float, str]]:
    """Every run is over in the end, and so is each of its executions."""
    if life.records and life.over is None:
        yield life.end.time, f"still {life.last['state']}"
    for id_ in life.executions:
        if id_ not in life.ended:
            yield life.end.time, f"execution {id_} still runs"


def terminal_once(life: Life) -> Iterator[tuple[float, str]]:
    """What a terminal record says of the end stays as it is; no history is ever rewritten."""
    for before, after in pairwise(life.records):
        old, new = before.value, after.value
        if new["history"][: len(old["history"])] != old["history"]:
            yield after.time, "its history was rewritten"
        if old["state"] in TERMINAL and any(old[key] != new[key] for key in ("state", "error", "attempts", "history")):
            yield after.time, f"it was {old['state']}, and was changed: now {new['state']}"


def attempts_are_closed(life: Life) -> Iterator[tuple[float, str]]:
    """When a run is over, none of its attempts goes on costing money in its record."""
    if life.over is not None:
        for attempt in life.over.value["attempts"]:
            if attempt["ended"] is None:
                yield life.over.time, f"attempt {attempt['number']} has no end in the record of a run that is over"


def one_owner(life: Life) -> Iterator[tuple[float, str]]:
    """One execution owns a run; another takes it over only after that one has ended. The others touch nothing."""
    owners: list[str] = []
    for found in life.records:
        owner = found.value["execution"]
        if owner and owner not in owners:
            former = owners[-1] if owners else None
            if former and (former not in life.ended or life.ended[former].index > found.index):
                yield found.time, f"execution {owner} took it while {former} was running"
            owners.append(owner)
    for id_, ended in life.ended.items():
        if (
            id_ not in owners
            and ended.value["state"] == "SUCCEEDED"
            and ended.value["result"]["status"] != "SUPERSEDED"
        ):
            yield ended.time, f"execution {id_} does not own it, and ended as {ended.value['result']['status']}"


def rejected_does_nothing(life: Life) -> Iterator[tuple[float, str]]:
    """A spec that was refused has no execution and no resource."""
    if life.last.get("state") == "REJECTED":
        for id_, started in life.executions.items():
            yield started.time, f"execution {id_} was started for a rejected spec"
        for machine in life.machines:
            yield machine.created.time, f"{machine.name} was created for a rejected spec"


def intent_first(life: Life) -> Iterator[tuple[float, str]]:
    """The ledger says that a resource is intended before it is created."""
    for machine in life.machines:
        entry = life.entry_at(machine.created.index, machine.name)
        if entry is None:
            yield machine.created.time, f"{machine.name} was created, and the ledger did not know of it"
        elif entry["state"] == "gone" and not machine.late and not _was_known(life, machine):
            yield machine.created.time, f"{machine.name} was created while the ledger said that it was gone"


def one_at_a_time(life: Life) -> Iterator[tuple[float, str]]:
    """The training resource of one attempt is gone before that of the next is created."""
    training = [machine for machine in life.machines if not machine.is_endpoint]
    for machine in training:
        others = [other for other in training if other.exists_at(machine.created.index) and other is not machine]
        for other in others:
            if not life.is_stray(machine) and not life.is_stray(other):
                yield machine.created.time, f"{machine.name} was created while {other.name} existed"


def nothing_left(life: Life) -> Iterator[tuple[float, str]]:
    """What a run made is gone when it is over, but for its endpoint; what came late, by the second sweep after."""
    for machine in life.machines:
        if machine.gone is None:
            yield life.end.time, f"{machine.name} still exists"
        elif life.over is not None and machine.exists_at(life.over.index):
            kept = machine.is_endpoint and life.over.value["state"] == "SUCCEEDED"
            if not kept and not life.is_stray(machine):
                yield life.over.time, f"{machine.name} existed when the run was {life.over.value['state']}"
        if machine.gone is not None and life.over is not None and not machine.is_endpoint:
            since = max(machine.created.time, life.over.time, life.calm)
            if machine.gone.time - since > SWEEPS_SECONDS:
                yield machine.gone.time, f"{machine.name} had no owner for {machine.gone.time - since:.0f} s"


def endpoint_ends(life: Life) -> Iterator[tuple[float, str]]:
    """An endpoint is gone soon after its ttl, and is never deleted before it while nobody asks for that."""
    endpoint = life.last.get("endpoint")
    if not endpoint:
        return
    expires = _seconds(endpoint["expires"])
    for machine in life.machines:
        if machine.is_endpoint and machine.gone is not None:
            late = machine.gone.time - max(expires, life.calm, machine.created.time)
            if late > SWEEPS_SECONDS:
                yield machine.gone.time, f"its endpoint was gone {late:.0f} s after its ttl"


def cancel_wins(life: Life) -> Iterator[tuple[float, str]]:
    """A run whose end somebody asked for, before its teardown had begun, ends CANCELLED, and serves nothing."""
    if life.over is None:
        return
    asked = next((found for found in life.records if found.value["cancel_requested"]), None)
    # Later it asks for the end of the endpoint.
    obeyed = asked is not None and asked.value["state"] not in (*TERMINAL, "TEARING_DOWN")
    if obeyed and life.over.value["state"] != "CANCELLED":
        yield life.over.time, f"its cancel was recorded, and it ended {life.over.value['state']}"
    if life.over.value["state"] == "CANCELLED" and asked is None:
        yield life.over.time, "it ended CANCELLED, and nobody asked"
    for cancel in life.cancels:
        handled = life.handled.get(cancel.value["message"])
        if handled is None:
            yield life.end.time, f"nobody answered its cancel, message {cancel.value['message']}"
            continue
        record = life.record_at(handled.index)
        if record is None or record["state"] == "REJECTED":
            continue
        if record["state"] not in TERMINAL and record["state"] != "TEARING_DOWN" and not record["cancel_requested"]:
            yield handled.time, f"it was {record['state']} when its cancel was answered, and knows nothing of it"
        serving = [m for m in life.machines if m.is_endpoint and m.exists_at(handled.index) and not life.is_stray(m)]
        if record["state"] in TERMINAL and serving:
            yield handled.time, f"its cancel was answered while {serving[0].name} existed"


def within_budget(life: Life) -> Iterator[tuple[float, str]]:
    """Training costs no more than the limit and one check interval."""
    limit = life.spec.get("limits", {}).get("max_cost_usd")
    if not limit or not life.valid:
        return
    price = life.spec["target"]["price_usd_per_hour"] / 3600
    spent = sum(_busy(machine, life.end.time) * price for machine in life.machines if not machine.is_endpoint)
    strays = sum(_busy(machine, life.end.time) for machine in life.machines if life.is_stray(machine))
    allowed = limit + price * (CHECK_SECONDS + strays)
    if spent > allowed:
        yield life.end.time, f"its training cost {spent:.3f} USD; the limit is {limit}"


def within_duration(life: Life) -> Iterator[tuple[float, str]]:
    """Nothing trains after max_duration and one check interval."""
    if not life.records or not life.valid:
        return
    deadline = _seconds(life.records[0].value["created"]) + _duration(life.spec["limits"]["max_duration"])
    for machine in life.machines:
        if machine.running is not None and not machine.is_endpoint:
            over = (machine.ended or life.end.time) - deadline
            # What came late finds its deadline over, and stops by itself.
            stopped = life.is_stray(machine) and _busy(machine, life.end.time) <= SLACK_SECONDS
            if over > CHECK_SECONDS + SLACK_SECONDS and not stopped:
                yield machine.ended or life.end.time, f"{machine.name} ran {over:.0f} s after max_duration"


def attempts_end(life: Life) -> Iterator[tuple[float, str]]:
    """No attempt follows one that no further attempt can mend, and there are no more than the spec allows."""
    attempts = life.last.get("attempts", [])
    for before, after in pairwise(attempts):
        found = (before["error"] or {}).get("error_class")
        if found in FINAL_CLASSES:
            yield _seconds(after["started"]), f"attempt {after['number']} followed one that failed for good: {found}"
    most = life.spec.get("limits", {}).get("max_attempts", 20)
    if len(attempts) > most:
        yield _seconds(attempts[-1]["started"]), f"{len(attempts)} attempts; the spec allows {most}"


def everybody_is_told(life: Life) -> Iterator[tuple[float, str]]:
    """The end is told at least once by event and in Slack, and nothing is told that was not so."""
    if not life.records:
        return
    reached = {_event_id(life.run, entry): _seconds(entry["time"]) for entry in life.last["history"]}
    by_event = {found.value["id"] for found in life.published}
    in_slack = {found.value["event"] for found in life.slack if found.value["status"] == 200}
    for found in life.published:
        event = found.value["event"]
        if event.get("notice"):
            continue
        if found.value["id"] not in reached or event["id"] != found.value["id"]:
            yield found.time, f"event {found.value['id']} tells of a state that it did not reach"
        elif abs(_seconds(event["time"]) - reached[event["id"]]) > 0.001:
            yield found.time, f"event {event['id']} was published with another time: {event['time']}"
    for found in life.slack:
        if found.value["event"] not in reached and "/notice/" not in found.value["event"]:
            yield found.time, f"Slack was told {found.value['event']}, a state that it did not reach"
    if life.over is not None:
        final = _event_id(life.run, life.last["history"][-1])
        if final not in by_event:
            yield life.end.time, f"no event {final} was published"
        if final not in in_slack:
            yield life.end.time, f"Slack was never told {final}"
    unstarted = [entry["state"] for entry in life.last["history"]] == ["ACCEPTED", "CANCELLED"]
    if not life.publish_faults and not unstarted:  # cancelled before anybody was told that it had begun
        for id_, time in reached.items():
            if id_ not in by_event:
                yield time, f"no event {id_} was published, and publishing never failed"


RULES: tuple[Rule, ...] = (
    one_run,
    ends,
    terminal_once,
    attempts_are_closed,
    one_owner,
    rejected_does_nothing,
    intent_first,
    one_at_a_time,
    nothing_left,
    endpoint_ends,
    cancel_wins,
    within_budget,
    within_duration,
    attempts_end,
    everybody_is_told,
)


def _defects(history: History) -> Iterator[Problem]:
    """Errors that no fault explains: defects of the code."""
    for fact in history.of("answer"):
        if fact.data["status"] == 500:
            name = str(fact.data["body"]["error"]).split(":")[0]
            if name.isidentifier() and name not in EXPECTED_ERRORS:
                text = f"{fact.data['instance']} answered {fact.data['body']['error'][:300]}"
                yield Problem("no_defects", "", fact.time, text)
        elif fact.data["status"] in (400, 404):
            text = f"{fact.data['instance']} answered {fact.data['status']} to the workflow: {fact.data['body']}"
            yield Problem("no_defects", "", fact.time, text)


def _read(history: History) -> dict[str, Life]:
    """The history, by run."""
    last = history.facts[-1]
    end = At(len(history.facts), last.time, last.data)
    calm = next((fact.time for fact in history.of("calm")), end.time)
    lives: dict[str, Life] = defaultdict(lambda: Life("", end, calm))
    machines: dict[str, Machine] = {}
    calls: dict[str, Fact] = {}
    handled: dict[str, At] = {}
    late = -1
    faults = False
    for index, fact in enumerate(history.facts):
        kind, data = fact.kind, fact.data
        here = At(index, fact.time, data)
        if kind == "late":
            late = index
        elif kind == "fault" and data["what"] in ("refused", "lost", "late", "killed", "cancelled_execution"):
            faults = True
        elif kind == "created":
            machine = Machine(data["name"], data["labels"], here, late == index - 1)
            machines[data["name"]] = machine
            lives[data["labels"].get("dropforge-run", "")].machines.append(machine)
        elif kind in ("running", "ended", "gone"):
            _happened(machines[data["name"]], kind, here)
        elif kind == "call":
            calls[data["instance"]] = fact
        elif kind == "answer" and data["status"] == 200:
            message = calls[data["instance"]].data.get("message")
            if message is not None:
                handled.setdefault(message, here)
        elif kind == "write":
            _wrote(lives, here)
        else:
            _told(lives, kind, here)
    for run, life in lives.items():
        life.run, life.handled, life.publish_faults = run, handled, faults
    return dict(lives)


def _happened(machine: Machine, kind: str, here: At) -> None:
    if kind == "gone":
        machine.gone = here
    else:
        setattr(machine, kind, here.time)


def _wrote(lives: dict[str, Life], here: At) -> None:
    parts = here.value["name"].split("/")
    if len(parts) == 3 and parts[0] == "runs":
        found = At(here.index, here.time, here.value["content"])
        if parts[2] == "record.json":
            lives[parts[1]].records.append(found)
            if here.value["replaced"] == 0:
                lives[parts[1]].creations.append(found)
        elif parts[2] == "ledger.json":
            lives[parts[1]].ledgers.append(found)


def _told(lives: dict[str, Life], kind: str, here: At) -> None:
    data = here.value
    if kind == "dropped":
        lives[data["run"]].dropped.append(here)
    elif kind == "cancel":
        lives[data["run"]].cancels.append(here)
    elif kind == "execution":
        lives[data["run"]].executions[data["id"]] = here
    elif kind == "execution_ended":
        lives[data["run"]].ended[data["id"]] = here
    elif kind == "published":
        lives[data["event"]["run"]].published.append(here)
    elif kind == "slack":
        lives[data["event"].split("/")[0]].slack.append(here)


def _was_known(life: Life, machine: Machine) -> bool:
    """It was intended once: its creation had been on its way when it was torn down."""
    return any(
        entry["name"] == machine.name and entry["state"] != "gone"
        for found in life.ledgers
        if found.index < machine.created.index
        for entry in found.value["entries"]
    )


def _busy(machine: Machine, end: float) -> float:
    """Seconds for which it is paid."""
    return 0.0 if machine.running is None else (machine.ended or end) - machine.running


def _event_id(run: str, entry: dict[str, Any]) -> str:
    return f"{run}/{entry['attempt']}/{entry['state'].lower()}"


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _duration(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
