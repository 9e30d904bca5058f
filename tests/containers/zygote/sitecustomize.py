"""Python imports this at start where its directory is on PYTHONPATH: it lets a zygote start the programs that import
MaxText, Ray or vLLM (see zygote.py).

A start of such a program takes 1 to 8 s of processor time for its imports, which is more than most of them compute. The
interpreter that was to run the program stays: it passes signals on, and ends as the program does. The program ends with
this interpreter. Every other program starts as usual.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import NoReturn

SOCKET = "DROPFORGE_TEST_ZYGOTE"
MESSAGE_BYTES = 1 << 17
STAGES = ("prepare", "import_hf", "train", "verify", "export_hf", "publish")
MODULES = (*(f"containers.train_maxtext.{stage}" for stage in STAGES), "containers.train_ray.train")
RAY_WORKER = "/setup_worker.py"  # it applies the environment of its last option, and runs the script that it names
PROGRAMS = (
    *("/bin/ray", "/ray/dashboard/agent.py", "/ray/dashboard/dashboard.py", "/ray/_private/log_monitor.py"),
    *("/ray/_private/runtime_env/agent/main.py", RAY_WORKER, "/vllm_cpu.py"),
)


def program(command: Sequence[str]) -> list[str]:
    """The words after `python` that start a program of the zygote; [] for another program."""
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] != "-m":
        del words[0]
    if words[:1] == ["-m"] and words[1] in MODULES:
        return words
    return words if words and words[0].endswith(PROGRAMS) else []


def ray_worker(words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The words that setup_worker.py runs; adds the variables of its runtime environment."""
    import json

    option = "--serialized-runtime-env-context="
    for word in words:
        if word.startswith(option):
            environment.update(json.loads(word.removeprefix(option))["env_vars"])
    return [word for word in words[1:] if not word.startswith((option, "--language="))]


def stand_for(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Let the zygote run the program; end as it does."""
    import json
    import signal
    import socket

    request = {
        "words": words,
        "environment": environment,
        "directory": os.getcwd(),
        "executable": sys.executable,
        "is_safe": sys.flags.safe_path,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(environment[SOCKET])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(connection.recv(MESSAGE_BYTES))

        def pass_on(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        code = int(connection.recv(MESSAGE_BYTES) or -signal.SIGKILL)  # no answer: the zygote has ended
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def start() -> None:
    environment = dict(os.environ)
    if SOCKET in environment and (words := program(sys.orig_argv)):
        stand_for(ray_worker(words, environment) if words[0].endswith(RAY_WORKER) else words, environment)
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec(__name__, [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    start()
