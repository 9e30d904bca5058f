"""The console of a stack: `python -P -m dropforge_local.stack.console_host FD`, in the stack's state directory.

FD is a listening socket. A line of JSON on standard input is the environment of the deployment. The process ends when
that pipe closes, so it never outlives the stack.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from dropforge.context import Context
from dropforge_console.access import Access
from dropforge_console.passes import Passes
from dropforge_console.server import host_of, serve

from .child import end_with_parent
from .config import console_directory
from .logs import last_lines


def main() -> None:
    line = sys.stdin.readline()
    if not line:
        return  # the stack ended before it could send the line
    os.environ.update(json.loads(line))
    end_with_parent()
    http = os.environ["STORAGE_EMULATOR_HOST"]
    listener = socket.socket(fileno=int(sys.argv[1]))
    access = Access(host_of(listener), Passes(console_directory(Path()), time.time))
    serve(Context.from_environment(), listener, access, lambda resource: last_lines(http, resource))


if __name__ == "__main__":
    main()
