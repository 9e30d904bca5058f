"""The functions' process: the stack begins it before it knows its own addresses, and again whenever it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from dropforge_local.base.ports import HOST

from .child import inherited, listen

MODULE = "dropforge_local.stack.functions_host"
STOP_SECONDS = 10


class FunctionsProcess:
    """One functions' process at a time, always at the same socket. Raises StackError when the port is taken."""

    def __init__(self, state: Path, port: int, *, tells_callers: bool) -> None:
        self._listener = listen(port, "--functions-port")
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}/"
        self._state = state
        self._command = [sys.executable, "-P", "-m", MODULE, str(self._listener.fileno())]
        self._command += ["tell"] if tells_callers else []
        self.begin()

    def begin(self) -> None:
        """Start the process. It imports its libraries, waits for `tell`, then serves."""
        with (self._state / "functions.log").open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=inherited(),
                pass_fds=[self._listener.fileno()],
                cwd=self._state,
            )

    def tell(
        self,
        environment: dict[str, str],
        secret: str,
        invokers: Mapping[str, Collection[str]] | None,
        *,
        records: bool = False,
    ) -> None:
        """Send the functions' environment, the secret that signs tokens, which no environment contains, who may call
        which function (None: every caller), and whether calls of functions are recorded."""
        start = {
            "url": self.url,
            "environment": environment,
            "secret": secret,
            "invokers": invokers,
            "records": records,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(start).encode() + b"\n")
        self._process.stdin.flush()

    def poll(self) -> int | None:
        """The exit code of the process once it has ended; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process and wait for its end."""
        self._process.terminate()
        self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self._process.kill()
