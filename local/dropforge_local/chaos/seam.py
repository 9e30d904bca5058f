"""Where the simulation meets the code under test: the context with the simulated clients, time, chance and log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, TypeVar

from dropforge.base.clock import Clock
from dropforge.base.log import Log
from dropforge.base.settings import Settings
from dropforge.base.threads import Threads
from dropforge.cloud.context import Cloud
from dropforge.context import Context
from dropforge.platforms.lookup import Platforms

from .world import World

T = TypeVar("T")
U = TypeVar("U")


def context_of(
    world: World, clients: dict[str, Callable[..., Any]], settings: Settings, platforms: Platforms | None = None
) -> Context:
    """The context of all functions in a world. `clients` are simulated clients, by the method names of Clients."""
    cloud = Cloud(
        settings=settings,
        clients=SimpleNamespace(**clients),  # type: ignore[arg-type]  # a client that is not simulated has no attribute
        clock=WorldClock(world),
        threads=OneThread(),
        chance=world.random,
        log=_log_of(world),
    )
    return Context(cloud, platforms or Platforms())


class WorldClock(Clock):
    """The time of a world, as the machine of the present process sees it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.world.now + self.world.scheduler.current.skew, UTC)

    def monotonic(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.scheduler.wait(seconds)


class OneThread(Threads):
    """Makes the calls one after the other, in the caller's turn."""

    def map(self, call: Callable[[T], U], items: Iterable[T], workers: int) -> list[U]:
        return [call(item) for item in items]


def _log_of(world: World) -> Log:
    def log(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
        world.fact("log", stage=stage, severity=severity, run=run, message=message)

    return log
