"""The lives of the named endpoints of a history, which endpoint_rules.py and vm_rules.py judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from dropforge.base import names
from dropforge.endpoints.record import EndpointRecord, Rollout, RolloutState

from .endpoint_lives import USD_PER_HOUR
from .history import Fact, History

REPEATING = frozenset({"killed", "lost", "late", "refused", "stalled", "doubled_sweep"})


@dataclass
class Vm:
    """A queued resource or a node of a revision. A node has an address once it runs.

    `lost` is when it ended from outside, `deleting` when dropforge began to delete it; infinite: never.
    """

    name: str
    revision: str
    number: int
    created: float
    address: str = ""
    running: float = float("inf")
    answered: float = float("inf")
    lost: float = float("inf")
    deleting: float = float("inf")
    gone: float = float("inf")

    @property
    def ended(self) -> float:
        return min(self.lost, self.deleting, self.gone)


class Pointed(NamedTuple):
    """When a name got an address; "": when it got none."""

    time: float
    address: str


class Look(NamedTuple):
    """When a sweep that met no fault began and ended."""

    began: float
    ended: float


@dataclass
class EndpointLife:
    """The part of a history about one endpoint. Each list has times first."""

    name: str
    end: float
    calm: float
    records: list[tuple[float, EndpointRecord]] = field(default_factory=list)
    paying: list[tuple[float, int]] = field(default_factory=list)
    shares: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    answered: list[tuple[float, str]] = field(default_factory=list)  # completions, by revision
    forgotten: list[float] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)  # by id: messages that Slack has taken
    service: dict[str, Any] | None = None
    is_repeated: bool = False  # a fault may have had a message sent twice
    stalls: int = 0  # functions that were suspended
    vms: list[Vm] = field(default_factory=list)
    pointed: list[Pointed] = field(default_factory=list)
    strayed: list[float] = field(default_factory=list)  # somebody changed the record of the name
    late: list[float] = field(default_factory=list)  # a change of the record was executed late
    delays: list[float] = field(default_factory=list)  # functions were suspended, or waited for a reply that was lost
    delay: float = 0.0  # seconds, of all faults that delay a write
    looks: list[Look] = field(default_factory=list)

    @property
    def last(self) -> EndpointRecord:
        return self.records[-1][1]

    def record_at(self, time: float) -> EndpointRecord | None:
        """The record at a time."""
        return next((record for when, record in reversed(self.records) if when <= time), None)

    def entered(self, rollout: str, *states: RolloutState) -> float | None:
        """When a rollout was first in one of the states; None: never."""
        found = ((time, record.find(rollout)) for time, record in self.records)
        return next((time for time, each in found if each is not None and each.state in states), None)

    def promotions(self) -> Iterator[tuple[float, EndpointRecord, Rollout]]:
        """When each promoted rollout was promoted, with the record before that, and the rollout as promoted."""
        for (_, before), (time, after) in pairwise(self.records):
            for each in after.rollouts:
                found = before.find(each.id)
                if each.state is RolloutState.PROMOTED and found is not None and not found.state.is_terminal:
                    yield time, before, each

    def times(self) -> Iterator[float]:
        """When the record was written."""
        return (time for time, _ in self.records)

    def address_at(self, time: float) -> str:
        """The address of the name at a time."""
        return next((address for when, address in reversed(self.pointed) if when <= time), "")

    def vm_at(self, address: str) -> Vm | None:
        """The machine that has an address."""
        return next((vm for vm in self.vms if address and vm.address == address), None)

    def is_harmed(self, time: float) -> bool:
        """Whether the machine of the name was lost, or somebody changed its record, and nobody has mended that yet."""
        vm, record = self.vm_at(self.address_at(time)), self.record_at(time)
        if vm is not None and vm.lost <= time:
            return True
        if record is not None and _has_no_machine(record):
            return True
        harm = max((when for when in (*self.strayed, *self.late) if when <= time), default=0.0)
        return bool(harm) and not any(harm < when <= time for when, _ in self.pointed)

    def cost(self, since: float, until: float, vm: Vm | None = None) -> float:
        """The cost of the instances, or of one machine, between two times, in US dollars."""
        own = [(vm.running, 1), (min(vm.ended, self.end), 0)] if vm is not None else []
        changes = [*(own or self.paying), (self.end, 0)]
        spans = ((max(a, since), min(b, until), number) for (a, number), (b, _) in pairwise(changes))
        return sum(max(0.0, b - a) * number for a, b, number in spans) / 3600 * USD_PER_HOUR


def read_lives(history: History) -> tuple[dict[str, EndpointLife], list[str]]:
    """The life of each endpoint, and the executions that have not ended."""
    end = next(history.of("end"))
    calm = next(history.of("calm")).time
    lives: dict[str, EndpointLife] = {}
    for fact in history.facts:
        parts = str(fact.data.get("name", "")).split("/")
        if fact.kind == "write" and parts[0] == "endpoints" and parts[-1] == "record.json":
            life = lives.setdefault(parts[1], EndpointLife(parts[1], end.time, calm))
            life.records.append((fact.time, EndpointRecord.model_validate(fact.data["content"])))
    for fact in history.facts:
        if fact.kind in ("paying", "shares", "answered", "forgotten") and fact.data["endpoint"] in lives:
            life = lives[fact.data["endpoint"]]
            if fact.kind == "paying":
                life.paying.append((fact.time, fact.data["revisions"]))
            elif fact.kind == "shares":
                life.shares.append((fact.time, fact.data["shares"]))
            elif fact.kind == "answered":
                life.answered.append((fact.time, fact.data["revision"]))
            else:
                life.forgotten.append(fact.time)
        elif fact.kind == "slack" and "/notice/budget-" in fact.data["event"] and fact.data["status"] == 200:
            name = fact.data["event"].partition("/notice/budget-")[2].split("-")[0]
            lives[name].warnings[fact.data["event"]] = lives[name].warnings.get(fact.data["event"], 0) + 1
    faults = [fact.data["what"] for fact in history.of("fault")]
    for life in lives.values():
        life.service = end.data["services"].get(life.name)
        life.is_repeated = not REPEATING.isdisjoint(faults)
        life.stalls = faults.count("stalled")
        life.looks = list(_looks(history))
        life.delays = [fact.time for fact in history.of("fault") if fact.data["what"] in ("stalled", "late", "lost")]
        faults_of_writes = [
            fact.data for fact in history.of("fault") if fact.data.get("call", "").startswith("storage.")
        ]
        life.delay = sum(fault.get("seconds", 0.0) for fault in faults_of_writes)
    _read_vms(history, lives)
    return lives, list(end.data["active"])


def _has_no_machine(record: EndpointRecord) -> bool:
    """Whether no machine could be started in the place of the one that ended, and none was promoted since."""
    for rollout in reversed(record.rollouts):
        if rollout.state in (RolloutState.PROMOTED, RolloutState.SUSPENDED):
            return False
        if rollout.kind == "resume" and rollout.state is RolloutState.ROLLED_BACK:
            return True
    return False


def _looks(history: History) -> Iterator[Look]:
    """The sweeps that met no fault."""
    struck = {fact.data.get("process") for fact in history.of("fault")}
    began = {fact.data["instance"]: fact.time for fact in history.of("call")}
    for fact in history.of("answer"):
        name = fact.data["instance"]
        is_good = fact.data["status"] == 200 and name not in struck
        if name.startswith("sweep-") and is_good and not fact.data["body"]["problems"]:
            yield Look(began[name], fact.time)


def _read_vms(history: History, lives: dict[str, EndpointLife]) -> None:
    """The machines of each endpoint, and the addresses of its name."""
    found: dict[str, tuple[EndpointLife, Vm]] = {}  # the present one of each name
    for fact in history.facts:
        data, time = fact.data, fact.time
        life = lives.get(data.get("labels", {}).get(names.ENDPOINT_LABEL, "") or data.get("endpoint", ""))
        if fact.kind == "created" and life is not None:
            revision = data["name"].rpartition("/")[2]
            number = names.revision_number(revision, life.name) or 0
            vm = Vm(data["name"], revision, number, time)
            life.vms.append(vm)
            found[vm.name] = life, vm
        elif fact.kind == "pointed" and life is not None:
            life.pointed.append(Pointed(time, data["address"]))
        elif fact.kind == "strayed" and life is not None:
            life.strayed.append(time)
        elif fact.kind == "answered" and life is not None:
            for vm in life.vms:
                if vm.revision == data["revision"] and vm.running <= time < vm.ended:
                    vm.answered = min(vm.answered, time)
        elif fact.kind == "late" and data["call"] == "dns.post changes":
            for each in lives.values():
                each.late.append(time)
        elif (about := str(data.get("name", data.get("resource")))) in found:
            _note(fact, *found[about])


def _note(fact: Fact, life: EndpointLife, vm: Vm) -> None:
    """The events in the life of a machine."""
    if fact.kind == "running":
        vm.running, vm.address = fact.time, fact.data["address"]
    elif fact.kind == "fault":
        vm.lost = min(vm.lost, fact.time)
        life.forgotten.append(fact.time)
    elif fact.kind == "deleting":
        vm.deleting = min(vm.deleting, fact.time)
    elif fact.kind == "gone":
        vm.gone = fact.time
    if vm.address and fact.kind in ("running", "fault", "deleting", "gone"):
        paying = sum(each.running <= fact.time < each.ended for each in life.vms)
        life.paying.append((fact.time, paying))
