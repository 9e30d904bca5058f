"""The history sorted by run: records, machines, executions and messages, and the sweeps between them.

This module reads only the history, not the code and not the cloud.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from .forgeries import is_forged
from .history import History

TERMINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"})
CHECK_SECONDS = 300.0  # Settings.check_interval_seconds
SWEEP_SECONDS = 600.0  # of the scheduler that calls it
SLACK_SECONDS = 30.0  # clocks differ by seconds, and a task ends some seconds after the request
POINT = "point"  # of a series: progress that no event tells
CALL_FAULTS = frozenset({"refused", "lost", "late", "killed"})
LISTS = {"dropped": "dropped", "forged": "forged", "cancel": "cancels", "told": "job_events"}  # of a Life, by fact
_DISK = "compute.googleapis.com/Disk"
_CLUSTER = "container.googleapis.com/Cluster"


@dataclass(frozen=True)
class At:
    """A value with its index and time in the history."""

    index: int
    time: float
    value: Any


@dataclass
class Machine:
    """A cloud resource from `created` to `gone`: indices and times in the history, None while it exists.

    It is paid from `running` to `ended`; a service from `created` to `deleting`, ready or not. `owner` is the
    resource for which a controller created it. `share` is its part of the hourly price.
    """

    name: str
    kind: str
    labels: dict[str, str]
    created: At
    late: bool
    owner: Machine | None = None
    share: float = 1.0
    made: At | None = None
    running: float | None = None
    ended: float | None = None
    deleting: At | None = None
    gone: At | None = None
    by_hand: bool = False
    orphaned: bool = False  # its owner was deleted without it

    @property
    def origin(self) -> Machine:
        """The resource that dropforge requested: this one, or the one for which a controller created this one."""
        return self.owner.origin if self.owner else self

    @property
    def is_endpoint(self) -> bool:
        return self.origin.name.endswith("-serve")

    @property
    def is_disk(self) -> bool:
        """Whether it is a disk, which cannot be deleted before its machine."""
        return self.kind == _DISK

    @property
    def is_cluster(self) -> bool:
        """Whether it is an attempt's own GKE cluster, which cannot be deleted before its creation is complete."""
        return self.kind == _CLUSTER

    @property
    def ends_by_itself(self) -> bool:
        """Whether the platform ends it at its time-out, whatever the control plane does."""
        return "jobs/" in self.origin.name and not self.orphaned

    @property
    def attempt(self) -> int:
        """The attempt that it trains for; 0 for an endpoint."""
        match = re.search(r"-a(\d+)$", self.origin.name)
        return int(match[1]) if match else 0

    def exists_at(self, index: int) -> bool:
        return self.created.index < index and (self.gone is None or self.gone.index > index)

    def deletion_request(self) -> At | None:
        """The first request to delete it, or its end if there was no such request."""
        return self.deleting or self.gone


class Sweep(NamedTuple):
    """A sweep that finished. `clean` says that it could read and do everything."""

    began: At
    ended: At
    clean: bool


@dataclass
class Life:
    """The part of a history about one run."""

    run: str
    end: At
    calm: float
    dropped: list[At] = field(default_factory=list)
    withdrawn: At | None = None  # its spec object was deleted or overwritten
    was_lost: bool = False  # the event of its upload was lost
    joined: At | None = None  # the run event that says which run its request has joined
    is_cancelled_by_repeat: bool = False  # a user cancelled a request that has joined it
    forged: list[At] = field(default_factory=list)  # requests about this id, which no run has
    creations: list[At] = field(default_factory=list)
    records: list[At] = field(default_factory=list)
    summaries: list[At] = field(default_factory=list)  # of each record: the metadata of its object
    ledgers: list[At] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)
    executions: dict[str, At] = field(default_factory=dict)
    ended: dict[str, At] = field(default_factory=dict)
    published: list[At] = field(default_factory=list)
    slack: list[At] = field(default_factory=list)
    cancels: list[At] = field(default_factory=list)
    intents: list[At] = field(default_factory=list)  # cancel marks, written before the record existed
    job_events: list[At] = field(default_factory=list)
    received: list[At] = field(default_factory=list)  # attempt, sequence and type of each job event, and of each point
    manifests: list[At] = field(default_factory=list)
    completions: list[At] = field(default_factory=list)  # of every run: what answered a completion, by URL
    failed_hosts: list[At] = field(default_factory=list)  # the attempts of which one host failed while others waited
    silenced: set[int] = field(default_factory=set)  # attempts whose container could not report its end
    delays: list[tuple[float, float]] = field(default_factory=list)
    touched: list[At] = field(default_factory=list)  # by which process: writes to the run's objects, and deletions
    callers: dict[str, At] = field(default_factory=dict)  # of every run: the calls, by process
    handled: dict[str, At] = field(default_factory=dict)
    sweeps: list[Sweep] = field(default_factory=list)
    publish_faults: bool = False
    dearer: float = 0.0  # the rise of the price from each placement to the next, as a share of the first one's

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
        return next((record for record in self.records if record.value["state"] in TERMINAL), None)

    @property
    def training(self) -> list[Machine]:
        return [machine for machine in self.machines if not machine.is_endpoint]

    def record_at(self, index: int) -> dict[str, Any] | None:
        return next((record.value for record in reversed(self.records) if record.index < index), None)

    def record_when(self, time: float) -> dict[str, Any] | None:
        return next((record.value for record in reversed(self.records) if record.time <= time), None)

    def entry_at(self, index: int, name: str) -> dict[str, Any] | None:
        """The ledger's entry for a resource at an index."""
        ledger = next((ledger.value for ledger in reversed(self.ledgers) if ledger.index < index), None)
        return next((entry for entry in ledger["entries"] if entry["name"] == name), None) if ledger else None

    def is_stray(self, machine: Machine) -> bool:
        """Whether an abandoned request created it, after it was verified gone or after the run was over."""
        machine = machine.origin
        entry = self.entry_at(machine.created.index, machine.name)
        return machine.late or (entry is not None and entry["state"] == "gone")

    def dearness(self, machine: Machine) -> float:
        """The price of a machine's placement, as a multiple of the first placement's."""
        if not self.dearer:
            return 1.0
        places = [place.get("zone") or place["region"] for place in self.spec["target"]["placements"]]
        match = re.search(r"/(?:locations|zones)/([^/]+)/", machine.origin.name)
        return 1 + self.dearer * (places.index(match[1]) if match and match[1] in places else 0)

    @property
    def dearest(self) -> float:
        """The price of the last placement, as a multiple of the first placement's."""
        return 1 + self.dearer * (len(self.spec["target"]["placements"]) - 1) if self.dearer else 1.0

    def serves(self, machine: Machine) -> bool:
        """Whether it is part of the endpoint: created for it, or kept after training."""
        entry = self.entry_at(self.end.index, machine.origin.name)
        return machine.is_endpoint or bool(entry and entry.get("kept"))

    def delay(self, since: float, until: float) -> float:
        """The most seconds by which the faults of a period may have delayed the run."""
        return sum(seconds for time, seconds in self.delays if time + seconds >= since and time <= until)

    def swept_after(self, index: int, time: float) -> Sweep | None:
        """The first clean sweep that began after a moment."""
        return next((s for s in self.sweeps if s.clean and s.began.index > index and s.began.time > time), None)


def read(history: History) -> dict[str, Life]:
    """The history, by run."""
    reader = _Reader(history)
    for index, fact in enumerate(history.facts):
        reader.take(At(index, fact.time, fact.data), fact.kind)
    for run, life in reader.lives.items():
        life.run, life.handled, life.publish_faults, life.sweeps = run, reader.handled, reader.faults, reader.sweeps
        life.completions, life.callers, life.dearer = reader.completions, reader.calls, reader.dearer
        life.delays = sorted([*life.delays, *reader.delays])
        dropped = life.dropped[0].value if life.dropped else {}
        if life.joined is not None and life.cancels:
            reader.lives[life.joined.value["event"]["run"]].is_cancelled_by_repeat = True
        life.was_lost = (dropped.get("object"), dropped.get("generation")) in reader.lost
    return dict(reader.lives)


class _Reader:
    """One pass over a history."""

    def __init__(self, history: History) -> None:
        last = history.facts[-1]
        end = At(len(history.facts), last.time, last.data)
        calm = next((fact.time for fact in history.of("calm")), end.time)
        self.lives: dict[str, Life] = defaultdict(lambda: Life("", end, calm))
        self.machines: dict[str, Machine] = {}
        self.calls: dict[str, At] = {}
        self.handled: dict[str, At] = {}
        self.sweeps: list[Sweep] = []
        self.completions: list[At] = []
        self.delays: list[tuple[float, float]] = []  # of every run
        self.lost: set[tuple[str, str]] = set()
        self.faults = False
        self.dearer = 0.0
        self.late = -1
        self.forged = -1

    def take(self, here: At, kind: str) -> None:
        data = here.value
        if kind == "late":
            self.late = here.index
        elif kind == "dearer":
            self.dearer = data["share"]
        elif kind == "hostile":
            self.forged = here.index
        elif kind == "fault":
            self._failed(here)
        elif kind == "created":
            self._created(here)
        elif kind in ("made", "running", "ended", "deleting", "gone", "orphaned"):
            self._happened(self.machines[data["name"]], kind, here)
        elif kind == "call":
            self.calls[data["instance"]] = here
        elif kind == "answer":
            self._answered(here)
        elif kind == "write":
            self._wrote(here)
        elif kind == "completion":
            self.completions.append(here)
        else:
            _record_message(self.lives, kind, here)

    def _created(self, here: At) -> None:
        """Record a new resource. If a queue or a controller creates it, it is as late as the request behind it."""
        data = here.value
        owner = self.machines.get(data.get("owner", ""))
        before = owner or self.machines.get(data.get("queued", ""))
        late = self.late == here.index - 1 or (before is not None and before.late)
        share = data.get("share", 1.0)
        machine = Machine(data["name"], data.get("type", ""), data["labels"], here, late, owner, share)
        self.machines[machine.name] = machine
        self.lives[machine.origin.labels.get("dropforge-run", "")].machines.append(machine)

    def _happened(self, machine: Machine, kind: str, here: At) -> None:
        if kind in ("running", "ended"):
            setattr(machine, kind, here.time)
        elif kind in ("made", "gone"):
            setattr(machine, kind, here)
        elif kind == "orphaned":
            machine.orphaned = True
        elif machine.deleting is None:
            machine.deleting = here
            self.lives[machine.origin.labels.get("dropforge-run", "")].touched.append(here)

    def _failed(self, here: At) -> None:
        """Record a fault and the longest delay that it explains: to the next check, retry, or second sweep."""
        data, fault = here.value, here.value["what"]
        self.faults = self.faults or fault in CALL_FAULTS or fault == "cancelled_execution"
        if fault == "deleted":
            self.machines[data["resource"]].by_hand = True
        elif fault == "dropped" and "object" in data:
            self.lost.add((data["object"], data["generation"]))
        elif fault == "host_failed":
            self.lives[data["run"]].failed_hosts.append(here)
        elif fault in ("lost_machine", "silent"):
            self.lives[data["run"]].silenced.add(data["attempt"])
        elif fault == "cancelled_execution":
            self.lives[data["run"]].delays.append((here.time, 2 * SWEEP_SECONDS))
        elif fault == "restart":
            self.delays.append((here.time, CHECK_SECONDS))
        elif fault in CALL_FAULTS or fault == "stalled":
            process = data["process"]
            is_sweep = process.startswith("sweep-")
            seconds = (SWEEP_SECONDS if is_sweep else CHECK_SECONDS) + data.get("seconds", 0.0)
            run = self.calls[process].value.get("run", "") if process in self.calls else ""
            (self.delays if is_sweep or not run else self.lives[run].delays).append((here.time, seconds))

    def _answered(self, here: At) -> None:
        call, status = self.calls.get(here.value["instance"]), here.value["status"]
        if call is None or status != 200:
            return
        message = call.value.get("message")
        if message is not None:
            self.handled.setdefault(message, here)
        if here.value["instance"].startswith("sweep-"):
            self.sweeps.append(Sweep(call, here, not here.value["body"]["problems"]))

    def _wrote(self, here: At) -> None:
        parts = here.value["name"].split("/")
        if parts[0] == "runs" and len(parts) > 2:
            self.lives[parts[1]].touched.append(here)
        if parts[0] == "models" and parts[2:] == ["MANIFEST.json"] and not is_forged(here.value["content"]):
            self.lives[parts[1]].manifests.append(At(here.index, here.time, here.value["content"]))
        elif parts[0] == "models" and parts[2] == "series" and self.forged != here.index - 1:
            told = self.lives[parts[1]].job_events[-1].value
            self.lives[parts[1]].received.append(At(here.index, here.time, (told["attempt"], told["sequence"], POINT)))
        elif len(parts) == 3 and parts[0] == "runs":
            content = At(here.index, here.time, here.value["content"])
            if parts[2] == "record.json":
                self.lives[parts[1]].records.append(content)
                self.lives[parts[1]].summaries.append(At(here.index, here.time, here.value.get("metadata", {})))
                entries = content.value.get("resources", [])
                self.lives[parts[1]].ledgers.append(At(here.index, here.time, {"entries": entries}))
                if here.value["replaced"] == 0:
                    self.lives[parts[1]].creations.append(content)
            elif parts[2].startswith("cancel"):
                self.lives[parts[1]].intents.append(content)
        elif parts[0] == "runs" and parts[2:3] == ["events"]:
            attempt, sequence, kind = parts[3].removesuffix(".json").split("-")
            self.lives[parts[1]].received.append(At(here.index, here.time, (int(attempt), int(sequence), kind)))


def _record_message(lives: dict[str, Life], kind: str, here: At) -> None:
    data = here.value
    if kind == "published":
        lives[data["event"]["run"]].published.append(here)
        if repeated := (data["event"].get("details") or {}).get("joined"):
            lives[repeated].joined = here
    elif kind == "slack":
        lives[data["event"].split("/")[0]].slack.append(here)
    elif kind == "withdrawn":
        lives[data["run"]].withdrawn = here
    elif kind in ("execution", "execution_ended"):
        life = lives[data["run"]]
        (life.executions if kind == "execution" else life.ended)[data["id"]] = here
    elif kind in LISTS:
        getattr(lives[data["run"]], LISTS[kind]).append(here)


def seconds_of(time: str) -> float:
    """A moment, in seconds since the epoch."""
    return datetime.fromisoformat(time).timestamp()


def duration_of(text: str) -> float:
    """The seconds of a duration such as `20m`."""
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[text[-1]]
