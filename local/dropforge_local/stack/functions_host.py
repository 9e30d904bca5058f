"""The deployed functions, served by the real functions-framework: every entry point of functions/main.py by its name.

The stack (functions_process.py) starts one process for all functions: `python -P -m
dropforge_local.stack.functions_host FD [tell]`. FD is a bound socket; with `tell`, each request of a function names the
function (base/recording.py). A line of JSON on standard input gives the process its URL, the functions' environment,
the secret that signs tokens, and who may call which function. The process ends when that pipe closes, so it never
outlives its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dropforge_local.base.identity import Identity
from dropforge_local.base.recording import FILE, INVOCATION, Recorder, caller, tell_callers

from .child import end_with_parent

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
SOURCE = Path(__file__).resolve().parents[3] / "functions" / "main.py"
THREADS = 24  # a stage spends its time waiting for the emulators
IMPORTS = (  # of every start
    "functions_framework",
    "gunicorn.app.base",
    "gunicorn.workers.gthread",
    "dropforge.stages.submit",
    "dropforge.stages.sweep.sweep",
)


def entry_points(source: Path = SOURCE) -> list[str]:
    """The names that main.py decorates as functions, in order."""
    return re.findall(r"^@functions_framework\.\w+\ndef (\w+)", source.read_text(), re.M)


def build(
    identity: Identity,
    base_url: str,
    source: Path = SOURCE,
    invokers: Mapping[str, Collection[str]] | None = None,
    recorder: Recorder | None = None,
) -> Wsgi:
    """One WSGI application with every function at /<name>; callers need an OIDC token for that URL, as in the cloud.

    `invokers` names the callers that may call each function, besides the owner; without it every caller may.
    `recorder` notes each call of a function.
    """
    import functions_framework
    from werkzeug.exceptions import NotFound
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    apps = {f"/{name}": functions_framework.create_app(name, str(source)) for name in entry_points(source)}
    dispatch = DispatcherMiddleware(NotFound(), apps)

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        name, _, rest = environ.get("PATH_INFO", "").lstrip("/").partition("/")
        environ["PATH_INFO"] = f"/{name}/{rest}"  # without the second slash, werkzeug redirects
        problem = _refusal(identity, environ.get("HTTP_AUTHORIZATION", ""), base_url, name, invokers)
        if not problem:
            caller.set(name)  # of this thread, until it serves another request
            if recorder:
                recorder.note(name, INVOCATION)
            return dispatch(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [f"{name}: {problem}\n".encode()]

    return checked


def _refusal(
    identity: Identity, authorization: str, base_url: str, name: str, invokers: Mapping[str, Collection[str]] | None
) -> str:
    """Why a caller may not call a function; "" if it may."""
    headers = {"Authorization": authorization}
    if not identity.is_for(headers, base_url + name):
        return f"the caller needs an OIDC token for the audience {base_url + name}"
    claims = identity.claims(headers)
    if claims is None or not claims.caller or invokers is None or claims.caller in invokers.get(name, ()):
        return ""
    return f"the account of {claims.caller!r} lacks run.routes.invoke (terraform/functions.tf)"


def serve(
    url: str,
    descriptor: int,
    identity: Identity,
    invokers: Mapping[str, Collection[str]] | None = None,
    recorder: Recorder | None = None,
) -> None:
    """Serve at a bound socket until SIGTERM. `invokers` and `recorder` are those of `build`."""
    from gunicorn.app.base import BaseApplication
    from gunicorn.glogging import Logger
    from gunicorn.sock import create_sockets
    from gunicorn.workers.gthread import ThreadWorker

    app = build(identity, url, invokers=invokers, recorder=recorder)

    class Application(BaseApplication):  # type: ignore[misc]
        def load_config(self) -> None:
            options = {
                "bind": f"fd://{descriptor}",
                "threads": THREADS,
                "keepalive": 75,
                "graceful_timeout": 2,
                "loglevel": "error",
            }
            for name, value in options.items():
                self.cfg.set(name, value)

        def load(self) -> Wsgi:
            return app

    # Without the master process of gunicorn, which takes 40 MiB: the stack starts the functions again by itself.
    application = Application()
    log = Logger(application.cfg)
    worker = ThreadWorker(
        age=0,
        ppid=os.getppid(),
        sockets=create_sockets(application.cfg, log),
        app=application,
        timeout=0,
        cfg=application.cfg,
        log=log,
    )
    worker.init_process()
    os._exit(0)  # a call that takes longer than the graceful timeout would hold the process back


def _import_what_takes_long() -> None:
    """Import what every start needs, while the stack imports its own libraries and cannot send the start line yet."""
    for name in IMPORTS:
        importlib.import_module(name)


def main() -> None:
    if "tell" in sys.argv[2:]:
        tell_callers()
    _import_what_takes_long()
    line = sys.stdin.readline()
    if not line:
        return  # the stack ended before it could send the line
    start = json.loads(line)
    os.environ.update(start["environment"])
    end_with_parent()
    recorder = Recorder(Path(FILE)) if start["records"] else None  # the working directory is the stack's state
    serve(start["url"], int(sys.argv[1]), Identity(start["secret"]), start["invokers"], recorder)


if __name__ == "__main__":
    main()
