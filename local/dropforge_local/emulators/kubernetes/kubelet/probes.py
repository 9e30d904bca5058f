"""HTTP and TCP probes, by their periods and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from dropforge_local.base.ports import HOST

from ..store import Object


@dataclass(frozen=True)
class Prober:
    """Probes a container; `resolve` maps a probe's port to a port of this machine, or None if it does not exist."""

    session: aiohttp.ClientSession
    fast_seconds: float
    resolve: Callable[[int | str], int | None]

    async def until_success(self, probe: Object, on_failure: Callable[[str], None]) -> bool:
        """For startup probes: True at success, False after failureThreshold periods without success."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        loop = asyncio.get_running_loop()
        end = loop.time() + probe["failureThreshold"] * probe["periodSeconds"]
        report = _Throttle(on_failure, probe["periodSeconds"])
        while problem := await self.ask(probe):
            report(problem)
            if loop.time() >= end:
                return False
            await asyncio.sleep(min(self.fast_seconds, probe["periodSeconds"]))
        return True

    async def watch(
        self, probe: Object, on_change: Callable[[bool], None], on_failure: Callable[[str], None], *, first: bool
    ) -> None:
        """Report failures, and each change of state by the thresholds; `first` is the state at the start."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        report = _Throttle(on_failure, probe["periodSeconds"])
        state, streak = first, 0
        while True:
            if problem := await self.ask(probe):
                report(problem)
            streak = streak + 1 if bool(problem) is state else 0
            if streak >= probe["failureThreshold" if problem else "successThreshold"]:
                state, streak = not problem, 0
                on_change(state)
            await asyncio.sleep(probe["periodSeconds"] if state else min(self.fast_seconds, probe["periodSeconds"]))

    async def ask(self, probe: Object) -> str:
        """Probe once; return the problem, or ""."""
        handler = probe.get("httpGet") or probe["tcpSocket"]
        port = self.resolve(handler["port"])
        if port is None:
            return f"no container port is named {handler['port']!r}"
        try:
            async with asyncio.timeout(probe["timeoutSeconds"]):
                if "httpGet" in probe:
                    return await self._get(handler, port)
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                await writer.wait_closed()
                return ""
        except TimeoutError:
            return f"context deadline exceeded: no answer within {probe['timeoutSeconds']} s"
        except (OSError, aiohttp.ClientError) as error:
            return f"dial tcp {HOST}:{port}: {error}"

    async def _get(self, handler: Object, port: int) -> str:
        url = f"{handler['scheme'].lower()}://{HOST}:{port}/{handler['path'].lstrip('/')}"
        headers = {header["name"]: header["value"] for header in handler.get("httpHeaders", ())}
        async with self.session.get(url, headers=headers, allow_redirects=False, ssl=False) as response:
            if 200 <= response.status < 400:
                return ""
            return f"HTTP probe failed with statuscode: {response.status}"


class _Throttle:
    """Reports a new problem at once, and the same problem at most once per period."""

    def __init__(self, report: Callable[[str], None], seconds: float) -> None:
        self._report = report
        self._seconds = seconds
        self._last = ("", 0.0)

    def __call__(self, problem: str) -> None:
        now = asyncio.get_running_loop().time()
        if problem != self._last[0] or now - self._last[1] >= self._seconds:
            self._last = (problem, now)
            self._report(problem)
