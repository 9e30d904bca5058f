"""The console's process. It starts when somebody opens the console, so it costs nobody else time or memory."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from dropforge_local.base.ports import HOST

from .child import inherited, listen

MODULE = "dropforge_local.stack.console_host"
PAUSE_SECONDS = 1.0  # before another start: a console that cannot start must not use a processor
STOP_SECONDS = 10.0


class ConsoleProcess:
    """The console's socket, and one process at a time behind it. Raises StackError when the port is taken."""

    def __init__(self, state: Path, port: int) -> None:
        self._listener = listen(port, "--console-port")
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._state = state
        self._task: asyncio.Task[None] | None = None

    def begin(self, environment: dict[str, str]) -> None:
        """Start the process at the first connection, with this environment, and again after each end."""
        self._task = asyncio.create_task(self._serve(environment))

    async def stop(self) -> None:
        """End the process and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()

    async def _serve(self, environment: dict[str, str]) -> None:
        while True:
            await self._connection()
            await self._run(environment)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _connection(self) -> None:
        """Wait for a connection, and leave it to the process."""
        loop, has_come = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener, has_come.set)
        try:
            await has_come.wait()
        finally:
            loop.remove_reader(self._listener)

    async def _run(self, environment: dict[str, str]) -> None:
        """Start the process and wait for its end. If this is cancelled, end it."""
        with (self._state / "console.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-P", "-m", MODULE, str(self._listener.fileno())],
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=inherited(),
                pass_fds=[self._listener.fileno()],
                cwd=self._state,
            )
        try:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.write(json.dumps(environment).encode() + b"\n")
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
