"""The durable engine: runs machines, commits what they did, sends what they asked for, brings back the answers.

All of it happens on one event loop. `_pump` is the only place where executions advance: it takes the answers that have
come in, runs every execution that can go on, writes all of them in one transaction (group commit), and only then sends
the new effects. What is in memory can be thrown away at any time: a killed engine goes on from the rows when it starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import sqlite3
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from . import effects
from .clock import Clock
from .compiler import compile_source
from .connectors import Connectors, Later, LoadDocument
from .errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    LeaseLost,
    NotFound,
    Problem,
    ResourceExhausted,
    WorkflowError,
    limit_error,
    system_error,
)
from .http import HttpRequest, HttpResponse, HttpTransport
from .keepalive import PooledTransport
from .limits import Limits
from .machine import Machine, Wait
from .mock import Mocks
from .program import Program
from .store import Db, ExecutionRecord, Revision, Store, WorkflowRecord
from .values import Sizer, Value, from_json, store

log = logging.getLogger(__name__)

WORKFLOW_NAME: Final = re.compile(r"projects/([^/]+)/locations/([^/]+)/workflows/([A-Za-z][A-Za-z0-9_-]{0,63})\Z")
CALL_LOG_LEVELS: Final = ("", "CALL_LOG_LEVEL_UNSPECIFIED", "LOG_ALL_CALLS", "LOG_ERRORS_ONLY", "LOG_NONE")
HISTORY_LEVELS: Final = (
    "",
    "EXECUTION_HISTORY_LEVEL_UNSPECIFIED",
    "EXECUTION_HISTORY_BASIC",
    "EXECUTION_HISTORY_DETAILED",
)
HOT_MACHINES: Final = 256  # executions kept in memory between their steps; the others are rows only
PROGRAMS: Final = 256
RETENTION_SECONDS: Final = 90 * 24 * 3600  # finished executions are forgotten after this, as at Google

Authorize = Callable[[Mapping[str, str]], bool]


@dataclass
class _Answer:
    """What came back for a wait. `settled` is told, after the commit, whether the wait still wanted it."""

    execution: int
    thread: int
    seq: int
    value: Value
    error: bool = False
    settled: asyncio.Future[bool] | None = None


# Engine has a method named list; these spare its annotations that name.
_Answers = list[_Answer]
_Taken = list[tuple[_Answer, bool]]
_Waits = list[tuple[int, Wait]]
_Names = list[str]


class _Running:
    """An execution in memory."""

    __slots__ = ("created", "machine", "name", "next_chunk", "settings")

    def __init__(self, machine: Machine, record: ExecutionRecord, next_chunk: int) -> None:
        self.machine = machine
        self.name = record.name
        self.created = record.created
        self.settings = record.settings
        self.next_chunk = next_chunk

    def waits_again(self, thread: int) -> bool:
        """True if the thread's row of waits is about to be replaced (or the execution's rows to be deleted)."""
        return self.machine.outcome is not None or any(wait.thread == thread for wait in self.machine.waits)


class Engine:
    """Workflows on one database.

    `token(kind, audience_or_scope)` gives the bearer token of `auth: {type: OIDC|OAuth2}`. `authorize(headers)` decides
    about a callback's sender beyond its having a bearer token. `repeatable(url)` says which hosts honour the
    Idempotency-Key header, so that a POST to them may be sent again after a crash. `mocks` answer in a service's place.
    """

    def __init__(
        self,
        db: Db,
        *,
        clock: Clock,
        http: HttpTransport | None = None,
        token: Callable[[str, str], str] = lambda kind, audience: "local",
        callback_base_url: str = "",
        limits: Limits = Limits(),  # noqa: B008  # frozen
        authorize: Authorize = lambda headers: True,
        repeatable: Callable[[str], bool] = lambda url: False,
        endpoints: Mapping[str, str] | None = None,
        discovery: LoadDocument | None = None,
        project_number: str = "100000000000",
        mocks: Mocks | None = None,
        takeover: bool = False,
    ) -> None:
        self.callback_base_url = callback_base_url
        self.limits = limits
        self.clock = clock
        self.connectors = Connectors(endpoints or {}, discovery)
        self._store = Store(db)
        self._db = db
        self._http = http or PooledTransport(limits.response_bytes)
        self._token = token
        self._authorize = authorize
        self._repeatable = repeatable
        self._project_number = project_number
        self._mocks = mocks
        self._takeover = takeover
        self._sizer = Sizer(limits.variables_bytes, limits.string_bytes)
        self._programs: OrderedDict[tuple[str, str], Program] = OrderedDict()
        self._hot: OrderedDict[int, _Running] = OrderedDict()
        self._answers: _Answers = []
        self._runnable: dict[int, None] = {}
        self._tasks: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._finished: dict[str, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._timer: asyncio.Task[None] | None = None
        self._timer_due = float("inf")
        self._active = 0
        self._dozing = 0
        self._time_floor = 0.0
        self.lost_lease = False

    # Life

    async def start(self) -> None:
        """Take the lease and go on with every execution in the database: this is also recovery."""
        self._loop = asyncio.get_running_loop()
        self._store.acquire_lease(takeover=self._takeover)
        self._time_floor = self._store.latest_time()
        self._store.prune(self.now() - RETENTION_SECONDS)
        self._active = self._store.count("ACTIVE")
        for id_ in self._store.runnable():
            self._runnable[id_] = None
        for id_, wait, sent in self._store.effects():
            self._recover(id_, wait, sent)
        self._schedule()
        self._wake()

    async def stop(self) -> None:
        """Stop at once; what is in flight is in doubt and will be looked at by the next start."""
        loop, self._loop = self._loop, None
        if self._pump_handle is not None:
            self._pump_handle.cancel()
            self._pump_handle = None
        tasks = [*self._tasks.values(), *([self._timer] if self._timer else [])]
        self._timer, self._timer_due = None, float("inf")
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()
        self._hot.clear()
        self._answers.clear()
        self._runnable.clear()
        if loop is not None and not self.lost_lease:
            self._store.release_lease()

    def now(self) -> float:
        """The clock's time, but never before what the database has already seen."""
        return max(self.clock.now(), self._time_floor)

    @property
    def is_idle(self) -> bool:
        """True if nothing can happen before a timer is due or a callback comes."""
        return not self.is_computing and len(self._tasks) == self._dozing

    @property
    def is_computing(self) -> bool:
        """True if work is at hand, rather than only requests on their way."""
        return bool(self._answers or self._runnable or self._pump_handle)

    # Workflows

    def deploy(
        self,
        name: str,
        source: str,
        *,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Revision:
        """Make `source` the workflow's current revision; the same source and env change nothing.

        Raises DeployError with every problem in the source, InvalidArgument for a bad name, env or label.
        """
        if not WORKFLOW_NAME.match(name):
            raise InvalidArgument(f"{name!r} is not of the form projects/P/locations/L/workflows/W")
        environment = dict(env or {})
        self._check_environment(environment)
        self._check_labels(labels or {})
        old = self._store.workflow(name)
        now = self.now()
        if old is not None and old.revision.source == source and old.revision.environment == environment:
            revision = old.revision
        else:
            program, _ = compile_source(source, self.limits)
            digest = hashlib.sha256(json.dumps([source, environment], sort_keys=True).encode()).hexdigest()
            number = self._store.count_revisions(name) + 1
            revision = Revision(name, f"{number:06d}-{digest[:3]}", source, environment, now)
            self._remember_program(revision, program)
        record = WorkflowRecord(
            name,
            revision,
            old.created if old else now,
            now,
            dict(labels) if labels is not None else (old.labels if old else {}),
            dict(settings) if settings is not None else (old.settings if old else {}),
        )
        with self._db.transaction():
            if old is None or revision is not old.revision:
                self._store.put_revision(revision)
            self._store.put_workflow(record)
        return revision

    def lint(self, source: str) -> Sequence[Problem]:
        """Warnings about a source that deploys. Raises DeployError for one that does not."""
        return compile_source(source, self.limits)[1]

    def get_workflow(self, name: str) -> WorkflowRecord:
        record = self._store.workflow(name)
        if record is None:
            raise NotFound(f"workflow {name!r} not found")
        return record

    def list_workflows(self, parent: str) -> Sequence[WorkflowRecord]:
        return self._store.workflows(parent)

    def list_revisions(self, name: str) -> Sequence[Revision]:
        self.get_workflow(name)
        return self._store.revisions(name)

    def delete_workflow(self, name: str) -> None:
        """Remove a workflow; its running executions are cancelled, their records stay."""
        self.get_workflow(name)
        with self._db.transaction():
            for _, record in self._store.executions(name):
                if not record.is_finished:
                    self.cancel(record.name)
            self._store.delete_workflow(name)

    # Executions

    def create_execution(
        self,
        workflow: str,
        argument: str = "null",
        *,
        labels: Mapping[str, str] | None = None,
        call_log_level: str = "",
        history_level: str = "",
        disable_overflow_buffering: bool = False,
        parent: tuple[int, int, int] | None = None,
    ) -> ExecutionRecord:
        """Start an execution of the current revision, or queue it when too many are active. `argument` is JSON."""
        deployed = self.get_workflow(workflow)
        argument = argument or "null"
        self._check_argument(argument)
        self._check_labels(labels or {})
        if call_log_level not in CALL_LOG_LEVELS:
            raise InvalidArgument(f"call log level {call_log_level!r} is none of {', '.join(CALL_LOG_LEVELS[1:])}")
        if history_level not in HISTORY_LEVELS:
            raise InvalidArgument(f"history level {history_level!r} is none of {', '.join(HISTORY_LEVELS[1:])}")
        now = self.now()
        record = ExecutionRecord(
            name=f"{workflow}/executions/{uuid.uuid4()}",
            workflow=workflow,
            revision_id=deployed.revision.revision_id,
            state=self._admission(disable_overflow_buffering),
            argument=argument,
            result=None,
            error=None,
            labels={**deployed.labels, **(labels or {})},
            created=now,
            started=None,
            ended=None,
            steps=0,
            external_steps=0,
            settings={
                "call_log_level": call_log_level or deployed.settings.get("call_log_level", ""),
                "history_level": history_level or deployed.settings.get("history_level", ""),
            },
        )
        if record.state == "ACTIVE":
            record = replace(record, started=now)
        with self._db.transaction():
            id_ = self._store.insert_execution(record, parent)
            if record.state == "ACTIVE":
                self._db.after_commit(lambda: self._begin(id_))
        return record

    def get(self, name: str) -> ExecutionRecord:
        """An execution, with its current steps if it runs."""
        found = self._store.execution(name)
        if found is None:
            raise NotFound(f"execution {name!r} not found")
        id_, record = found
        if record.state != "ACTIVE":
            return record
        running = self._running(id_)
        if running is None:
            return record
        machine = running.machine
        return replace(
            record,
            current_steps=machine.current_steps(),
            steps=machine.steps,
            external_steps=machine.external_steps,
        )

    def list(self, workflow: str) -> Iterator[ExecutionRecord]:
        """A workflow's executions, the newest first."""
        for _, record in self._store.executions(workflow):
            yield record

    def cancel(self, name: str) -> ExecutionRecord:
        """End an execution now. Answers that are on their way are ignored."""
        found = self._store.execution(name)
        if found is None:
            raise NotFound(f"execution {name!r} not found")
        id_, record = found
        if record.is_finished:
            raise FailedPrecondition(f"execution {name!r} has already ended: {record.state}")
        running = self._hot.get(id_) if record.state == "ACTIVE" else None
        with self._db.transaction():
            if running is not None:
                self._flush_history(id_, running)
            self._store.finish(id_, "CANCELLED", result=None, error=None, now=self.now())
            self._db.after_commit(lambda: self._cancelled(id_, record))
        return self.get(name)

    def history(self, name: str) -> tuple[ExecutionRecord, Sequence[Any], Program]:
        """What `history.step_entries` needs: the record, the event log, and the program that the events refer to."""
        record = self.get(name)
        found = self._store.execution(name)
        assert found is not None
        revision = self._store.revision(record.workflow, record.revision_id)
        if revision is None:
            raise NotFound(f"revision {record.revision_id!r} of {record.workflow!r} not found")
        return record, self._store.history(found[0]), self._program(revision)

    async def wait(self, name: str) -> ExecutionRecord:
        """The execution's record once it has ended."""
        while not (record := self.get(name)).is_finished:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._finished.setdefault(name, []).append(waiter)
            await waiter
        return record

    # Callbacks

    async def deliver_callback(
        self, execution: str, ref: str, method: str, headers: Mapping[str, str], query: Value, body: Value, url: str
    ) -> int:
        """A request to a callback endpoint: the HTTP status to answer, after the request is safe in the database."""
        bearer = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        if not bearer.lower().startswith("bearer ") or not bearer[7:].strip():
            return 401
        if not self._authorize(headers):
            return 403
        found = self._store.callback(ref)
        record = self._store.execution_by_id(found[0]) if found else None
        if found is None or record is None or record.name != execution or record.is_finished:
            return 404
        id_, expected, early = found
        if method != expected:
            return 405
        request = effects.callback_value(method, headers, query, body, url, self.now())
        waiting = self._store.waiting_for(ref)
        if waiting is not None and self._loop is not None:
            settled: asyncio.Future[bool] = self._loop.create_future()
            self._answer(_Answer(id_, waiting[1].thread, waiting[1].seq, request, settled=settled))
            if await settled:
                return 200
            return await self.deliver_callback(execution, ref, method, headers, query, body, url)
        if early is not None:
            return 429
        with self._db.transaction():
            self._store.check_lease()
            self._store.fill_callback(ref, request)
        return 200

    def list_callbacks(self, execution: str) -> Sequence[tuple[str, str, bool]]:
        """(ref, method, whether the execution waits for it now) of an execution's endpoints."""
        found = self._store.execution(execution)
        if found is None:
            raise NotFound(f"execution {execution!r} not found")
        waited = {wait.ref for wait in self._store.waits(found[0])}
        return [(ref, method, ref in waited) for ref, method in self._store.callbacks(found[0])]

    # Checks of what callers give

    def _check_argument(self, argument: str) -> None:
        size = len(argument.encode("utf-8", "replace"))
        if size > self.limits.argument_bytes:
            raise InvalidArgument(f"argument is {size} bytes; the limit is {self.limits.argument_bytes}")
        try:
            from_json(argument)
        except ValueError as error:
            raise InvalidArgument(f"argument is not JSON: {error}") from error

    def _check_labels(self, labels: Mapping[str, str]) -> None:
        if len(labels) > self.limits.labels:
            raise InvalidArgument(f"{len(labels)} labels; the limit is {self.limits.labels}")
        for key, value in labels.items():
            if not re.fullmatch(r"[^\W\dA-Z_][\w-]{0,62}", key) or key != key.lower():
                raise InvalidArgument(
                    f"label key {key!r} must be a lowercase letter and then letters, digits, _ or -, 63 in all"
                )
            if not isinstance(value, str) or not re.fullmatch(r"[\w-]{0,63}", value) or value != value.lower():
                raise InvalidArgument(
                    f"label {key!r} has value {value!r}; expected lowercase letters, digits, _ and -, 63 at most"
                )

    def _check_environment(self, environment: Mapping[str, str]) -> None:
        limits = self.limits
        if len(environment) > limits.environment_variables:
            raise InvalidArgument(
                f"{len(environment)} environment variables; the limit is {limits.environment_variables}"
            )
        for key, value in environment.items():
            if not key or key.startswith(("GOOGLE", "WORKFLOWS")):
                raise InvalidArgument(
                    f"environment variable {key!r} may not be empty or start with GOOGLE or WORKFLOWS"
                )
            if len(value.encode()) > limits.environment_variable_bytes:
                raise InvalidArgument(f"environment variable {key!r} is over {limits.environment_variable_bytes} bytes")

    def _admission(self, disable_overflow_buffering: bool) -> str:
        if self._active < self.limits.active_executions:
            return "ACTIVE"
        if disable_overflow_buffering:
            raise ResourceExhausted(
                f"{self._active} executions are active; the limit is {self.limits.active_executions}"
            )
        if self._store.count("QUEUED") >= self.limits.queued_executions:
            raise ResourceExhausted(f"the backlog is full: {self.limits.queued_executions} executions are queued")
        return "QUEUED"

    # Programs and machines

    def _program(self, revision: Revision) -> Program:
        key = (revision.workflow, revision.revision_id)
        program = self._programs.get(key)
        if program is None:
            program, _ = compile_source(revision.source, Limits.lifted())  # it was checked when it was deployed
            self._remember_program(revision, program)
        self._programs.move_to_end(key)
        return program

    def _remember_program(self, revision: Revision, program: Program) -> None:
        self._programs[(revision.workflow, revision.revision_id)] = program
        while len(self._programs) > PROGRAMS:
            self._programs.popitem(last=False)

    def _running(self, id_: int) -> _Running | None:
        """An active execution's machine, from memory or from its rows."""
        running = self._hot.get(id_)
        if running is not None:
            self._hot.move_to_end(id_)
            return running
        record = self._store.execution_by_id(id_)
        state = self._store.state(id_)
        if record is None or state is None or record.state != "ACTIVE":
            return None
        revision = self._store.revision(record.workflow, record.revision_id)
        assert revision is not None
        machine = Machine(
            self._program(revision),
            execution=record.name,
            environment=self._environment(record, revision),
            callback_base_url=self.callback_base_url,
            limits=self.limits,
            now=self.now,
            sizer=self._sizer,
        )
        snapshot, values = state
        if snapshot:
            machine.restore(snapshot, values)
        else:
            machine.start(from_json(record.argument))
        running = _Running(machine, record, self._store.next_chunk(id_) if snapshot else 0)
        self._hot[id_] = running
        return running

    def _environment(self, record: ExecutionRecord, revision: Revision) -> dict[str, str]:
        _, project, _, location, _, workflow, _, execution = record.name.split("/")
        return {
            **revision.environment,
            "GOOGLE_CLOUD_PROJECT_ID": project,
            "GOOGLE_CLOUD_PROJECT_NUMBER": self._project_number,
            "GOOGLE_CLOUD_LOCATION": location,
            "GOOGLE_CLOUD_WORKFLOW_ID": workflow,
            "GOOGLE_CLOUD_WORKFLOW_REVISION_ID": revision.revision_id,
            "GOOGLE_CLOUD_WORKFLOW_EXECUTION_ID": execution,
            "GOOGLE_CLOUD_SERVICE_ACCOUNT_NAME": f"{self._project_number}-compute@developer.gserviceaccount.com",
        }

    # The pump

    def _begin(self, id_: int) -> None:
        self._active += 1
        self._runnable[id_] = None
        self._wake()

    def _answer(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None and self._pump_handle is None and not self.lost_lease:
            self._pump_handle = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        answers, self._answers = self._answers, []
        runnable, self._runnable = self._runnable, {}
        try:
            self._advance(answers, runnable)
        except LeaseLost:
            self._lose(answers)
        except sqlite3.Error:
            log.exception("the database refused a commit; trying again")
            self._hot.clear()  # what is in memory has gone on without the database
            self._answers[:0] = answers
            self._runnable.update(runnable)
            if self._loop is not None:
                self._loop.call_later(0.2, self._wake)
            return
        except Exception:  # one execution that cannot be handled must not stop the others
            log.exception("an execution cannot be advanced")
            self._hot.clear()
            self._isolate(answers, runnable)
        if self._runnable or self._answers:
            self._wake()
        while len(self._hot) > HOT_MACHINES:
            self._hot.popitem(last=False)

    def _lose(self, answers: Sequence[_Answer] = ()) -> None:
        log.error("another engine has taken over this database; this one stops")
        self.lost_lease = True
        for answer in answers:
            if answer.settled is not None and not answer.settled.done():
                answer.settled.set_result(False)

    def _isolate(self, answers: _Answers, runnable: dict[int, None]) -> None:
        """Advance each execution by itself, and fail the one that makes it impossible."""
        for id_ in {answer.execution for answer in answers} | set(runnable):
            try:
                self._advance([answer for answer in answers if answer.execution == id_], {id_: None})
            except (LeaseLost, sqlite3.Error):
                raise
            except Exception as defect:  # noqa: BLE001  # it is reported in the execution, where its owner looks
                self._hot.clear()
                text = f"SystemError: {type(defect).__name__}: {defect}"
                error = {"payload": json.dumps({"message": text, "tags": ["SystemError"]}), "context": text}
                with self._db.transaction():
                    self._store.check_lease()
                    self._store.finish(id_, "FAILED", result=None, error=error, now=self.now())
                self._active -= 1
                self._tell_parent(id_)
                record = self._store.execution_by_id(id_)
                self._notify(record.name if record else "")

    def _advance(self, answers: _Answers, runnable: dict[int, None]) -> None:
        """One round: answers in, machines on, everything written, effects out."""
        touched: dict[int, _Running] = {}
        taken: _Taken = []
        for answer in answers:
            running = touched.get(answer.execution) or self._running(answer.execution)
            accepted = running is not None and running.machine.complete(
                answer.thread, answer.seq, answer.value, answer.error
            )
            taken.append((answer, accepted))
            if running is not None and accepted:
                touched[answer.execution] = running
        for id_ in runnable:
            if id_ not in touched and (running := self._running(id_)) is not None:
                touched[id_] = running
        cleared: _Names = []
        for running in touched.values():
            running.machine.run()
            cleared += self._take_early_requests(running.machine)
        waits = self._commit(touched, taken, cleared)
        self._dispatch(waits)
        for answer, accepted in taken:
            if answer.settled is not None and not answer.settled.done():
                answer.settled.set_result(accepted)

    def _take_early_requests(self, machine: Machine) -> _Names:
        """Give callbacks that came before they were awaited to the threads that now wait for them."""
        cleared: _Names = []
        fresh = {ref for ref, _ in machine.new_callbacks}
        again = True
        while again and machine.outcome is None:
            again = False
            for wait in [wait for wait in machine.waits if wait.kind == "callback"]:
                assert wait.ref is not None
                if wait.ref in fresh:
                    continue
                found = self._store.callback(wait.ref)
                if found is None:
                    machine.waits.remove(wait)
                    error = system_error("ValueError", f"events.await_callback: no callback {wait.ref!r}")
                    again = machine.complete(wait.thread, wait.seq, effects.error_value(error), True)
                elif found[2] is not None and wait.ref not in cleared:
                    machine.waits.remove(wait)
                    cleared.append(wait.ref)
                    again = machine.complete(wait.thread, wait.seq, found[2])
            if again:
                machine.run()
        return cleared

    def _commit(self, touched: Mapping[int, _Running], taken: _Taken, cleared: _Names) -> _Waits:
        waits: _Waits = []
        if not touched:
            return waits
        ended: _Names = []
        with self._db.transaction():
            self._store.check_lease()
            for answer, accepted in taken:
                if accepted and not touched[answer.execution].waits_again(answer.thread):
                    self._store.drop_wait(answer.execution, answer.thread, answer.seq)
            for ref in cleared:
                self._store.fill_callback(ref, None)
            for id_, running in touched.items():
                if running.machine.outcome is None:
                    waits += [(id_, wait) for wait in self._save(id_, running)]
                else:
                    self._end(id_, running)
                    ended.append(running.name)
            if ended:
                self._promote(len(ended))
        for id_, running in touched.items():
            self._after_save(id_, running)
        for name in ended:
            self._notify(name)
        return waits

    def _save(self, id_: int, running: _Running) -> Sequence[Wait]:
        machine, store_ = running.machine, self._store
        for ref, method in machine.new_callbacks:
            store_.put_callback(ref, id_, method)
        for wait in machine.waits:
            if wait.kind == "execution" and self._mocks is None:
                self._start_children(id_, wait)
            store_.put_wait(id_, wait)
        snapshot, added, removed = machine.snapshot()
        store_.save_state(id_, snapshot, added, removed, runnable=machine.is_ready)
        self._flush_history(id_, running)
        return machine.waits

    def _flush_history(self, id_: int, running: _Running) -> None:
        if running.machine.events:
            self._store.add_history(id_, running.next_chunk, store(running.machine.events))

    def _end(self, id_: int, running: _Running) -> None:
        machine = running.machine
        assert machine.outcome is not None
        state, value = machine.outcome
        self._flush_history(id_, running)
        self._store.finish(
            id_,
            state,
            result=value if state == "SUCCEEDED" else None,
            error=value if state == "FAILED" else None,
            now=self.now(),
            steps=(machine.steps, machine.external_steps),
            last_steps=machine.current_steps(),
        )

    def _after_save(self, id_: int, running: _Running) -> None:
        machine = running.machine
        for entry in machine.logs:
            effects.write_log(running.name, entry)
        running.next_chunk += bool(machine.events)
        machine.events, machine.logs, machine.new_callbacks, machine.waits = [], [], [], []
        if machine.outcome is not None:
            self._hot.pop(id_, None)
            self._active -= 1
            self._tell_parent(id_)
        elif machine.is_ready:
            self._runnable[id_] = None

    def _promote(self, places: int) -> None:
        """Start queued executions in the places of those that have ended."""
        if self._active - places >= self.limits.active_executions:
            return
        for id_ in self._store.next_queued(places):
            self._store.activate(id_, self.now())
            self._db.after_commit(lambda id_=id_: self._begin(id_))  # type: ignore[misc]

    def _notify(self, name: str) -> None:
        for waiter in self._finished.pop(name, []):
            if not waiter.done():
                waiter.set_result(None)

    def _cancelled(self, id_: int, record: ExecutionRecord) -> None:
        self._hot.pop(id_, None)
        self._runnable.pop(id_, None)
        if record.state == "ACTIVE":
            self._active -= 1
            for key in [key for key in self._tasks if key[0] == id_]:
                self._tasks.pop(key).cancel()
            with self._db.transaction():
                self._promote(0 if self._active >= self.limits.active_executions else 1)
        self._tell_parent(id_)
        self._notify(record.name)

    # Executions started by executions

    def _start_children(self, id_: int, wait: Wait) -> None:
        """Create what `experimental.executions.run|map` asked for, in the commit that records the wait."""
        parent = self._store.execution_by_id(id_)
        assert parent is not None
        try:
            for workflow, argument in effects.child_executions(wait, parent.name):
                self.create_execution(
                    workflow, argument, parent=(id_, wait.thread, wait.seq), disable_overflow_buffering=False
                )
            if not self._store.children(id_, wait.thread, wait.seq):
                self._db.after_commit(lambda: self._answer(_Answer(id_, wait.thread, wait.seq, [])))
        except (NotFound, InvalidArgument, ResourceExhausted, WorkflowError) as error:
            failure = error if isinstance(error, WorkflowError) else effects.api_error(error)
            answer = _Answer(id_, wait.thread, wait.seq, effects.error_value(failure), True)
            self._db.after_commit(lambda: self._answer(answer))

    def _tell_parent(self, id_: int) -> None:
        """If a sub-execution was the last that its parent waited for, answer the parent."""
        parent = self._store.parent_of(id_)
        if parent is None:
            return
        children = self._store.children(*parent)
        if all(child.is_finished for child in children):
            wait = next((w for w in self._store.waits(parent[0]) if (w.thread, w.seq) == parent[1:]), None)
            if wait is not None:
                value, failed = effects.children_result(wait, children)
                self._answer(_Answer(*parent, value, failed))

    # Effects and timers

    def _dispatch(self, waits: _Waits) -> None:
        """Do what has just been committed. A request that must not be sent twice is first marked as sent."""
        unsafe = [(id_, wait.thread) for id_, wait in waits if not self._may_repeat(wait)]
        if unsafe:
            with self._db.transaction():
                self._store.check_lease()
                self._store.mark_sent(unsafe)
        earliest = self._timer_due
        for id_, wait in waits:
            if wait.due is not None:
                earliest = min(earliest, wait.due)
            if wait.kind in ("http", "connector") or (self._mocks is not None and wait.kind != "sleep"):
                self._perform(id_, wait)
        self._schedule(earliest)

    def _may_repeat(self, wait: Wait) -> bool:
        """True if sending it again does no harm, or nothing is sent."""
        if wait.kind == "http":
            return effects.may_repeat(wait.detail, self._repeatable)
        return wait.kind != "connector" or self.connectors.may_repeat(wait, self._repeatable)

    def _recover(self, id_: int, wait: Wait, sent: bool) -> None:
        """An effect that was under way when the engine ended: done again where that is safe, else in doubt."""
        if not sent or self._may_repeat(wait):
            self._perform(id_, wait)
            return
        what = wait.call if wait.kind == "connector" else f"{wait.detail['method']} {wait.detail['url']}"
        error = system_error("ConnectionError", f"the engine stopped during {what}; it may have been received")
        self._answers.append(_Answer(id_, wait.thread, wait.seq, effects.error_value(error), True))

    def _perform(self, id_: int, wait: Wait) -> None:
        assert self._loop is not None
        key = (id_, wait.thread, wait.seq)
        self._tasks[key] = self._loop.create_task(self._effect(key, wait))

    async def _effect(self, key: tuple[int, int, int], wait: Wait) -> None:
        id_, thread, seq = key
        name = f"{id_}-{thread}-{seq}"
        try:
            await self._db.durable(alone=len(self._tasks) == 1)
            outcome = await effects.perform(self, wait, name)
        except WorkflowError as error:
            self._log_call(id_, wait, error)
            outcome = _Answer(id_, thread, seq, effects.error_value(error), True)
        except Exception as error:  # a defect in an effect must not leave its execution waiting for ever
            log.exception("%s", wait.call)
            failure = system_error("SystemError", f"{type(error).__name__}: {error}")
            outcome = _Answer(id_, thread, seq, effects.error_value(failure), True)
        self._tasks.pop(key, None)
        if outcome is effects.UNANSWERED:
            return
        if isinstance(outcome, Later):
            try:
                self._postpone(id_, outcome.wait)
            except LeaseLost:
                self._lose()
            return
        if not isinstance(outcome, _Answer):
            self._log_call(id_, wait, None)
            outcome = _Answer(id_, thread, seq, outcome)
        self._answer(outcome)
        if not self._tasks and self._pump_handle is not None:
            self._pump_handle.cancel()  # nothing else can come in this round, so there is no group to wait for
            self._pump()

    def _log_call(self, id_: int, wait: Wait, error: WorkflowError | None) -> None:
        running = self._hot.get(id_)
        level = running.settings.get("call_log_level") if running else ""
        if running and (level == "LOG_ALL_CALLS" or (level == "LOG_ERRORS_ONLY" and error is not None)):
            effects.write_call(running.name, wait, error)

    def _postpone(self, id_: int, wait: Wait) -> None:
        """Record how far a connector's call has come, and when to look again."""
        with self._db.transaction():
            self._store.check_lease()
            record = self._store.execution_by_id(id_)
            if record is None or record.state != "ACTIVE":
                return
            self._store.put_wait(id_, wait)
        self._schedule(wait.due)

    def _schedule(self, due: float | None = None) -> None:
        """Wake up at the earliest moment that anything is due; nothing runs until then."""
        if self._loop is None:
            return
        if due is None:
            candidates = [self._store.next_due(), self._deadline()]
            due = min((moment for moment in candidates if moment is not None), default=float("inf"))
            self._timer_due = float("inf")
        if due >= self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.create_task(self._sleep(due))

    def _deadline(self) -> float | None:
        oldest = self._store.oldest_start()
        return None if oldest is None else oldest + self.limits.duration_seconds

    async def _sleep(self, due: float) -> None:
        await self.clock.sleep_until(due)
        self._timer = None
        self._timer_due = float("inf")
        try:
            self._fire()
        except LeaseLost:
            self._lose()

    def _fire(self) -> None:
        """Answer every wait that is due."""
        now = self.now()
        pending = {(answer.execution, answer.thread, answer.seq) for answer in self._answers}
        assert self._loop is not None
        due = self._store.due(now)
        polls = [(id_, replace(wait, due=None)) for id_, wait in due if wait.kind == "connector"]
        if polls:
            with self._db.transaction():
                self._store.check_lease()
                self._store.begin_polls((id_, wait.thread) for id_, wait in polls)
            self._dispatch(polls)
        for id_, wait in due:
            key = (id_, wait.thread, wait.seq)
            if wait.kind != "connector" and key not in pending:
                value, error = effects.timer_result(wait)
                self._answers.append(_Answer(id_, wait.thread, wait.seq, value, error))
        for id_ in self._store.started_before(now - self.limits.duration_seconds):
            self._expire(id_)
        self._wake()
        self._loop.call_soon(self._schedule)

    def _expire(self, id_: int) -> None:
        running = self._running(id_)
        if running is not None and running.machine.outcome is None:
            running.machine.fail(limit_error(f"the execution ran for {self.limits.duration_seconds} seconds"))
            self._runnable[id_] = None

    # For effects

    async def send(self, request: HttpRequest) -> HttpResponse:
        return await self._http.send(request)

    async def doze(self, when: float) -> None:
        """Sleep inside an effect: a virtual clock may jump over this, unlike over a request."""
        self._dozing += 1
        try:
            await self.clock.sleep_until(when)
        finally:
            self._dozing -= 1

    @property
    def mocks(self) -> Mocks | None:
        return self._mocks

    def token(self, kind: str, audience: str) -> str:
        return self._token(kind, audience)


__all__ = ["AlreadyExists", "Engine", "ExecutionRecord", "Revision", "WorkflowRecord"]
