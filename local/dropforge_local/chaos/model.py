"""The life of one run, explored to the end: every order of events, with a bound on the faults.

A state is everything durable: the runs bucket, the cloud, the snapshots of executions, and undelivered messages.
A transition is the real code: a function called whole, or killed before one of its effects; a step of the workflow; an
event of the cloud. The model simplifies two things: time stands still, and two functions never run at once.
The seeds cover both.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from dropforge.base import names
from dropforge.base.errors import CloudError, DropforgeError, ErrorClass
from dropforge.cloud.context import Cloud
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.platforms.lookup import Platforms
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import Launch, Phase, Status
from dropforge.run.places import Entry, Places
from dropforge.run.proof import key_of_run, with_proof
from dropforge.spec import JobSpec
from dropforge.stages.places import OBJECT as OBJECT_OF_PLACES
from workflows_engine import Wait, decode_value, encode_value, timer_result

from .cloud import OPERATIONS, RUNS, SPECS, deployment
from .faults import Strike
from .functions import call_stage, entry_points, event_of, give_context, topic_source
from .manifests import manifest
from .scheduler import START, Killed
from .seam import context_of
from .storage import Storage, StoredObject
from .workflows import Execution, Reply, Workflows
from .world import World

T = TypeVar("T")
JOB, SERVICE = "run.googleapis.com/Job", "run.googleapis.com/Service"
OBJECT = "specs/job.json"
MOST_EFFECTS = 400
SWEEP_AFTER = 60.0  # seconds: old enough for the sweep to treat a resource as lost
LATE_SWEEP_AFTER = 5 * 86400.0  # every endpoint is past its ttl
MAX_ATTEMPTS = 2
RUN = names.run_id_of_object(SPECS, OBJECT, 1)
CANCEL = base64.b64encode(json.dumps({"cancel": RUN}).encode()).decode()
SPEC = json.dumps(
    {
        "api_version": "dropforge/v1",
        "name": "job",
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": {"type": "cloud_run", "ttl": "1h"},
        "limits": {"max_duration": "2h", "max_attempts": MAX_ATTEMPTS},
    }
).encode()
# Time stands still: a pause would never end. The policy lets one run begin; another run has the place at first.
SETTINGS = replace(deployment('{"api_version": "dropforge/v1", "max_runs": 1}'), capacity_pause_seconds=0)
OTHER = "other-0123456789ab"
TAKEN = Places(holding=[Entry(run=OTHER, created=datetime.fromtimestamp(START, UTC), labels={}, usd=0.0)])
PLACES = ((OBJECT_OF_PLACES, TAKEN.model_dump_json().encode()),)
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"})


class Change(NamedTuple):
    """The result of a transition, as `State.after` needs it.

    The code can read the first four fields of the next state. `taken` is the mail that the transition acknowledged, and
    `published` are the ids of its run events. `deaths` has a number for each effect of the transition: a death before
    the effect with this number has the same result, because nothing durable changed between the two effects.
    """

    objects: tuple[tuple[str, bytes], ...]
    cloud: tuple[tuple[str, str], ...]
    executions: tuple[tuple[str, str, str, str], ...]
    late: bool
    taken: frozenset[str]
    published: frozenset[str]
    deaths: tuple[int, ...]


class State(NamedTuple):
    """Everything that outlives a call. `announced` are the ids of run events that were published."""

    objects: tuple[tuple[str, bytes], ...] = ()
    cloud: tuple[tuple[str, str], ...] = ()  # name and phase
    executions: tuple[tuple[str, str, str, str], ...] = ()  # id, state, snapshot, wait
    mail: tuple[str, ...] = ()
    announced: frozenset[str] = frozenset()
    faults: int = 0
    late: bool = False  # every endpoint is past its ttl
    is_cancelled: bool = False  # a cancel was recorded before the teardown began

    @property
    def record(self) -> dict[str, Any]:
        """The run's record; empty while there is none."""
        return dict(_parsed(next((data for name, data in self.objects if name.endswith("/record.json")), b"{}")))

    @property
    def places(self) -> Places:
        """Who holds a place, and who waits for one."""
        return Places.model_validate_json(next(data for name, data in self.objects if name == OBJECT_OF_PLACES))

    @property
    def holding(self) -> list[str]:
        """The runs that hold a place."""
        return [entry.run for entry in self.places.holding]

    @property
    def ledger(self) -> dict[str, str]:
        """The state of each resource in the run's ledger, by its name."""
        return {entry["name"]: entry["state"] for entry in self.record.get("resources", ())}

    @property
    def seen(self) -> State:
        """This state without the fields that no code reads. A step has one result for all states with one `seen`."""
        return self._replace(mail=(), announced=frozenset(), faults=0, is_cancelled=False)

    def after(self, change: Change, fault: bool) -> State:
        """The state after a transition."""
        following = State(
            change.objects,
            change.cloud,
            change.executions,
            tuple(kind for kind in self.mail if kind not in change.taken),
            self.announced | change.published,
            self.faults + fault,
            change.late,
            self.is_cancelled,
        )
        if self.is_cancelled or self.record.get("state") in (*TERMINAL, "TEARING_DOWN"):
            return following
        return following._replace(is_cancelled=bool(following.record.get("cancel_requested")))


class Step(NamedTuple):
    """An event that can happen in a state, its name for people, and whether it is a fault."""

    name: str
    take: Callable[[Stage], None]
    fault: bool = False


class Stage(World):
    """The world of one transition: made from a state, acted on, and read into the change of the state."""

    def __init__(self, state: State, waits: dict[str, Wait], main: ModuleType, kill_at: int | None = None) -> None:
        super().__init__(0, Strike(0, ""))
        self.state = state
        self.waits = waits
        self.kill_at = kill_at
        self.count = 0
        self.deaths: list[int] = []
        self.trace: object = None  # grows with each change of what outlives the call
        self.refuse = False
        self.slept = 0.0
        self.late = state.late
        self.offset = LATE_SWEEP_AFTER if state.late else 0.0
        self.cloud = dict(state.cloud)
        self.taken: set[str] = set()  # mail that was acknowledged
        self.soon: list[Callable[[], None]] = []
        self.scheduler.wait = self.sleep  # type: ignore[method-assign]  # time passes only within a call
        self.storage = Storage(self, (SPECS, RUNS))
        self.storage.objects[RUNS] = {name: StoredObject(data, 1, START) for name, data in state.objects}
        self.storage.objects[SPECS] = {OBJECT: StoredObject(SPEC, 1, START)}
        self.workflows = Workflows(self, lambda *_: None)
        for id_, phase, snapshot, wait in state.executions:
            self.workflows.executions[id_] = self._execution(id_, phase, snapshot, wait)
        self._ids = len(state.executions)
        self.main = main

    @property
    def now(self) -> float:
        return START + self.offset + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def after(self, delay: float, event: Callable[[], None]) -> None:
        if delay < 1:
            self.soon.append(event)

    def effect(
        self,
        name: str,
        action: Callable[[], T],
        *,
        changes: bool = False,
        error: Callable[[bool], Exception] | None = None,
    ) -> T:
        """One effect of the called function; the function may crash before it. Nothing that is dead has effects."""
        self.count += 1
        if self.kill_at is not None and self.count >= self.kill_at:
            raise Killed(name)
        trace = len(self.history.facts), tuple(self.cloud.items()), self.slept
        self.deaths.append(self.deaths[-1] if trace == self.trace else self.count)
        self.trace = trace
        return action()

    def call(self, name: str, body: dict[str, Any]) -> Reply:
        """A stage by HTTP, on this stack."""
        try:
            return call_stage(self.main, name, body)
        except Killed:
            return None
        except Exception as error:  # noqa: BLE001  # as functions-framework does
            return 500, {"error": repr(error)}

    def deliver(self, name: str, source: str, data: dict[str, Any]) -> bool:
        """An event; whether it was acknowledged."""
        try:
            getattr(self.main, name)(event_of(source, data))
        except (Killed, DropforgeError):
            return False
        return True

    def change(self) -> Change:
        """The result of this transition, after all that it had started."""
        while self.soon:
            self.soon.pop(0)()
        return Change(
            tuple(sorted((name, stored.data) for name, stored in self.storage.objects[RUNS].items())),
            tuple(sorted(self.cloud.items())),
            tuple(self._frozen(execution) for execution in self.workflows.executions.values()),
            self.late,
            frozenset(self.taken),
            frozenset(fact.data["id"] for fact in self.history.of("published")),
            tuple(self.deaths),
        )

    def _execution(self, id_: str, state: str, snapshot: str, wait: str) -> Execution:
        text, values = json.loads(snapshot)
        restored = (text, {int(key): value for key, value in values.items()})
        machine: Any = None
        created = self.state.record.get("created")  # no execution is older than its run
        began = datetime.fromisoformat(created).timestamp() if created else START
        execution = Execution(id_, RUN, {names.RUN_LABEL: RUN}, began, machine, restored, state)
        if wait:
            restored_wait = self.waits[wait]
            execution.waits[restored_wait.thread] = restored_wait
            execution.early = {restored_wait.ref: None} if restored_wait.ref else {}
        return execution

    def _frozen(self, execution: Execution) -> tuple[str, str, str, str]:
        """An execution as part of a state; without counts and times that decide nothing, so that waits recur."""
        wait = next(iter(execution.waits.values()), None)
        if wait is None or execution.snapshot is None:
            return execution.id, execution.state, json.dumps(["", {}]), ""
        text, values = execution.snapshot
        state = decode_value(text)
        state |= {"steps": 0, "external_steps": 0}
        for thread in state["threads"]:
            thread["seq"] = 0
        wait = replace(wait, seq=0, due=None)
        key = repr(wait)
        self.waits[key] = wait
        return execution.id, execution.state, json.dumps([encode_value(state), values]), key


class ModelTarget:
    """Both target and server: a resource exists, is running or has ended, and is deleted at once."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def regions(self, spec: JobSpec) -> list[str]:
        return ["us-central1"]

    def region(self, deployment: Any) -> str:
        return "us-central1"

    def price(self, spec: JobSpec, placement: int | None = 0) -> HourlyPrice:
        return HourlyPrice(1.0, None, "the model")

    def resources(self, wanted: Any) -> list[Resource]:
        if isinstance(wanted, Launch):
            return [Resource(JOB, f"jobs/{names.training_name(wanted.run, wanted.attempt)}")]
        return [Resource(SERVICE, f"services/{names.endpoint_name(wanted.run)}")]

    def provision(self, cloud: Any, launch: Launch) -> None:
        if self.stage.refuse:
            raise CloudError(ErrorClass.STOCKOUT, "no more capacity")
        self._create(self.resources(launch)[0].name)

    def inspect(self, cloud: Any, launch: Launch) -> Status:
        name = self.resources(launch)[0].name
        phase = self.stage.effect("inspect", lambda: self.stage.cloud.get(name, "gone"))
        if phase == "preempted":
            return Status(Phase.FAILED, name, ErrorClass.PREEMPTED)
        return Status(Phase(phase), name, ErrorClass.CODE if phase == "failed" else None)

    def deploy(self, cloud: Any, deployment: Any) -> str:
        self._create(self.resources(deployment)[0].name)
        return "https://endpoint.chaos"

    def why_not_ready(self, cloud: Any, deployment: Any) -> CloudError:
        return CloudError(ErrorClass.CODE, "the endpoint is ready at once")

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        resources = self.stage.effect("list", lambda: sorted(self.stage.cloud))
        for name in resources:
            labels = names.labels(RUN, {}, **{names.DEPLOYMENT_LABEL: cloud.settings.deployment})
            if name.startswith("jobs/"):
                labels[names.ATTEMPT_LABEL] = name.rsplit("-a", 1)[1]
            kind = JOB if name.startswith("jobs/") else SERVICE
            yield Listed(kind, name, labels, datetime.fromtimestamp(START, UTC) - timedelta(days=1))

    def teardown(self, cloud: Any, kind: str, name: str) -> bool:
        self.stage.effect("delete", lambda: self.stage.cloud.pop(name, None))
        return True

    def _create(self, name: str) -> None:
        self.stage.effect("create", lambda: self.stage.cloud.setdefault(name, "running"))


class Explorer:
    """Breadth first through every state that `faults` faults, and one cancel, can lead to."""

    def __init__(self, faults: int, cancel: bool) -> None:
        self.faults = faults
        self.main = entry_points()  # for all transitions: it keeps nothing between two calls
        self.waits: dict[str, Wait] = {}
        self.changes: dict[tuple[str, int | None, State], Change] = {}
        self.first = State(PLACES, mail=("spec", "cancel") if cancel else ("spec",))
        self.came: dict[State, tuple[State, str] | None] = {self.first: None}
        self.edges: dict[State, list[tuple[State, bool]]] = {}
        self.problems: list[tuple[State, str]] = []

    def explore(self) -> None:
        """Visit every state. Note each broken rule, with the state that breaks it."""
        ahead = deque([self.first])
        while ahead:
            state = ahead.popleft()
            self.edges[state] = []
            for name, following, fault in self._successors(state):
                self.edges[state].append((following, fault))
                new = following not in self.came
                if new:
                    self.came[following] = state, name
                    ahead.append(following)
                if new or following.record != state.record or following.cloud != state.cloud:
                    self.problems += [(following, problem) for problem in broken(state, following)]
        self.problems += [(state, "no good end can be reached from here") for state in self._hopeless()]

    def way(self, state: State) -> list[str]:
        """The names of the steps from the first state to a state."""
        steps: list[str] = []
        at: State = state
        while (came := self.came[at]) is not None:
            at, name = came
            steps.append(name)
        return steps[::-1]

    def _successors(self, state: State) -> Iterator[tuple[str, State, bool]]:
        for step in steps(state):
            if step.fault and state.faults >= self.faults:
                continue
            change = self.change(step, state, None)
            yield step.name, state.after(change, step.fault), step.fault
            if state.faults + step.fault >= self.faults:
                continue
            for at, first in enumerate(change.deaths[:MOST_EFFECTS], 1):
                died = self.change(step, state, first)
                yield f"{step.name}, killed at effect {at}", state.after(died, True), True

    def change(self, step: Step, state: State, kill_at: int | None) -> Change:
        """The result of a step, which is taken only once for all states with one `seen`."""
        key = step.name, kill_at, state.seen
        if key not in self.changes:
            self.changes[key] = self.take(step, state.seen, kill_at)
        return self.changes[key]

    def take(self, step: Step, state: State, kill_at: int | None) -> Change:
        """Take a step. The called function dies before the effect with the number `kill_at`."""
        stage = Stage(state, self.waits, self.main, kill_at)
        target: Any = ModelTarget(stage)
        platforms = Platforms(lambda _: target, lambda _: target, lambda _: target, lambda: [target, target])
        give_context(stage.main, context_of(stage, _clients(stage), SETTINGS, platforms))
        step.take(stage)
        return stage.change()

    def _hopeless(self) -> list[State]:
        """States from which no good end can be reached without further faults."""
        back: dict[State, list[State]] = {}
        for state, edges in self.edges.items():
            for following, fault in edges:
                if not fault:
                    back.setdefault(following, []).append(state)
        ahead = deque(state for state in self.edges if is_good_end(state))
        hopeful = set(ahead)
        while ahead:
            for state in back.get(ahead.popleft(), []):
                if state not in hopeful:
                    hopeful.add(state)
                    ahead.append(state)
        return [state for state in self.edges if state not in hopeful]


@lru_cache(maxsize=1024)
def _parsed(content: bytes) -> dict[str, Any]:
    return dict(json.loads(content))


def steps(state: State) -> Iterator[Step]:
    """Every event that can happen next."""
    for kind in state.mail:
        yield Step(f"{kind} arrives", _mail(kind, keep=False))
        yield Step(f"{kind} arrives twice", _mail(kind, keep=True), fault=True)
    for id_, phase, _, wait in state.executions:
        if phase == "ACTIVE":
            yield Step(f"{id_} continues", _continue(id_))
            yield Step(f"{id_} is cancelled by hand", _cancel_execution(id_), fault=True)
            if "/provision" in wait:
                yield Step(f"{id_} continues: no capacity", _continue(id_, refuse=True), fault=True)
            if "http" in wait:
                yield Step(f"{id_} continues: its reply is lost", _continue(id_, lose=True), fault=True)
    for name, phase in state.cloud:
        if name.startswith("jobs/") and phase == "running":
            yield Step(f"{name} succeeds", _train(name))
            yield Step(f"{name} fails permanently", _end(name, "failed"))
            yield Step(f"{name} is preempted", _end(name, "preempted"), fault=True)
    if OTHER in state.holding and state.record.get("queued"):
        yield Step("the other run ends", _end_other)
    yield Step("a sweep", _sweep)
    if not state.late and state.record.get("state") in TERMINAL:
        yield Step("a week passes, and a sweep", _late_sweep)


def broken(before: State, after: State) -> Iterator[str]:
    """The rules that a transition breaks."""
    old, new = before.record, after.record
    over = new.get("state") in TERMINAL
    if old.get("state") in TERMINAL and any(old[key] != new[key] for key in ("state", "error", "history", "attempts")):
        yield f"a run was changed after it was {old['state']}"
    jobs = [name for name, _ in after.cloud if name.startswith("jobs/")]
    if len(jobs) > 1:
        yield f"two attempts have resources at once: {jobs}"
    created = {name for name, _ in after.cloud} - {name for name, _ in before.cloud}
    for name in created:
        if after.ledger.get(name) not in ("intended", "created"):
            yield f"{name} was created, but the ledger says {after.ledger.get(name)}"
    if over and old.get("state") not in TERMINAL:
        if jobs:
            yield f"{jobs} existed when the run was {new['state']}"
        if before.is_cancelled and new["state"] != "CANCELLED":
            yield f"the cancel was recorded, but the run ended {new['state']}"
        if old.get("cancel_requested") and new["state"] == "SUCCEEDED":
            yield "the run succeeded, although its record had a cancel request"
        if any(attempt["ended"] is None for attempt in new["attempts"]):
            yield "an attempt has no end in the record of a finished run"
    if len(after.holding) > 1:
        yield f"{after.holding} hold a place at once"
    if new.get("attempts") and not over and after.holding != [RUN]:
        yield f"the run has an attempt, but {after.holding} hold a place"
    if len(new.get("attempts", [])) > MAX_ATTEMPTS:
        yield "more attempts than the spec allows"


def is_good_end(state: State) -> bool:
    """The run is over and announced, no resource exists, no execution is active, and its place is given back."""
    record = state.record
    if record.get("state") not in TERMINAL or state.mail or not state.late or RUN in state.places.runs:
        return False
    end = record["history"][-1]
    is_announced = f"{RUN}/{end['attempt']}/{end['state'].lower()}" in state.announced
    return is_announced and not state.cloud and all(phase != "ACTIVE" for _, phase, _, _ in state.executions)


def _mail(kind: str, keep: bool) -> Callable[[Stage], None]:
    def arrive(stage: Stage) -> None:
        if kind == "spec":
            stage.slept += _age(stage)
            data = {"bucket": SPECS, "name": OBJECT, "generation": "1", "size": str(len(SPEC))}
            done = stage.deliver("on_spec_uploaded", SPECS, data)
        else:
            message = {"message": {"data": CANCEL, "messageId": "cancel"}}
            done = stage.deliver("on_spec_message", topic_source(OPERATIONS), message)
        if done and not keep:
            stage.taken.add(kind)

    return arrive


def _end_other(stage: Stage) -> None:
    """Give back the other run's place, as its end does."""
    stored = stage.storage.objects[RUNS][OBJECT_OF_PLACES]
    places = Places.model_validate_json(stored.data).without(OTHER, None, ())
    stage.storage.put(RUNS, OBJECT_OF_PLACES, places.model_dump_json().encode())


def _continue(id_: str, refuse: bool = False, lose: bool = False) -> Callable[[Stage], None]:
    """The wait of the execution ends: a function answers, or a sleep or the wait for a callback ends."""

    def proceed(stage: Stage) -> None:
        execution = stage.workflows.executions[id_]
        wait = next(iter(execution.waits.values()), None)
        if wait is None:
            stage.workflows.begin(execution)
            return
        stage.workflows.revive(execution)
        if wait.kind != "http":
            stage.workflows.answer(execution, wait, *timer_result(wait))
            return
        stage.refuse = refuse
        reply = stage.call(*stage.workflows.request_of(wait))
        stage.workflows.reply(execution, wait, None if lose else reply)

    return proceed


def _cancel_execution(id_: str) -> Callable[[Stage], None]:
    return lambda stage: stage.workflows.cancel(id_)


def _train(name: str) -> Callable[[Stage], None]:
    """The container ends. The first attempt that gets here commits the model."""

    def end(stage: Stage) -> None:
        path = f"models/{RUN}/MANIFEST.json"
        attempt = int(name.rsplit("-a", 1)[1])
        objects = stage.storage.objects[RUNS]
        day = json.loads(objects[names.record_object(RUN)].data)["key_day"]
        key = key_of_run(objects[names.day_key_object(day)].data.decode(), RUN)
        data = with_proof(key, path, manifest(RUN, attempt, START, 0.9))
        stage.storage.objects[RUNS].setdefault(path, StoredObject(data, 1, START))
        stage.cloud[name] = "succeeded"

    return end


def _end(name: str, phase: str) -> Callable[[Stage], None]:
    return lambda stage: stage.cloud.update({name: phase})


def _sweep(stage: Stage) -> None:
    stage.slept += _age(stage)
    stage.call("sweep", {})


def _age(stage: Stage) -> float:
    """Seconds until the next check of the run: long enough that lost work counts as lost."""
    created = stage.state.record.get("created")
    return SWEEP_AFTER + (datetime.fromisoformat(created).timestamp() - START if created else 0.0)


def _late_sweep(stage: Stage) -> None:
    stage.late = True
    stage.slept += LATE_SWEEP_AFTER
    stage.call("sweep", {})


class Publisher:
    """An unused client, like the client of an instance that has just started."""

    def __init__(self, publish: Callable[..., Any]) -> None:
        self.publish = publish


def _clients(stage: Stage) -> dict[str, Callable[..., Any]]:
    none = SimpleNamespace
    secret = none(state=none(name="ENABLED"), payload=none(data=b"https://slack.chaos"))
    answered = none(status_code=200, text="", body="ok", json=lambda: {"choices": [{"message": {}}]})

    def publish(topic: str, data: bytes, timeout: float, **attributes: str) -> Any:
        def result(timeout: float) -> None:
            stage.effect("publish", lambda: stage.fact("published", id=attributes["ce-id"]))

        return none(result=result)

    return {
        "storage": lambda: stage.storage,
        "publisher": lambda: Publisher(publish),
        "secrets": lambda: none(get_secret_version=lambda **_: secret, access_secret_version=lambda **_: secret),
        "workflow_executions": lambda: stage.workflows,
        "callbacks": lambda: none(post=lambda *_, **__: none(status_code=404)),
        "endpoint": lambda audience, key="": none(post=lambda *_, **__: answered),
        "slack": lambda url: none(send=lambda **_: answered),
    }
