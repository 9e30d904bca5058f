"""The runs of `dropforge smoke`: the smallest real spec for each target, and its share of the maximum cost."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from dropforge.base import names
from dropforge.base.figures import usd
from dropforge.base.settings import Settings
from dropforge.money.plan import make_plan
from dropforge.platforms import platform_of, targets
from dropforge.spec import JobSpec, parse_spec, registry

from .problems import CliError
from .smoke_checks import Seen

CANCELLED_STEPS = 1_000_000  # steps of the run that the test cancels: more than its time allows
CANCELLED_DURATION = "15m"
# On Cloud Run the task of the cancelled run may take more than an hour, which is a Preview value: Cloud Run accepts or
# refuses it when the job is created. The time before the attempt shortens the task.
CANCELLED_DURATIONS = {"cloud_run": "70m"}


@dataclass
class Options:
    """The user's options: targets; for each target a price (US dollars per hour) and a region or zone."""

    targets: tuple[str, ...] = ()
    prices: dict[str, float] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def enabled_targets(settings: Settings) -> list[str]:
    """Return the targets whose image or cluster the deployment has."""
    return [name for name, training in targets().items() if training.is_enabled(settings)]


def plan_runs(settings: Settings, options: Options, max_cost_usd: float) -> list[Seen]:
    """Return the runs, each with its share of the cost. Raises CliError if a price is unknown or the cost too high."""
    enabled = enabled_targets(settings)
    for target in options.targets:
        if target not in enabled:
            raise CliError(f"the deployment does not have target {target}", f"its targets are {', '.join(enabled)}")
    chosen = [target for target in enabled if not options.targets or target in options.targets]
    stem = f"smoke-{secrets.token_hex(4)}"
    runs = [_planned(target, False, stem, settings, options) for target in chosen]
    runs.append(_planned(chosen[0], True, stem, settings, options))
    total = round(sum(run.limit_usd for run in runs), 2)
    if total > max_cost_usd:
        parts = ", ".join(f"{run.label} {usd(run.limit_usd)}" for run in runs)
        hint = f"give --max-cost-usd {total:.2f}, or fewer targets with --target"
        raise CliError(f"{usd(max_cost_usd)} is too little: {parts}; the sum is {usd(total)}", hint)
    return runs


def _planned(target: str, cancels: bool, stem: str, settings: Settings, options: Options) -> Seen:
    """Return one run whose budget is the cost of its time limits. Raises CliError for an unknown price."""
    given = document(target, cancels, settings, options)
    name = "cancel" if cancels else target.replace("_", "-")
    object_name = f"{names.SPECS_PREFIX}{stem}/smoke-{name}.json"
    plan = make_plan(_parsed(given), settings, object_name)
    if plan.worst_case_usd is None:
        prices = [
            *(placement.price for placement in plan.placements),
            *([plan.endpoint.price] if plan.endpoint else []),
        ]
        why = next(price.source for price in prices if price.usd_per_hour is None)
        raise CliError(
            f"the price of {target} is unknown: {why}", f"give --price {target}=USD_PER_HOUR, or omit this target"
        )
    given["limits"]["max_cost_usd"] = math.ceil(plan.worst_case_usd * 100 + 1) / 100
    return Seen(target, _parsed(given), given["limits"]["max_cost_usd"], object_name, cancels)


def document(target: str, cancels: bool, settings: Settings, options: Options) -> dict[str, Any]:
    """Return the spec for a target, without its share of the cost."""
    given: dict[str, Any] = json.loads(_template(target))
    placement, key = given["target"]["placements"][0], targets()[target].spec.placement_key
    placement[key] = options.places.get(target) or _place(placement[key], _parsed(given), settings)
    if target in options.prices:
        for part in filter(None, (given["target"], given["serve"])):
            part["price_usd_per_hour"] = options.prices[target]
    if cancels:
        given["serve"] = None
        given["training"] |= {"max_steps": CANCELLED_STEPS, "checkpoint_steps": CANCELLED_STEPS}
        given["limits"]["max_duration"] = CANCELLED_DURATIONS.get(target, CANCELLED_DURATION)
    return given


def _template(target: str) -> str:
    """Return the smallest real spec for a target: smoke.json in its platform's folder."""
    return (files(registry.module_of(platform_of(target).name)) / "smoke.json").read_text(encoding="utf-8")


def _place(default: str, spec: JobSpec, settings: Settings) -> str:
    """Return a place in the deployment's region if Google offers the accelerator there, else `default`."""
    offered = spec.target.offered_places or (settings.location,)
    return next((place for place in offered if place.startswith(settings.location)), default)


def _parsed(given: dict[str, Any]) -> JobSpec:
    return parse_spec(json.dumps(given).encode())
