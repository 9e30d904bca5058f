"""Performs the effect of a wait: a mock's answer, an HTTP request, or a connector's call."""

from __future__ import annotations

from collections.abc import Callable

from ..clock import Clock
from ..interpreter.http_requests import IDEMPOTENT, READS, has_idempotency_key
from ..interpreter.waits import Wait
from ..values import Value
from .connectors import Connectors, Later
from .http import HttpCaller
from .mocks import Mocks

UNANSWERED = object()  # no answer arrives before the wait times out


class Performer:
    """`repeatable(url)` says whether the host honours the Idempotency-Key header, so that a POST may be sent again."""

    def __init__(
        self,
        http: HttpCaller,
        connectors: Connectors,
        mocks: Mocks | None,
        clock: Clock,
        now: Callable[[], float],
        repeatable: Callable[[str], bool],
    ) -> None:
        self.mocks = mocks
        self.dozing = 0  # effects that sleep on the clock, which a virtual clock may jump over
        self._http = http
        self._connectors = connectors
        self._clock = clock
        self._now = now
        self._repeatable = repeatable

    async def perform(self, wait: Wait, effect_id: str) -> Value | Later:
        """The answer, `Later` if the call is not done, or UNANSWERED. Raises WorkflowError to answer with an error."""
        if self.mocks is not None:
            answered, value = await self.mocks.answer(wait, self._now, self._doze)
            if answered:
                return value
            if wait.kind in ("callback", "execution"):
                return UNANSWERED
        if wait.kind == "connector":
            return await self._connectors.perform(wait, effect_id)
        return await self._http.call(wait.detail, effect_id)

    def is_performed(self, wait: Wait) -> bool:
        """True if the wait needs an effect, rather than a timer, a callback or a sub-execution alone."""
        return wait.kind in ("http", "connector") or (self.mocks is not None and wait.kind != "sleep")

    def may_repeat(self, wait: Wait) -> bool:
        """True if sending the request again is harmless, or if no request is sent."""
        if wait.kind == "connector":
            return self._connectors.may_repeat(wait, self._repeatable)
        if wait.kind != "http":
            return True
        request = wait.detail
        return (
            request["method"] in IDEMPOTENT
            or has_idempotency_key(request["headers"])
            or self._repeatable(request["url"])
        )

    def is_read(self, wait: Wait) -> bool:
        """True if the effect is an HTTP request that tells its server nothing."""
        return self.mocks is None and wait.kind == "http" and wait.detail["method"] in READS

    async def close(self) -> None:
        await self._http.close()

    async def _doze(self, until: float) -> None:
        self.dozing += 1
        try:
            await self._clock.sleep_until(until)
        finally:
            self.dozing -= 1
