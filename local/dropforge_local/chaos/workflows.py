"""Workflows and its Executions API: the engine's own interpreter over run.workflows.yaml, under the virtual clock.

Everything that an execution holds goes through a snapshot at every wait, so that an engine that restarts goes on from
what was written. A request that was on its way then is sent again, or answered with a broken connection, as drawn.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from workflows_engine import (
    Limits,
    Machine,
    Program,
    Value,
    Wait,
    WorkflowError,
    callback_value,
    check_status,
    compile_source,
    error_value,
    system_error,
    timer_result,
)

from .world import LOCATION, PROJECT, World

SOURCE = Path(__file__).resolve().parents[3] / "workflows" / "run.workflows.yaml"
WORKFLOW = f"projects/{PROJECT}/locations/{LOCATION}/workflows/dropforge-run"
FUNCTIONS_URL = "https://functions.chaos/"
CALLBACKS_URL = "https://workflowexecutions.chaos"

# What a function answers: (HTTP status, body); None: the connection broke.
Reply = tuple[int, Any] | None
Post = Callable[[str, dict[str, Any], Callable[[Reply], None]], None]


@dataclass
class Execution:
    """One execution. `waits` holds what it waits for, by thread; `early` requests to callbacks, by their ids."""

    id: str
    run: str
    labels: dict[str, str]
    started: float
    machine: Machine
    snapshot: tuple[str, dict[int, str]] | None = None
    state: str = "ACTIVE"
    waits: dict[int, Wait] = field(default_factory=dict)
    early: dict[str, Value] = field(default_factory=dict)
    epoch: int = 0  # of the engine that sent the present requests

    @property
    def name(self) -> str:
        return f"{WORKFLOW}/executions/{self.id}"


class Workflows:
    """The service. `post` calls a function and comes back with its answer."""

    def __init__(self, world: World, post: Post) -> None:
        self.world = world
        self.post = post
        self.executions: dict[str, Execution] = {}
        self.epoch = 0

    # The Executions client

    def create_execution(self, parent: str, execution: Any, timeout: float) -> Any:
        return self.world.effect("executions.create", lambda: self._create(execution), changes=True)

    def get_execution(self, name: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Any:
        wanted = name or request["name"]
        return self.world.effect("executions.get", lambda: self._shown(self._find(str(wanted))))

    def list_executions(self, request: Any = None, timeout: float = 0, **_: Any) -> Iterator[Any]:
        """Newest first; of filters only `state="…"`."""
        wanted = re.fullmatch(r'state="(\w+)"', getattr(request, "filter", ""))

        def read() -> list[Any]:
            newest_first = reversed(self.executions.values())
            return [self._shown(e) for e in newest_first if wanted is None or e.state == wanted[1]]

        return iter(self.world.effect("executions.list", read))

    def cancel_execution(self, name: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Any:
        wanted = name or request["name"]

        def cancel() -> Any:
            execution = self._find(str(wanted))
            self.cancel(execution.id)
            return self._shown(execution)

        return self.world.effect("executions.cancel", cancel, changes=True)

    def cancel(self, id_: str) -> None:
        """End an execution from outside; nothing if it has ended."""
        execution = self.executions[id_]
        if execution.state == "ACTIVE":
            self._end(execution, "CANCELLED", None)

    # The callbacks client

    def call_back(self, url: str) -> Any:
        """POST to a callback."""
        return self.world.effect("callback", lambda: self._deliver(url), changes=True, error=_broken)

    def _deliver(self, url: str) -> Any:
        id_, _, ref = url.rpartition("/callbacks/")
        execution = self.executions.get(id_.rsplit("/", 1)[-1])
        if execution is None or execution.state != "ACTIVE" or ref not in execution.early:
            return SimpleNamespace(status_code=404)
        waiting = next((w for w in execution.waits.values() if w.kind == "callback" and w.ref == ref), None)
        value = callback_value("POST", {}, {}, {}, url, self.world.now)
        if waiting is not None:
            self.answer(execution, waiting, value, False)
        elif execution.early[ref] is not None:
            return SimpleNamespace(status_code=429)
        else:
            execution.early[ref] = value
        return SimpleNamespace(status_code=200)

    # The engine

    def begin(self, execution: Execution) -> None:
        """Take the first steps of an execution that has just been created."""
        self._go(execution)

    def revive(self, execution: Execution) -> None:
        """Go on from what was written, as an engine that has restarted."""
        assert execution.snapshot is not None, "written before anything is waited for"
        execution.machine = self._machine(execution.name)
        execution.machine.restore(*execution.snapshot)

    def request_of(self, wait: Wait) -> tuple[str, dict[str, Any]]:
        """The function that an http wait calls, and the body."""
        request = wait.detail
        return request["url"].removeprefix(FUNCTIONS_URL), json.loads(base64.b64decode(request["body"]))

    def reply(self, execution: Execution, wait: Wait, reply: Reply) -> None:
        """What a function has answered, or (None) that the connection broke."""
        if reply is None:
            self._fail(execution, wait, "ConnectionError")
        else:
            self._reply(execution, wait, *reply)

    def answer(self, execution: Execution, wait: Wait, value: Value, failed: bool) -> None:
        """What was waited for has come; nothing if that was answered already."""
        if execution.state != "ACTIVE" or execution.waits.get(wait.thread) is not wait:
            return
        del execution.waits[wait.thread]
        if execution.machine.complete(wait.thread, wait.seq, value, failed):
            self._go(execution)

    def restart(self) -> None:
        """Kill the engine, and go on from what it had written."""
        self.epoch += 1
        self.world.fact("fault", what="restart")
        for execution in list(self.executions.values()):
            if execution.state != "ACTIVE" or execution.snapshot is None:
                continue
            self.revive(execution)
            for wait in list(execution.waits.values()):
                if wait.kind == "http" and self.world.random.random() < 0.5:
                    self._send(execution, wait)
                elif wait.kind == "http":
                    self.world.after(0, lambda e=execution, w=wait: self._fail(e, w, "ConnectionError"))  # type: ignore[misc]

    def _create(self, wanted: Any) -> Any:
        argument = json.loads(wanted.argument)
        id_ = f"e{self.world.id():04d}"
        machine = self._machine(f"{WORKFLOW}/executions/{id_}")
        execution = Execution(id_, argument["run"], dict(wanted.labels), self.world.now, machine)
        self.executions[id_] = execution
        self.world.fact("execution", id=id_, run=execution.run)
        machine.start(argument)
        self.world.after(0.01, lambda: self._go(execution))
        return self._shown(execution)

    def _machine(self, name: str) -> Machine:
        environment = {"FUNCTIONS_URL": FUNCTIONS_URL, "GOOGLE_CLOUD_WORKFLOW_EXECUTION_ID": name.rsplit("/", 1)[1]}
        return Machine(
            program(),
            execution=name,
            environment=environment,
            callback_base_url=CALLBACKS_URL,
            limits=Limits(),
            now=lambda: self.world.now,
            new_id=lambda: str(UUID(int=self.world.random.getrandbits(128), version=4)),
        )

    def _go(self, execution: Execution) -> None:
        """Run until it waits or ends; write down where it is; only then send what it asks for."""
        machine = execution.machine
        if execution.state != "ACTIVE":
            return
        machine.run()
        while machine.is_ready:
            machine.run()
        execution.early.update({ref: None for ref, _ in machine.new_callbacks})
        machine.new_callbacks, machine.logs, machine.events = [], [], []
        waits, machine.waits = machine.waits, []
        if machine.outcome is not None:
            self._end(execution, *machine.outcome)
            return
        text, added, removed = machine.snapshot()
        values = {**(execution.snapshot[1] if execution.snapshot else {}), **added}
        execution.snapshot = (text, {key: value for key, value in values.items() if key not in removed})
        for wait in waits:
            execution.waits[wait.thread] = wait
            self._begin(execution, wait)

    def _begin(self, execution: Execution, wait: Wait) -> None:
        if wait.kind == "http":
            self._send(execution, wait)
        elif wait.kind == "callback" and execution.early.get(wait.ref or "") is not None:
            value, execution.early[wait.ref or ""] = execution.early[wait.ref or ""], None
            self.answer(execution, wait, value, False)
        else:
            assert wait.due is not None, "sleeps and callbacks have an end"
            self.world.scheduler.at(wait.due, lambda: self.answer(execution, wait, *timer_result(wait)))

    def _send(self, execution: Execution, wait: Wait) -> None:
        """POST to a function; the answer counts if the engine that sent it still runs when it comes."""
        epoch = self.epoch

        def done(reply: Reply) -> None:
            if self.epoch == epoch:
                self.reply(execution, wait, reply)

        def give_up() -> None:
            if self.epoch == epoch:
                self._fail(execution, wait, "TimeoutError")

        self.world.after(wait.detail["timeout"], give_up)
        self.post(*self.request_of(wait), done)

    def _reply(self, execution: Execution, wait: Wait, status: int, body: Any) -> None:
        try:
            value, failed = check_status({"body": body, "code": status, "headers": {}}), False
        except WorkflowError as error:
            value, failed = error_value(error), True
        self.answer(execution, wait, value, failed)

    def _fail(self, execution: Execution, wait: Wait, tag: str) -> None:
        self.answer(execution, wait, error_value(system_error(tag, f"{wait.call}: {tag}")), True)

    def _end(self, execution: Execution, state: str, value: Any) -> None:
        execution.state = state
        execution.waits.clear()
        result = json.loads(value) if state == "SUCCEEDED" and value else value
        self.world.fact("execution_ended", id=execution.id, run=execution.run, state=state, result=result)

    def _find(self, name: str) -> Execution:
        from google.api_core.exceptions import NotFound

        if name.rsplit("/", 1)[-1] not in self.executions:
            raise NotFound(f"Execution {name} does not exist.")
        return self.executions[name.rsplit("/", 1)[-1]]

    def _shown(self, execution: Execution) -> Any:
        from google.cloud.workflows import executions_v1

        return SimpleNamespace(
            name=execution.name,
            labels=execution.labels,
            start_time=datetime.fromtimestamp(execution.started, UTC),
            create_time=datetime.fromtimestamp(execution.started, UTC),
            state=executions_v1.Execution.State[execution.state],
            argument=json.dumps({"run": execution.run}),
        )


@cache
def program() -> Program:
    """The compiled workflow."""
    return compile_source(SOURCE.read_text(encoding="utf-8"), Limits())[0]


def _broken(timed_out: bool) -> Exception:
    """What requests raises for a call that failed on its way."""
    import requests

    return requests.ReadTimeout("timed out") if timed_out else requests.ConnectionError("connection reset")
