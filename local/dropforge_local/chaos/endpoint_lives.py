"""Lives of named endpoints: rollouts, canaries, rollbacks and budgets of two endpoints, with the faults of a seed.

Users publish changes for a day; the rollouts have executions of the real workflow. Services are deleted by hand, new
revisions get no capacity or never answer, and functions, calls, the engine and executions fail as in other lives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms
from dropforge.run.proof import key_of_run, with_proof
from dropforge.run.record import Attempt, Record, RunState, Transition

from .cloud import OPERATIONS, RUNS, Cloud, deployment
from .faults import Strike
from .history import History
from .manifests import manifest
from .named import NamedCloud
from .named_vms import STRANGE, NamedVms
from .scheduler import START
from .seam import context_of
from .workflows import SOURCE, Workflows
from .world import World

VMS = "vms"  # the kind of lives on TPU VMs
BUDGETED, FREE = "budgeted", "free"  # the second never has a budget
USD_PER_HOUR = 3.0
SWEEP_SECONDS = 1800.0
DAY = 86400.0
DAY_KEY = "0" * 64  # drawing one would change what the seeds draw
CALM_SECONDS, LIFE_SECONDS = DAY, 2.5 * DAY
RUNS_OF_A_LIFE = tuple(f"model-{number:012x}" for number in range(4))
BAD_RUN = RUNS_OF_A_LIFE[3]  # its model fails half of its requests
Script = tuple[
    tuple[float, dict[str, Any]], ...
]  # what users want: hours after the beginning of a life, and the change
SCRIPT: Script = (
    (0.01, {"serve": {"run": RUNS_OF_A_LIFE[0], "endpoint": BUDGETED, "canary": None}}),
    (0.5, {"serve": {"run": RUNS_OF_A_LIFE[1], "endpoint": BUDGETED, "canary": None}}),
    (2.6, {"budget": {"endpoint": BUDGETED, "usd": 0.5, "per": "month"}}),
    (3.6, {"budget": {"endpoint": BUDGETED, "usd": 50.0, "per": "month"}}),
    (5.0, {"retire": BUDGETED}),
)
STRUCK_SECONDS = 10 * 3600.0
ROLLOUT = SOURCE.with_name("rollout.workflows.yaml")


class Place(Protocol):
    """Where the endpoints of a life are. `serve` is what specs say of it."""

    platforms: Platforms
    serve: dict[str, Any]

    def settings(self, own: Settings) -> Settings:
        """The settings of a deployment with named endpoints there."""

    def clients(self) -> dict[str, Callable[..., Any]]:
        """The simulated clients, by their names in clients.py."""

    def shown(self, endpoint: str) -> dict[str, Any] | None:
        """The parts of an endpoint that the cloud has, for the rules; None without any."""

    def plan_harm(self, endpoint: str, seconds: float) -> None:
        """Plan what people and Google do to an endpoint in this time, by the faults of the seed."""


class EndpointCloud(Cloud):
    """The simulated cloud with a platform for named endpoints, and the workflow of rollouts."""

    def __init__(self, world: World, kind: str) -> None:
        super().__init__(world)
        self.place: Place = NamedVms(world, self.tpu) if kind == VMS else NamedCloud(world, {BAD_RUN})
        self.rollouts = Workflows(world, self.functions.post, ROLLOUT, "rollout")
        settings = self.place.settings(replace(deployment(), rollout_workflow="dropforge-rollout"))
        clients = {**self.clients(), **self.place.clients(), "workflow_executions": lambda: self.rollouts}
        self.context: Context = context_of(world, clients, settings, self.place.platforms)
        self.functions.connect(self.context)


def run(seed: int, kind: str = "") -> History:
    """The history of a seed: the same each time, in every process. `kind`: VMS, or "" for a platform like Cloud Run."""
    world = World(seed)
    cloud = EndpointCloud(world, kind)
    for number, name in enumerate(RUNS_OF_A_LIFE):
        _train(world, cloud, name, number)
    world.calm = START + CALM_SECONDS
    _plan_users(world, cloud)
    _plan_operators(world, cloud)
    return _live(world, cloud, START + LIFE_SECONDS)


def run_struck(strike: Strike, script: Script = SCRIPT, preempted: float = 1.4 * 3600) -> History:
    """The history of a name on TPU VMs that one fault strikes: two models, a lost machine, a budget, and its end.

    `preempted` is when its machine is lost, in seconds; infinite: never.
    """
    world = World(0, strike)
    cloud = EndpointCloud(world, VMS)
    place = cloud.place
    assert isinstance(place, NamedVms), "that is the place of this kind"
    for number, name in enumerate(RUNS_OF_A_LIFE[:2]):
        _train(world, cloud, name, number, ttl="7d")
    world.actions = {
        "restart": cloud.rollouts.restart,
        "sweep": cloud.sweep,
        "stray": partial(place.stray, BUDGETED, STRANGE),
        "unname": partial(place.stray, BUDGETED, ""),
    }
    for hours, change in script:
        _publish(world, cloud, hours * 3600.0, change)
    world.after(preempted, partial(place.harm, BUDGETED, "preempted"))
    world.calm = START + STRUCK_SECONDS - 4 * 3600.0
    return _live(world, cloud, START + STRUCK_SECONDS)


def run_alone(script: Script, seconds: float) -> History:
    """The history of a name on a platform like Cloud Run without any fault, for so many seconds."""
    world = World(0, Strike(0, ""))
    cloud = EndpointCloud(world, "")
    for number, name in enumerate(RUNS_OF_A_LIFE):
        _train(world, cloud, name, number, ttl="7d")
    for hours, change in script:
        _publish(world, cloud, hours * 3600.0, change)
    world.calm = START
    return _live(world, cloud, START + seconds)


def _live(world: World, cloud: EndpointCloud, end: float) -> History:
    when = START + 60
    while when < end:
        world.scheduler.at(when, cloud.sweep)
        if world.random.random() < world.faults.doubled_sweep:
            world.fact("fault", what="doubled_sweep")
            world.scheduler.at(when + world.random.random(), cloud.sweep)
        when += SWEEP_SECONDS
    try:
        world.scheduler.run(world.calm)
        world.fact("calm", effects=world.effects)
        world.scheduler.run(end)
        shown = {name: found for name in (BUDGETED, FREE) if (found := cloud.place.shown(name))}
        active = [each.id for each in cloud.rollouts.executions.values() if each.state == "ACTIVE"]
        world.fact("end", services=shown, active=active)
    finally:
        world.scheduler.close()
    return world.history


def _train(world: World, cloud: EndpointCloud, run: str, number: int, ttl: str = "") -> None:
    """A run that has ended well before."""
    began = datetime.fromtimestamp(START, UTC) - timedelta(hours=2)
    ended = began + timedelta(hours=1)
    attempt = Attempt(number=1, placement=0, region="us-central1", started=began, deadline=ended, ended=ended)
    states = [Transition(state=RunState.ACCEPTED, time=began), Transition(state=RunState.SUCCEEDED, time=ended)]
    about: dict[str, Any] = {"name": "model", "source": "chaos", "created": began, "attempts": [attempt]}
    record = Record(run=run, state=RunState.SUCCEEDED, history=states, **about)
    day = f"{began:%Y-%m-%d}"
    cloud.storage.put(RUNS, names.day_key_object(day), DAY_KEY.encode())
    cloud.context.store.create(evolve(record, key_day=day))
    has_canary = number % 2 and not isinstance(cloud.place, NamedVms)
    canary = {"canary": {"percent": 20, "for": "30m"}} if has_canary else {}
    times = {"startup_timeout": "20m", "ttl": ttl or world.random.choice(("7d", "7d", "7d", "4h"))}
    serve = {**cloud.place.serve, "endpoint": "x", "price_usd_per_hour": USD_PER_HOUR, **times, **canary}
    spec = {
        "api_version": "dropforge/v1",
        "name": "model",
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "training": {"adapter": {"type": "lora"}},
        "serve": serve,
        "notify": {"slack": {"webhook_secret": "slack-webhook"}},
    }
    cloud.storage.put(RUNS, names.spec_object(run), json.dumps(spec).encode())
    name = f"models/{run}/MANIFEST.json"
    cloud.storage.put(RUNS, name, with_proof(key_of_run(DAY_KEY, run), name, manifest(run, 1, START - 3600, 0.9)))


def _plan_users(world: World, cloud: EndpointCloud) -> None:
    """Changes of both endpoints, at random times before the faults end."""
    draw = world.random
    for endpoint in (BUDGETED, FREE):
        first = {"serve": {"run": RUNS_OF_A_LIFE[0], "endpoint": endpoint, "canary": None}}
        _publish(world, cloud, 30 + draw.random() * 60, first)
        for _ in range(draw.randrange(3, 9)):
            run = draw.choice(RUNS_OF_A_LIFE)
            serve = {"run": run, "endpoint": endpoint, "again": True}  # also a model that serves already
            change = {"rollback": endpoint} if draw.random() < 0.3 else {"serve": serve}
            _publish(world, cloud, draw.random() * CALM_SECONDS, change)
        if draw.random() < 0.15:
            _publish(world, cloud, CALM_SECONDS * (0.5 + draw.random()), {"retire": endpoint})
    for _ in range(draw.randrange(1, 4)):
        usd = draw.choice((None, 2.0, 5.0, 12.0, 30.0))
        budget = {"endpoint": BUDGETED, "usd": usd, **({} if usd is None else {"per": draw.choice(("day", "month"))})}
        _publish(world, cloud, draw.random() * CALM_SECONDS, {"budget": budget})


def _publish(world: World, cloud: EndpointCloud, delay: float, change: dict[str, Any]) -> None:
    attributes = {"idempotency_key": f"k{world.id()}"}

    def arrive() -> None:
        cloud.events.accept(f"topics/{OPERATIONS}", json.dumps(change).encode(), attributes)

    world.after(delay, arrive)


def _plan_operators(world: World, cloud: EndpointCloud) -> None:
    """Deletions and cancels by hand, and restarts of the engine."""
    draw, faults = world.random, world.faults
    for endpoint in (BUDGETED, FREE):
        cloud.place.plan_harm(endpoint, CALM_SECONDS)
    for _ in range(int(faults.restarts * 6 * draw.random())):
        world.after(draw.random() * CALM_SECONDS, cloud.rollouts.restart)
    for _ in range(draw.randrange(6) if faults.cancelled_execution else 0):
        world.after(draw.random() * CALM_SECONDS, lambda: _cancel_executions(cloud))


def _cancel_executions(cloud: EndpointCloud) -> None:
    for execution in list(cloud.rollouts.executions.values()):
        if execution.state == "ACTIVE":
            cloud.rollouts.cancel(execution.id)
