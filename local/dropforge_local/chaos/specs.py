"""The job specs that people drop: each target, and what may serve what it has trained, by a function of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

TRAINING_USD, ENDPOINT_USD = 2.0, (0.6, 3.0)  # for an hour
Part = Callable[[random.Random], dict[str, Any]]
_REGIONS = ("us-central1", "europe-west4", "us-east4")


def spec(name: str, target: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A spec that is valid."""
    return {
        "api_version": "dropforge/v1",
        "name": name,
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "target": target,
        "serve": None,
        "notify": {"slack": {"webhook_secret": "slack-webhook"}},
        **parts,
    }


def drawn(draw: random.Random, name: str, kind: str) -> tuple[dict[str, Any], bool]:
    """A spec for a kind of target, and whether it is valid."""
    target = TARGETS[kind](draw)
    if draw.random() < 0.3:
        target["placements"][0]["max_wait"] = "5m"
    found = spec(name, target, limits=_limits(draw))
    if draw.random() < 0.3:
        found["evaluation"] = {"gate": {"metric": "exact_match", "min": 0.5}}
    if draw.random() < 0.5:
        found["serve"] = draw.choice(SERVERS[kind])(draw)
    valid = draw.random() >= 0.1
    if not valid:
        found["epochs"] = 3
    return found, valid


def cloud_run(regions: list[str]) -> dict[str, Any]:
    """A target of Cloud Run jobs."""
    placements = [{"region": region} for region in regions]
    return {"type": "cloud_run", "placements": placements, "price_usd_per_hour": TRAINING_USD}


def cloud_run_endpoint(ttl: str, startup_timeout: str, price: float) -> dict[str, Any]:
    """An endpoint on a Cloud Run service."""
    return {"type": "cloud_run", "ttl": ttl, "startup_timeout": startup_timeout, "price_usd_per_hour": price}


def _cloud_run(draw: random.Random) -> dict[str, Any]:
    return cloud_run(draw.sample(_REGIONS, 1 + draw.randrange(3)))


def _cloud_run_endpoint(draw: random.Random) -> dict[str, Any]:
    """Its ttl is short, or longer than a small budget pays for."""
    times = draw.choice(("10m", "20m", "1h")), draw.choice(("5m", "20m"))
    return cloud_run_endpoint(*times, draw.choice(ENDPOINT_USD))


def _limits(draw: random.Random) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "max_duration": draw.choice(("10m", "20m", "40m")),
        "max_attempts": 1 + draw.randrange(4),
    }
    if draw.random() < 0.4:
        limits["max_cost_usd"] = draw.choice((0.6, 1.0, 1.5))
    return limits


TARGETS: dict[str, Part] = {"cloud_run": _cloud_run}
SERVERS: dict[str, tuple[Part, ...]] = {"cloud_run": (_cloud_run_endpoint,)}
