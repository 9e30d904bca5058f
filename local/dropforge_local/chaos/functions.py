"""Where the functions run: each call is an instance of its own, which may be slow, die, or have a wrong clock."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from cloudevents.http import CloudEvent

import dropforge
from dropforge.context import Context

from .scheduler import Killed, Process
from .workflows import Reply
from .world import PROJECT, World

SOURCE = Path(dropforge.__file__).resolve().parents[1] / "main.py"
LAST_EFFECT = 40  # a call has up to some hundreds; most have less than this


class Functions:
    """Every entry point of main.py, by its name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._main = entry_points()

    def connect(self, context: Context) -> None:
        """Give every function the same context, as warm instances keep theirs."""
        give_context(self._main, context)

    def post(self, name: str, body: dict[str, Any], done: Callable[[Reply], None]) -> None:
        """Call a stage; `done` gets its answer, or None when the instance crashed."""
        self._start(name, {"run": body.get("run", "")}, lambda: call_stage(self._main, name, body), done)

    def ask(self, name: str, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, Any]:
        """Call a stage within the present process, which waits for the answer."""
        try:
            return call_stage(self._main, name, body, headers)
        except Exception as error:  # noqa: BLE001  # as functions-framework does
            return 500, {"error": f"{type(error).__name__}: {error}"}

    def deliver(self, name: str, event: CloudEvent, about: dict[str, Any], done: Callable[[bool], None]) -> None:
        """Give an event to a function; `done` gets whether it was acknowledged."""

        def answer() -> tuple[int, Any]:
            getattr(self._main, name)(event)
            return 200, None

        self._start(name, about, answer, lambda reply: done(reply is not None and reply[0] == 200))

    def _start(
        self, name: str, about: dict[str, Any], answer: Callable[[], tuple[int, Any]], done: Callable[[Reply], None]
    ) -> None:
        world = self.world
        instance = f"{name}-{world.id()}"

        def live() -> None:
            world.fact("call", instance=instance, **about)
            reply: tuple[int, Any]
            try:
                reply = answer()
            except Killed:
                world.after(0.1, lambda: done(None))
                raise
            except Exception as error:  # noqa: BLE001  # as functions-framework does: it answers 500
                reply = 500, {"error": f"{type(error).__name__}: {error}"}
            world.fact("answer", instance=instance, status=reply[0], body=reply[1])
            world.after(0.01, lambda: done(reply))

        skew = world.random.uniform(-2, 2) if world.happens(world.faults.skewed) else 0.0
        process = Process(instance, live, skew)
        if world.happens(world.faults.killed):
            process.kill_at = (1 + int(LAST_EFFECT * world.random.random() ** 2), world.random.random() < 0.5)
        world.scheduler.spawn(process, world.random.uniform(0.005, 0.3))


def event_of(source: str, data: dict[str, Any]) -> CloudEvent:
    """A CloudEvent as Eventarc sends it. Functions read its data and its source."""
    fixed = {"id": "1", "time": "2026-01-01T00:00:00Z", "type": "event"}
    return CloudEvent({**fixed, "source": source}, data)


def topic_source(topic: str) -> str:
    """The source of the events of a Pub/Sub topic."""
    return f"//pubsub.googleapis.com/projects/{PROJECT}/topics/{topic}"


def call_stage(
    main: ModuleType, name: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Call a stage by HTTP: the status and the body of its answer."""
    encoded = json.dumps(body).encode()
    request = SimpleNamespace(get_data=lambda: encoded, get_json=lambda silent: body, headers=headers or {})
    answered: Any = getattr(main, name)(request)
    content, status = answered if isinstance(answered, tuple) else (answered, 200)
    return status, json.loads(json.dumps(content))


def entry_points() -> ModuleType:
    """A copy of functions/main.py, as a process of the functions loads it. Its functions need `give_context` first."""
    spec = importlib.util.spec_from_file_location("dropforge_functions_main", SOURCE)
    assert spec is not None, "a file of Python"
    assert spec.loader is not None, "likewise"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def give_context(main: ModuleType, context: Context) -> None:
    """Let the functions of a copy work with `context` from here on."""
    main.context = lambda: context  # type: ignore[attr-defined]
