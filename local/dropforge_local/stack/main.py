"""A stack's process starts here. It starts the functions' process first: both import their libraries in parallel.

`python -P -m dropforge_local.stack.main STATE HTTP_PORT GRPC_PORT FUNCTIONS_PORT CONSOLE_PORT`
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .config import PRIVATE, StackConfig, StackError
from .console_process import ConsoleProcess
from .functions_process import FunctionsProcess


def run(state: Path, ports: list[int]) -> None:
    """Serve until SIGTERM or SIGINT. Raises StackError."""
    http_port, grpc_port, functions_port, console_port = ports
    os.umask(PRIVATE)
    with _locked(state):
        functions = FunctionsProcess(state, functions_port, tells_callers=StackConfig.of(state).tells_callers)
        console = ConsoleProcess(state, console_port)
        from .process import serve  # its import takes a second; the functions' process starts before

        asyncio.run(serve(state, http_port, grpc_port, functions, console))


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Hold the lock of a state directory: one stack at a time uses it. Raises StackError."""
    file = (state / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StackError(
            f"another stack uses {state}; end it with `dropforge down`, or choose another --state"
        ) from error
    with file:
        yield


def main() -> None:
    level = os.environ.get("DROPFORGE_LOG_LEVEL", "WARNING")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        run(Path(sys.argv[1]), [int(port) for port in sys.argv[2:6]])
    except StackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
