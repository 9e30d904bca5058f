"""Starts programs that import MaxText, Ray or vLLM without these imports: forks them from a process that has made them.

    python -P zygote.py SOCKET IMPORTS MODULE...

MaxText's or vLLM's interpreter runs this; `Zygote` (tests/containers/quick.py) starts it. Where sitecustomize.py is on
PYTHONPATH, an interpreter asks for a fork instead of running its program. The fork is a process of its own, with the
interpreter's environment, directory, arguments, output, signals and exit code. It imports the repository's modules
itself. Its parent is the zygote, and it is killed when the interpreter ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

MESSAGE_BYTES = 1 << 17
STANDARD = 3  # standard input, output and error


def main(path: str, imports: str, *modules: str) -> None:
    """Import the modules; fork until standard input ends. IMPORTS is containers/train_maxtext/imports.py."""
    import_all(Path(imports), modules)
    gc.freeze()  # a fork's collections of garbage visit none of the modules' objects, whose memory stays shared
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork safely"
    base = list(sys.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(100)
        print("ready", flush=True)
        waiting: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a fork: its pid, and who asked for it
        poll = select.poll()
        poll.register(0, select.POLLIN | select.POLLHUP)
        poll.register(listener, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == 0:
                    return
                if descriptor == listener.fileno():
                    asking = listener.accept()[0]
                    message, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES, STANDARD)
                    if not (pid := os.fork()):
                        for other in (listener, *(each for _, each in waiting.values())):
                            other.close()
                        for handle in waiting:
                            os.close(handle)
                        become(json.loads(message), descriptors, asking, base)
                    for each in descriptors:
                        os.close(each)
                    asking.send(str(pid).encode())
                    handle = os.pidfd_open(pid)
                    waiting[handle] = pid, asking
                    poll.register(handle, select.POLLIN)
                else:
                    poll.unregister(descriptor)
                    pid, asking = waiting.pop(descriptor)
                    os.close(descriptor)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with asking, suppress(BrokenPipeError):  # it was killed
                        asking.send(str(code).encode())


def import_all(imports: Path, modules: Sequence[str]) -> None:
    """Import modules, MaxText's as the stages do. IMPORTS is not in sys.modules: a fork imports its image's own."""
    spec = importlib.util.spec_from_file_location("quick", imports)
    assert spec is not None
    assert spec.loader is not None
    quick = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quick)
    for name in modules:
        with quick.quick_imports() if name.startswith("maxtext.") else nullcontext():
            importlib.import_module(name)


def become(
    request: Mapping[str, Any], descriptors: Sequence[int], asking: socket.socket, base: Sequence[str]
) -> NoReturn:
    """Run the program of the request, and end as an interpreter does."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setpgid(0, 0)  # Ray kills the process group of a lost worker
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the zygote's
    threading.Thread(target=end_with, args=(asking,), daemon=True).start()
    if platforms := os.environ.get("JAX_PLATFORMS"):
        sys.modules["jax"].config.update("jax_platforms", platforms)  # JAX read the zygote's variables
    sys.executable = request["executable"]
    words, paths = request["words"], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = os.getcwd() if words[0] == "-m" else os.path.dirname(words[0])
    sys.path[:] = [*([] if request["is_safe"] else [first]), *filter(None, paths), *base]
    code: Any = 0
    try:
        sys.argv = list(words[1:] if words[0] == "-m" else words)
        customise()
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  (an interpreter prints every exception, too)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def customise() -> None:
    """Import sitecustomize, as an interpreter does at its start.

    The one beside this file finds no program to fork and runs the next of the path: the local stack's, on Ray's nodes.
    That one's finder patches modules once they are loaded. Here some are loaded already, and nothing has used them yet.
    """
    sys.modules.pop("sitecustomize", None)  # the zygote's
    importlib.import_module("sitecustomize")
    for patches in [finder.patches for finder in sys.meta_path if hasattr(finder, "patches")]:
        for name in patches.keys() & sys.modules.keys():
            patches.pop(name)(sys.modules[name])


def end_with(asking: socket.socket) -> None:
    """Kill this process when the interpreter that asked for it ends."""
    while asking.recv(MESSAGE_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
