"""The first process of an emulated machine: runs the startup script, then waits for the machine's shutdown.

Usage: python -I -S init.py [SCRIPT]. A shutdown sends SIGTERM to every process of the machine; this process ends after
the script. Imports only small modules of the standard library, to start fast.
"""

from __future__ import annotations

import os
import signal
import sys

AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def main(script: str = "") -> int:
    with open(os.path.join(os.environ["DROPFORGE_ROOT"], "run/init.pid"), "w") as file:
        file.write(str(os.getpid()))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # sigwait misses SIGCHLD without a handler
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    child, stopping = start(script) if script else 0, False
    while child or not stopping:
        if signal.sigwait(AWAITED) == signal.SIGTERM:
            stopping = True
        while (ended := collect()) is not None:
            pid, code = ended
            if pid == child:
                print(f"startup-script exit status {code}", flush=True)
                child = 0
    return 0


def start(script: str) -> int:
    os.chmod(script, 0o700)
    return os.posix_spawn(script, [script], os.environ, setsigmask=())


def collect() -> tuple[int, int] | None:
    """The pid and exit code of an ended child; None without an ended child."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return pid, 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
