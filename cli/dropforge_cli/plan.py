"""`dropforge plan`: the resources, places, requests and maximum cost of a spec."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dropforge.base import names
from dropforge.base.figures import duration, usd
from dropforge.base.settings import Settings
from dropforge.cloud.resource import Resource
from dropforge.fit.batch import Batch, batch_of
from dropforge.fit.phases import Row, phase_rows
from dropforge.fit.shape import ModelShape
from dropforge.money import MIN_ENDPOINT_SECONDS, endpoint_seconds, paid_seconds, short_endpoint, training_seconds
from dropforge.platforms import get_server, get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice
from dropforge.platforms.serving import Deployment as EndpointDeployment
from dropforge.platforms.training import Launch
from dropforge.spec import JobSpec, seconds
from dropforge.spec.advice import advice
from dropforge.spec.machine import GIB

from .control_plane import AS_OF, RUN, usage_of_training
from .deployment import find, placeholders
from .display import stdout, table, titled
from .options import SPEC_FILE, json_option, model_config_option, state_option
from .plain import echo_json
from .policy import policy_in_use
from .specs import read_spec, shape_here

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
        training = [placement.worst_case_usd for placement in self.placements]
        serving = 0.0 if self.endpoint is None else self.endpoint.worst_case_usd
        if None in training or serving is None:
            return None
        total = max(part for part in training if part is not None) + serving
        return min(total, self.spec.limits.max_cost_usd or total)


@click.command()
@click.argument("spec", type=SPEC_FILE)
@json_option
@model_config_option
@state_option
def plan(spec: Path, as_json: bool, model_config: Path | None, state: str | None) -> None:
    """Show the resources, the memory and the maximum cost of a job spec. Creates nothing."""
    deployment = find(state)
    clients = deployment.clients if deployment else None
    job = read_spec(spec, policy_in_use(deployment), model_config, clients)
    shape = shape_here(job, model_config, clients)
    planned = make_plan(job, deployment.settings if deployment else placeholders(), spec.name, shape=shape)
    if as_json:
        echo_json(to_json(planned))
        return
    out = stdout()
    show(planned, out)
    note = (
        f"the names are those of {deployment.where}"
        if deployment
        else "no deployment is configured: YOUR-… replaces its names"
    )
    out.print(f"\n{note}; the upload decides the last digits of the run id", style="dim")


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


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan for programs. The requests are exact, except the last digits of the run id."""
    parts = {**asdict(plan), "spec": plan.spec.model_dump(mode="json", by_alias=True)}
    parts["worst_case_usd"] = plan.worst_case_usd
    parts["batch"] |= {"sequences": plan.batch.sequences, "tokens": plan.batch.tokens}
    parts["phases"] = [_phase_json(row) for row in plan.phases]
    return json.loads(json.dumps(parts, default=str))  # type: ignore[no-any-return]


def show(plan: Plan, out: Console) -> None:
    """Print a plan for people."""
    spec = plan.spec
    out.print(titled(spec.name, f"run {plan.run}"))
    out.print(f"{spec.model.source} on {spec.dataset.source}, {spec.training.method}, {spec.training.adapter.type}\n")
    out.print(titled("training", f"{_machine(spec.target)}; at most {spec.limits.max_attempts} attempts"))
    rows = table("#", "region", "resource", "timeout", "$ per hour", "worst case", right=("$ per hour", "worst case"))
    for number, placement in enumerate(plan.placements, start=1):
        price = usd(placement.price.usd_per_hour)
        limit = duration(placement.timeout_seconds)
        first, *rest = placement.resources
        rows.add_row(str(number), placement.region, first.name, limit, price, usd(placement.worst_case_usd))
        for resource in rest:  # the price is the sum over all resources
            rows.add_row("", "", resource.name, "", "", "")
    out.print(rows)
    for image in _images(plan.placements[0].resources):
        out.print(f"image {image}")
    _show_budget(plan, out)
    if plan.endpoint is not None:
        _show_endpoint(plan.endpoint, spec, out)
    show_phases(plan, out)
    out.print()
    out.print(titled("worst case", f"{usd(plan.worst_case_usd)} in all"))
    longest = duration(max(placement.timeout_seconds for placement in plan.placements))
    for source in _sources(plan):
        out.print(f"price: {source}")
    control = f"{usd(plan.control_plane_usd)} if the attempt lasts {longest} ({usd(RUN.usd)} if it ends at once)"
    out.print(f"control plane, not included: {control}; prices of {AS_OF}, without free tiers")
    for warning in plan.warnings:
        out.print(f"warning: {warning}", style="yellow")


def show_phases(plan: Plan, out: Console) -> None:
    """Print what each phase needs, what its machine has, and what is left over. At most 80 columns."""
    out.print()
    out.print(titled("optimiser step", str(plan.batch)))
    if not plan.phases:
        return
    out.print(titled("memory and disk", "GiB of an accelerator and of a host: need, available, left over"))
    resources = {"accel": "accelerator", "host": "host", "disk": "disk"}
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows.add_column("phase")
    for heading in [heading for name in resources for heading in (name, "of", "left")]:
        rows.add_column(heading, justify="right", no_wrap=True)
    for row in plan.phases:
        values = _phase_json(row)
        cells = [_gib(values[name][part]) for name in resources.values() for part in ("need", "available", "left")]
        rows.add_row(row.need.phase, *cells)
    out.print(rows)
    if any(row.machine.files_in_memory for row in plan.phases):
        out.print("the files are in the host's memory, and count there")


def _phase_json(row: Row) -> dict[str, Any]:
    """Bytes of each resource: need, available (None if unknown, or if there is none), left over."""
    machine = row.machine
    disk = None if machine.files_in_memory else machine.disk_bytes
    needs = {"accelerator": row.need.accelerator, "host": row.host, "disk": row.need.disk}
    accelerator = row.accelerator_bytes if machine.accelerators else None
    available = {"accelerator": accelerator, "host": machine.host_bytes, "disk": disk}
    amounts = {
        name: {"need": needs[name], "available": available[name], "left": left} for name, left in row.left.items()
    }
    return {"phase": row.need.phase, "place": row.place, "machine": machine.accelerator, **amounts}


def _gib(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / GIB:.1f}" if abs(count) < 1000 * GIB else f"{count / GIB:.0f}"


def _placement(run: str, spec: JobSpec, settings: Settings, index: int, now: datetime) -> PlacementPlan:
    target = get_target(spec.target.type)
    launch = _launch(run, spec, settings, index, now)
    price, allowed = target.price(spec, index), launch.timeout_seconds
    cost = _cost(price, allowed)
    return PlacementPlan(target.regions(spec)[index], allowed, price, cost, target.resources(launch))


def _launch(run: str, spec: JobSpec, settings: Settings, index: int, now: datetime) -> Launch:
    """Return the first attempt, at the given placement."""
    allowed = training_seconds(spec, get_target(spec.target.type).price(spec, index))
    return Launch(run, 1, index, spec, settings, now + timedelta(seconds=allowed), allowed)


def _endpoint(launch: Launch, now: datetime) -> EndpointPlan:
    """Return the endpoint of a run whose first attempt succeeds."""
    spec, serve = launch.spec, launch.spec.serve
    assert serve is not None, "only specs that serve have an endpoint"
    server = get_server(serve.type)
    price = server.price(spec)
    lifetime = endpoint_seconds(spec, price.times(serve.max_instances).usd_per_hour)
    expires = now + timedelta(seconds=lifetime)
    deployment = EndpointDeployment(launch.run, spec, launch.settings, expires, launch)
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


def _show_budget(plan: Plan, out: Console) -> None:
    limits = plan.spec.limits
    if limits.max_cost_usd is None:
        out.print(f"budget: none; the time limit is {limits.max_duration} for the whole run")
        return
    paid = [paid_seconds(plan.spec, placement.price) or 0 for placement in plan.placements]
    bought = duration(min(paid))
    binding = "the budget" if plan.placements[0].timeout_seconds < seconds(limits.max_duration) else "max_duration"
    text = f"budget: {usd(limits.max_cost_usd)} buys {bought} of training; max_duration is {limits.max_duration}"
    out.print(f"{text}; {binding} ends it first")
    if plan.endpoint is not None:
        kept = duration(MIN_ENDPOINT_SECONDS)
        out.print(f"the rest pays for the endpoint, at the price of all instances; training leaves at least {kept}")


def _show_endpoint(endpoint: EndpointPlan, spec: JobSpec, out: Console) -> None:
    out.print()
    out.print(titled("endpoint", f"{_machine(spec.serve)}; for {duration(endpoint.lifetime_seconds)} at most"))
    rows = table("region", "resource", "instances", "$ per hour", "worst case", right=("$ per hour", "worst case"))
    instances = f"{endpoint.min_instances} to {endpoint.max_instances}"
    price, worst = usd(endpoint.price.usd_per_hour), usd(endpoint.worst_case_usd)
    first, *rest = endpoint.resources
    rows.add_row(endpoint.region, first.name, instances, price, worst)
    for resource in rest:
        rows.add_row("", resource.name, "", "", "")
    out.print(rows)
    for image in _images(endpoint.resources):
        out.print(f"image {image}")
    idle = "costs nothing while scaled to zero" if endpoint.min_instances == 0 else "never scales to zero"
    out.print(f"the price is per running instance; the endpoint {idle}")
    if spec.serve is not None and spec.serve.is_private:
        out.print("clients must be inside the VPC")


def _machine(part: Any) -> str:
    """Return the fields of a target or an endpoint of any type as text."""
    shown = part.model_dump(exclude={"type", "placements", "price_usd_per_hour", "region", "ttl"}, exclude_none=True)
    words = [f"{name} {str(value).lower()}" for name, value in shown.items() if not isinstance(value, dict)]
    return f"{part.type}: {', '.join(words)}"


def _images(resources: list[Resource]) -> list[str]:
    """Return every container image in the requests."""

    def walk(node: Any) -> list[str]:
        if isinstance(node, dict):
            # A TPU VM reads the name of its image from its metadata.
            images = [
                node[key]
                for key in ("image", "dropforge-image", "dropforge-server-image")
                if isinstance(node.get(key), str)
            ]
            return images + [image for value in node.values() for image in walk(value)]
        return [image for item in node for image in walk(item)] if isinstance(node, list) else []

    return sorted({image for resource in resources for image in walk(resource.request)})


def _sources(plan: Plan) -> list[str]:
    prices = [placement.price for placement in plan.placements] + ([plan.endpoint.price] if plan.endpoint else [])
    shown = [f"{p.source}, as of {p.as_of}" if p.as_of else p.source for p in prices if p.usd_per_hour is not None]
    return list(dict.fromkeys(shown))
