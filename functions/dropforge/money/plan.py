"""The plan of a job spec: the resources, places, requests and maximum cost of its run. Read by people, before a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from dropforge.base import names
from dropforge.base.settings import Settings
from dropforge.cloud.resource import Resource
from dropforge.fit.batch import Batch, batch_of
from dropforge.fit.phases import Row, phase_rows
from dropforge.fit.shape import ModelShape
from dropforge.money.control_plane import usage_of_training
from dropforge.money.limits import endpoint_seconds, most_usd, short_endpoint, training_seconds
from dropforge.platforms import get_server, get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import NO_KEY, Launch
from dropforge.spec import JobSpec
from dropforge.spec.advice import advice

OLD_PRICE = timedelta(days=180)
UNKNOWN_DIGEST = "0" * 12  # digest of bucket, object and generation: the upload decides the generation


@dataclass(frozen=True)
class PlacementPlan:
    """One attempt at one placement. `worst_case_usd` is the cost of all attempts if all of them run here."""

    region: str
    timeout_seconds: int
    price: HourlyPrice
    worst_case_usd: float | None
    resources: list[Resource]


@dataclass(frozen=True)
class EndpointPlan:
    """The endpoint. `price` is per running instance; `worst_case_usd` is the cost of all instances until the expiry."""

    region: str
    lifetime_seconds: int
    min_instances: int
    max_instances: int
    price: HourlyPrice
    worst_case_usd: float | None
    resources: list[Resource]


@dataclass(frozen=True)
class Plan:
    """The resources that a run of the spec would create."""

    run: str
    spec: JobSpec
    placements: list[PlacementPlan]
    endpoint: EndpointPlan | None
    warnings: list[str]
    batch: Batch
    phases: list[Row]
    control_plane_usd: float  # of a run whose only attempt uses all its time

    @property
    def worst_case_usd(self) -> float | None:
        """The maximum cost of training and endpoint, at most the budget; None if a price is unknown."""
        most = most_usd(self.spec)
        return None if most is None else round(most, 4)


def make_plan(
    spec: JobSpec,
    settings: Settings,
    object_name: str,
    now: datetime | None = None,
    shape: ModelShape | str = "",
) -> Plan:
    """Return the plan of `spec`, dropped as `object_name` at `now`. Without side effects.

    `shape` is that of the model, or why it is not known, which is a warning: the plan then has no phases.
    """
    now = now or datetime.now(UTC)
    slug = names.run_id_of_object("", object_name, 0).rpartition("-")[0]
    run = f"{slug}-{UNKNOWN_DIGEST}"
    target = get_target(spec.target.type)
    placements = [_placement(run, spec, settings, index, now) for index in range(len(target.regions(spec)))]
    endpoint = None if spec.serve is None else _endpoint(_launch(run, spec, settings, 0, now), now)
    prices = [placement.price for placement in placements] + ([endpoint.price] if endpoint else [])
    warnings = [*price_warnings(prices, now.date()), *filter(None, [short_endpoint(spec)]), *advice(spec)]
    if isinstance(shape, str) and shape:
        warnings.append(f"memory and disk are not planned: {shape}")
    phases = phase_rows(spec, shape) if isinstance(shape, ModelShape) else []
    longest = max(placement.timeout_seconds for placement in placements)
    control_plane = usage_of_training(longest, settings.check_interval_seconds).usd
    return Plan(run, spec, placements, endpoint, warnings, batch_of(spec), phases, round(control_plane, 6))


def _placement(run: str, spec: JobSpec, settings: Settings, index: int, now: datetime) -> PlacementPlan:
    target = get_target(spec.target.type)
    launch = _launch(run, spec, settings, index, now)
    price, allowed = target.price(spec, index), launch.timeout_seconds
    cost = _cost(price, allowed)
    return PlacementPlan(target.regions(spec)[index], allowed, price, cost, target.resources(launch))


def _launch(run: str, spec: JobSpec, settings: Settings, index: int, now: datetime) -> Launch:
    """Return the first attempt, at the given placement."""
    allowed = training_seconds(spec, get_target(spec.target.type).price(spec, index))
    return Launch(run, 1, index, spec, settings, now + timedelta(seconds=allowed), allowed, key=NO_KEY)


def _endpoint(launch: Launch, now: datetime) -> EndpointPlan:
    """Return the endpoint of a run whose first attempt succeeds."""
    spec, serve = launch.spec, launch.spec.serve
    assert serve is not None, "only specs that serve have an endpoint"
    server = get_server(serve.type)
    price = server.price(spec, launch.placement)
    lifetime = endpoint_seconds(spec, price.times(serve.max_instances).usd_per_hour)
    expires = now + timedelta(seconds=lifetime)
    deployment = Deployment(launch.run, spec, launch.settings, expires, launch)
    return EndpointPlan(
        server.region(deployment),
        lifetime,
        serve.min_instances,
        serve.max_instances,
        price,
        _cost(price, lifetime * serve.max_instances),
        server.resources(deployment),
    )


def _cost(price: HourlyPrice, machine_seconds: int) -> float | None:
    if price.usd_per_hour is None:
        return None
    return round(price.usd_per_hour * machine_seconds / SECONDS_PER_HOUR, 4)


def price_warnings(prices: list[HourlyPrice], today: date) -> list[str]:
    """Return warnings about unknown and old prices."""
    warnings = []
    for price in prices:
        if price.usd_per_hour is None:
            warnings.append(f"unknown price: {price.source}")
        elif price.as_of is not None and today - price.as_of > OLD_PRICE:
            age = (today - price.as_of).days
            warnings.append(f"the price of {price.as_of} is {age} days old; check {price.source}")
    return list(dict.fromkeys(warnings))
