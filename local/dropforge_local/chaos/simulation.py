"""One life from its first event to its last: of a seed, or of one run that one fault strikes, anywhere or by aim."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

from dropforge_local.stack.config import find_containers

from . import focus
from .cloud import ACCESS_URL, Cloud, Services
from .container_log import ContainerLog
from .faults import Strike
from .history import History
from .priced import DEARER, dearer_platforms
from .repeats import RepeatCloud, Repeating
from .scheduler import START
from .specs import TARGETS, clusters
from .trainer import Work
from .workload import Workload
from .world import World

SWEEP_SECONDS = 600.0  # as var.sweep_schedule of Terraform has it
# Last digits of the seeds whose policy lets only one run, or two, begin at the same time; the others then wait. Kept
# seeds that revealed a defect end in other digits.
LIMITED = (2, 7)
MOST_IN_TURN = 3  # so many times SETTLE_SECONDS are enough for all runs of a seed, one after the other
FOCUSED_SECONDS = 5400.0  # from the begin of a focused life to its last fault
SETTLE_SECONDS = 10800.0  # from the last fault to the end: every run is over, and every endpoint past its ttl


def run(seed: int, targets: Sequence[str] = tuple(TARGETS), *, real_containers: bool = False) -> History:
    """The history of a seed whose runs are for these targets; the same each time, in every process.

    `real_containers`: containers/common runs in each training container, and what it asks meets the faults, too.
    """
    world, most_runs = World(seed), 1 + seed // 10 % 2 if seed % 10 in LIMITED else None
    policy = {"api_version": "dropforge/v1", "max_runs": most_runs}
    cloud = _cloud(world, targets, json.dumps(policy) if most_runs else "", real_containers=real_containers)
    world.fact("limit", runs=most_runs)
    Workload(world, cloud, targets).begin()
    world.calm = START + world.random.uniform(2400, 5400)
    _plan_restarts(world, cloud)
    with _logging(world, is_on=real_containers):
        return _live(world, cloud, world.calm + SETTLE_SECONDS * (MOST_IN_TURN if most_runs else 1))


def run_repeated(seed: int, targets: Sequence[str] = tuple(TARGETS)) -> History:
    """The history of a seed whose users also send again what they have sent (repeats.py)."""
    world = World(seed)
    cloud = RepeatCloud(world, clusters(targets))
    Repeating(world, cloud, targets).begin()
    world.calm = START + world.random.uniform(2400, 5400)
    _plan_restarts(world, cloud)
    return _live(world, cloud, world.calm + SETTLE_SECONDS)


def run_struck(strike: Strike, target: str = "cloud_run", *, real_containers: bool = False) -> History:
    """The history of one run that is preempted, trains again and serves, and that one fault strikes."""
    world = World(0, strike)
    cloud = _cloud(world, [target], real_containers=real_containers)
    workload = Workload(world, cloud, [target])
    workload.begin_single()
    world.calm = START + 3600
    world.actions = {"cancel": workload.cancel_all, "restart": cloud.workflows.restart, "sweep": cloud.sweep}
    with _logging(world, is_on=real_containers):
        return _live(world, cloud, world.calm + 3600)


def run_focused(seed: int, targets: Sequence[str] = tuple(TARGETS)) -> History:
    """The history of one run that can succeed and serve, and that the aim of this seed strikes."""
    every = focus.aims(targets)
    aim = every[seed % len(every)]
    world = World(seed, Strike(0, aim.fault))
    cloud = Cloud(world, clusters([aim.target]))
    workload = Workload(world, cloud, [aim.target])
    workload.begin_focused()
    world.calm = START + FOCUSED_SECONDS
    world.actions = {
        "cancel": workload.cancel_all,
        "delete": workload.delete_all,
        "execution": lambda: _cancel_executions(world, cloud, 1.0),
        "restart": cloud.workflows.restart,
        "sweep": cloud.sweep,
    }
    focus.arm(world, cloud, aim)
    return _live(world, cloud, world.calm + SETTLE_SECONDS)


def run_alone(
    spec: dict[str, Any],
    work: Work,
    cancel_after: float | None = None,
    seconds: float = SETTLE_SECONDS,
    policy: str = "",
) -> History:
    """The history of one run of this spec without any fault, for so many seconds, in a deployment with this policy.

    A user may cancel the run so many seconds after its drop.
    """
    world = World(0, Strike(0, ""))
    cloud = Cloud(world, clusters([spec["target"]["type"]]), policy)
    workload = Workload(world, cloud, [spec["target"]["type"]])
    workload.begin_alone(spec, work)
    if cancel_after is not None:
        world.after(1 + cancel_after, workload.cancel_all)
    world.calm = START
    return _live(world, cloud, START + seconds)


def run_beside_hostile(target: str = "cloud_run", *, hostile: bool = True, bounded: bool = True) -> History:
    """The history of two runs without any fault. The trainer of the first one is hostile, unless `hostile` is False.

    `bounded`: its token has the boundary that the function `access` sets.
    """
    world = World(0, Strike(0, ""))
    cloud = Cloud(world, clusters([target]))
    workload = Workload(world, cloud, [target])
    workload.begin_pair()
    cloud.trainer.is_hostile = lambda run: hostile and run == workload.dropped[0]
    cloud.trainer.is_bounded = bounded
    world.calm = START + 3600
    return _live(world, cloud, world.calm + 3600)


def _cloud(world: World, targets: Sequence[str], policy: str = "", *, real_containers: bool) -> Cloud:
    if not real_containers:
        return Cloud(world, clusters(targets), policy)
    find_containers()
    from .real_trainer import RealTrainer  # most lives need no container's code

    world.fact("dearer", share=DEARER)
    return Cloud(world, clusters(targets), policy, Services(trainer=RealTrainer), ACCESS_URL, dearer_platforms())


def _logging(world: World, *, is_on: bool) -> AbstractContextManager[object]:
    """What real containers log becomes facts."""
    return redirect_stderr(ContainerLog(world)) if is_on else nullcontext()


def _live(world: World, cloud: Cloud, end: float) -> History:
    _plan_sweeps(world, cloud, end)
    try:
        world.scheduler.run(world.calm)
        world.fact("calm", effects=world.effects)
        world.scheduler.run(end)
        world.fact("end", living=cloud.living(), effects=world.effects)
    finally:
        world.scheduler.close()
    return world.history


def _plan_sweeps(world: World, cloud: Cloud, end: float) -> None:
    when = START + world.random.random() * SWEEP_SECONDS
    while when < end:
        world.scheduler.at(when, cloud.sweep)
        if world.random.random() < world.faults.doubled_sweep:
            world.scheduler.at(when + world.random.random(), cloud.sweep)
        when += SWEEP_SECONDS


def _plan_restarts(world: World, cloud: Cloud) -> None:
    """Of the engine, and the moments at which somebody cancels executions by hand."""
    seconds = world.calm - START
    for _ in range(round(world.faults.restarts * seconds / 3600 * world.random.random())):
        world.scheduler.at(START + world.random.random() * seconds, cloud.workflows.restart)
    if world.faults.cancelled_execution:
        for _ in range(1 + world.random.randrange(3)):
            world.scheduler.at(START + world.random.random() * seconds, lambda: _cancel_executions(world, cloud))


def _cancel_executions(world: World, cloud: Cloud, rate: float | None = None) -> None:
    """Cancel each active execution by hand, with the rate of the seed's faults or with this rate."""
    for execution in list(cloud.workflows.executions.values()):
        if execution.state == "ACTIVE" and world.happens(world.faults.cancelled_execution if rate is None else rate):
            world.fact("fault", what="cancelled_execution", id=execution.id, run=execution.run)
            cloud.workflows.cancel(execution.id)
