"""Callback endpoints: requests from outside, and the waits that they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from ..errors import system_error
from ..interpreter.answers import callback_value, error_value
from ..interpreter.machine import Machine
from ..interpreter.waits import Wait
from ..values import Value
from .core import Core
from .inbox import Answer


class Callbacks:
    """`authorize(headers)` decides whether a sender with a bearer token may call."""

    def __init__(self, core: Core, authorize: Callable[[Mapping[str, str]], bool]) -> None:
        self._core = core
        self._authorize = authorize

    async def deliver(
        self, execution: str, ref: str, method: str, headers: Mapping[str, str], query: Value, body: Value, url: str
    ) -> int:
        """The HTTP status that answers a request to an endpoint; 200 once the request is in the database."""
        refusal = self._refusal(headers)
        if refusal is not None:
            return refusal
        endpoint = self._core.store.callback(ref)
        record = self._core.store.execution_by_id(endpoint[0]) if endpoint else None
        if endpoint is None or record is None or record.name != execution or record.is_finished:
            return 404
        id_, expected, early = endpoint
        if method != expected:
            return 405
        request = callback_value(method, headers, query, body, url, self._core.now())
        waiting = self._core.store.waiting_for(ref)
        if waiting is not None and self._core.inbox.loop is not None:
            if await self._answer(id_, waiting[1], request):
                return 200
            return await self.deliver(execution, ref, method, headers, query, body, url)
        if early is not None:
            return 429
        with self._core.owned_transaction():
            self._core.store.fill_callback(ref, request)
        return 200

    def _refusal(self, headers: Mapping[str, str]) -> int | None:
        bearer = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        if not bearer.lower().startswith("bearer ") or not bearer[7:].strip():
            return 401
        return None if self._authorize(headers) else 403

    async def _answer(self, id_: int, wait: Wait, request: Value) -> bool:
        """True if the thread still waited, and the answer is committed."""
        assert self._core.inbox.loop is not None
        settled: asyncio.Future[bool] = self._core.inbox.loop.create_future()
        self._core.inbox.put(Answer(id_, wait.thread, wait.seq, request, settled=settled))
        return await settled

    def endpoints(self, id_: int) -> Sequence[tuple[str, str, bool]]:
        """(ref, method, whether the execution waits for a request now) of an execution's endpoints."""
        awaited = {wait.ref for wait in self._core.store.waits(id_)}
        return [(ref, method, ref in awaited) for ref, method in self._core.store.callbacks(id_)]

    def take_early_requests(self, machine: Machine) -> list[str]:
        """Answer new waits with requests that arrived before; returns the endpoints whose request was taken."""
        taken: list[str] = []
        new = {ref for ref, _ in machine.new_callbacks}
        is_answered = True
        while is_answered and machine.outcome is None:
            is_answered = False
            for wait in [wait for wait in machine.waits if wait.kind == "callback" and wait.ref not in new]:
                is_answered = self._take(machine, wait, taken) or is_answered
            if is_answered:
                machine.run()
        return taken

    def _take(self, machine: Machine, wait: Wait, taken: list[str]) -> bool:
        assert wait.ref is not None
        endpoint = self._core.store.callback(wait.ref)
        if endpoint is None:
            machine.waits.remove(wait)
            error = system_error("ValueError", f"events.await_callback: no callback {wait.ref!r}")
            return machine.complete(wait.thread, wait.seq, error_value(error), True)
        if endpoint[2] is None or wait.ref in taken:
            return False
        machine.waits.remove(wait)
        taken.append(wait.ref)
        return machine.complete(wait.thread, wait.seq, endpoint[2])
