"""The job specs that users drop: one function for each target and each endpoint."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

TRAINING_USD, ENDPOINT_USD = 2.0, (0.6, 3.0)  # for an hour
Part = Callable[[random.Random], dict[str, Any]]
_ZONES = ("us-central1-a", "europe-west4-b", "us-west4-a")  # of v5litepod-8
_REGIONS = ("us-central1", "europe-west4", "us-east4")
_CLUSTERS = ("us-central1", "europe-west4")  # regions with a standing GKE cluster


def spec(name: str, target: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A valid spec. On TPUs every weight is trained."""
    adapter = "lora" if target["type"] in ("cloud_run", "gke") else "none"
    return {
        "api_version": "dropforge/v1",
        "name": name,
        "model": {"source": "acme/tiny"},
        "dataset": {"source": "acme/rows"},
        "target": target,
        "training": {"adapter": {"type": adapter}},
        "serve": None,
        "notify": {"slack": {"webhook_secret": "slack-webhook"}},
        **parts,
    }


def drawn(draw: random.Random, name: str, kind: str) -> tuple[dict[str, Any], bool]:
    """A spec for a type of target, and whether the spec is valid."""
    target = TARGETS[kind](draw)
    if draw.random() < 0.3:
        target["placements"][0]["max_wait"] = "5m"
    dropped = spec(name, target, limits=_limits(draw))
    if draw.random() < 0.3:
        dropped["evaluation"] = {"gate": {"metric": "exact_match", "min": 0.5}}
    if draw.random() < 0.5:
        dropped["serve"] = draw.choice(SERVERS[kind])(draw)
    valid = draw.random() >= 0.1
    if not valid:
        dropped["epochs"] = 3
    return dropped, valid


def servable(draw: random.Random, kind: str, *, is_watched: bool) -> dict[str, Any]:
    """A spec of a target that asks for an endpoint, with the time and the money to reach it.

    `is_watched`: a stuck attempt is restarted.
    """
    dropped, _ = drawn(draw, "job-0", kind)
    dropped.pop("epochs", None)
    limits = {"max_duration": "40m", "max_attempts": 3}
    budget = {"max_cost_usd": 2.0} if draw.random() < 0.3 else {}
    watched = {"stuck_after": "5m", "on_stuck": "restart"} if is_watched else {}
    serve = draw.choice(SERVERS[kind])(draw) | {"startup_timeout": "20m"}
    return {**dropped, "limits": {**limits, **budget, **watched}, "serve": serve}


def whole(kind: str) -> dict[str, Any]:
    """A spec with two placements, a gate, an endpoint and a budget."""
    places: dict[str, list[dict[str, Any]]] = {
        "cloud_run": [{"region": "us-central1"}, {"region": "europe-west4"}],
        "tpu_vm": [{"zone": "us-central1-a"}, {"zone": "europe-west4-b"}],
        "gke": [{"region": "us-central1"}, {"region": "europe-west4"}],
        "ray": [{"region": "us-central1"}, {"region": "europe-west4"}],
    }
    serves = {"cloud_run": "cloud_run", "tpu_vm": "tpu_vm", "gke": "gke", "ray": "gke"}
    return spec(
        "job-0",
        {"type": kind, "placements": places[kind], "price_usd_per_hour": TRAINING_USD},
        evaluation={"gate": {"metric": "exact_match", "min": 0.5}},
        serve={"type": serves[kind], "ttl": "20m", "startup_timeout": "20m", "price_usd_per_hour": ENDPOINT_USD[0]},
        limits={"max_duration": "40m", "max_attempts": 3, "max_cost_usd": 2.0},
    )


def _cloud_run(draw: random.Random) -> dict[str, Any]:
    placements = [{"region": region} for region in draw.sample(_REGIONS, 1 + draw.randrange(3))]
    return {"type": "cloud_run", "placements": placements, "price_usd_per_hour": TRAINING_USD}


def _tpu_vm(draw: random.Random) -> dict[str, Any]:
    """Queued, or created at once."""
    zones = draw.sample(_ZONES, 1 + draw.randrange(3))
    placements = [{"zone": zone, "capacity": draw.choice(("on_demand", "spot"))} for zone in zones]
    target = {"type": "tpu_vm", "placements": placements, "price_usd_per_hour": TRAINING_USD}
    return {**target, "queued": draw.random() < 0.7}


def _gke(draw: random.Random) -> dict[str, Any]:
    """On 1 or 2 nodes."""
    target = _in_regions(draw, "gke")
    return {**target, "nodes": draw.choice((1, 1, 2)), "node_network": "tcp", **_cluster(draw)}


def _ray(draw: random.Random) -> dict[str, Any]:
    """On a slice of 1 or 4 hosts."""
    return {**_in_regions(draw, "ray"), "topology": draw.choice(("2x2", "2x2", "4x4")), **_cluster(draw)}


def _in_regions(draw: random.Random, kind: str) -> dict[str, Any]:
    regions = draw.sample(_CLUSTERS, 1 + draw.randrange(2))
    placements = [{"region": region, "capacity": draw.choice(("on_demand", "spot"))} for region in regions]
    return {"type": kind, "placements": placements, "price_usd_per_hour": TRAINING_USD}


def _cluster(draw: random.Random) -> dict[str, Any]:
    """A standing cluster or the attempt's own cluster."""
    return {"cluster": {"create": draw.random() < 0.3}}


def _cloud_run_endpoint(draw: random.Random) -> dict[str, Any]:
    return {"type": "cloud_run", **_times(draw), "price_usd_per_hour": draw.choice(ENDPOINT_USD)}


def _tpu_vm_endpoint(draw: random.Random) -> dict[str, Any]:
    queued = draw.random() < 0.7
    return {"type": "tpu_vm", **_times(draw), "queued": queued, "price_usd_per_hour": draw.choice(ENDPOINT_USD)}


def _gke_endpoint(draw: random.Random) -> dict[str, Any]:
    """One instance, or up to two cheap instances, which count as running all the time."""
    price = draw.choice(ENDPOINT_USD)
    most = draw.choice((1, 2)) if price == min(ENDPOINT_USD) else 1
    return {"type": "gke", **_times(draw), "max_instances": most, "price_usd_per_hour": price}


def _training_vm(draw: random.Random) -> dict[str, Any]:
    return {"type": "training_vm", **_times(draw)}


def _times(draw: random.Random) -> dict[str, Any]:
    """A short ttl, or a ttl that costs more than a small budget."""
    return {"ttl": draw.choice(("10m", "20m", "1h")), "startup_timeout": draw.choice(("5m", "20m"))}


def _limits(draw: random.Random) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "max_duration": draw.choice(("10m", "20m", "40m")),
        "max_attempts": 1 + draw.randrange(4),
    }
    if draw.random() < 0.4:
        limits["max_cost_usd"] = draw.choice((0.6, 1.0, 1.5))
    return limits


def stuck_limits(draw: random.Random) -> dict[str, Any]:
    """`stuck_after` and `on_stuck`. With half an hour, a training that hangs between two steps is stuck earlier."""
    if draw.random() < 0.4:
        return {}
    limits = {"stuck_after": draw.choice(("5m", "10m")), "on_stuck": draw.choice(("notify", "restart", "fail"))}
    return limits | ({"stuck_after": "30m"} if draw.random() < 0.3 else {})


TARGETS: dict[str, Part] = {"cloud_run": _cloud_run, "tpu_vm": _tpu_vm, "gke": _gke, "ray": _ray}
SERVERS: dict[str, tuple[Part, ...]] = {
    "cloud_run": (_cloud_run_endpoint,),
    "tpu_vm": (_tpu_vm_endpoint, _training_vm),
    "gke": (_gke_endpoint, _cloud_run_endpoint),
    "ray": (_gke_endpoint,),
}


def clusters(targets: Iterable[str]) -> tuple[str, ...]:
    """The regions that need a standing GKE cluster for these targets."""
    return _CLUSTERS if {"gke", "ray"} & set(targets) else ()
