"""Many runs at once against the quotas of a project: the runs of a large deployment, in small (docs/scale.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dropforge.base import names
from dropforge.platforms.cloud_run.catalog import CLOUD_RUN_MACHINES

from . import specs
from .cloud import SPECS
from .faults import Strike
from .history import History
from .limited import LimitedCloud
from .quotas import Quotas
from .scheduler import START
from .simulation import SWEEP_SECONDS
from .trainer import Work
from .world import World

AT_ONCE = 10_000  # the runs at once for which `Quotas` has its values
TRAINING_SECONDS = 8640.0  # 2 h 24 min, on average
STEP_SECONDS = 3600.0
LAST_SECONDS = 5 * 86400.0  # by then every run must have ended
SETTLE_SECONDS = 3 * 3600.0  # from the end of the last run until every endpoint has expired and every sweep has looked
REGIONS = CLOUD_RUN_MACHINES["nvidia-l4"].regions


@dataclass(frozen=True)
class Crowd:
    """So many runs, dropped within some seconds. `max_runs` is that of the policy; None: no policy.

    `part` is the part of a large deployment that is simulated: the quotas are scaled by it.
    """

    runs: int = 200
    within: float = 600.0
    part: float = 0.01
    max_runs: int | None = None
    quotas: Quotas = field(default_factory=Quotas)
    regions: tuple[str, ...] = REGIONS
    channels: int = 10
    serving: int = 10  # each run with a number that this divides serves its model for an hour
    training_seconds: float = TRAINING_SECONDS


def run_crowd(crowd: Crowd, seed: int = 0) -> History:
    """The history of a crowd without any other fault; the same each time, in every process."""
    world, quotas = World(seed, Strike(0, "")), crowd.quotas.scaled(crowd.part)
    policy = json.dumps({"api_version": "dropforge/v1", "max_runs": crowd.max_runs}) if crowd.max_runs else ""
    channels = {f"slack-{number}": f"https://slack.chaos/{number}" for number in range(crowd.channels)}
    cloud = LimitedCloud(world, quotas, policy, channels)
    world.calm = START
    world.fact("limit", runs=crowd.max_runs)
    world.fact("quotas", **vars(quotas))
    for number in range(crowd.runs):
        world.after(world.random.random() * crowd.within, partial(_drop, world, cloud, crowd, number))
    try:
        _live(world, cloud, crowd)
    finally:
        world.scheduler.close()
    return world.history


def _live(world: World, cloud: LimitedCloud, crowd: Crowd) -> None:
    world.fact("calm", effects=0)
    end, last = START + crowd.within, START + crowd.within + LAST_SECONDS
    sweeps = START
    while True:
        while sweeps < end:
            world.scheduler.at(sweeps + world.random.random(), cloud.sweep)
            sweeps += SWEEP_SECONDS
        world.scheduler.run(end)
        if end >= last or cloud.is_idle(crowd.runs):
            break
        end += STEP_SECONDS
    world.fact("end", living=cloud.living(), effects=world.effects)


def _drop(world: World, cloud: LimitedCloud, crowd: Crowd, number: int) -> None:
    """A user drops a spec. Its placements are the regions, beginning with another one for each run."""
    draw, name = world.random, f"specs/job-{number}.json"
    spec = _spec(crowd, number)
    generation = cloud.storage.put(SPECS, name, json.dumps(spec).encode())
    run = names.run_id_of_object(SPECS, name, generation)
    total = crowd.training_seconds * draw.uniform(0.5, 1.5)
    cloud.trainer.work[run] = Work(total=total, metric=0.9)
    world.fact("dropped", run=run, valid=True, spec=spec, object=name, generation=str(generation))


def _spec(crowd: Crowd, number: int) -> dict[str, Any]:
    first = number % len(crowd.regions)
    regions = [*crowd.regions[first:], *crowd.regions[:first]]
    target = {"type": "cloud_run", "placements": [{"region": region} for region in regions]}
    serve = {"type": "cloud_run", "ttl": "1h", "price_usd_per_hour": specs.ENDPOINT_USD[0]}
    return specs.spec(
        f"job-{number}",
        {**target, "price_usd_per_hour": specs.TRAINING_USD},
        limits={"max_duration": "12h", "stuck_after": "12h"},
        notify={"slack": {"webhook_secret": f"slack-{number % crowd.channels}"}},
        serve=serve if number % crowd.serving == 0 else None,
    )
