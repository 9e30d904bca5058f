"""Where the simulation meets the code under test: clients, time, chance and log of every dropforge module.

Nothing in functions/ knows of it. Modules bind some of these by name, so every binding is replaced, and put back.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import dropforge
from dropforge import platforms
from dropforge.base import log, settings
from dropforge.cloud import clients
from dropforge.run import record as runs

from .functions import entry_points
from .world import World

CLIENTS = tuple(
    name
    for name, value in vars(clients).items()
    if getattr(value, "__module__", "") == clients.__name__ and not name.startswith("_")
)


@contextmanager
def seam(
    world: World, fakes: dict[str, Callable[..., Any]], deployment: settings.Settings, **others: Any
) -> Iterator[None]:
    """While it is open, dropforge's modules see this world, and the clients of `fakes` by their names in clients.py.

    `others` stand in for get_target, get_server, targets and servers, where those are not to be the real ones.
    """
    replacements: dict[str, Any] = {name: fakes.get(name, _no_client(name)) for name in CLIENTS}
    replacements |= {
        "time": SimpleNamespace(
            sleep=world.scheduler.wait, monotonic=lambda: world.now, time=lambda: world.now + _skew(world)
        ),
        "random": world.random,
        "utc_now": lambda: datetime.fromtimestamp(world.now + _skew(world), UTC),
        "settings": lambda: deployment,
        "log": _logger(world),
        "ThreadPoolExecutor": _OneThread,
    }
    replacements = {**_originals(), **replacements, **others}
    places = _places()
    for module, name, key in places:
        setattr(module, name, replacements[key])
    slack: Any = importlib.import_module("slack_sdk")
    webhook, slack.WebhookClient = slack.WebhookClient, fakes["WebhookClient"]
    try:
        yield
    finally:
        slack.WebhookClient = webhook
        for module, name, key in places:
            setattr(module, name, _originals()[key])


@cache
def _originals() -> dict[str, Any]:
    return {
        **{name: getattr(clients, name) for name in CLIENTS},
        "time": time,
        "random": random,
        "utc_now": runs.utc_now,
        "settings": settings.settings,
        "log": log.log,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "get_target": platforms.get_target,
        "get_server": platforms.get_server,
        "owner_of": platforms.owner_of,
        "targets": platforms.targets,
        "servers": platforms.servers,
    }


@cache
def _places() -> list[tuple[ModuleType, str, str]]:
    """Where the originals are bound: module, its name for it, ours."""
    for found in pkgutil.walk_packages(dropforge.__path__, "dropforge."):
        importlib.import_module(found.name)
    keys = {id(value): key for key, value in _originals().items()}
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("dropforge.")]
    return [
        (module, name, keys[id(value)])
        for module in [*modules, entry_points()]
        for name, value in sorted(vars(module).items())
        if id(value) in keys
    ]


def _skew(world: World) -> float:
    return world.scheduler.current.skew


def _logger(world: World) -> Callable[..., None]:
    def log(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
        world.fact("log", stage=stage, severity=severity, run=run, message=message)

    return log


def _no_client(name: str) -> Callable[..., Any]:
    def missing(*_: Any) -> Any:
        raise AssertionError(f"clients.{name}() is not simulated: see chaos/cloud.py")

    return missing


class _OneThread:
    """An executor that does each task at once, in the caller's turn."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _OneThread:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, *_: Any, **__: Any) -> None: ...

    def map(self, call: Callable[..., Any], *items: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter([call(*found) for found in zip(*items, strict=False)])

    def submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            value = call(*arguments, **options)
        except Exception as error:  # noqa: BLE001  # given to whoever asks for the result, as by a future
            return SimpleNamespace(result=_raiser(error), exception=lambda timeout=None, e=error: e, done=lambda: True)
        return SimpleNamespace(
            result=lambda timeout=None: value, exception=lambda timeout=None: None, done=lambda: True
        )


def _raiser(error: Exception) -> Callable[..., Any]:
    def result(timeout: float | None = None) -> Any:
        raise error

    return result
