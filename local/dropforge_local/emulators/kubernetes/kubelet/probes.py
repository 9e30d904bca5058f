"""HTTP, TCP and exec probes, by their periods and thresholds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from dropforge_local.base.ports import HOST

from ..store import Object

EXEC_SECONDS = 1.0  # at least, between two starts of an exec probe: it starts processes on this machine


class ProbeError(Exception):
    """The probe itself could not be made, so its result is unknown: it counts neither as failure nor as success."""


@dataclass(frozen=True)
class Command:
    """A program in a container: what to execute, its environment and its directory, all as paths of this machine."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: Path


@dataclass(frozen=True)
class Prober:
    """Probes a container.

    `resolve` maps a probe's port to a port of this machine, or None if it does not exist; `command` makes an exec
    probe's command executable.
    """

    session: aiohttp.ClientSession
    fast_seconds: float
    resolve: Callable[[int | str], int | None]
    command: Callable[[Sequence[str]], Command]

    async def until_success(self, probe: Object, on_failure: Callable[[str], None]) -> bool:
        """For startup probes: True at success, False after failureThreshold periods without success."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        loop = asyncio.get_running_loop()
        end = loop.time() + probe["failureThreshold"] * probe["periodSeconds"]
        report = _Throttle(on_failure, probe["periodSeconds"])
        while problem := await self._problem(probe):
            report(problem)
            if loop.time() >= end:
                return False
            await asyncio.sleep(self._pause(probe))
        return True

    async def watch(
        self, probe: Object, on_change: Callable[[bool], None], on_failure: Callable[[str], None], *, first: bool
    ) -> None:
        """Report failures, and each change of state by the thresholds; `first` is the state at the start."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        report = _Throttle(on_failure, probe["periodSeconds"])
        state, streak = first, 0
        while True:
            try:
                problem = await self.ask(probe)
            except ProbeError as error:
                report(str(error))
            else:
                if problem:
                    report(problem)
                streak = streak + 1 if bool(problem) is state else 0
                if streak >= probe["failureThreshold" if problem else "successThreshold"]:
                    state, streak = not problem, 0
                    on_change(state)
            await asyncio.sleep(probe["periodSeconds"] if state else self._pause(probe))

    def _pause(self, probe: Object) -> float:
        """Seconds between two probes of a container that is not ready."""
        fast = max(self.fast_seconds, EXEC_SECONDS) if "exec" in probe else self.fast_seconds
        return float(min(fast, probe["periodSeconds"]))

    async def _problem(self, probe: Object) -> str:
        try:
            return await self.ask(probe)
        except ProbeError as error:
            return str(error)

    async def ask(self, probe: Object) -> str:
        """Probe once; return the problem, or "". Raises ProbeError."""
        if "exec" in probe:
            return await self._execute(probe["exec"].get("command", ()), probe["timeoutSeconds"])
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

    async def _execute(self, words: Sequence[str], timeout_seconds: float) -> str:
        """Run an exec probe. As in Kubernetes, a program that cannot be started is no failure of the container."""
        command = self.command(words)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=command.env,
                cwd=command.workdir,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProbeError(f"failed to exec in container: {words[0]!r}: {error.strerror} (in $PATH)") from error
        try:
            async with asyncio.timeout(timeout_seconds):
                output, _ = await process.communicate()
        except TimeoutError:
            return f"command {' '.join(words)!r} timed out after {timeout_seconds} s"
        finally:
            await kill_group(process)
        return (
            "" if process.returncode == 0 else output.decode(errors="replace")[-1000:] or f"exit {process.returncode}"
        )


async def kill_group(process: Process) -> None:
    """Kill what is left of a program: its whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.returncode is None:
        await process.wait()


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
