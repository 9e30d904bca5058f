"""The engine: deploys workflows and runs their executions durably on a single event loop.

Parts: `Rounds` advances executions and commits them, `EffectTasks` performs their effects, `Deadlines` handles timers,
`Callbacks` takes requests from outside. A killed engine continues from the database when it starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..clock import Clock
from ..database import Database
from ..effects.connectors import Connectors, LoadDocument
from ..effects.http import HttpCaller, HttpTransport
from ..effects.keepalive import PooledTransport
from ..effects.mocks import Mocks
from ..effects.performer import Performer
from ..language.program import Program
from ..limits import Limits
from ..records import ExecutionRecord, Revision, WorkflowRecord
from ..values import Value
from .callbacks import Callbacks
from .core import Core
from .deadlines import Deadlines
from .effect_tasks import EffectTasks
from .executions import Executions
from .inbox import WaitKey
from .machines import Machines
from .rounds import Rounds
from .timer import Timer
from .workflows import Programs, Workflows

RETENTION_SECONDS: Final = 90 * 24 * 3600  # the service, too, deletes finished executions after 90 days


class Engine:
    """Runs the workflows of a database.

    `token(kind, audience_or_scope)` returns the bearer token of `auth: {type: OIDC|OAuth2}`. `authorize(headers)`
    decides whether the sender of a callback, who has a bearer token, may send it. `repeatable(url)` says which hosts
    honour the Idempotency-Key header, so that the engine may send a POST to them again after a crash. `endpoints` maps
    an API's name to the base URL that replaces Google's; `discovery(api, version)` returns its discovery document.
    `mocks` answer in the place of services. `takeover` starts the engine although another process holds the lease.
    """

    def __init__(
        self,
        db: Database,
        *,
        clock: Clock,
        http: HttpTransport | None = None,
        token: Callable[[str, str], str] = lambda kind, audience: "local",
        callback_base_url: str = "",
        limits: Limits = Limits(),  # noqa: B008  # frozen
        authorize: Callable[[Mapping[str, str]], bool] = lambda headers: True,
        repeatable: Callable[[str], bool] = lambda url: False,
        endpoints: Mapping[str, str] | None = None,
        discovery: LoadDocument | None = None,
        project_number: str = "100000000000",
        mocks: Mocks | None = None,
        takeover: bool = False,
    ) -> None:
        self._takeover = takeover
        self._core = core = Core(db, clock, limits)
        self._timer = timer = Timer(core)
        programs = Programs()
        self._workflows = Workflows(core, programs)
        self._machines = machines = Machines(core, programs, project_number)
        machines.callback_base_url = callback_base_url
        caller = HttpCaller(http or PooledTransport(limits.response_bytes), token, limits)
        connectors = Connectors(caller, self.now, endpoints or {}, discovery)
        self._performer = Performer(caller, connectors, mocks, clock, self.now, repeatable)
        self._effects = EffectTasks(core, timer, machines, self._performer)
        self._executions = Executions(core, machines, programs, self._effects)
        self._callbacks = Callbacks(core, authorize)
        deadlines = Deadlines(core, timer, machines, self._effects)
        timer.next_due = deadlines.next_due
        timer.on_due = deadlines.handle_due
        rounds = Rounds(core, machines, self._executions, self._callbacks, self._effects, self._create_child)
        core.inbox.run_round = rounds.run

    # Life

    async def start(self) -> None:
        """Take the lease and continue every execution in the database; recovery is the same.

        Raises FailedPrecondition if another process runs the database.
        """
        self._core.lease.acquire(takeover=self._takeover)
        self._core.earliest = self._core.store.latest_time()
        self._core.store.prune(self.now() - RETENTION_SECONDS)
        self._executions.active = self._core.store.count("ACTIVE")
        self._core.inbox.loop = asyncio.get_running_loop()
        for id_ in self._core.store.runnable():
            self._core.inbox.make_runnable(id_)
        self._effects.recover()
        if self._performer.mocks is None:
            self._executions.children.recover()
        self._timer.reschedule()
        self._core.inbox.wake()

    async def stop(self) -> None:
        """Stop at once. The next start repeats the effects in flight, or answers them with an error."""
        was_started = self._core.inbox.loop is not None
        await asyncio.gather(*self.halt(), return_exceptions=True)
        await self._performer.close()
        if was_started and not self._core.inbox.lost_lease:
            self._core.lease.release()

    def halt(self) -> Sequence[asyncio.Task[None]]:
        """Stop as a kill of the process does: write nothing, keep the lease. Returns the cancelled tasks."""
        self._core.inbox.stop()
        self._machines.clear()
        return [*self._effects.stop(), *self._timer.stop()]

    def now(self) -> float:
        """The clock's time, but never before the latest time in the database."""
        return self._core.now()

    @property
    def lost_lease(self) -> bool:
        """True after another engine has taken over the database."""
        return self._core.inbox.lost_lease

    @property
    def is_idle(self) -> bool:
        """True if nothing happens before a timer is due or a callback arrives."""
        return not self.is_computing and self._effects.is_idle

    @property
    def is_computing(self) -> bool:
        """True if a round is to run, rather than that only requests are in flight."""
        return self._core.inbox.has_work

    @property
    def callback_base_url(self) -> str:
        """The beginning of every callback's URL; it must stay the same over restarts."""
        return self._machines.callback_base_url

    @callback_base_url.setter
    def callback_base_url(self, url: str) -> None:
        self._machines.callback_base_url = url

    # Workflows

    def deploy(
        self,
        name: str,
        source: str,
        *,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        service_account: str = "",
    ) -> Revision:
        """Make `source` the workflow's current revision; with the same source, env and service account it stays.

        Raises DeployError with every problem in the source, InvalidArgument for a bad name, env or label.
        """
        return self._workflows.deploy(name, source, dict(env or {}), labels, settings, service_account)

    def get_workflow(self, name: str) -> WorkflowRecord:
        """Raises NotFound."""
        return self._workflows.get(name)

    def list_workflows(self, parent: str) -> Sequence[WorkflowRecord]:
        """The workflows of projects/P/locations/L, by name."""
        return self._workflows.list(parent)

    def list_revisions(self, name: str) -> Sequence[Revision]:
        """A workflow's revisions, the newest first. Raises NotFound."""
        return self._workflows.revisions(name)

    def delete_workflow(self, name: str) -> None:
        """Cancel a workflow's running executions; then delete the workflow with all its executions. Raises NotFound."""
        self._workflows.get(name)
        for record in self._executions.list(name):
            if not record.is_finished:
                self._executions.cancel(record.name)  # which tells a parent that waits for the execution
        with self._core.db.transaction():
            self._core.store.delete_workflow(name)

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
    ) -> ExecutionRecord:
        """Start an execution of the current revision, or queue it when too many are active. `argument` is JSON.

        Raises NotFound, InvalidArgument, and ResourceExhausted if the backlog is full or `disable_overflow_buffering`.
        """
        return self._executions.create(
            self._workflows.get(workflow),
            argument or "null",
            labels or {},
            call_log_level,
            history_level,
            disable_overflow_buffering,
        )

    def _create_child(self, workflow: str, argument: str, parent: WaitKey) -> None:
        self._executions.create(self._workflows.get(workflow), argument, {}, "", "", False, parent)

    def get(self, name: str) -> ExecutionRecord:
        """An execution, with its current step while it runs. Raises NotFound."""
        return self._executions.get(name)

    def list(self, workflow: str, *, current: bool = False) -> Iterator[ExecutionRecord]:
        """A workflow's executions, the newest first; with `current`, active executions with their current steps."""
        return self._executions.list(workflow, current=current)

    def cancel(self, name: str) -> ExecutionRecord:
        """End an execution now. Raises NotFound, and FailedPrecondition if it has ended."""
        return self._executions.cancel(name)

    def history(self, name: str) -> tuple[ExecutionRecord, Sequence[Any], Program]:
        """The record, the event log, and the program that the events refer to: see `read_entries`. Raises NotFound."""
        return self._executions.history(name)

    async def wait(self, name: str) -> ExecutionRecord:
        """The execution's record after its end. Raises NotFound."""
        return await self._executions.wait(name)

    # Callbacks

    async def deliver_callback(
        self, execution: str, ref: str, method: str, headers: Mapping[str, str], query: Value, body: Value, url: str
    ) -> int:
        """The HTTP status that answers a request to a callback; 200 once the request is in the database."""
        return await self._callbacks.deliver(execution, ref, method, headers, query, body, url)

    def list_callbacks(self, execution: str) -> Sequence[tuple[str, str, bool]]:
        """(ref, method, whether the execution waits for a request now) of its endpoints. Raises NotFound."""
        return self._callbacks.endpoints(self._executions.find(execution)[0])
