"""Probes: http and tcp, by their periods and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from ....server import HOST
from ..store import Object


@dataclass(frozen=True)
class Prober:
    """Asks one container; `resolve` turns a probe's port into one of this machine (None: no such port)."""

    session: aiohttp.ClientSession
    fast_seconds: float
    resolve: Callable[[int | str], int | None]

    async def until_success(self, probe: Object, on_failure: Callable[[str], None]) -> bool:
        """For startup probes: True at success, False when failureThreshold periods have passed without one."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        loop = asyncio.get_running_loop()
        end = loop.time() + probe["failureThreshold"] * probe["periodSeconds"]
        while problem := await self.ask(probe):
            on_failure(problem)
            if loop.time() >= end:
                return False
            await asyncio.sleep(min(self.fast_seconds, probe["periodSeconds"]))
        return True

    async def watch(self, probe: Object, on_result: Callable[[bool, str], None], *, first: bool) -> None:
        """Report each change between working and not, by the thresholds; `first` is what holds at the beginning."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        state, streak = first, 0
        while True:
            problem = await self.ask(probe)
            streak = streak + 1 if bool(problem) is state else 0
            if streak >= probe["failureThreshold" if problem else "successThreshold"]:
                state, streak = not problem, 0
                on_result(state, problem)
            await asyncio.sleep(probe["periodSeconds"] if state else min(self.fast_seconds, probe["periodSeconds"]))

    async def ask(self, probe: Object) -> str:
        """One probe: what was wrong, or ""."""
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
                return ""
        except TimeoutError:
            return f"context deadline exceeded: no answer within {probe['timeoutSeconds']} s"
        except (OSError, aiohttp.ClientError) as error:
            return f"dial tcp {HOST}:{port}: {error}"

    async def _get(self, handler: Object, port: int) -> str:
        url = f"{handler['scheme'].lower()}://{HOST}:{port}/{handler['path'].lstrip('/')}"
        headers = {one["name"]: one["value"] for one in handler.get("httpHeaders", ())}
        async with self.session.get(url, headers=headers, allow_redirects=False, ssl=False) as response:
            if 200 <= response.status < 400:
                return ""
            return f"HTTP probe failed with statuscode: {response.status}"
