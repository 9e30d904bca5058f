"""Workflows and its Executions API: the engine's own interpreter runs a workflow under the virtual clock.

At every wait the whole state of an execution goes through a snapshot, so that a restarted engine continues from the
snapshot. For a request in flight, a random draw decides: the engine sends it again, or the connection breaks.
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

from google.api_core.exceptions import NotFound
from google.cloud.workflows import executions_v1

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

from .world import LOCATION, PROJECT, World, broken

SOURCE = Path(__file__).resolve().parents[3] / "workflows" / "run.workflows.yaml"
WORKFLOW = f"projects/{PROJECT}/locations/{LOCATION}/workflows/dropforge-run"
FUNCTIONS_URL = "https://functions.chaos/"
CALLBACKS_URL = "https://workflowexecutions.chaos"

# A function's answer: (HTTP status, body), or None if the connection broke.
Reply = tuple[int, Any] | None
Post = Callable[[str, dict[str, Any], Callable[[Reply], None]], None]


@dataclass
class Execution:
    """An execution. `waits` has its waits by thread; `early` has the early requests to its callbacks, by ref.

    `run` is the run, or the rollout, that the execution carries out.
    """

    id: str
    run: str
    labels: dict[str, str]
    started: float
    machine: Machine
    snapshot: tuple[str, dict[int, str]] | None = None
    state: str = "ACTIVE"
    waits: dict[int, Wait] = field(default_factory=dict)
    early: dict[str, Value] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{WORKFLOW}/executions/{self.id}"


class Workflows:
    """The service, with one workflow. `post` calls a function and passes its answer on.

    `subject` is the field of an argument that names the run, or the rollout.
    """

    def __init__(self, world: World, post: Post, source: Path = SOURCE, subject: str = "run") -> None:
        self.world = world
        self.post = post
        self.source = source
        self.subject = subject
        self.executions: dict[str, Execution] = {}
        self.epoch = 0

    # The Executions client

    def create_execution(self, parent: str, execution: Any, timeout: float) -> Any:
        return self.world.effect("executions.create", lambda: self._create(execution), changes=True)

    def get_execution(self, name: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Any:
        full_name = name or request["name"]
        return self.world.effect("executions.get", lambda: self._shown(self._find(str(full_name))))

    def list_executions(self, request: Any = None, timeout: float = 0, **_: Any) -> Iterator[Any]:
        """The newest first; the only filter is `state="…"`."""
        state = re.fullmatch(r'state="(\w+)"', getattr(request, "filter", ""))

        def read() -> list[Any]:
            newest_first = reversed(self.executions.values())
            return [self._shown(e) for e in newest_first if state is None or e.state == state[1]]

        return iter(self.world.effect("executions.list", read))

    def cancel_execution(self, name: Any = None, request: Any = None, timeout: float = 0, **_: Any) -> Any:
        full_name = name or request["name"]

        def cancel() -> Any:
            execution = self._find(str(full_name))
            self.cancel(execution.id)
            return self._shown(execution)

        return self.world.effect("executions.cancel", cancel, changes=True)

    def cancel(self, id_: str) -> None:
        """End an execution from outside. Does nothing if the execution has ended."""
        execution = self.executions[id_]
        if execution.state == "ACTIVE":
            self._end(execution, "CANCELLED", None)

    # The callbacks client

    def call_back(self, url: str) -> Any:
        """POST to a callback."""
        return self.world.effect("callback", lambda: self._deliver(url), changes=True, error=broken)

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
        """Run the first steps of a new execution."""
        self._advance(execution)

    def revive(self, execution: Execution) -> None:
        """Continue from the snapshot, as a restarted engine does."""
        assert execution.snapshot is not None, "a snapshot precedes every wait"
        execution.machine = self._machine(execution.name)
        execution.machine.restore(*execution.snapshot)

    def request_of(self, wait: Wait) -> tuple[str, dict[str, Any]]:
        """(function, body) of an http wait's request."""
        request = wait.detail
        return request["url"].removeprefix(FUNCTIONS_URL), json.loads(base64.b64decode(request["body"]))

    def reply(self, execution: Execution, wait: Wait, reply: Reply) -> None:
        """Pass on a function's answer; None: the connection broke."""
        if reply is None:
            self._fail(execution, wait, "ConnectionError")
        else:
            self._reply(execution, wait, *reply)

    def answer(self, execution: Execution, wait: Wait, value: Value, failed: bool) -> None:
        """Answer a wait. Does nothing if the wait already has an answer."""
        if execution.state != "ACTIVE" or execution.waits.get(wait.thread) is not wait:
            return
        del execution.waits[wait.thread]
        if execution.machine.complete(wait.thread, wait.seq, value, failed):
            self._advance(execution)

    def restart(self) -> None:
        """Kill the engine, and continue from its snapshots."""
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

    def _create(self, requested: Any) -> Any:
        argument = json.loads(requested.argument)
        id_ = f"e{self.world.id():04d}"
        machine = self._machine(f"{WORKFLOW}/executions/{id_}")
        execution = Execution(id_, argument[self.subject], dict(requested.labels), self.world.now, machine)
        self.executions[id_] = execution
        self.world.fact("execution", id=id_, run=execution.run)
        machine.start(argument)
        self.world.after(0.01, lambda: self._advance(execution))
        return self._shown(execution)

    def _machine(self, name: str) -> Machine:
        environment = {"FUNCTIONS_URL": FUNCTIONS_URL, "GOOGLE_CLOUD_WORKFLOW_EXECUTION_ID": name.rsplit("/", 1)[1]}
        return Machine(
            program(self.source),
            execution=name,
            environment=environment,
            callback_base_url=CALLBACKS_URL,
            limits=Limits(),
            now=lambda: self.world.now,
            new_id=lambda: str(UUID(int=self.world.random.getrandbits(128), version=4)),
        )

    def _advance(self, execution: Execution) -> None:
        """Run an execution until it waits or ends; write a snapshot; only then send its requests."""
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
            assert wait.due is not None, "sleeps and callbacks have a due time"
            self.world.scheduler.at(wait.due, lambda: self.answer(execution, wait, *timer_result(wait)))

    def _send(self, execution: Execution, wait: Wait) -> None:
        """POST to a function. The answer counts only if the same engine still runs when the answer arrives."""
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
        machine = execution.machine  # None in the model of a run (model.py), which takes its own steps
        steps = {"steps": machine.steps, "external_steps": machine.external_steps} if machine else {}
        self.world.fact("execution_ended", id=execution.id, run=execution.run, state=state, result=result, **steps)

    def _find(self, name: str) -> Execution:
        if name.rsplit("/", 1)[-1] not in self.executions:
            raise NotFound(f"Execution {name} does not exist.")
        return self.executions[name.rsplit("/", 1)[-1]]

    def _shown(self, execution: Execution) -> Any:
        return SimpleNamespace(
            name=execution.name,
            labels=execution.labels,
            start_time=datetime.fromtimestamp(execution.started, UTC),
            create_time=datetime.fromtimestamp(execution.started, UTC),
            state=executions_v1.Execution.State[execution.state],
            argument=json.dumps({self.subject: execution.run}),
        )


@cache
def program(source: Path = SOURCE) -> Program:
    """The compiled workflow."""
    return compile_source(source.read_text(encoding="utf-8"), Limits())[0]
