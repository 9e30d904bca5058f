"""The machines of active executions: in memory while they are in use, else rebuilt from the database."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ..interpreter.machine import Machine
from ..records import ExecutionRecord, Revision
from ..values import Sizer, from_json
from .core import Core
from .workflows import Programs

MACHINES: Final = 256  # machines that stay in memory between the steps of their executions


class ActiveExecution:
    """An active execution with its machine."""

    __slots__ = ("machine", "name", "next_chunk", "settings")

    def __init__(self, machine: Machine, record: ExecutionRecord, next_chunk: int) -> None:
        self.machine = machine
        self.name = record.name
        self.settings = record.settings
        self.next_chunk = next_chunk

    def waits_again(self, thread: int) -> bool:
        """True if this round replaces the thread's row of waits, or deletes the execution's rows."""
        return self.machine.outcome is not None or any(wait.thread == thread for wait in self.machine.waits)


class Machines:
    """Active executions by their row id. `callback_base_url` begins the URL of every callback."""

    def __init__(self, core: Core, programs: Programs, project_number: str) -> None:
        self.callback_base_url = ""
        self._core = core
        self._programs = programs
        self._project_number = project_number
        self._sizer = Sizer(core.limits.variables_bytes, core.limits.string_bytes)
        self._in_memory: OrderedDict[int, ActiveExecution] = OrderedDict()

    def get(self, id_: int) -> ActiveExecution | None:
        """An active execution, from memory or from its rows; None if it is not active."""
        active = self._in_memory.get(id_)
        if active is not None:
            self._in_memory.move_to_end(id_)
            return active
        return self._load(id_)

    def in_memory(self, id_: int) -> ActiveExecution | None:
        return self._in_memory.get(id_)

    def forget(self, id_: int) -> None:
        self._in_memory.pop(id_, None)

    def clear(self) -> None:
        self._in_memory.clear()

    def trim(self) -> None:
        while len(self._in_memory) > MACHINES:
            self._in_memory.popitem(last=False)

    def _load(self, id_: int) -> ActiveExecution | None:
        record = self._core.store.execution_by_id(id_)
        state = self._core.store.state(id_)
        if record is None or state is None or record.state != "ACTIVE":
            return None
        revision = self._core.store.revision(record.workflow, record.revision_id)
        assert revision is not None
        machine = Machine(
            self._programs.get(revision),
            execution=record.name,
            environment=self._environment(record, revision),
            callback_base_url=self.callback_base_url,
            limits=self._core.limits,
            now=self._core.now,
            sizer=self._sizer,
        )
        snapshot, values = state
        if snapshot:
            machine.restore(snapshot, values)
        else:
            machine.start(from_json(record.argument))
        active = ActiveExecution(machine, record, self._core.store.next_chunk(id_) if snapshot else 0)
        self._in_memory[id_] = active
        return active

    def _environment(self, record: ExecutionRecord, revision: Revision) -> dict[str, str]:
        _, project, _, location, _, workflow, _, execution = record.name.split("/")
        account = revision.service_account.rsplit("/", 1)[-1]  # of projects/P/serviceAccounts/EMAIL, or the e-mail
        return {
            **revision.environment,
            "GOOGLE_CLOUD_PROJECT_ID": project,
            "GOOGLE_CLOUD_PROJECT_NUMBER": self._project_number,
            "GOOGLE_CLOUD_LOCATION": location,
            "GOOGLE_CLOUD_WORKFLOW_ID": workflow,
            "GOOGLE_CLOUD_WORKFLOW_REVISION_ID": revision.revision_id,
            "GOOGLE_CLOUD_WORKFLOW_EXECUTION_ID": execution,
            "GOOGLE_CLOUD_SERVICE_ACCOUNT_NAME": account
            or f"{self._project_number}-compute@developer.gserviceaccount.com",
        }
