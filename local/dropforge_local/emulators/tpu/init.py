"""The first process of an emulated machine: runs the startup script, then waits for the machine's shutdown.

Usage: python -I -S init.py [SCRIPT]. A shutdown sends SIGTERM to this process alone, which then does what systemd does
on Google's machines. The script gets no signal, because its unit has KillMode=process
(https://github.com/GoogleCloudPlatform/guest-agent, google-startup-scripts.service). Docker stops its containers. What
is left then gets SIGTERM. Imports only small modules of the standard library, to start fast.
"""

from __future__ import annotations

import os
import signal
import sys

AWAITED = (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
STOPPING = "run/stopping"  # read by shims/systemctl


def main(script: str = "") -> int:
    write("run/init.pid", str(os.getpid()))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # sigwait misses SIGCHLD without a handler
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    child, docker, stopping = start(script) if script else 0, 0, False
    while child or docker or not stopping:
        number = signal.sigwait(AWAITED)
        if number == signal.SIGTERM and not stopping:
            stopping = True
            write(STOPPING, "")
            docker = spawn("docker", "shut-down") if has_containers() else 0
            if not docker:
                finish_later()
        if number == signal.SIGALRM and child:
            spawn("pkill", "-TERM", "-P", str(child))
            os.kill(child, signal.SIGTERM)
        while (ended := collect()) is not None:
            pid, code = ended
            if pid == child:
                print(f"startup-script exit status {code}", flush=True)
                child = 0
            elif pid == docker:
                docker = 0
                finish_later()
    return 0


def has_containers() -> bool:
    path = os.path.join(os.environ["DROPFORGE_ROOT"], "run/docker/containers")
    return os.path.isdir(path) and bool(os.listdir(path))


def finish_later() -> None:
    """Let SIGALRM say when what is left gets SIGTERM."""
    signal.setitimer(signal.ITIMER_REAL, float(os.environ["DROPFORGE_SANDBOX_FINAL"]))


def write(name: str, text: str) -> None:
    with open(os.path.join(os.environ["DROPFORGE_ROOT"], name), "w") as file:
        file.write(text)


def start(script: str) -> int:
    os.chmod(script, 0o700)
    return os.posix_spawn(script, [script], os.environ, setsigmask=())


def spawn(*words: str) -> int:
    return os.posix_spawnp(words[0], words, os.environ, setsigmask=())


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
