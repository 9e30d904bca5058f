"""Named endpoints on TPU VMs: the real platform over the simulated Cloud TPU and Cloud DNS.

The history tells whenever a name gets another address, and which machine has that address then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from dropforge.base import names
from dropforge.base.settings import Settings
from dropforge.platforms import get_server
from dropforge.platforms.lookup import Platforms

from .dns import Dns
from .tpu import Node, Tpu
from .world import PROJECT, World, broken

KIND = "tpu_vm"
ZONE = "us-central1-a"
DOMAIN = "models.chaos.internal"
STRANGE = "10.99.0.1"  # an address that somebody gives a name; nothing answers there
HARM = ("preempted", "stopped", "deleted")  # how a machine ends from outside


class NamedVms:
    """See `Place` of endpoint_lives.py."""

    serve: dict[str, Any]

    def __init__(self, world: World, tpu: Tpu) -> None:
        self.world = world
        self.tpu = tpu
        self.serve = {"type": KIND, "zone": ZONE}
        self.platforms = Platforms(all=lambda: [get_server(KIND)])
        self.dns = Dns(world, f"projects/{PROJECT}/managedZones/names", DOMAIN)
        self.dns.changed = self._changed
        tpu.is_full = lambda name: world.lasts(f"no capacity for {_short(name)}", world.faults.stockout / 2)

    def settings(self, own: Settings) -> Settings:
        return replace(own, endpoint_domain=DOMAIN, endpoint_zone="names")

    def clients(self) -> dict[str, Callable[..., Any]]:
        session = SimpleNamespace(post=self._complete, get=self._is_healthy)
        return {**self.tpu.clients(), **self.dns.clients(), "endpoint": lambda audience, key="": session}

    def shown(self, endpoint: str) -> dict[str, Any] | None:
        """The parts of an endpoint that exist: the machine to which its name points, and all its machines."""
        own = [node.name for node in self._nodes(endpoint)]
        queued = [each.name for each in self.tpu.queued.values() if _is_of(each.node, endpoint)]
        address = self.dns.address(_name(endpoint))
        if not (own or queued or address):
            return None
        found = self._at(address)
        return {"address": address, "serves": _short(found.name) if found else "", "resources": sorted([*own, *queued])}

    def plan_harm(self, endpoint: str, seconds: float) -> None:
        """Machines end from outside, and somebody changes the record."""
        draw, faults = self.world.random, self.world.faults
        rate = faults.preempted + faults.lost_machine + faults.deleted
        for _ in range(int(rate * 4 * draw.random())):
            how = draw.choice(HARM)
            self.world.after(draw.random() * seconds, partial(self.harm, endpoint, how))
        if draw.random() < faults.deleted * 2:
            address = draw.choice(("", STRANGE))
            self.world.after(draw.random() * seconds, partial(self.stray, endpoint, address))

    def harm(self, endpoint: str, how: str) -> None:
        """End one of the machines of an endpoint from outside: `how` is one of HARM."""
        ready = [node for node in self._nodes(endpoint) if node.state == "READY"]
        if not ready:
            return
        node = self.world.random.choice(ready)
        self.world.fact("fault", what=how, resource=node.name)
        if how == "deleted":
            self.tpu.delete_by_hand(node.name)
        else:
            self.tpu.lose(node.name, "PREEMPTED" if how == "preempted" else "")

    def stray(self, endpoint: str, address: str) -> None:
        """A user changes the record of an endpoint that has one, or deletes it ("")."""
        if self.dns.address(_name(endpoint)):
            self.world.fact("strayed", endpoint=endpoint)
            self.dns.by_hand(_name(endpoint), address)

    def _changed(self, name: str, address: str) -> None:
        """Tell which machine has the address now; "": none that runs has it."""
        endpoint, node = name.partition(".")[0], self._at(address)
        runs = node is not None and node.state == "READY"
        machine = _short(node.name) if node is not None and runs else ""
        self.world.fact("pointed", endpoint=endpoint, address=address, machine=machine)
        if node is not None:
            self.world.fact("shares", endpoint=endpoint, shares={_short(node.name): 100})

    def _complete(self, url: str, **_: Any) -> Any:
        def answer() -> Any:
            node = self._at(url.removeprefix("http://").partition(":")[0])
            does = node is not None and node.machine is not None and node.machine.serves
            if node is not None and does:
                endpoint = node.wanted.labels[names.ENDPOINT_LABEL]
                self.world.fact("answered", endpoint=endpoint, revision=_short(node.name))
            body: dict[str, Any] = {"choices": [{"message": {}}]}
            return SimpleNamespace(status_code=200 if does else 503, text="", json=lambda: body)

        return self.world.effect("endpoint", answer, error=broken)

    def _is_healthy(self, url: str, **_: Any) -> Any:
        def answer() -> Any:
            return SimpleNamespace(ok=self.tpu.answers(url.removesuffix("/health")))

        return self.world.effect("endpoint.health", answer, error=broken)

    def _nodes(self, endpoint: str) -> list[Node]:
        return [node for node in self.tpu.nodes.values() if _is_of(node.name, endpoint)]

    def _at(self, address: str) -> Node | None:
        """The machine at an address."""
        return next((node for node in self.tpu.nodes.values() if address and node.address == address), None)


def _is_of(node: str, endpoint: str) -> bool:
    return names.revision_number(node, endpoint) is not None


def _name(endpoint: str) -> str:
    return f"{endpoint}.{ZONE}.{DOMAIN}."


def _short(node: str) -> str:
    return node.rpartition("/")[2]
