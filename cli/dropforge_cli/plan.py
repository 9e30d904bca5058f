"""`dropforge plan`: show the plan of a job spec."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dropforge.base.figures import duration, usd
from dropforge.cloud.resource import Resource
from dropforge.fit.phases import Row
from dropforge.money.control_plane import AS_OF, RUN
from dropforge.money.limits import MIN_ENDPOINT_SECONDS, paid_seconds
from dropforge.money.plan import EndpointPlan, Plan, make_plan
from dropforge.spec import JobSpec, seconds
from dropforge.spec.machine import GIB

from .deployment import find, placeholders
from .display import stdout, table, titled
from .options import SPEC_FILE, STDIN, json_option, model_config_option, spec_bytes, state_option
from .plain import echo_json
from .policy import policy_in_use
from .specs import read_spec, shape_here


@click.command()
@click.argument("spec", type=SPEC_FILE)
@json_option
@model_config_option
@state_option
def plan(spec: Path, as_json: bool, model_config: Path | None, state: str | None) -> None:
    """Show the resources, the memory and the maximum cost of a job spec. Creates nothing."""
    deployment = find(state)
    clients = deployment.clients if deployment else None
    job = read_spec(spec_bytes(spec), policy_in_use(deployment), model_config, clients)
    name = f"{job.name}.json" if spec == STDIN else spec.name
    shape = shape_here(job, model_config, clients)
    planned = make_plan(job, deployment.settings if deployment else placeholders(), name, shape=shape)
    if as_json:
        echo_json(to_json(planned))
        return
    out = stdout()
    show(planned, out)
    note = (
        f"the names come from {deployment.where}"
        if deployment
        else "no deployment is configured: YOUR-… replaces its names"
    )
    out.print(f"\n{note}; the upload decides the last digits of the run id", style="dim")


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
    training = spec.training
    out.print(f"{spec.model.source} on {spec.dataset.title}, {training.method}, {training.adapter.type}")
    out.print(f"learning rate {training.learning_rate:g}, {training.lr_scheduler_type}\n")
    out.print(titled("training", f"{_machine(spec.target)}; at most {spec.limits.max_attempts} attempts"))
    rows = table("#", "region", "timeout", "$ per hour", "worst case", right=("$ per hour", "worst case"))
    for number, placement in enumerate(plan.placements, start=1):
        price, limit = usd(placement.price.usd_per_hour), duration(placement.timeout_seconds)
        rows.add_row(str(number), placement.region, limit, price, usd(placement.worst_case_usd))
    out.print(rows)
    for number, placement in enumerate(plan.placements, start=1):
        _show_names(f"{number}  creates", placement.resources, out)
    for image in _images(plan.placements[0].resources):
        out.print(f"image {image}", soft_wrap=True)
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


def _show_names(title: str, resources: list[Resource], out: Console) -> None:
    """Print each name whole, in a line of its own, so that it can be copied."""
    for resource in resources:
        out.print(f"{title} {resource.name}", soft_wrap=True)


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
    amounts = {
        name: {"need": need, "available": available, "left": row.left[name]}
        for name, (need, available) in row.amounts.items()
    }
    return {"phase": row.need.phase, "place": row.place, "machine": row.machine.accelerator, **amounts}


def _gib(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / GIB:.1f}" if abs(count) < 1000 * GIB else f"{count / GIB:.0f}"


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
    rows = table("region", "instances", "$ per hour", "worst case", right=("$ per hour", "worst case"))
    instances = f"{endpoint.min_instances} to {endpoint.max_instances}"
    price, worst = usd(endpoint.price.usd_per_hour), usd(endpoint.worst_case_usd)
    rows.add_row(endpoint.region, instances, price, worst)  # of all resources together
    out.print(rows)
    _show_names("creates", endpoint.resources, out)
    for image in _images(endpoint.resources):
        out.print(f"image {image}", soft_wrap=True)
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
