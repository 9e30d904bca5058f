"""Compare a spec with the deployment's policy, and add the policy's defaults to what the spec leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.base.names import SHARED_PREFIX
from dropforge.money.limits import serving_price
from dropforge.platforms import get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR
from dropforge.spec import JobSpec, parse_spec, seconds, serving_seconds
from dropforge.spec.policy import ByLabel, Ceiling, Policy

REPAIR = "an operator can change the policy (docs/policy.md)"
_ROUNDING_USD = 1e-6  # sums of floats differ from the price on paper
_DURATIONS = ("max_duration", "max_ttl", "max_startup_timeout")


class Found(NamedTuple):
    """A value of a spec that a rule limits, its place in the spec, and the value as people read it."""

    pointer: str
    value: float
    shown: str


class Cost(NamedTuple):
    """US dollars of a spec at list prices. None: a price is unknown.

    `training` and `serving` are for an hour. `most` is for the run: the maximum time of training and endpoint, or the
    budget if that is lower.
    """

    training: float | None
    serving: float | None
    most: float | None


def with_defaults(spec: JobSpec, policy: Policy) -> JobSpec:
    """The spec with the policy's defaults for what it leaves out. Raises InvalidSpec if they do not fit together."""
    defaults, limits, serve = policy.defaults, spec.limits, spec.serve
    added: dict[str, dict[str, Any]] = {"limits": {}, "serve": {}}
    if limits.max_cost_usd is None and defaults.max_cost_usd is not None:
        added["limits"]["max_cost_usd"] = defaults.max_cost_usd
    for name in ("max_duration", "max_attempts"):
        if name not in limits.model_fields_set and getattr(defaults, name) is not None:
            added["limits"][name] = getattr(defaults, name)
    if serve is not None and "ttl" not in serve.model_fields_set and defaults.ttl is not None:
        added["serve"]["ttl"] = defaults.ttl
    if not any(added.values()):
        return spec
    document = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for part, values in added.items():
        if values:
            document[part] = {**document.get(part, {}), **values}
    return parse_spec(json.dumps(document).encode())


def policy_problems(spec: JobSpec, policy: Policy) -> list[SpecProblem]:
    """Every rule of the policy that the spec breaks."""
    return [
        problem
        for place, ceiling in policy.ceilings.items()
        if not isinstance(ceiling, ByLabel) or ceiling.labels.items() <= spec.labels.items()
        for problem in _broken(spec, ceiling, place)
    ]


def cost_of(spec: JobSpec) -> Cost:
    """The maximum cost of a spec at list prices. A price that the spec states counts only where it is the higher price.

    A budget is enforced at the stated prices. It therefore limits the cost only if they are not below the list prices.
    """
    listed = _prices(_without_stated_prices(spec))
    stated = _prices(spec)
    prices = [max((p for p in pair if p is not None), default=None) for pair in zip(listed, stated, strict=True)]
    *training, serving = prices
    known = [price for price in training if price is not None]
    hourly = max(known) if len(known) == len(training) else None
    most = None
    if hourly is not None and (serving is not None or spec.serve is None):
        most = hourly * seconds(spec.limits.max_duration) / SECONDS_PER_HOUR
        if spec.serve is not None:
            most += (serving or 0.0) * serving_seconds(spec.serve) / SECONDS_PER_HOUR
    budget = spec.limits.max_cost_usd
    is_enforced = all(b is not None and b >= (a or 0.0) for a, b in zip(listed, stated, strict=True) if a is not None)
    if budget is not None and is_enforced:
        most = budget if most is None else min(most, budget)
    return Cost(hourly, serving, most)


def _broken(spec: JobSpec, ceiling: Ceiling, place: str) -> Iterator[SpecProblem]:
    for rule, found in _amounts(spec):
        limit = getattr(ceiling, rule)
        if limit is None:
            continue
        most = seconds(limit) if rule in _DURATIONS else limit
        if found.value > most + _ROUNDING_USD:
            yield _problem(found.pointer, "more than", place + rule, found.shown, f"at most {limit}")
    for rule, pointer, name in _names(spec):
        allowed = getattr(ceiling, rule)
        if allowed is not None and not _matches(name, allowed):
            yield _problem(pointer, "not in", place + rule, name, f"one of {', '.join(allowed) or 'none'}")
    for key, allowed in ceiling.required_labels.items():
        if key not in spec.labels or not _matches(spec.labels[key], allowed):
            present, rule = spec.labels.get(key, "no such label"), f"{place}required_labels.{key}"
            yield _problem(f"/labels/{key}", "not in", rule, present, f"one of {', '.join(allowed)}")
    yield from _broken_switches(spec, ceiling, place)


def _broken_switches(spec: JobSpec, ceiling: Ceiling, place: str) -> Iterator[SpecProblem]:
    if ceiling.trust_remote_code is False and spec.model.trust_remote_code:
        pointer = "/model/trust_remote_code"
        yield _problem(pointer, "refused by", f"{place}trust_remote_code", "true", "false")
    if ceiling.require_budget and spec.limits.max_cost_usd is None:
        pointer = "/limits/max_cost_usd"
        yield _problem(pointer, "demanded by", f"{place}require_budget", "no budget", "a budget in US dollars")
    cost = cost_of(spec)
    if ceiling.max_usd_per_day is not None and cost.most is None:
        pointer, expected = "/limits/max_cost_usd", "price_usd_per_hour in `target` and in `serve`"
        yield _problem(pointer, "demanded by", f"{place}max_usd_per_day", "an unknown maximum cost", expected)
    if ceiling.require_price:
        for part, price in (("target", cost.training), ("serve", cost.serving if spec.serve else 0.0)):
            if price is None:
                pointer, expected = f"/{part}/price_usd_per_hour", f"{part}.price_usd_per_hour"
                yield _problem(pointer, "demanded by", f"{place}require_price", "an unknown price", expected)


def _amounts(spec: JobSpec) -> Iterator[tuple[str, Found]]:
    """The numbers of a spec, by the rule that limits them."""
    limits, target, serve, cost = spec.limits, spec.target, spec.serve, cost_of(spec)
    if cost.most is not None:
        most = Found("/limits/max_cost_usd", cost.most, f"up to {cost.most:.2f} USD at list prices")
        yield from (("max_cost_usd", most), ("max_usd_per_day", most))
    if cost.training is not None:
        yield "max_usd_per_hour", Found("/target", cost.training, f"{cost.training:.2f} USD an hour")
    yield "max_duration", Found("/limits/max_duration", seconds(limits.max_duration), limits.max_duration)
    yield "max_attempts", Found("/limits/max_attempts", limits.max_attempts, str(limits.max_attempts))
    for error_class, retries in limits.retry.model_dump().items():
        yield "max_retries", Found(f"/limits/retry/{error_class}", retries, str(retries))
    chips = max((demand.number for demand in target.demands()), default=target.accelerators.count)
    yield "max_accelerators", Found("/target", chips, f"{chips} {target.accelerators.name}")
    yield "max_nodes", Found("/target", target.machines, f"{target.machines} machines")
    yield "max_disk_gib", Found("/target", target.storage_gib, f"{target.storage_gib} GiB")
    if serve is None:
        return
    if cost.serving is not None:
        yield "max_usd_per_hour", Found("/serve", cost.serving, f"{cost.serving:.2f} USD an hour")
    yield "max_ttl", Found("/serve/ttl", seconds(serve.ttl), serve.ttl)
    started = serve.startup_timeout
    yield "max_startup_timeout", Found("/serve/startup_timeout", seconds(started), started)
    for demand in serve.demands(spec):
        yield "max_accelerators", Found("/serve", demand.number, f"{demand.number} {demand.name}")
    yield "max_instances", Found("/serve/max_instances", serve.max_instances, str(serve.max_instances))
    yield "max_disk_gib", Found("/serve", serve.storage_gib, f"{serve.storage_gib} GiB")


def _names(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    """The names in a spec: the rule that lists the allowed names, the place in the spec, the name."""
    target, serve = spec.target, spec.serve
    yield "targets", "/target/type", target.type
    trained_on = {demand.name for demand in target.demands()} or {target.accelerators.name}
    yield from (("accelerators", "/target", name) for name in sorted(trained_on))
    for region in dict.fromkeys(get_target(target.type).regions(spec)):
        yield "regions", "/target/placements", _region(region)
    for place, source in spec.sources.items():
        yield "models" if place == "/model/source" else "datasets", place, source
    for place, host in spec.notify.hosts:
        yield "notify_hosts", place, host
    if serve is not None:
        yield "endpoints", "/serve/type", serve.type
        if serve.share and serve.endpoint is None:  # dropforge chooses the name after the training
            yield "endpoint_names", "/serve/share", f"{SHARED_PREFIX}*"
        if serve.endpoint is not None:
            yield "endpoint_names", "/serve/endpoint", serve.endpoint
        for demand in serve.demands(spec):
            yield "accelerators", "/serve", demand.name
            yield "regions", "/serve", _region(demand.place)


def _prices(spec: JobSpec) -> list[float | None]:
    """The hourly price at each placement, and last the price of all instances of the endpoint (None: no endpoint)."""
    target = get_target(spec.target.type)
    training = [target.price(spec, index).usd_per_hour for index in range(len(target.regions(spec)))]
    return [*training, serving_price(spec).usd_per_hour if spec.serve else None]


def _without_stated_prices(spec: JobSpec) -> JobSpec:
    parts = {"target": spec.target, "serve": spec.serve}
    priced = {name: part for name, part in parts.items() if getattr(part, "price_usd_per_hour", None) is not None}
    changes = {name: evolve(part, price_usd_per_hour=None) for name, part in priced.items() if part}
    return evolve(spec, **changes)


def _region(place: str) -> str:
    """The region of a place, which is a region or a zone."""
    return re.sub(r"-[a-z]$", "", place)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _problem(pointer: str, verb: str, rule: str, found: str, expected: str) -> SpecProblem:
    return SpecProblem(pointer, f"{verb} `{rule}` of the deployment's policy", found, f"{expected}; {REPAIR}")
