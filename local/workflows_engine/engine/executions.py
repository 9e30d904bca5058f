"""Executions: create, read, cancel, and everything that follows from the end of an execution."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import FailedPrecondition, NotFound, ResourceExhausted
from ..language.program import Program
from ..records import ExecutionRecord, WorkflowRecord
from ..values import encode_value
from .core import Core
from .effect_tasks import EffectTasks
from .inbox import WaitKey
from .machines import ActiveExecution, Machines
from .subexecutions import SubExecutions
from .validation import check_argument, check_labels, check_levels
from .workflows import Programs


class Executions:
    """The executions of a database. `active` counts those that may run now."""

    def __init__(self, core: Core, machines: Machines, programs: Programs, effects: EffectTasks) -> None:
        self.active = 0
        self.children = SubExecutions(core)
        self._core = core
        self._machines = machines
        self._programs = programs
        self._effects = effects
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def create(
        self,
        workflow: WorkflowRecord,
        argument: str,
        labels: Mapping[str, str],
        call_log_level: str,
        history_level: str,
        disable_overflow_buffering: bool,
        parent: WaitKey | None = None,
    ) -> ExecutionRecord:
        """Start an execution of the workflow's current revision, or queue it when too many are active."""
        check_argument(argument, self._core.limits)
        check_labels(labels, self._core.limits)
        check_levels(call_log_level, history_level)
        now = self._core.now()
        state = self._first_state(disable_overflow_buffering)
        record = ExecutionRecord(
            name=f"{workflow.name}/executions/{uuid.uuid4()}",
            workflow=workflow.name,
            revision_id=workflow.revision.revision_id,
            state=state,
            argument=argument,
            result=None,
            error=None,
            labels={**workflow.labels, **labels},
            created=now,
            started=now if state == "ACTIVE" else None,
            ended=None,
            steps=0,
            external_steps=0,
            settings={
                "call_log_level": call_log_level or workflow.settings.get("call_log_level", ""),
                "history_level": history_level or workflow.settings.get("history_level", ""),
                "disable_overflow_buffering": disable_overflow_buffering,
            },
        )
        with self._core.db.transaction():
            id_ = self._core.store.insert_execution(record, parent)
            if state == "ACTIVE":
                self._core.db.after_commit(lambda: self._begin(id_))
        return record

    def _first_state(self, disable_overflow_buffering: bool) -> str:
        limits = self._core.limits
        if self.active < limits.active_executions:
            return "ACTIVE"
        if disable_overflow_buffering:
            raise ResourceExhausted(f"{self.active} executions are active; the limit is {limits.active_executions}")
        if self._core.store.count("QUEUED") >= limits.queued_executions:
            raise ResourceExhausted(f"the backlog is full: {limits.queued_executions} executions are queued")
        return "QUEUED"

    def _begin(self, id_: int) -> None:
        self.active += 1
        self._core.inbox.make_runnable(id_)

    def find(self, name: str) -> tuple[int, ExecutionRecord]:
        """(row id, record as stored). Raises NotFound."""
        row = self._core.store.execution(name)
        if row is None:
            raise NotFound(f"execution {name!r} not found")
        return row

    def get(self, name: str) -> ExecutionRecord:
        """The record; of an active execution with its current step and its steps so far."""
        return self._with_current_steps(*self.find(name))

    def _with_current_steps(self, id_: int, record: ExecutionRecord) -> ExecutionRecord:
        active = self._machines.get(id_) if record.state == "ACTIVE" else None
        if active is None:
            return record
        machine = active.machine
        return replace(
            record,
            current_steps=machine.current_steps(),
            steps=machine.steps,
            external_steps=machine.external_steps,
        )

    def list(self, workflow: str, *, current: bool = False) -> Iterator[ExecutionRecord]:
        for id_, record in self._core.store.executions(workflow):
            yield self._with_current_steps(id_, record) if current else record
            self._machines.trim()

    def history(self, name: str) -> tuple[ExecutionRecord, Sequence[Any], Program]:
        record = self.get(name)
        id_, _ = self.find(name)
        revision = self._core.store.revision(record.workflow, record.revision_id)
        if revision is None:
            raise NotFound(f"revision {record.revision_id!r} of {record.workflow!r} not found")
        return record, self._core.store.history(id_), self._programs.get(revision)

    async def wait(self, name: str) -> ExecutionRecord:
        while not (record := self.get(name)).is_finished:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(name, []).append(waiter)
            await waiter
        return record

    def cancel(self, name: str) -> ExecutionRecord:
        """End an execution now. The engine ignores answers that arrive later."""
        id_, record = self.find(name)
        if record.is_finished:
            raise FailedPrecondition(f"execution {name!r} has already ended: {record.state}")
        active = self._machines.in_memory(id_) if record.state == "ACTIVE" else None
        with self._core.db.transaction():
            if active is not None:
                self.save_history(id_, active)
            self._core.store.finish(id_, "CANCELLED", result=None, error=None, now=self._core.now())
            self._core.db.after_commit(lambda: self._after_cancel(id_, record))
        return self.get(name)

    def _after_cancel(self, id_: int, record: ExecutionRecord) -> None:
        self._machines.forget(id_)
        self._core.inbox.forget(id_)
        if record.state == "ACTIVE":
            self.active -= 1
            self._effects.cancel(id_)
            with self._core.db.transaction():
                self.promote(0 if self.active >= self._core.limits.active_executions else 1)
        self.children.report_end(id_)
        self.notify(record.name)

    # For rounds

    def save_history(self, id_: int, active: ActiveExecution) -> None:
        if active.machine.events:
            self._core.store.add_history(id_, active.next_chunk, encode_value(active.machine.events))

    def finish(self, id_: int, active: ActiveExecution) -> None:
        """Write the outcome of the execution's machine."""
        machine = active.machine
        assert machine.outcome is not None
        state, value = machine.outcome
        self.save_history(id_, active)
        self._core.store.finish(
            id_,
            state,
            result=value if state == "SUCCEEDED" else None,
            error=value if state == "FAILED" else None,
            now=self._core.now(),
            steps=(machine.steps, machine.external_steps),
            last_steps=machine.current_steps(),
        )

    def promote(self, places: int) -> None:
        """Start queued executions in the places of executions that end in this transaction."""
        if self.active - places >= self._core.limits.active_executions:
            return
        for id_ in self._core.store.next_queued(places):
            self._core.store.activate(id_, self._core.now())
            self._core.db.after_commit(lambda id_=id_: self._begin(id_))  # type: ignore[misc]

    def after_finish(self, id_: int) -> None:
        """After the commit that wrote the end of an active execution: free its place, answer its parent."""
        self._machines.forget(id_)
        self.active -= 1
        self.children.report_end(id_)

    def notify(self, name: str) -> None:
        """Wake the callers that wait for the execution's end."""
        for waiter in self._waiters.pop(name, []):
            if not waiter.done():
                waiter.set_result(None)
